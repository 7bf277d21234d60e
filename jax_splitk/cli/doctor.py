"""`doctor`: what this installation can do. It reports versions, the machine, a verdict, and the command to type next.

This module imports nothing that a broken installation may lack. It imports the machine's report (`cli.machine`) once
the requirements for it are met.
"""

import argparse
import importlib
import platform
import re
import shlex
import sys
from typing import Any

from jax_splitk.cli import output, parser
from jax_splitk.runtime import requirements

_PACKAGES = (
    *("jax_splitk", "jax", "jaxlib", "numpy", "jax-cuda13-plugin", "nvidia-cutlass", "nvidia-cuda-nvrtc"),
    *("nvidia-cuda-cccl", "nvidia-cuda-runtime"),
)
# Where a problem's message has no pip command: what to type, by a part of the message.
_REMEDIES = (
    (r"cannot be written", "export JAX_SPLITK_CACHE_DIR=A_FOLDER_THAT_CAN_BE_WRITTEN"),
    (r"(?P<folder>/.*) is not used: anybody may write", "chmod go-w {folder}"),
    (r"(?P<variable>JAX_\w+)", "unset {variable}"),
)


def doctor(arguments: argparse.Namespace) -> int:
    """Prints the report."""
    report = examine()
    output.emit(report, text(report), arguments.json)
    return 1 if report["problems"] else 0


def examine() -> dict[str, Any]:
    """Examines this process's installation; runs nothing on a device.

    A package that is not installed has the version None. "problems" lists what has to be mended, "verdict" says what
    can run, "next" is a command. The other values are those of `cli.machine.examine`, and are missing where the package
    cannot be imported.
    """
    versions = {package: requirements.installed(package) for package in _PACKAGES}
    report: dict[str, Any] = {"python": platform.python_version(), "versions": versions, **_machine()}
    report["verdict"], report["next"] = _verdict(report)
    return report


def _machine() -> dict[str, Any]:
    """The machine's report; only "problems" where it cannot be made."""
    version = sys.modules["jax_splitk"].__version__
    why = [requirements.unmet_module(version), requirements.unmet_version(version)]
    if problems := [problem for problem in why if problem is not None]:
        return {"problems": problems}
    try:
        return importlib.import_module("jax_splitk.cli.machine").examine()
    except Exception as error:  # whatever a broken installation raises where it is imported
        return {"problems": [f"{type(error).__name__}: {error}"]}


def _verdict(report: dict[str, Any]) -> tuple[str, str]:
    """What can run, and the command to type next."""
    program = parser.program()
    attempt = f"{program} explain YOUR_SCRIPT.py --platform cuda"
    problems = report["problems"]
    if problems:
        what = "jax_splitk runs, but not as it is set up to"
        what = what if "implementations" in report else "jax_splitk cannot be imported"
        return f"{what}: see the problem{'s' * (len(problems) > 1)}", _remedy(problems[0], f"{program} doctor")
    why = report["implementations"]["cutlass"]
    if why is None:
        return "the Hopper kernels run here", f"{program} tune YOUR_SCRIPT.py"
    if report["backend"] == "cpu" and not report["gpus"]:
        return "the CPU kernels run here; explain says what a Hopper GPU would gain", attempt
    return "XLA computes every operation, since no Hopper kernel runs here", _remedy(report["compiler"], attempt)


def _remedy(message: str, otherwise: str) -> str:
    """The command in a message, or the one that belongs to it."""
    _, begins, command = message.replace("`", "").partition("pip install")
    if begins:
        return begins + command.partition(" in /")[0]
    matches = ((re.search(pattern, message), command) for pattern, command in _REMEDIES)
    found = ((command, match.groupdict()) for match, command in matches if match)
    return next((command.format_map({k: shlex.quote(v) for k, v in of.items()}) for command, of in found), otherwise)


def text(report: dict[str, Any]) -> str:
    """The report for people, without repetitions."""
    lines = [f"python {report['python']}"]
    lines += [f"{name} {version}" for name, version in report["versions"].items() if version]
    lines += [f"not installed: {', '.join(name for name, version in report['versions'].items() if not version)}"]
    lines += _machine_lines(report) if "implementations" in report else []
    lines += [f"problem: {problem}" for problem in report["problems"]]
    return "\n".join([*lines, f"verdict: {report['verdict']}", f"next: {report['next']}"])


def _machine_lines(report: dict[str, Any]) -> list[str]:
    implementations: dict[str | None, list[str]] = {}
    for name, why in report["implementations"].items():
        implementations.setdefault(why, []).append(name)
    told = {None: "can run"} | dict.fromkeys(report["problems"], "cannot run")
    own = ("", report["cache_dir"])  # which the line of the cache tells
    return [
        f"backend {report['backend'] or 'none'}{': ' * bool(report['devices'])}{', '.join(report['devices'])}",
        f"NVIDIA driver {report['driver'] or 'none'}",
        *(
            f"GPU {i}: {gpu['name']}, {gpu['memory_bytes'] / 2**30:.1f} GiB, {gpu['free_bytes'] / 2**30:.1f} free"
            for i, gpu in enumerate(report["gpus"])
        ),
        f"device code compiler: {report['compiler']}",
        f"cache {report['cache_dir']} ({'can' if report['cache_can_be_written'] else 'cannot'} be written)",
        *(f"{name}={value}" for name, value in report["settings"].items() if value not in own),
        *(
            f"implementation{'s' * (len(names) > 1)} {', '.join(names)}: {told.get(why, why)}"
            for why, names in implementations.items()
        ),
    ]
