"""A tensor map whose bounds are those of one group: loads give zeros beyond it, stores write nothing there."""

import pathlib
import types
from typing import Any

import numpy as np
import pytest
from jax import numpy as jnp

from jax_splitk.kernels.ragged.maps import group_map
from jax_splitk.runtime.plan import Buffer, DevicePlan, Launch, MapParam, Pointer
from jax_splitk.runtime.source import Source
from tests import emulator, poison
from tests.problems import seeded

COLUMNS, BOX_ROWS = 72, 64  # the second box of columns is not whole
SIZES = (0, 1, 63, 64, 65, 0, 200, 128)
GAP = 3  # rows before and behind each group, which must stay

# Loads each box of each group, and stores it in the same place of the output. The box behind the group's last is all
# zeros, and is added to `beyond` element by element.
TEXT = """
#include "device/skeleton.cuh"
#include "ragged/group_map.cuh"
extern "C" __global__ void __launch_bounds__(32)
    copy_groups(const __grid_constant__ TensorMap in, const __grid_constant__ TensorMap out, const int* groups) {
  __shared__ Pipeline<1> pipeline;
  const uint32_t box = shared_stages();
  start_barriers(pipeline);
  if (threadIdx.x != 0) return;
  const Rows rows = {groups[2 * blockIdx.x], groups[2 * blockIdx.x + 1]};
  Position at;
  for (int row = 0; row < rows.size + 1; row += 64) {
    for (int column = 0; column < 72; column += 64) {
      rows.load(in, pipeline.expect(at, 64 * 128), box, column, row);
      pipeline.wait_full(at);
      rows.store(out, box, column, row);
      wait_stores_read();
      at.advance(1);
    }
  }
}

// The box that begins two rows before the group's end, as it is in shared memory: [group][row][64].
extern "C" __global__ void __launch_bounds__(32)
    load_ends(const __grid_constant__ TensorMap in, const int* groups, uint16_t* out) {
  __shared__ Pipeline<1> pipeline;
  const uint32_t box = shared_stages();
  start_barriers(pipeline);
  const Rows rows = {groups[2 * blockIdx.x], groups[2 * blockIdx.x + 1]};
  if (threadIdx.x == 0) rows.load(in, pipeline.expect({}, 64 * 128), box, 0, max(rows.size - 2, 0));
  pipeline.wait_full({});
  for (int i = threadIdx.x; i < 64 * 64; i += 32) {
    const int row = i / 64, column = i % 64, byte = ((column / 8) ^ row % 8) * 16 + column % 8 * 2;
    out[blockIdx.x * 64 * 64 + i] = load_shared<uint16_t>(box + row * 128 + byte);
  }
}
"""


def groups() -> np.ndarray:
    starts = np.cumsum([GAP + size for size in SIZES]) - SIZES
    return np.stack([starts, SIZES], axis=1).astype(np.int32)


def total_rows() -> int:
    return int(groups()[-1].sum()) + GAP


def plans(folder: pathlib.Path) -> tuple[DevicePlan, DevicePlan]:
    (folder / "copy.cu").write_text(TEXT)
    source, rows, count = Source(str(folder / "copy.cu"), ()), total_rows(), len(SIZES)
    maps = tuple(group_map(buffer, "bfloat16", COLUMNS, BOX_ROWS) for buffer in (0, 2))
    size = Buffer(rows * COLUMNS * 2, 16)
    shared = BOX_ROWS * 128 + 1024

    def plan(name: str, out: Buffer, *params: Any) -> DevicePlan:
        launch = Launch(name, (count, 1, 1), (32, 1, 1), params, shared)
        return DevicePlan(source, (size, Buffer(count * 8, 16), out, Buffer(0, 16)), maps, (launch,), name)

    copied = plan("copy_groups", size, MapParam(0), MapParam(1), Pointer(1))
    return copied, plan("load_ends", Buffer(count * 64 * 64 * 2, 16), MapParam(0), Pointer(1), Pointer(2))


def check(copied: np.ndarray, ends: np.ndarray, x: np.ndarray) -> None:
    """`copied` has the groups and NaN elsewhere. `ends` has two rows of each group, then zeros."""
    expected = np.full_like(x, np.nan)
    for (start, size), box in zip(groups(), ends, strict=True):
        expected[start : start + size] = x[start : start + size]
        want = np.zeros((64, 64), x.dtype)
        first = max(size - 2, 0)
        want[: size - first] = x[start + first : start + size, :64]
        np.testing.assert_array_equal(box.astype(np.float32), want.astype(np.float32))
    np.testing.assert_array_equal(copied.astype(np.float32), expected.astype(np.float32))


def operand(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(-100, 100, (total_rows(), COLUMNS)).astype(jnp.bfloat16)


def test_bounds_are_the_groups(tmp_path: pathlib.Path) -> None:
    copying, loading = plans(tmp_path)
    with seeded(31) as rng:
        x = operand(rng)
        copied, ends = np.zeros_like(x), np.zeros((len(SIZES), 64, 64), x.dtype)
        emulator.run(copying, [x, groups()], [copied])
        emulator.run(loading, [x, groups()], [ends])
        check(copied, ends, x)


@pytest.mark.gpu
def test_bounds_are_the_groups_on_a_gpu(tmp_path: pathlib.Path) -> None:
    copying, loading = plans(tmp_path)
    x = operand(np.random.default_rng())

    def run(plan: DevicePlan, shape: tuple[int, ...]) -> np.ndarray:
        problem: Any = types.SimpleNamespace(out_shape=shape, out_dtype="bfloat16")
        return poison.run(plan, problem, jnp.asarray(x), jnp.asarray(groups()))

    # The poisoned results are further operands; the map of the output's buffer moves with them.
    check(run(copying, x.shape), run(loading, (len(SIZES), 64, 64)), x)
