"""What the tests of the kernel families of products with packed weights share: problems, products whose results are
known exactly, and checks."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import numpy as np
from jax import numpy as jnp

from jax_splitk.kernels.quantized import tiles
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.quantized import PackedWeight, QuantizedArray
from jax_splitk.runtime import plan
from jax_splitk.runtime.target import DEFAULT_CUDA, Target
from tests import formats
from tests.problems import SEED

E4M3 = "float8_e4m3fn"
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
    """A product; `zero` is as in `formats.every_code`."""

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
        return formats.every_code(self.qtype, self.k, self.features, self.group_size, self.zero, self.scale_dtype)


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
    table = formats.table(case.qtype)
    fits = np.isfinite(table) & (np.abs(table) <= 128) & (table * 2048 == np.rint(table * 2048))
    if case.qtype == "float8_e4m3fn":
        fits = (np.abs(table) <= 16) & (table * 8 == np.rint(table * 8))
    patterns = rng.choice(np.flatnonzero(fits), (case.k, case.features))
    shape = (case.k // case.group_size, case.features)
    scale = rng.choice([-2.0, -1.0, 0.5, 1.0, 2.0], shape)
    value, zero_point = table[patterns], None
    if case.zero is not None:
        zero = rng.integers(0, 8, shape)
        zero_point = jnp.asarray(zero, formats.storage(case.qtype) if case.zero == "own" else case.zero)
        value = value - np.repeat(zero, case.group_size, axis=0)
    q = QuantizedArray(
        formats.elements(case.qtype, patterns), jnp.asarray(scale, case.scale_dtype), zero_point, case.qtype
    )
    return q, value * np.repeat(scale, case.group_size, axis=0)


def rounded(exact: np.ndarray, dtype: str) -> np.ndarray:
    """Through float32, as results are defined."""
    with np.errstate(over="ignore"):
        return np.asarray(jnp.asarray(exact.astype(np.float32)).astype(dtype))


def elements(q: QuantizedArray) -> np.ndarray:
    """What a weight's elements stand for, without scales and zero points, in float64."""
    if q.qtype == "nf4":
        return formats.table("nf4")[np.asarray(q.qvalue.astype(jnp.int32))]
    return np.asarray(q.qvalue.astype(jnp.float32), np.float64)


def as_float32_product(case: Case, x: jax.Array, weight: np.ndarray) -> jax.Array:
    """XLA's product in float32, of the weight rounded as the definition has it."""
    dequantized = jnp.asarray(weight.astype(np.float32))
    if case.out_dtype == case.x_dtype:
        dequantized = dequantized.astype(case.x_dtype).astype(jnp.float32)
    return jnp.dot(x.astype(jnp.float32), dequantized, precision="highest").astype(case.out_dtype)


def error(out: Any, exact: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(out).astype(np.float64) - exact) / np.linalg.norm(exact))


def valid_problem(rows: int, k: int, features: int, **changes: Any) -> QuantizedMatmulProblem:
    """Of int4 weights in groups of 64 and bfloat16, but for the changes."""
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
    """All kinds in all sizes; per channel (group_size 0, too) where k is no multiple of the group."""
    found = []
    for (rows, k, features), kind in itertools.product(sizes, kinds):
        group = kind.get("group_size", 64)
        group = group if group and k % group == 0 else k
        found.append(valid_problem(rows, k, features, **{**defaults, **kind, "group_size": group}))
    return found


_Config = TypeVar("_Config", bound=tiles.Config)


def without_idle(p: QuantizedMatmulProblem, config: _Config) -> _Config:
    """The config with the nearest number of thread blocks not above its own that leaves none without work."""
    workers = tiles.schedule(p, config).without_idle().workers
    return dataclasses.replace(config, blocks=workers * config.multicast)


# ---- checks without a GPU ------------------------------------------------------------------------------------------


def check_only_hopper(family: Any, p: QuantizedMatmulProblem) -> None:
    ampere = Target("cuda", "NVIDIA A100", "8.0", 108)
    expected = "needs a GPU of compute capability 9.0 (Hopper), not NVIDIA A100 (8.0)"
    assert family.refusal(p, None, ampere) == expected
    assert family.refusal(p, None, DEFAULT_CUDA) is None
    assert family.unmeasured_refusal(p) is None


def check_candidates(family: Any, p: QuantizedMatmulProblem) -> None:
    """They are legal and in order."""
    found = family.candidates(p, DEFAULT_CUDA)
    assert found
    assert len(set(found)) == len(found) <= 40
    for config in found:
        assert family.refusal(p, config, DEFAULT_CUDA) is None, config
    seconds = [family.estimate(p, config, DEFAULT_CUDA) for config in found]
    assert seconds == sorted(seconds)
    assert 1e-6 < seconds[0] < 1
    for config in family.neighbours(p, found[0], DEFAULT_CUDA):
        assert config != found[0]


def check_buffers(p: QuantizedMatmulProblem, made: plan.DevicePlan) -> None:
    """All but the workspace are those of the custom call."""
    shapes = [(p.x_shape, p.x_dtype), (p.words_shape, "uint32"), (p.scale_shape, p.scale_dtype)]
    shapes += [(p.scale_shape, p.zero_dtype)] * (p.zero_dtype != "none") + [(p.out_shape, p.out_dtype)]
    assert [b.bytes for b in made.buffers[:-1]] == [math.prod(s) * jnp.dtype(d).itemsize for s, d in shapes]


Piece = tuple[int, int, int, int]  # a tile, its first k block, end, slot


def check_schedule(
    family: tiles.TileFamily[Any],
    p: QuantizedMatmulProblem,
    config: tiles.Config,
    pieces: Callable[[plan.Int32Struct, int, int], list[Piece]],
) -> None:
    """Every k block of every tile is computed once, and the second kernel adds what was cut.

    `pieces(args, worker, workers)` is what the device code makes of its arguments.
    """
    given = tiles.schedule(p, config)
    launches = {launch.kernel: launch for launch in family.plan(p, config).launches}
    main = launches[family.name]
    (args,) = (param for param in main.params if isinstance(param, plan.Int32Struct))
    length = args.values[9]
    done = np.zeros((given.tiles, given.k_blocks), int)
    slots: dict[int, list[int]] = {}
    for worker in range(given.workers):
        for tile, begin, end, slot in pieces(args, worker, given.workers):
            done[tile, begin:end] += 1
            if slot >= 0:
                slots.setdefault(tile, []).append(slot)
    assert (done == 1).all(), config
    assert bool(slots) == ("reduce_ranges" in launches) == tiles.is_cut(p, config)
    size = config.multicast * config.splits
    assert (main.grid[0], main.cluster) == (config.blocks, (size, 1, 1))
    assert main.grid[0] % size == 0
    flat = list(itertools.chain(*slots.values()))
    assert len(set(flat)) == len(flat)
    slot_bytes = config.multicast * tiles.tile_bytes(config)
    assert all((slot + 1) * slot_bytes <= family.workspace_bytes(p, config) for slot in flat)
    if not slots:
        return
    # What the second kernel adds, in the order of the ranges.
    before = config.whole_tiles * given.workers
    parts = launches["reduce_ranges"].grid[0] // (given.tiles - before)
    assert parts * tiles.CHUNK_BYTES == slot_bytes
    for tile in range(given.tiles - before):
        first_unit = tile * given.k_blocks
        first, last = first_unit // length, (first_unit + given.k_blocks - 1) // length
        added = [2 * r + (r * length < first_unit) for r in range(first, last + 1)] if first < last else []
        assert added == slots.get(before + tile, [])
