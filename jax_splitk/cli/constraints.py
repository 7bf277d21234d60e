"""The caller's constraints, as command line options."""

import argparse
from contextlib import AbstractContextManager

from jax_splitk.cli.usage import UsageError
from jax_splitk.tuning.options import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workspace-limit-bytes", type=int, metavar="N", help="for another limit than 256 MiB")


def in_force(arguments: argparse.Namespace) -> AbstractContextManager[None]:
    """`jax_splitk.options` with them."""
    limit = arguments.workspace_limit_bytes
    if limit is not None and limit < 0:
        raise UsageError(f"--workspace-limit-bytes={limit}; accepted: an integer of at least 0")
    return options(workspace_limit_bytes=limit)
