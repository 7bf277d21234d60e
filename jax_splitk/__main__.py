"""`python -m jax_splitk COMMAND`."""

import argparse
import json
import sys

from jax_splitk import doctor


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jax_splitk", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("doctor", help="what is installed, which GPU, which implementations can run")
    check.add_argument("--json", action="store_true", help="machine-readable output")
    arguments = parser.parse_args(argv)
    report = doctor.examine()
    print(json.dumps(report.as_dict(), indent=2) if arguments.json else report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
