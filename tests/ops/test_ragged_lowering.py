"""Grouped products of layers in training, lowered for a GPU: three calls, no copies of operands, little memory."""

import math
import re
from typing import Any

import jax
import pytest

import jax_splitk
from benchmarks.ragged_cases import TRAINING
from jax_splitk.runtime import compiler

TENSOR = re.compile(r"tensor<((?:\d+x)+)(\w+)>")


def operations(
    sizes: tuple[int, int, int, int], dtypes: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[list[str], list[str]]:
    """The kernels' calls and the other operations of all three passes of a layer, for tokens, weights and cotangents of
    these dtypes."""
    monkeypatch.setattr(compiler, "compile_source", lambda source: compiler.Compiled(b"machine code", ""))
    monkeypatch.setenv("JAX_SPLITK_COMPILE_AHEAD", "off")
    m, k, n, experts = sizes

    def passes(x: jax.Array, w: jax.Array, ct: jax.Array, counts: jax.Array) -> object:
        out, back = jax.vjp(lambda x, w: jax_splitk.ragged_dot(x, w, counts, **options), x, w)
        return out, back(ct)

    shapes = zip(((m, k), (experts, k, n), (m, n), (experts,)), (*dtypes, "int32"), strict=True)
    given = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    text = jax.jit(passes).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    found = [line for line in text.splitlines() if "stablehlo." in line and "stablehlo.return" not in line]
    calls = [line for line in found if "jax_splitk_launch" in line]
    return calls, [line for line in found if line not in calls]


def elements(shape: str) -> int:
    return math.prod(map(int, shape.rstrip("x").split("x")))


@pytest.mark.parametrize("weights", ["bfloat16", "float32"])
@pytest.mark.parametrize("sizes", TRAINING, ids=str)
def test_a_layer_is_three_calls_and_no_copies(
    sizes: tuple[int, int, int, int], weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No operation has a large array but the kernels, and the rounding of float32 weights to bfloat16: operands are not
    padded, transposed or gathered, whatever the group sizes are. Workspaces are at most 64 MiB."""
    options = {"preferred_element_type": "bfloat16", "compute_dtype": "bfloat16"}
    calls, others = operations(sizes, ("bfloat16", weights, "bfloat16"), monkeypatch, **options)
    large = [line for line in others if any(elements(shape) > 2**20 for shape, _ in TENSOR.findall(line))]
    names = {name for line in large for name in re.findall(r"stablehlo\.(\w+)", line)}
    assert len(calls) == 3
    assert names == ({"convert"} if weights == "float32" else set())
    workspaces = [elements(shape) for line in calls for shape, dtype in TENSOR.findall(line) if dtype == "ui8"]
    assert sum(workspaces) <= 64 * 2**20


def test_float32_operands_are_three_calls_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call in a loop over the pieces of k, or one for all of it; results are float32."""
    sizes, dtypes = (4096, 1024, 512, 8), ("float32", "float32", "float32")
    for precision, times, longest in (("default", 3, 1024), ("highest", 6, 256)):
        calls, others = operations(sizes, dtypes, monkeypatch, precision=precision)
        assert sorted(re.findall(r"tensor<([\dx]+x(?:bf16|f32))>", line) for line in calls) == sorted([
            [f"4096x{times * longest}xbf16", f"8x{times * longest}x512xbf16", "4096x512xf32"],
            [f"{times * 4096}x1024xbf16", f"{times * 4096}x512xbf16", "8x1024x512xf32"],
            [f"4096x{times * min(512, longest)}xbf16", f"8x1024x{times * min(512, longest)}xbf16", "4096x1024xf32"],
        ])  # fmt: skip
        assert sum("stablehlo.while" in line for line in others) == (2 if precision == "highest" else 0)
