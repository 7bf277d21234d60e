"""Every kernel on the CPU, in the emulator; and the emulator finds errors that would crash a GPU."""

import pathlib
import re

import numpy as np
import pytest

from jax_splitk.runtime.plan import Buffer, DevicePlan, Launch, Pointer
from jax_splitk.runtime.source import Source
from tests import emulator, every_kernel
from tests.problems import seeded

FIRST = {run.family.name: run for run in reversed(every_kernel.RUNS)}
RUNS = [
    pytest.param(run, id=str(run), marks=[pytest.mark.exhaustive] * (run is not FIRST[run.family.name]))
    for run in every_kernel.RUNS
]


@pytest.mark.parametrize("run", RUNS)
def test_exact_on_integers(run: every_kernel.Run) -> None:
    """The order of threads and copies is random."""
    assert run.family.refusal(run.problem, run.config) is None
    operands, exact = run.operands()
    out = np.zeros(exact.shape, exact.dtype)
    with seeded(71) as rng:
        emulator.run(run.plan, operands, [out], seed=int(rng.integers(2**31)))
        np.testing.assert_array_equal(out, exact)


START = """
#include "device/skeleton.cuh"
extern "C" __global__ void __launch_bounds__(64) kernel(const float* x, float* out) {
  __shared__ Pipeline<1> pipeline;
  extern __shared__ float4 raw[];
  const uint32_t data = shared_address(raw);
  start_barriers(pipeline);
"""
COPY = "if (threadIdx.x == 0) copy_bulk(data, x, 256, shared_address(pipeline.expect({}, 256)), 0);"
USE = "out[threadIdx.x] = load_shared<float>(data + threadIdx.x * 4);"


def run(folder: pathlib.Path, text: str, accesses: list[emulator.Access] | None = None, seed: int = 0) -> np.ndarray:
    """Runs a kernel with this body on 64 elements x, and returns its 64 elements out."""
    (folder / "kernel.cu").write_text(START + text + "\n}\n")
    source = Source(str(folder / "kernel.cu"), ())
    launch = Launch("kernel", (1, 1, 1), (64, 1, 1), (Pointer(0), Pointer(1)), 1024)
    plan = DevicePlan(source, (Buffer(256, 16), Buffer(256, 16), Buffer(0, 16)), (), (launch,), "test")
    out = np.empty(64, np.float32)
    emulator.run(plan, [np.arange(64, dtype=np.float32)], [out], seed=seed, accesses=accesses)
    return out


def test_what_is_waited_for_has_come(tmp_path: pathlib.Path) -> None:
    np.testing.assert_array_equal(run(tmp_path, COPY + "pipeline.wait_full({});" + USE), np.arange(64))


@pytest.mark.parametrize(("text", "error"), [
    (COPY + "pipeline.wait_full({0, 1}); pipeline.wait_full({0, 0}); pipeline.wait_full({0, 1});",
     r"deadlock:\n  thread 0 of block \(0, 0, 0\) waits at mbarrier"),
    (USE + "__syncthreads();" + COPY + "pipeline.wait_full({});", "has read without a fence since"),
    (COPY + "if (threadIdx.x < 33) __syncthreads();", "a copy that nobody waited for"),
    ("if (threadIdx.x < 2) { pipeline.expect({}, 4); pipeline.expect({}, 4); }", "an arrival too many at a barrier"),
    ("out[threadIdx.x + 1] = 0;", "a write outside of buffer 1"),
    ("const_cast<float*>(x)[-1 - int(threadIdx.x)] = 0;", "a write outside of buffer 0"),
    ("__ldg(x + 64 + threadIdx.x);", "__ldg outside of the buffers"),
    ("load_shared<float4>(data + 8);", "not a multiple of 16"),
    ("if (threadIdx.x < 32) sync_threads<64, 1>();", "waits at sync_threads"),
])  # fmt: skip
def test_what_a_gpu_would_not_survive(text: str, error: str, tmp_path: pathlib.Path) -> None:
    """Some order of threads and copies shows the error."""
    with pytest.raises(emulator.EmulationError, match=error):
        for seed in range(8):
            run(tmp_path, text, seed=seed)


OVERTAKES = """for (Position at; at.phase < 2; ++at.phase) {
  if (threadIdx.x == 0) copy_bulk(data, x, 256, shared_address(pipeline.expect(at, 256)), 0);
  pipeline.wait_full({0, at.phase & 1});
  FENCE
}"""


@pytest.mark.parametrize("meet", [True, False])
def test_a_late_warp_is_found(meet: bool, tmp_path: pathlib.Path) -> None:
    """A warp is a phase behind, because the producer does not wait for it."""
    text = OVERTAKES.replace("FENCE", "__syncthreads();" if meet else "")
    deadlocks = 0
    for seed in range(8):
        try:
            run(tmp_path, text, seed=seed)
        except emulator.EmulationError as error:
            assert re.search("deadlock:\n  thread .* waits at mbarrier", str(error))
            deadlocks += 1
    assert (deadlocks > 0) == (not meet)


def test_what_was_not_waited_for_is_not_there(tmp_path: pathlib.Path) -> None:
    """The data is missing if its copy is late."""
    text = COPY + "__syncthreads();" + USE + "pipeline.wait_full({});"
    assert any(np.isnan(run(tmp_path, text, seed=seed)).all() for seed in range(8))


@pytest.mark.parametrize("between", ["fence_async_shared();", "loads_done();"])
def test_a_fence_keeps_a_copy_behind_what_was_read(between: str, tmp_path: pathlib.Path) -> None:
    text = USE + between + "__syncthreads();" + COPY + "pipeline.wait_full({});" + USE
    np.testing.assert_array_equal(run(tmp_path, text), np.arange(64))


COSTS = {
    "store_shared(data + threadIdx.x * 4, 0u);": ("st.shared", (2, 2, 2)),
    # Accesses of 8 bytes a lane, half a warp at a time: contiguous lanes use each bank once; with 32 bytes from lane to
    # lane, four lanes share a bank.
    "load_shared<uint2>(data + threadIdx.x * 8);": ("ld.shared", (2, 4, 4)),
    "load_shared<uint2>(data + threadIdx.x * 32 % 1024);": ("ld.shared", (2, 16, 4)),
    "load_shared<uint32_t>(data + threadIdx.x % 32 / 4 * 128);": ("ld.shared", (2, 16, 2)),
    "load_shared<uint4>(data);": ("ld.shared", (2, 8, 8)),
    "load_matrices(data + threadIdx.x % 32 * 16, v);": ("ldmatrix.shared", (2, 8, 8)),
    "load_matrices(data + threadIdx.x % 8 * 64, v);": ("ldmatrix.shared", (2, 32, 8)),
    "store_matrices(data + threadIdx.x % 16 * 32, v);": ("stmatrix.shared", (2, 16, 8)),
    "__ldg(x + threadIdx.x);": ("ld.global", (2, 2, 2)),
    "if (threadIdx.x % 2) __ldg(x + threadIdx.x * 2 % 64);": ("ld.global", (2, 4, 2)),
}


def test_what_accesses_cost(tmp_path: pathlib.Path) -> None:
    """The costs are requests, and wavefronts or lines with and without conflicts and gaps."""
    accesses: list[emulator.Access] = []
    run(tmp_path, "\n".join(["uint32_t v[4] = {};", *COSTS]), accesses)
    assert {a.statement: (a.kind, (a.requests, a.paid, a.ideal)) for a in accesses} == COSTS
    assert {a.function for a in accesses} == {"kernel"}
