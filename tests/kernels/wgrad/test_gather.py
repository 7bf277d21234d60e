"""The gathering family: the layout of its input, and the accuracy of its sums. Needs no GPU."""

import itertools

import numpy as np
import pytest

from jax_splitk.kernels.gather import wgrad as gather
from jax_splitk.kernels.gather.wgrad import CHAINS, FAMILY, Config
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests.problems import conv, seeded


def test_precision_decides_the_parts() -> None:
    parts = lambda **fields: gather.volume(conv((12, 12), (3, 3), (3, 64), padding=1, **fields)).parts  # noqa: E731
    assert parts(dtype="bfloat16", precision="highest") == 1
    assert parts(dtype="float32") == parts(dtype="float32", precision="high") == 2
    assert parts(dtype="float32", precision="highest") == parts(dtype="float32", precision="default,highest") == 3


@pytest.mark.parametrize("pad", [2, 3])
def test_the_stems_rows_are_runs_of_its_window(pad: int) -> None:
    p = conv((32, 32), (7, 7), (3, 64), batch=1, stride=2, padding=((pad, 3), (pad, 3)))
    for config in FAMILY.candidates(p, DEFAULT_CUDA)[::6]:
        x = gather.layout(gather.volume(p), config)
        assert (x.dense, x.runs, x.paired, x.granule) == (True, True, True, 16)


def test_splitting_into_parts_is_what_the_device_code_assumes() -> None:
    """Three truncated bf16 parts hold a float exactly (from 1e-33 on); two hold 16 bits of it."""
    truncated = lambda x: (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)  # noqa: E731
    with seeded(33) as rng:
        x = (rng.standard_normal(10_000) * 10.0 ** rng.uniform(-25, 30, 10_000)).astype(np.float32)
        high = truncated(x)
        middle = truncated(x - high)
        low = truncated(x - high - middle)
        np.testing.assert_array_equal(high.astype(np.float64) + middle + low, x)
        assert (abs(x - high - middle) <= abs(x) * 2.0**-15).all()


# ---- how exactly the tensor cores add ------------------------------------------------------------------------------

SMALL = ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1))  # products of parts (of X, of dY), in the device code's order


def bf16_parts(x: np.ndarray) -> list[np.ndarray]:
    """Three bf16 parts that together hold float32 numbers exactly, as float64."""
    parts = []
    for _ in range(3):
        part = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        parts.append(part.astype(np.float64))
        x = x - part
    return parts


def truncated_sum(sums: np.ndarray, products: np.ndarray) -> np.ndarray:
    """The sum of a WGMMA: it drops bits below the 26 leading bits of the largest term, and rounds the result to 24
    bits.

    Errors measured on an H200 follow from it: see `test_chains_keep_float32s_accuracy`.
    """
    terms = np.concatenate([sums[None], products])
    unit = np.ldexp(1.0, np.frexp(np.abs(terms).max(0))[1] - 26)
    total = np.trunc(terms / unit).sum(0) * unit
    unit = np.ldexp(1.0, np.frexp(total)[1] - 24)
    return np.trunc(total / unit) * unit


def chain_error(order: list[tuple[int, int, int]], splits: int, chains: int) -> float:
    """Relative error of inner products in `splits` parts with `chains` chains each. `order` lists the products: (step
    of 16 pixels, part of X, part of dY)."""
    width, steps = 512, 1 + max(step for step, _, _ in order)
    with seeded(35) as rng:
        x, dy = (rng.standard_normal((splits, chains, steps, 16, width)).astype(np.float32) for _ in range(2))
    exact = (x.astype(np.float64) * dy).sum((0, 1, 2, 3))
    x_parts, dy_parts = bf16_parts(x), bf16_parts(dy)
    total = np.zeros(width, np.float32)
    for split in range(splits):
        rounded = np.zeros(width, np.float32)
        for chain in range(chains):
            sums = np.zeros(width)
            for step, i, j in order:
                sums = truncated_sum(sums, x_parts[i][split, chain, step] * dy_parts[j][split, chain, step])
            rounded += sums.astype(np.float32)
        total += rounded
    return float(np.linalg.norm(total - exact) / np.linalg.norm(exact))


def order_of(steps: int) -> list[tuple[int, int, int]]:
    """The device code's order of products in a chain."""
    return [(step, *parts) for step in range(steps) for parts in SMALL] + [(step, 0, 0) for step in range(steps)]


@pytest.mark.exhaustive
def test_chains_keep_float32s_accuracy() -> None:
    """There are 25088 pixels in 44 splits, where XLA's float32 has an error of 2.3e-7 on an H200."""
    before = [(step, *parts) for step in range(2) for parts in ((0, 0), *reversed(SMALL))]
    assert 5e-7 < chain_error(before, 44, 18) < 6.5e-7
    for steps in CHAINS:
        assert chain_error(order_of(steps), 44, 36 // steps) < 2.5e-7


# Warpgroups of several blocks, whose chains end one after the other, by (blocks, steps of a chain).
CHAINED = conv((33, 31), (3, 3), (64, 72), padding=1, dtype="float32", precision="highest")
BLOCKS = {
    (2, 4): Config(2, 2, 32, 1, 8, 8, 16, 2, 3),
    (3, 4): Config(2, 3, 32, 1, 8, 8, 16, 2, 2),
    (2, 2): Config(2, 2, 64, 1, 4, 8, 16, 2, 5),
    (4, 2): Config(1, 4, 16, 1, 8, 8, 16, 2, 1),
}


def test_chains_of_several_blocks() -> None:
    v = gather.volume(CHAINED)
    for (blocks, steps), config in BLOCKS.items():
        assert FAMILY.refusal(CHAINED, config) is None
        assert (config.blocks, gather.chain(v, config)) == (blocks, steps)
    stem = conv((224, 224), (7, 7), (3, 64), batch=256, stride=2, padding=3)
    assert gather.chain(gather.volume(stem), BLOCKS[2, 4]) == 1


def test_sums_of_the_longest_split_keep_float32s_accuracy() -> None:
    assert chain_error(order_of(CHAINS[0]), 1, gather.MAX_ROUNDED_CHAIN) < 4e-7


@pytest.mark.parametrize(
    ("dtype", "precision"), [("bfloat16", "default"), ("float32", "default"), ("float32", "highest")]
)
def test_no_legal_variant_is_skipped(dtype: str, precision: str) -> None:
    """`variants` leaves out only configs that no number of stages makes fit. Each kind has its largest legal number of
    stages."""
    problem = conv((12, 20), (3, 3), (36, 80), batch=4, dtype=dtype, precision=precision)
    v, found = gather.volume(problem), set(FAMILY.variants(problem, DEFAULT_CUDA))
    kinds = itertools.product(
        gather._pixel_tiles(v), v.column_tiles(gather.TILE_N), gather.slices(v), range(1, 5), range(1, 5)
    )
    skipped = 0
    for tile, columns, channels, consumers, blocks in kinds:
        of_kind = [Config(consumers, blocks, columns, *tile, channels, stages, 1) for stages in range(4, 1, -1)]
        legal = [config for config in of_kind if FAMILY.config_refusal(problem, config) is None]
        skipped += not legal
        useful = [c for c in legal if c.tile_m < gather.layout(v, c).gemm_rows + 64 * consumers or c.tile_m == 64]
        assert set(useful[:1]) <= found
        assert found & set(of_kind) <= set(useful)
        assert bool(found & set(of_kind)) == bool(useful)
    assert skipped
    assert found
