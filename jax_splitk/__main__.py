"""`python -m jax_splitk COMMAND`."""

import argparse
import json
import os
import sys

from jax_splitk.cli import cache, doctor, explain, tune
from jax_splitk.cli.usage import UsageError


def _doctor(arguments: argparse.Namespace) -> int:
    report = doctor.examine()
    print(json.dumps(report.as_dict(), indent=2) if arguments.json else report)
    return 1 if report.problems else 0


def main(argv: list[str] | None = None) -> int:
    """Runs a command; its exit code: 0, or 1 where something it looked at or did failed.

    Raises:
      SystemExit: with code 2, for wrong arguments.
    """
    argv = sys.argv[1:] if argv is None else argv
    # What follows -- is for a script, and may look like our own options.
    split = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(prog="python -m jax_splitk", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("doctor", help="what is installed, which GPU, which implementations can run")
    check.add_argument("--json", action="store_true", help="machine-readable output")
    check.set_defaults(run=_doctor, parser=check)
    for command in (tune, explain, cache):
        command.add_parser(commands)
    arguments = parser.parse_args(argv[:split])
    arguments.script_arguments = argv[split + 1 :] if split < len(argv) else None
    chosen: argparse.ArgumentParser = arguments.parser
    if arguments.script_arguments is not None and arguments.command not in ("tune", "explain"):
        chosen.error(f"-- {' '.join(arguments.script_arguments)}; accepted only by tune and explain")
    try:
        code = arguments.run(arguments)
        print(end="", flush=True)  # here, not at exit, where nobody could catch what it raises
    except UsageError as error:
        chosen.error(str(error))
    except BrokenPipeError:  # whoever read our output (`| head`) has enough; what is left goes nowhere
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
