"""Which thread block computes what of a product whose reduction is ragged (ragged/schedule_k.cuh): every stage of every
tile once, slots that are each a piece's own, and workers that have about the same to do."""

import collections
import dataclasses
import pathlib

import numpy as np
import pytest

from jax_splitk.runtime.plan import Buffer, DevicePlan, Int32Struct, Launch, Pointer
from jax_splitk.runtime.source import Source
from tests import emulator, ragged_dots
from tests.exhaustive import thinned
from tests.problems import seeded

MOST = 4096  # items of a worker
STORE, FEW, LEAST = 2, 3, 8  # ragged_k.py has these, with 16-bit results

# The items of each worker, and how many there are.
TEXT = """
#include "device/output.cuh"
#include "device/ptx.cuh"
#include "ragged/schedule_k.cuh"
struct Args {
  int groups, matrices, m, tiles, most;
};
extern "C" __global__ void __launch_bounds__(32)
    dump(const int* sizes, const int* offset, const __grid_constant__ Args args, int* items, int* counts) {
  __shared__ int ends[GROUPS];
  const Schedule all(sizes, offset, args.groups, args.matrices, args.m, args.tiles, ends);
  int count = 0;
  all.for_work(blockIdx.x, [&](int matrix, int tile, int first, int end, int slot) {
    if (threadIdx.x == 0 && count < args.most) {
      int* to = items + (size_t(blockIdx.x) * args.most + count) * 5;
      to[0] = matrix, to[1] = tile, to[2] = first, to[3] = end, to[4] = slot;
    }
    ++count;
  });
  if (threadIdx.x == 0) counts[blockIdx.x] = count;
}
"""


@dataclasses.dataclass(frozen=True)
class Item:
    """Stages `first` to `end` of a tile, whose sums go to a slot of the workspace; -1: they are the result."""

    matrix: int
    tile: int
    first: int
    end: int
    slot: int

    @property
    def units(self) -> int:
        return self.end - self.first + STORE


def schedule(
    folder: pathlib.Path, sizes: np.ndarray, m: int, tiles: int, workers: int, matrices: int, offset: int
) -> list[list[Item]]:
    """What each worker computes, in its order."""
    (folder / "schedule.cu").write_text(TEXT)
    groups = len(sizes)
    macros = {"WORKERS": workers, "GROUPS": -(-groups // 64) * 64, "OUT": 1, "HAS_OFFSET": 1}
    macros |= {"STORE_UNITS": STORE, "WORKER_TILES": FEW, "PIECE_STAGES": LEAST, "SLOTS": 2 * workers}
    args = Int32Struct((groups, matrices, m, tiles, MOST))
    params = (Pointer(0), Pointer(1), args, Pointer(2), Pointer(3))
    launch = Launch("dump", (workers, 1, 1), (32, 1, 1), params, 0)
    sizes_of_buffers = (4 * groups, 4, workers * MOST * 20, 4 * workers, 0)
    buffers = tuple(Buffer(size, 16) for size in sizes_of_buffers)
    source = Source(str(folder / "schedule.cu"), tuple(macros.items()))
    items, counts = np.zeros((workers, MOST, 5), np.int32), np.zeros(workers, np.int32)
    given = [sizes.astype(np.int32), np.array([offset], np.int32)]
    emulator.run(DevicePlan(source, buffers, (), (launch,), "schedule"), given, [items, counts])
    assert counts.max() <= MOST
    return [[Item(*map(int, row)) for row in rows[:count]] for rows, count in zip(items, counts, strict=True)]


def check(work: list[list[Item]], stages: list[int], tiles: int) -> None:
    """Checks a schedule for matrices with `stages` stages, each with `tiles` tiles if it has any stages."""
    workers, pieces = len(work), collections.defaultdict(list)
    for item in (item for items in work for item in items):
        pieces[item.matrix, item.tile].append(item)
    assert set(pieces) == {(matrix, tile) for matrix, count in enumerate(stages) if count for tile in range(tiles)}
    for (matrix, _), found in pieces.items():
        found.sort(key=lambda item: item.first)
        assert [item.first for item in found] == [0, *(item.end for item in found[:-1])]
        assert found[-1].end == stages[matrix]
        if len(found) == 1:
            assert found[0].slot == -1
        else:
            # The second kernel adds a tile's slots one after the other.
            assert [item.slot for item in found] == list(range(found[0].slot, found[0].slot + len(found)))
            assert min(item.end - item.first for item in found) >= LEAST
    slots = [item.slot for found in pieces.values() for item in found if item.slot >= 0]
    assert len(set(slots)) == len(slots) and max(slots, default=0) < 2 * workers
    assert sum(len(found) > 1 for found in pieces.values()) <= workers  # a block of the second kernel for each


def check_balance(work: list[list[Item]], tiles: int) -> None:
    """The work of two workers differs at most by the longest item of those that do not come out even, plus one for
    pieces of unequal length."""
    loads = [sum(item.units for item in items) for items in work]
    every = [item for items in work for item in items]
    count = collections.Counter((item.matrix, item.slot < 0) for item in every)
    uneven = [item.units + 1 for item in every if count[item.matrix, item.slot < 0] % len(work)]
    cut = len({item.matrix for item in every if item.slot >= 0})
    rounds = max(map(len, work))
    assert max(loads) - min(loads) <= max(uneven, default=0) + cut * rounds, (loads, tiles)


def drawn(rng: np.random.Generator, groups: int) -> tuple[np.ndarray, int]:
    """Group sizes of any kind, and the rows that there are."""
    m = int(2 ** rng.uniform(3, 18))
    weights = rng.dirichlet(np.full(groups, rng.choice([0.02, 0.3, 5.0])))
    sizes = rng.multinomial(int(m * rng.choice([0.5, 1, 1, 1.2])), weights)
    return sizes - (sizes == 0) * rng.integers(0, 2, groups), m


@pytest.mark.parametrize(("workers", "groups", "count"), thinned([
    (5, 8, 15), (132, 16, 8), (1, 8, 10), (70, 3, 5), (33, 64, 8), (256, 40, 3), (31, 300, 4), (8, 1100, 2), (5, 8, 60),
], 3))  # fmt: skip
def test_every_stage_is_computed_once(workers: int, groups: int, count: int, tmp_path: pathlib.Path) -> None:
    with seeded(93) as rng:
        for _ in range(count):
            sizes, m = drawn(rng, groups)
            matrices = groups if rng.random() < 0.7 else int(rng.integers(1, groups + 1))
            offset = int(rng.integers(-1, groups - matrices + 2))
            tiles = int(rng.integers(1, max(2, min(3 * workers, MOST * workers // groups // 2))))
            work = schedule(tmp_path, sizes, m, tiles, workers, matrices, offset)
            rows = ragged_dots.group_rows(m, sizes, offset, matrices)
            stages = [-(-(each.stop - each.start) // 64) for each in rows]
            try:
                check(work, stages, tiles)
                check_balance(work, tiles)
            except AssertionError as error:
                error.add_note(f"{workers} workers, {tiles} tiles, sizes {sizes.tolist()} of {m} rows, from {offset}")
                raise


@pytest.mark.parametrize(("sizes", "tiles", "least"), thinned([
    ([400_000] + [0] * 15, 48, 0.8),  # one hot: tiles are fewer than workers
    ([400_000] + [0] * 15, 140, 0.9),
    ([25_000] * 16, 48, 0.9),
    ([25_000] * 16, 264, 0.95),
    ([200_000, 100_000, 50_000, 25_000, 12_500, 6_250, 3_125, 1_500], 60, 0.85),
], 5))  # fmt: skip
def test_workers_are_busy(sizes: list[int], tiles: int, least: float, tmp_path: pathlib.Path) -> None:
    """The mean load of 132 workers is at least `least` times the largest one. The stores of pieces count."""
    given = np.array(sizes)
    work = schedule(tmp_path, given, int(given.sum()), tiles, 132, len(sizes), 0)
    check(work, [-(-size // 64) for size in sizes], tiles)
    loads = [sum(item.units for item in items) for items in work]
    assert np.mean(loads) / max(loads) >= least


@pytest.mark.exhaustive
def test_a_long_group_is_cut_in_any_order(tmp_path: pathlib.Path) -> None:
    """There are more groups than are sorted, and the longest is in their middle."""
    sizes = np.zeros(1100, int)
    sizes[500], sizes[20] = 64 * 700, 64 * 500
    work = schedule(tmp_path, sizes, int(sizes.sum()), 3, 8, 1100, 0)
    check(work, [-(-int(size) // 64) for size in sizes], 3)
    assert {item.matrix for items in work for item in items if item.slot >= 0} == {20, 500}


@pytest.mark.exhaustive
def test_pieces_of_the_longest_reduction(tmp_path: pathlib.Path) -> None:
    """The reduction has 2**24 stages, whose product with the number of pieces exceeds 32 bits."""
    work = schedule(tmp_path, np.array([2**30]), 2**30, 1, 256, 1, 0)
    check(work, [2**24], 1)
    assert len([item for items in work for item in items]) > 128
