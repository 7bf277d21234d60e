"""The cost of a lowering that repeats an earlier one: problem, choice and plan of an equation are derived once."""

import collections
import pathlib
import sys
from typing import Any

import jax
import pytest
from jax import numpy as jnp

import jax_splitk
from jax_splitk.runtime import compiler
from tests.convolutions import NHWC

PACKAGE = str(pathlib.Path(jax_splitk.__file__).parent)

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU's cache may have to be filled first")


def lower() -> Any:
    """A new function for JAX, which has lowered no such function before."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        y = jax_splitk.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=NHWC, compute_dtype=jnp.bfloat16, preferred_element_type=jnp.float32
        )
        return jnp.square(y).mean()

    w, x = jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.float32), jax.ShapeDtypeStruct((32, 56, 56, 64), jnp.bfloat16)
    return jax.jit(jax.grad(loss, (0, 1))).trace(w, x).lower(lowering_platforms=("cuda",))


def test_a_convolution_under_grad_and_jit_is_lowered_again_in_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "compile_source", lambda source: compiler.Compiled(b"machine code", ""))
    monkeypatch.setenv("JAX_SPLITK_COMPILE_AHEAD", "off")
    first = lower().as_text()
    assert first.count("jax_splitk_launch") >= 1
    calls: collections.Counter[str] = collections.Counter()

    def count(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls[frame.f_code.co_qualname] += 1

    jax.clear_caches()
    sys.setprofile(count)
    try:
        again = lower()
    finally:
        sys.setprofile(None)
    assert again.as_text() == first
    assert calls.total() <= 2000, calls.most_common(20)
