"""The ways to multiply with a quantized (or a float) weight that the benchmark compares: XLA's and PyTorch's."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from benchmarks.quantized_cases import Case
from benchmarks.report import distance
from jax_splitk.ops.quantized_matmul import quantized_matmul
from jax_splitk.quantized import PackedWeight, dequantize, unpack
from jax_splitk.quantized.formats import FORMATS, NF4

Arrays = tuple[jax.Array, ...]
FP8 = "float8_e4m3fn"
FP8_ROWS = 16  # rows of cuBLASLt's fp8 products are multiples of 16


@dataclasses.dataclass(frozen=True)
class Product:
    """One contestant.

    Attributes:
      x_dtype: dtype of its activation.
      row_multiple: its activation's rows are a multiple of this.
      weight: maps (case, key) to the random arrays of one weight; traced.
      multiply: maps (case, x, *weight) to the product; traced.
    """

    name: str
    x_dtype: str
    weight: Callable[[Case, jax.Array], Arrays]
    multiply: Callable[..., jax.Array]
    row_multiple: int = 1

    def x(self, case: Case) -> jax.ShapeDtypeStruct:
        rows = math.ceil(case.rows / self.row_multiple) * self.row_multiple
        return jax.ShapeDtypeStruct((rows, case.k), jnp.dtype(self.x_dtype))

    def arguments(self, case: Case) -> tuple[Any, ...]:
        """Shapes and dtypes of the arguments of `multiply` after the case."""
        return self.x(case), *jax.eval_shape(functools.partial(self.weight, case), jax.random.key(0))

    def compile(self, case: Case) -> Any:
        return jax.jit(functools.partial(self.multiply, case)).lower(*self.arguments(case)).compile()


def products(case: Case) -> dict[str, Product]:
    """Ours and XLA's, by name."""
    float_dtype = case.out_dtype
    found = (
        Product("ours", case.x_dtype, _packed_weight, _ours),
        Product("xla_quantized", case.x_dtype, _stored_weight, _xla_quantized),
        Product("xla_16bit", float_dtype, _float_weight, lambda case, x, w: jnp.dot(x, w)),
        Product("xla_fp8", FP8, _fp8_weight, _xla_fp8, FP8_ROWS),
    )
    return {product.name: product for product in found}


def packed(case: Case, words: jax.Array, scale: jax.Array, zero_point: jax.Array | None = None) -> PackedWeight:
    zero_dtype = None if zero_point is None else zero_point.dtype.name
    return PackedWeight(words, scale, zero_point, (case.k, case.features), (0,), case.qtype, case.group, zero_dtype)


def _packed_weight(case: Case, key: jax.Array) -> Arrays:
    # The packed weight is drawn directly: quantizing and packing a float weight would take longer than all
    # measurements.
    one_row = dataclasses.replace(case, rows=1).problem()
    words, scale, *zeros = (jax.ShapeDtypeStruct(*array) for array in one_row.operand_types[1:])
    bits = jax.random.bits(key, words.shape, words.dtype)
    if case.qtype == "float8_e4m3fn":
        bits &= jnp.uint32(0xF7F7F7F7)  # no NaN
    scales = jax.random.uniform(key, scale.shape, jnp.float32, 0.5, 1).astype(scale.dtype)
    return bits, scales, *(_zero_point(case, key, zero.shape) for zero in zeros)


def _zero_point(case: Case, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Integers of the elements' range, in the scales' dtype."""
    low, high = int(FORMATS[case.qtype].low), int(FORMATS[case.qtype].high)
    return jax.random.randint(key, shape, low, high + 1).astype(case.scale_dtype)


def _ours(case: Case, x: jax.Array, *weight: jax.Array) -> jax.Array:
    w = packed(case, *weight)
    return quantized_matmul(x, w, preferred_element_type=case.out_dtype, compute_dtype=case.compute_dtype)


def _stored_weight(case: Case, key: jax.Array) -> Arrays:
    """[k, features] in the format's own dtype, and scales and zero points [k / group, features]."""
    fmt = FORMATS[case.qtype]
    size = case.k * case.features
    if fmt.name == FP8:
        w = jax.random.normal(key, (size,)).astype(fmt.storage)
    else:
        w = lax.bitcast_convert_type(jax.random.bits(key, (-(-size * fmt.bits // 8),), jnp.uint8), fmt.storage)
    shape = case.k // case.group, case.features
    scale = (jax.random.uniform(key, shape, jnp.float32, 0.5, 1) / fmt.high).astype(case.scale_dtype)
    zeros = (_zero_point(case, key, shape),) if case.zero_points else ()
    return w.reshape(-1)[:size].reshape(case.k, case.features), scale, *zeros


def _xla_quantized(case: Case, x: jax.Array, w: jax.Array, scale: jax.Array, *zeros: jax.Array) -> jax.Array:
    """The product as a user of JAX writes it."""
    dtype = jnp.dtype(case.out_dtype)
    values = jnp.take(jnp.asarray(NF4, dtype), w.astype(jnp.int32)) if case.qtype == "nf4" else w.astype(dtype)
    groups = values.reshape(-1, case.group, case.features)
    for zero in zeros:
        groups = groups - zero.astype(dtype)[:, None]
    groups = groups * scale.astype(dtype)[:, None]
    return jnp.dot(x.astype(dtype), groups.reshape(case.k, case.features))


def _float_weight(case: Case, key: jax.Array) -> Arrays:
    return (jax.random.normal(key, (case.k, case.features), jnp.dtype(case.out_dtype)),)


def _fp8_weight(case: Case, key: jax.Array) -> Arrays:
    """The weight [features, k], in cuBLASLt's order, and the two scales."""
    w = jax.random.normal(key, (case.features, case.k), jnp.bfloat16).astype(FP8)
    return w, jnp.float32(0.5), jnp.float32(0.25)


def _xla_fp8(case: Case, x: jax.Array, w: jax.Array, x_scale: jax.Array, w_scale: jax.Array) -> jax.Array:
    """A product of e4m3 operands, scaled afterwards: XLA turns this into cuBLASLt's fp8 product."""
    out = lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return (out * (x_scale * w_scale)).astype(jnp.bfloat16)


def is_fp8_product(compiled: Any) -> bool:
    """Whether XLA took cuBLASLt's fp8 product."""
    return "__cublas$lt$matmul$f8" in (compiled.as_text() or "")


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


class Launched:
    """A result of PyTorch for which `jax.block_until_ready` waits."""

    def __init__(self, torch: Any):
        self._torch = torch

    def block_until_ready(self) -> None:
        self._torch.cuda.synchronize()


def torch_or_none() -> Any:
    """PyTorch with a GPU, None without."""
    try:
        import torch  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def torch_weights(torch: Any, case: Case, sets: dict[str, int]) -> dict[str, list[Any]]:
    """Random weights on the GPU by contestant, [features, k]."""

    def draw() -> Any:
        return torch.randn(case.features, case.k, device="cuda", dtype=torch.bfloat16)

    return {
        "torch_bf16": [draw() for _ in range(sets["xla_16bit"])],
        "torch_fp8": [draw().to(torch.float8_e4m3fn) for _ in range(sets["xla_fp8"])],
    }


def torch_products(torch: Any, case: Case, weights: dict[str, list[Any]]) -> dict[str, Callable[[int], Any]]:
    """cuBLASLt through PyTorch, on set i of the weights."""
    rows = math.ceil(case.rows / FP8_ROWS) * FP8_ROWS
    most = max(map(len, weights.values()))
    x = [torch.randn(case.rows, case.k, device="cuda", dtype=torch.bfloat16) for _ in range(most)]
    x8 = [torch.randn(rows, case.k, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn) for _ in range(most)]
    one = torch.ones((), device="cuda", dtype=torch.float32)

    def bf16(i: int) -> Launched:
        w = weights["torch_bf16"]
        torch.mm(x[i % most], w[i % len(w)].t())
        return Launched(torch)

    def fp8(i: int) -> Launched:
        w = weights["torch_fp8"]
        torch._scaled_mm(
            x8[i % most], w[i % len(w)].t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return Launched(torch)

    return {"torch_bf16": bf16, "torch_fp8": fp8}


# ---- accuracy --------------------------------------------------------------------------------------------------------


def relative_error(case: Case, x: jax.Array, arrays: Arrays, out: jax.Array) -> float:
    """||out - reference|| / ||reference|| in float64, of one random tile of features and up to 16 rows."""
    rng = np.random.default_rng(0)
    rows = np.sort(rng.permutation(case.rows)[:16])
    tile = int(rng.integers(arrays[0].shape[0]))
    width = min(64, case.features - 64 * tile)
    piece = dataclasses.replace(case, features=width)
    one = (array[tile : tile + 1] for array in arrays)
    weight = np.asarray(dequantize(unpack(packed(piece, *one)), jnp.float32), np.float64)
    reference = np.asarray(x[rows].astype(jnp.float32), np.float64) @ weight
    found = np.asarray(out[rows, 64 * tile : 64 * tile + width].astype(jnp.float32), np.float64)
    return distance(found, reference)
