"""Other projects' tests of grouped products, over `jax_splitk.ragged_dot` and `ragged_dot_general`, or over lax's.

    python -m tests.other_suites tokamax
    python -m tests.other_suites jax CHECKOUT     (of jax, of the installed release)
    python -m tests.other_suites qwix CHECKOUT    (of qwix, of the installed release)

With `--lax` they run over lax's functions, for comparison. What they need:
`pip install tokamax qwix chex pytest absl-py`.
"""

import argparse
import pathlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import pytest

import jax_splitk

# A module of pytest's: tokamax's cases over a function of lax's arguments.
_TOKAMAX = """
import jax
from jax import numpy as jnp
from tokamax._src import quantization
from tokamax._src.ops.ragged_dot import test_base


def dot(lhs, rhs, *, group_sizes, activation=None, **options):
    lhs, rhs = map(quantization.as_array, (lhs, rhs))
    out = jax.lax.ragged_dot(lhs, rhs, jnp.asarray(group_sizes), **options)
    return out if activation is None else activation(out)


class RaggedDotTest(test_base.RaggedDotTestBase):
    def __init__(self, *args):
        super().__init__(*args, dot_fn=dot)
"""


def _arguments(suite: str, checkout: pathlib.Path | None, folder: pathlib.Path) -> list[str]:
    """pytest's, for a suite."""
    if suite == "tokamax":
        (folder / "test_tokamax.py").write_text(_TOKAMAX, encoding="utf-8")
        return [str(folder / "test_tokamax.py")]
    if checkout is None:
        raise SystemExit(f"{suite}: a checkout of it is needed")
    if suite == "jax":
        return [str(checkout / "tests" / "lax_test.py"), "-k", "RaggedTest"]
    return [str(path) for path in sorted(checkout.rglob("*ragged_dot*_test.py"))]


def _counted(function: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        calls.append(function.__name__)
        return function(*args, **kwargs)

    return called


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=["tokamax", "jax", "qwix"])
    parser.add_argument("checkout", nargs="?", type=pathlib.Path)
    parser.add_argument("--lax", action="store_true", help="run over lax's own functions")
    given = parser.parse_args(argv)
    calls: list[str] = []
    for name in ("ragged_dot", "ragged_dot_general"):
        function = getattr(jax.lax if given.lax else jax_splitk, name)
        setattr(jax.lax, name, _counted(function, calls))
    with tempfile.TemporaryDirectory() as folder:
        arguments = _arguments(given.suite, given.checkout, pathlib.Path(folder))
        status = pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", folder, *arguments])
    print(f"{len(calls)} calls of {'lax' if given.lax else 'jax_splitk'}'s functions")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
