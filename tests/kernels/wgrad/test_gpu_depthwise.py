"""Special properties of depthwise weight gradients on a GPU: shared memory beside a row is never read as zeros."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from benchmarks.cases import Case
from jax_splitk.kernels.depthwise import wgrad as depthwise
from jax_splitk.kernels.depthwise.wgrad import FAMILY, Config
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime import compiler
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import float64, on_gpu
from tests.grouped import DEPTHWISE, NETWORKS
from tests.on_gpu import integers

pytestmark = pytest.mark.gpu


def leaves_out_zeros(p: ConvWgradProblem) -> bool:
    """Whether the zeros beside a row of one segment are not stored in shared memory."""
    t = depthwise.tiling(p, Config(8, 1, 1, 1))
    return t.x_columns < t.used + depthwise.axes(p).width.reach


def short_rows() -> Iterator[tuple[ConvWgradProblem, list[Config]]]:
    """Such problems, with configs of one segment."""
    for case in (*NETWORKS[2:4], *DEPTHWISE):
        p = case.problem("float32")
        if leaves_out_zeros(p):
            configs = [FAMILY.with_splits(p, Config(channels, 1, 2, 1), 3) for channels in depthwise.CHANNELS]
            yield p, [config for config in configs if FAMILY.refusal(p, config) is None]


def filling(segments: int) -> tuple[ConvWgradProblem, list[Config]]:
    """A problem without any zeros, and configs for it whose planes fill the shared memory of every multiprocessor."""
    p = Case("", 64 * (4 // segments), 96, 16 * segments, 48, 48, (1, 1), groups=48).problem()
    deepest = depthwise.tiling(p, Config(16, segments, 1, 1)).max_stages
    configs = [Config(16, segments, stages, 64) for stages in (deepest, deepest - 1)]
    for config in configs:
        (launch, *_) = on_gpu.plan(FAMILY, p, config).launches
        assert launch.shared_bytes > 150 * 1024
        assert launch.grid[0] * launch.grid[1] > DEFAULT_CUDA.cores, "only one fits a multiprocessor"
    return p, configs


def device_code() -> set[compiler.Source]:
    problems = (*short_rows(), *map(filling, depthwise.SEGMENTS))
    return {FAMILY.source(p, config) for p, configs in problems for config in configs}


@functools.cache
def fill_with_nan() -> list[Callable[[], jax.Array]]:
    """Functions that leave NaN nearly everywhere in shared memory, each with different gaps."""
    found = []
    for p, configs in map(filling, depthwise.SEGMENTS):
        operands = [jnp.full(shape, jnp.nan, p.dtype) for shape in (p.lhs_shape, p.g_shape)]
        for config in configs:
            run = on_gpu.ours(FAMILY, p, config)
            assert jnp.isnan(run(*operands)).all()
            found.append(functools.partial(run, *operands))
    return found


@pytest.mark.parametrize(("p", "configs"), list(short_rows()), ids=lambda v: str(v) if hasattr(v, "op") else "")
def test_what_was_in_shared_memory_enters_no_product(p: ConvWgradProblem, configs: list[Any]) -> None:
    lhs, g = integers(p, seed=5)
    want = float64.rounded(float64.conv_wgrad(p, lhs, g), p.out_dtype)
    for config in configs:
        run = on_gpu.ours(FAMILY, p, config)
        run(lhs, g).block_until_ready()  # compiled, so that nothing runs in between
        for i, fill in enumerate(fill_with_nan()):
            fill().block_until_ready()
            np.testing.assert_array_equal(np.asarray(run(lhs, g)), want, err_msg=f"{config} after {i}")
