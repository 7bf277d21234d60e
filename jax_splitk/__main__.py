"""`jax-splitk COMMAND`, or `python -m jax_splitk COMMAND`."""

import argparse
import importlib
import os
import sys

from jax_splitk.cli.parser import parser, program
from jax_splitk.runtime.settings import SettingError
from jax_splitk.runtime.streams import replace_closed


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit code: 0, or 1 if something that it did or checked failed.

    Raises:
      SystemExit: with code 2, for wrong arguments.
    """
    argv = sys.argv[1:] if argv is None else argv
    replace_closed()
    # Arguments after -- are for a script, and may look like our own options.
    split = argv.index("--") if "--" in argv else len(argv)
    arguments, unknown = parser().parse_known_args(argv[:split])
    arguments.script_arguments = argv[split + 1 :] if split < len(argv) else None
    chosen: argparse.ArgumentParser = arguments.parser
    # The module and the function of `cli` to run; None without a command.
    module, _, name = (arguments.run or "").partition(".")
    takes_scripts = arguments.command in ("tune", "explain")
    if unknown:
        hint = "; those of the script come after --" if takes_scripts else ""
        chosen.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if arguments.script_arguments is not None and not takes_scripts:
        chosen.error(f"-- {' '.join(arguments.script_arguments)}; accepted only by tune and explain")
    if arguments.run is None:
        chosen.print_help()
        return 0
    # `doctor` must run even if the package cannot be imported.
    if module != "doctor" and not hasattr(package := sys.modules["jax_splitk"], "explain"):
        try:
            importlib.reload(package)
        except ImportError as error:
            if error.name != "jax_splitk":
                raise
            print(f"{program()}: {error}", file=sys.stderr)
            return 1
    run = importlib.import_module(f"jax_splitk.cli.{module}")
    try:
        code = getattr(run, name)(arguments)
        print(end="", flush=True)  # here, not at exit, where nobody could catch its exceptions
    except SettingError as error:
        chosen.error(str(error))
    except BrokenPipeError:  # the reader of our output (`| head`) has closed it; drop the rest
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
