"""The arguments of every command. Nothing is imported that a command may need, so that `--help` is quick."""

import argparse
import os
import pathlib
import sys
import textwrap
from typing import Any

from jax_splitk.cli.schema import schema

_SOURCE = "a cache folder, or a file with the text of TuningResult.dumps"
_SCRIPT = "Arguments after -- are the script's: SCRIPT.py -- --lr 3. "
_ABOUT = "Convolutions, their gradients and products with quantized weights for JAX on NVIDIA Hopper."
_FIRST = "Begin with `doctor`. Every command takes --help."
_PROBLEMS = f"""

A problem is a JSON object with "op" and these fields; docs/reference/problem-files.md has examples.

{schema()}"""


def program() -> str:
    """How the command line was started."""
    return "jax-splitk" if os.path.basename(sys.argv[0]) == "jax-splitk" else "python -m jax_splitk"


def parser() -> argparse.ArgumentParser:
    """The parser of all commands. It sets `run` to the command's function, MODULE.NAME in this folder, and `parser` to
    the command's own parser."""
    whole = argparse.ArgumentParser(prog=program(), description=_ABOUT, epilog=_FIRST)
    whole.add_argument("--version", action="version", version=f"jax_splitk {sys.modules['jax_splitk'].__version__}")
    commands = _commands(whole, "command")
    tune = _add(
        commands, "tune", "decide.tune", "measure a script's operations, or problems, and store the fastest choices"
    )
    tune.epilog = _SCRIPT + "Exit code 1: not everything was tuned and stored."
    tune.add_argument("--seconds", help="budget for one problem (default: JAX_SPLITK_TUNE_BUDGET_S, else 10)")
    tune.add_argument("--again", action="store_true", help="also measure problems that a cache already has")
    tune.add_argument(
        "--dry-run", action="store_true", help="list the problems that would be measured; measure nothing"
    )
    explain = _add(
        commands, "explain", "decide.explain", "show what computes a script's operations, or problems, and why"
    )
    explain.add_argument(
        "--platform", choices=("cpu", "cuda"), help="for this platform; cuda on a machine without a GPU means an H200"
    )
    explain.epilog = _SCRIPT + (
        "A script runs as usual, on the default backend: on a GPU, operations that no cache has are tuned, unless "
        "JAX_SPLITK_AUTOTUNE=off. Problems given as JSON are not measured. N x means N lowerings; JAX lowers equal "
        "operations of one function once. Forward passes and input gradients of conv_general_dilated that stay lax's "
        "are not listed. Plain lax operations that jax_splitk would compute are listed with their gain."
    )
    for each in (tune, explain):
        what = "a .py file, a .json file, or JSON text of a problem or a list"
        each.add_argument("what", metavar="SCRIPT_OR_PROBLEMS", help=what)
        each.add_argument("--verbose", action="store_true", help="also show configs, workspaces and full reasons")
        each.add_argument(
            "--workspace-limit-bytes", type=int, metavar="N", help="limit of the workspace (default: 256 MiB)"
        )
        each.formatter_class = argparse.RawDescriptionHelpFormatter
        each.epilog = f"{textwrap.fill(each.epilog or '')}{_PROBLEMS}"
    doctor = _add(
        commands,
        "doctor",
        "doctor.doctor",
        "show installed packages, the GPU, and which implementations can run",
    )
    doctor.epilog = "Exit code 1: there is a problem to fix."
    bench = commands.add_parser("bench", help="time kernels and XLA without storing a decision")
    _add_bench(_commands(bench, "bench_command"))
    cache = commands.add_parser("cache", help="list, show, combine, ship and delete stored decisions")
    _add_cache(_commands(cache, "cache_command"))
    return whole


def _commands(of: argparse.ArgumentParser, dest: str) -> Any:
    """A group of commands. Where none is given, `run` is None, and the group's help is printed."""
    of.set_defaults(run=None, parser=of)
    return of.add_subparsers(dest=dest, metavar="COMMAND")


def _add_bench(commands: Any) -> None:
    about = "time a matrix product for each number of splits, beside XLA's product"
    matmul = _add(commands, "matmul", "bench.matmul", about)
    for name, meaning in (("m", "rows of the result"), ("n", "columns of the result"), ("k", "the reduction")):
        matmul.add_argument(f"--{name}", type=int, required=True, help=meaning)
    matmul.add_argument("--batch", type=int, help="number of matrix products (default: 1)")
    matmul.add_argument(
        "--sweep-splits", default="1:128", metavar="SPLITS", help="1:128 or 1,2,4,8:16 (default: 1:128)"
    )
    about = "only configs with this value, e.g. tile_m=128 or reduction=workspace"
    matmul.add_argument("--only", action="append", default=[], metavar="FIELD=VALUE", help=about)
    about = "dimensions in memory, the contiguous one last: bmk, mbk, bkm or kbm (default: bkm)"
    matmul.add_argument("--lhs-order", default="bkm", help=about)
    matmul.add_argument("--rhs-order", default="bkn", help="the same for rhs: bkn, kbn, bnk or nbk (default: bkn)")
    matmul.add_argument("--out-dtype", default="float32", help="dtype of the result (default: float32)")
    about = "draw all measurements (needs matplotlib); also .png, .pdf"
    matmul.add_argument("--plot", type=pathlib.Path, metavar="FILE.svg", help=about)

    conv = _add(commands, "conv", "bench.conv", "time the three passes of a convolution: our best configs against XLA")
    for name, meaning in (("batch", "images"), ("in-channels", "C"), ("out-channels", "K")):
        conv.add_argument(f"--{name}", type=int, required=True, metavar="N", help=meaning)
    for name, meaning in (("input", "one to three sizes, e.g. 56 56"), ("kernel", "sizes of the filter, e.g. 3 3")):
        conv.add_argument(f"--{name}-spatial", type=int, nargs="+", required=True, metavar="N", help=meaning)
    for name, meaning in (("window-strides", "strides"), ("rhs-dilation", "dilation of the filter")):
        conv.add_argument(f"--{name}", type=int, nargs="+", metavar="N", help=f"{meaning} (default: 1 each)")
    conv.add_argument("--padding", help="SAME, SAME_LOWER or VALID (default: SAME)")
    conv.add_argument("--feature-group-count", type=int, metavar="N", help="feature groups (default: 1)")
    conv.add_argument("--out-dtype", help="dtype of the results (default: that of the operands)")
    for each in (matmul, conv):
        each.epilog = "On this machine's default device; nothing is stored in the cache. Exit code 1: a config failed."
        each.add_argument("--dtype", help="dtype of the operands: bfloat16 (default), float16 or float32")
        each.add_argument(
            "--precision", help="precision of float32 operands: default, high or highest (default: default)"
        )
        about = "how many of the cost model's best configs, splits apart (default: 3)"
        each.add_argument("--configs", type=int, default=3, metavar="N", help=about)
        each.add_argument("--out", type=pathlib.Path, metavar="FILE.json", help="write all measurements")


def _add_cache(commands: Any) -> None:
    epilog = "ratio: XLA's time over the choice's. Reads every file; exit code 1: one is damaged."
    ls = _add(commands, "ls", "cache.ls", "list the entries", epilog)
    ls.add_argument("paths", nargs="*", metavar="PATH", help=f"{_SOURCE}; the user's cache by default")
    ls.add_argument("--all", action="store_true", help="the user's cache, the read-only caches and the shipped tables")
    show = _add(commands, "show", "cache.show", "show one entry with all its measurements")
    show.add_argument(
        "what", metavar="DIGEST_PREFIX_OR_FILE", help="the beginning of a digest in `cache ls`, or a file"
    )
    about = (
        "merge entries into a cache folder or a file; the newer decision wins, all measurements are kept; kernels are "
        "copied from folders to a folder, except those that lost a measurement"
    )
    epilog = "A program reads such a file with TuningResult.loads. Exit code 1: not everything was merged."
    merge = _add(commands, "merge", "cache.merge", about, epilog)
    merge.add_argument("sources", nargs="+", metavar="SOURCE", help=_SOURCE)
    merge.add_argument(
        "destination", metavar="DEST", help="a cache folder, or NAME.json for a file; created if missing"
    )
    about = (
        "copy the user's cache and the read-only caches into a folder, and compile kernels of their decisions that "
        "are missing: machines that read the folder need no compiler"
    )
    export = _add(commands, "export", "cache.export", about, "Exit code 1: not everything was exported.")
    export.add_argument("destination", metavar="DEST", help="a cache folder; created if missing")
    about = "compile every kernel of a cache again, and compare the machine code"
    verify = _add(commands, "verify", "kernels.verify", about, "Exit code 1: a kernel differs, or cannot be compared.")
    verify.add_argument("paths", nargs="*", metavar="PATH", help="cache folders; the user's cache by default")
    about = "delete entries and compiled kernels of the user's cache, and list them"
    prune = _add(commands, "prune", "cache.prune", about)
    prune.add_argument(
        "--environment", choices=("other", "all"), help="files of other machines or versions, or all files"
    )
    prune.add_argument("--older-than", metavar="DAYS", help="only files that are older than this")
    prune.add_argument(
        "--damaged", action="store_true", help="also files that cannot be used or that dead processes left"
    )
    prune.add_argument("--dry-run", action="store_true", help="list the files, but do not delete them")


def _add(commands: Any, name: str, run: str, about: str, epilog: str | None = None) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=about, description=about, epilog=epilog)
    command.add_argument("--json", action="store_true", help="machine-readable output")
    command.set_defaults(run=run, parser=command)
    return command
