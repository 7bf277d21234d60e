"""Shared by tests of the families of products with packed weights: problems, products with exact results, and
checks."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
import scipy.special
from jax import numpy as jnp

from jax_splitk.kernels.quantized import tiles
from jax_splitk.problems.quantized_epilogue import QuantizedEpilogueProblem
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.problems.quantized_transposed import QuantizedTransposedProblem
from jax_splitk.quantized import PackedWeight, QuantizedArray
from tests import dots, formats
from tests.problems import SEED, on_device

E4M3 = "float8_e4m3fn"
HALF: dict[str, Any] = {"x_dtype": "float16", "out_dtype": "float16"}

# Dtypes of x, result and scale.
TYPES: tuple[dict[str, Any], ...] = (
    {},
    {"out_dtype": "float32"},
    {"scale_dtype": "float32"},
    {**HALF, "scale_dtype": "float16"},
    {**HALF, "scale_dtype": "bfloat16", "out_dtype": "float32"},
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A product, or one with the transposed weight; `zero` is as in `formats.every_code`."""

    rows: int
    k: int
    features: int
    qtype: str = "int4"
    group_size: int = 64
    zero: str | None = None
    scale_dtype: str = "bfloat16"
    x_dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    channel: bool = False  # with channel scales
    transposed: bool = False
    bias: str = "none"  # dtypes of an epilogue's operands
    activation: str = "none"
    residual: str = "none"
    norm: str = "none"  # "one": x is normalized, without a scale; or the scale's dtype
    epsilon: float = 0.0
    compute: str = "none"  # compute_dtype

    @property
    def after(self) -> dict[str, str]:
        """The fields of the normalization and the epilogue."""
        found = {"bias_dtype": self.bias, "activation": self.activation, "residual_dtype": self.residual}
        if self.norm == "none":
            return found
        scale = "none" if self.norm == "one" else self.norm
        return {**found, "norm_epsilon": repr(self.epsilon), "norm_scale_dtype": scale}

    @property
    def operand(self) -> str:
        """The dtype that the tensor cores multiply, but for products of e4m3."""
        return "bfloat16" if self.x_dtype == "bfloat16" else "float16"

    @property
    def problem(self) -> QuantizedMatmulProblem:
        byte = self.scale_dtype not in formats.FLOAT_DTYPES
        zero = {None: "none", "own": "bfloat16" if byte else self.scale_dtype}.get(self.zero, self.zero)
        kind: Any = QuantizedTransposedProblem if self.transposed else QuantizedMatmulProblem
        after = {} if set(self.after.values()) == {"none"} else self.after
        return (QuantizedEpilogueProblem if after else kind)(
            self.rows, self.k, self.features, self.x_dtype, self.out_dtype, self.qtype, self.group_size,
            self.scale_dtype, str(zero), channel_dtype="float32" if self.channel else "none",
            compute_dtype=self.compute, **after,
        )  # fmt: skip

    def multiplied(self, weight: np.ndarray) -> np.ndarray:
        """The matrix that x is multiplied with, of a weight [k, features]."""
        return weight.T if self.transposed else weight

    def every_code(self, rounded: str = "float32") -> tuple[QuantizedArray, np.ndarray]:
        given = (self.qtype, self.k, self.features, self.group_size, self.zero, self.scale_dtype)
        return formats.every_code(*given, channel=self.channel, rounded=rounded)


def operands(packed: PackedWeight, x: Any, x_dtype: str) -> tuple[jax.Array, ...]:
    more = [leaf for leaf in (packed.zero_point, packed.channel_scale) if leaf is not None]
    return (on_device(x, x_dtype), packed.words, packed.scale, *more)


GATED: dict[str, Any] = {
    "swiglu": lambda gate, up: dots.ACTIVATIONS["silu"](gate) * up,
    "geglu": lambda gate, up: dots.ACTIVATIONS["gelu"](gate) * up,
    "swigluoai": lambda gate, up: (
        np.minimum(gate, 7) * scipy.special.expit(1.702 * np.minimum(gate, 7)) * (np.clip(up, -7, 7) + 1)
    ),
}


def with_epilogue(case: Case, sums: np.ndarray, bias: Any = None, residual: Any = None) -> np.ndarray:
    """The epilogue of the exact product, in float64. A gated activation's sums are 8 of gate and 8 of up in turn."""
    if case.activation in GATED:
        blocks = sums.reshape(*sums.shape[:-1], -1, 2, 8)
        parts = [blocks[..., i, :].reshape(*sums.shape[:-1], -1) for i in range(2)]
        parts = parts if bias is None else [part + each for part, each in zip(parts, bias, strict=True)]
        out = GATED[case.activation](*parts)
    else:
        out = dots.ACTIVATIONS[case.activation](sums if bias is None else sums + bias)
    return out if residual is None else out + residual


def exact_epilogue(case: Case, sums: np.ndarray, seed: int) -> tuple[list[np.ndarray], np.ndarray]:
    """A bias and a residual with which the results are exact, and these results. The bias of an activation is so far
    from 0 that its exponential or tangent is 0 or 1, or rounds to it."""
    p, rng, given = case.problem, random(seed, 1), {}
    for name, (shape, dtype) in zip(
        [name for name in ("bias", "residual") if getattr(case, name) != "none"],
        getattr(p, "epilogue_operands", ()),
        strict=True,
    ):
        values = rng.integers(-3, 4, shape).astype(np.float64)
        if name == "bias" and case.activation not in ("none", "relu"):
            far = 2.0 ** np.ceil(np.log2(np.abs(sums).max() + 128))
            of_gate = values[:1] if case.activation in GATED else values
            of_gate[...] = rng.choice([-far, far], of_gate.shape)
        given[name] = values.astype(jnp.dtype(dtype))
    exact = with_epilogue(case, sums, **{name: value.astype(np.float64) for name, value in given.items()})
    return list(given.values()), exact


def exact_norm(case: Case, seed: int) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """An x of small integers, the scale of the normalized x if there is one, and the integers that are multiplied. Rows
    that are normalized are 2 and -2, whose mean square has an exact root."""
    if case.norm == "none":
        x = integers(case, 1 if case.x_dtype == E4M3 else 2, seed)
        return x, [], x
    rng = random(seed, 2)
    x = rng.choice([-2.0, 2.0], case.problem.x_shape)
    if case.norm == "one":
        return x, [], x / 2
    scale = rng.choice([-2.0, -1.0, 1.0, 2.0], case.k)
    return x, [scale.astype(jnp.dtype(case.norm))], x / 2 * scale


def normalized(case: Case, x: Any, scale: Any = None) -> np.ndarray:
    """x in float64, normalized as the case says, and not rounded."""
    x = np.asarray(x, np.float64)
    if case.norm == "none":
        return x
    x = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + case.epsilon)
    return x if scale is None else x * np.asarray(scale, np.float64)


def random_epilogue(rng: np.random.Generator) -> Case:
    """Any format, sizes, dtypes and epilogue whose results are exact on integers."""
    draw = lambda *values: values[int(rng.integers(len(values)))]  # noqa: E731
    x_dtype = draw("bfloat16", "float16", E4M3)
    wide = () if x_dtype == E4M3 else ("float32",)
    out_dtype = draw("bfloat16", "float16", *wide)  # not from a set, whose order differs in each process
    activation = draw("none", "relu", "silu", "gelu", "gelu_exact", *GATED)
    if activation == "swigluoai" and out_dtype == "float32":
        out_dtype = "bfloat16"  # its sigmoid of 7 is not 1 in float32
    gated = activation in GATED
    qtype, zero = draw(*formats.CASES)
    group, k = draw((32, 64), (64, 128), (128, 128), (0, 8))
    k *= int(rng.integers(1, 9)) if group else int(rng.integers(8, 60))
    kind = Case(
        int(rng.integers(1, draw(17, 65, 200))),
        k,
        int(rng.integers(1, 20)) * 16 if gated else int(rng.integers(1, 300)),
        qtype,
        group or k,
        zero,
        draw(*formats.FLOAT_DTYPES),
        x_dtype,
        out_dtype,
        bool(rng.integers(2)),
        bias="none",
        activation=activation,
        residual=draw("none", "bfloat16", "float16", "float32"),
    )
    if activation in ("none", "relu"):
        bias = draw("none" if activation == "relu" else "float16", "bfloat16")
    else:
        bias = draw("bfloat16", "float32")
    norm = draw("none", "one", "bfloat16")
    if kind.x_dtype != "bfloat16" or kind.rows > 32:
        norm = "none"
    elif norm != "none":  # the inverse of k is exact
        kind = dataclasses.replace(kind, k=512, group_size=min(kind.group_size, 64))
    return dataclasses.replace(kind, bias=bias, norm=norm)


def random(*key: int) -> np.random.Generator:
    return np.random.default_rng([SEED, *key])


def integers(case: Case, largest: int, seed: int) -> np.ndarray:
    """An x of small integers, in float64."""
    return random(seed).integers(-largest, largest + 1, case.problem.x_shape).astype(np.float64)


def normal(case: Case) -> jax.Array:
    return on_device(random(0).standard_normal(case.problem.x_shape), case.x_dtype)


def exact_weight(case: Case, seed: int, rounded: str = "float32") -> tuple[QuantizedArray, np.ndarray]:
    """A weight whose sums of products with small integers are exact in float32, and its values in float64. `rounded` as
    in `formats.table`."""
    rng = random(seed)
    table = formats.table(case.qtype, rounded)
    fits = np.isfinite(table) & (np.abs(table) <= 128) & (table * 2048 == np.rint(table * 2048))
    if case.qtype == "float8_e4m3fn":
        fits = (np.abs(table) <= 16) & (table * 8 == np.rint(table * 8))
    if case.compute == E4M3:  # which holds the values, also less a zero point
        fits &= (np.abs(table) <= 8) & (to_e4m3(table) == table)
    patterns = rng.choice(np.flatnonzero(fits), (case.k, case.features))
    shape = (case.k // case.group_size, case.features)
    sizes = [-2.0, -1.0, 0.5, 1.0, 2.0]
    scale = rng.choice(np.abs(sizes) if case.scale_dtype == formats.E8M0 else sizes, shape)
    channel = rng.choice(sizes, (1, case.features)) if case.channel else None
    value, zero_point = table[patterns], None
    if case.zero is not None:
        zero = rng.integers(0, 8, shape)
        zero_point = on_device(zero, formats.storage(case.qtype) if case.zero == "own" else case.zero)
        value = value - np.repeat(zero, case.group_size, axis=0)
    q = QuantizedArray(
        formats.elements(case.qtype, patterns),
        on_device(scale, case.scale_dtype),
        zero_point,
        case.qtype,
        None if channel is None else on_device(channel, jnp.float32),
    )
    value = value * np.repeat(scale, case.group_size, axis=0)
    return q, value if channel is None else value * channel


def to_e4m3(values: np.ndarray) -> np.ndarray:
    """Values rounded to e4m3, in float64."""
    return values.astype(jnp.dtype(E4M3)).astype(np.float64)


def in_e4m3(values: np.ndarray, axis: int) -> np.ndarray:
    """Values rounded to e4m3 over powers of two along an axis, of which the largest is from 128 to 256."""
    _, exponent = np.frexp(np.abs(values).max(axis, keepdims=True))
    factor = 2.0 ** (exponent - 8)
    return to_e4m3(values / factor) * factor


def e4m3_bound(case: Case, q: QuantizedArray, weight: np.ndarray) -> np.ndarray:
    """How far a weight that quantized_fp8 rounds may be from its definition: half a last place of e4m3, which is
    subnormal far below the feature's largest weight; 2^-8 of it each for a scale of 7 bits and for the result; and with
    a zero point that is no whole number 2^-7 of the scale."""
    bound = np.abs(weight) * (2.0**-4 + 2.0**-7) + np.abs(weight).max(0) * 2.0**-16
    if case.zero is None:
        return bound
    return bound + np.repeat(np.abs(np.asarray(q.scale).astype(np.float64)), case.group_size, axis=0) * 2.0**-7


def parts_bound(case: Case, q: QuantizedArray, weight: np.ndarray) -> np.ndarray:
    """How far a weight in bfloat16 may be from its definition where it is computed from parts of its scale and zero
    point (`tiled.in_parts`): half a last place and 2^-16 of it, and with a zero point 2^-8 of the scale."""
    scale = np.repeat(np.abs(np.asarray(q.scale).astype(np.float64)), case.group_size, axis=0)
    return np.abs(weight) * (2.0**-8 + 2.0**-16) + scale * (2.0**-8 if case.zero else 0)


def elements(q: QuantizedArray, rounded: str = "float32") -> np.ndarray:
    """The values of a weight's elements, without scales and zero points, in float64. `rounded` as in
    `formats.table`."""
    if q.qtype == "nf4":
        return formats.table("nf4", rounded)[np.asarray(q.qvalue).astype(int)]
    return np.asarray(q.qvalue).astype(np.float64)


def as_float32_product(case: Case, x: jax.Array, weight: np.ndarray) -> jax.Array:
    """XLA's product in float32, with the weight rounded by its definition."""
    dequantized = jnp.asarray(case.multiplied(weight).astype(np.float32))
    if case.out_dtype == case.x_dtype:
        dequantized = dequantized.astype(case.x_dtype).astype(jnp.float32)
    return jnp.dot(x.astype(jnp.float32), dequantized, precision="highest").astype(case.out_dtype)


def error(out: Any, exact: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(out).astype(np.float64) - exact) / np.linalg.norm(exact))


def valid_problem(rows: int, k: int, features: int, **changes: Any) -> QuantizedMatmulProblem:
    """A problem with int4 weights in groups of 64 and bfloat16, except for `changes`."""
    fields = {
        "x_dtype": "bfloat16", "out_dtype": "bfloat16", "qtype": "int4", "group_size": 64, "scale_dtype": "bfloat16",
        **changes,
    }  # fmt: skip
    made = QuantizedMatmulProblem(rows, k, features, **fields)
    made.validate()
    return made


def problems(
    sizes: Iterable[tuple[int, int, int]], kinds: Iterable[dict[str, Any]], **defaults: Any
) -> list[QuantizedMatmulProblem]:
    """All kinds in all sizes; per channel (also for group_size 0) if k is not a multiple of the group."""
    found = []
    for (rows, k, features), kind in itertools.product(sizes, kinds):
        group = kind.get("group_size", 64)
        group = group if group and k % group == 0 else k
        found.append(valid_problem(rows, k, features, **{**defaults, **kind, "group_size": group}))
    return found


_Config = TypeVar("_Config", bound=tiles.Config)


def without_idle(p: QuantizedMatmulProblem, config: _Config) -> _Config:
    """The config with the largest number of thread blocks, at most its own, that leaves no block without work."""
    workers = tiles.schedule(p, config).without_idle().workers
    return dataclasses.replace(config, blocks=workers * config.worker_blocks)


def few_and_single_ranges(
    family: tiles.TileFamily[_Config], p: QuantizedMatmulProblem, config: _Config
) -> Iterator[_Config]:
    """The config with the k blocks in few ranges, and each in a range of its own, if a GiB is workspace enough."""
    units = math.prod(tiles.tile_counts(p, config)) * tiles.k_blocks(p)
    for workers in sorted({min(7, units), units}):
        found = without_idle(p, dataclasses.replace(config, blocks=workers * config.worker_blocks))
        if family.workspace_bytes(p, found) <= 1 << 30:
            yield found
