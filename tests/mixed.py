"""Products with packed weights whose results are known exactly, for the kernel families that compute them on a GPU."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from jax_splitk.quantized import PackedWeight, QuantizedArray
from jax_splitk.quantized.problem import QuantizedMatmulProblem
from tests import poison, quantized

SEED = int(np.random.SeedSequence().generate_state(1)[0])
HALF: dict[str, Any] = {"x_dtype": "float16", "out_dtype": "float16"}

# Of x, result and scale.
TYPES: tuple[dict[str, Any], ...] = (
    {},
    {"out_dtype": "float32"},
    {"scale_dtype": "float32"},
    {**HALF, "scale_dtype": "float16"},
    {**HALF, "scale_dtype": "bfloat16", "out_dtype": "float32"},
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A product; `zero` is as in `quantized.every_code`."""

    rows: int
    k: int
    features: int
    qtype: str = "int4"
    group_size: int = 64
    zero: str | None = None
    scale_dtype: str = "bfloat16"
    x_dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"

    @property
    def problem(self) -> QuantizedMatmulProblem:
        zero = {None: "none", "own": self.scale_dtype}.get(self.zero, self.zero)
        return QuantizedMatmulProblem(
            self.rows, self.k, self.features, self.x_dtype, self.out_dtype, self.qtype, self.group_size,
            self.scale_dtype, str(zero),
        )  # fmt: skip

    def every_code(self) -> tuple[QuantizedArray, np.ndarray]:
        return quantized.every_code(self.qtype, self.k, self.features, self.group_size, self.zero, self.scale_dtype)


def operands(packed: PackedWeight, x: Any, x_dtype: str) -> tuple[jax.Array, ...]:
    zero = () if packed.zero_point is None else (packed.zero_point,)
    return (jnp.asarray(x, x_dtype), packed.words, packed.scale, *zero)


def random(*key: int) -> np.random.Generator:
    return np.random.default_rng([SEED, *key])


def integers(case: Case, largest: int, seed: int) -> np.ndarray:
    """An x of small integers, in float64."""
    return random(seed).integers(-largest, largest + 1, (case.rows, case.k)).astype(np.float64)


def normal(case: Case) -> jax.Array:
    return jax.random.normal(jax.random.key(SEED % 2**31), (case.rows, case.k)).astype(case.x_dtype)


def exact_weight(case: Case, seed: int) -> tuple[QuantizedArray, np.ndarray]:
    """A weight whose sums of products with small integers are exact in float32, and its values in float64."""
    rng = random(seed)
    table = quantized.table(case.qtype)
    fits = np.isfinite(table) & (np.abs(table) <= 128) & (table * 2048 == np.rint(table * 2048))
    if case.qtype == "float8_e4m3fn":
        fits = (np.abs(table) <= 16) & (table * 8 == np.rint(table * 8))
    patterns = rng.choice(np.flatnonzero(fits), (case.k, case.features))
    shape = (case.k // case.group_size, case.features)
    scale = rng.choice([-2.0, -1.0, 0.5, 1.0, 2.0], shape)
    value, zero_point = table[patterns], None
    if case.zero is not None:
        zero = rng.integers(0, 8, shape)
        zero_point = jnp.asarray(zero, quantized.storage(case.qtype) if case.zero == "own" else case.zero)
        value = value - np.repeat(zero, case.group_size, axis=0)
    q = QuantizedArray(
        quantized.elements(case.qtype, patterns), jnp.asarray(scale, case.scale_dtype), zero_point, case.qtype
    )
    return q, value * np.repeat(scale, case.group_size, axis=0)


def rounded(exact: np.ndarray, dtype: str) -> np.ndarray:
    """Through float32, as results are defined."""
    with np.errstate(over="ignore"):
        return np.asarray(jnp.asarray(exact.astype(np.float32)).astype(dtype))


def elements(q: QuantizedArray) -> np.ndarray:
    """What a weight's elements stand for, without scales and zero points, in float64."""
    if q.qtype == "nf4":
        return quantized.table("nf4")[np.asarray(q.qvalue.astype(jnp.int32))]
    return np.asarray(q.qvalue.astype(jnp.float32), np.float64)


def as_float32_product(case: Case, x: jax.Array, weight: np.ndarray) -> jax.Array:
    """XLA's product in float32, of the weight rounded as the definition has it."""
    dequantized = jnp.asarray(weight.astype(np.float32))
    if case.out_dtype == case.x_dtype:
        dequantized = dequantized.astype(case.x_dtype).astype(jnp.float32)
    return jnp.dot(x.astype(jnp.float32), dequantized, precision="highest").astype(case.out_dtype)


def error(out: Any, exact: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(out).astype(np.float64) - exact) / np.linalg.norm(exact))


def product(family: Any, case: Case, config: Any, packed: PackedWeight) -> Callable[[Any], np.ndarray]:
    """x to the family's result, with poisoned buffers."""
    call = poison.function(family.make_plan(case.problem, config), case.problem)
    return lambda x: np.asarray(call(*operands(packed, x, case.x_dtype)))
