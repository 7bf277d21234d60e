"""Times the kernel of docs/add-a-kernel.md against XLA's product, on a GPU: `python -m benchmarks.example [M N K]`."""

import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
from jax import numpy as jnp

from benchmarks import timing
from jax_splitk.problems.dot_general import DotProblem
from jax_splitk.runtime import execute
from jax_splitk.runtime.target import DEFAULT_CUDA

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "add-a-kernel.md"


def text() -> str:
    """The Python blocks of the page that define the example."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return "".join(block for block in blocks if "SOURCE" in block)


def family(folder: pathlib.Path) -> Any:
    """The example's kernel family; its device source is written to the folder."""
    names: dict[str, Any] = {"__name__": "example"}
    before = pathlib.Path.cwd()
    os.chdir(folder)
    try:
        exec(compile(text(), str(PAGE), "exec"), names)
    finally:
        os.chdir(before)
    return names["FAMILY"]


def main(argv: Sequence[str]) -> None:
    m, n, k = map(int, argv) if argv else (4096, 4096, 4096)
    problem = DotProblem(1, m, n, k, "bmk", "bkn", "bfloat16", "bfloat16")
    inputs = timing.random_input_sets([(m, k), (k, n)], "bfloat16")
    functions = {"XLA": jax.jit(jnp.dot)}
    with tempfile.TemporaryDirectory() as folder:
        product = family(pathlib.Path(folder))
        for config in product.candidates(problem, DEFAULT_CUDA):
            call = product.plan(problem, config).custom_call()
            functions[str(config)] = jax.jit(
                lambda a, b, call=call: execute.call(call, problem, a[None], b[None])[0],
            )
        compiled = {name: function.lower(*inputs[0]).compile() for name, function in functions.items()}
    exact = jnp.dot(*inputs[0], preferred_element_type=jnp.float32)
    timings = timing.compare(compiled, inputs)
    for name, found in timings.items():
        error = float(jnp.abs(compiled[name](*inputs[0]).astype(jnp.float32) - exact).max() / jnp.abs(exact).max())
        speed = f"{2e-6 * m * n * k / found.us:.0f} Tflop/s, {timings['XLA'].us / found.us:.3f} times XLA's speed"
        print(f"{name}: {found.us:.1f} us, {speed}, error {error:.1e}")


if __name__ == "__main__":
    main(sys.argv[1:])
