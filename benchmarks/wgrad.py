"""Convolution weight gradients: jax_splitk against XLA. See README.md beside this file.

python -m benchmarks.wgrad [--cases NAME_OR_TAG ...] [--quick] [--json FILE] [--implementation cutlass]
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

import jax_splitk
from benchmarks import against_xla, cases, ceilings
from benchmarks.against_xla import Benchmark
from benchmarks.cases import Case
from benchmarks.report import distance, percent, rate
from jax_splitk.problems import conv_reference
from jax_splitk.tuning.options import Implementation

QUICK_CPU_FLOPS = 2e9
QUICK_CPU_GROUPED_FLOPS = 2e8  # XLA:CPU takes seconds for more
CHANNELS = 4  # input and output channels whose weights are compared with float64


class Result(against_xla.Result):
    """One case's figures."""

    FIGURES = (*against_xla.Result.FIGURES, "share_of_measured", "speedup_of_main_kernel")

    @property
    def share_of_measured(self) -> float | None:
        """Share of the rate that a matrix product or a copy reached in the same run, whichever bounds the problem."""
        found, problem = ceilings.measured(), self.case.problem()
        return None if found is None else found.share(problem.flops, problem.bytes_moved, self.ours.us)

    @property
    def speedup_of_main_kernel(self) -> float:
        """The time of XLA's longest kernel alone over ours."""
        return max(self.xla.kernels.values(), default=self.xla.us) / self.ours.us


def run(case: Case, implementation: Implementation | None, quick: bool) -> Result:
    """Compiles, times and checks one case."""
    arguments = case.lax_arguments()

    def ours(x: jax.Array, dy: jax.Array) -> jax.Array:
        return jax_splitk.conv_wgrad(x, dy, case.rhs_shape, **arguments, implementation=implementation)

    def xla(x: jax.Array, dy: jax.Array) -> jax.Array:
        w = jnp.zeros(case.rhs_shape, case.dtype)
        return jax.vjp(lambda w: lax.conv_general_dilated(x, w, **arguments), w)[1](dy)[0]

    shapes = (case.lhs_shape, case.g_shape)
    return Result.measured(case, shapes, ours, xla, functools.partial(errors, case), quick)


def errors(case: Case, functions: Iterable[Callable[..., Any]], lhs: jax.Array, g: jax.Array) -> list[float]:
    """||out - reference|| / ||reference|| of each function, in float64 over a few channels of a group."""
    rng = np.random.default_rng(0)
    group, sizes = int(rng.integers(case.groups)), [n // case.groups for n in (case.in_channels, case.out_channels)]
    inputs, outputs = (rng.permutation(size)[:CHANNELS] for size in sizes)
    x, dy = lhs[..., group * sizes[0] + inputs], g[..., group * sizes[1] + outputs]
    counts = {"in_channels": len(inputs), "out_channels": len(outputs), "groups": 1}
    problem = dataclasses.replace(case, **counts, dtype="float64").problem()
    with jax.enable_x64(True):
        x, dy = (jnp.asarray(of, jnp.float64) for of in (x, dy))
        reference = np.asarray(conv_reference.conv_wgrad(x, dy, problem))
    outs = (np.asarray(function(lhs, g).astype(jnp.float32)) for function in functions)
    return [distance(out[:, :, inputs][..., group * sizes[1] + outputs], reference) for out in outs]


def geometric_means(results: Sequence[Result]) -> dict[str, float]:
    """Geometric mean of XLA's time over ours: over all cases, over those that a kernel of ours served, over the 16-bit
    ones, and of the time of XLA's longest kernel alone over the large 3x3 convolutions.
    """
    groups = {
        "all": [r.speedup for r in results],
        "kernels": [r.speedup for r in results if r.decision.implementation != "xla"],
        "16-bit": [r.speedup for r in results if r.case.dtype != "float32"],
        "main kernel, large3x3": [r.speedup_of_main_kernel for r in results if "large3x3" in r.case.tags],
    }
    return against_xla.geometric_means(groups)


def summary(results: Sequence[Result]) -> tuple[dict[str, Any], list[str]]:
    means = geometric_means(results)
    return {"geometric_means": means}, against_xla.mean_lines(means)


def shrunk(case: Case) -> Case:
    return case.shrunk(QUICK_CPU_FLOPS if case.groups == 1 else QUICK_CPU_GROUPED_FLOPS)


BENCHMARK = Benchmark(
    name="wgrad",
    about="Convolution weight gradients",
    ops=("conv_wgrad",),
    cases=cases.WGRAD_CASES,
    groups=lambda case: case.tags,
    cut="smaller batches, then images (at most 2 GFLOP)",
    shrunk=shrunk,
    run=run,
    columns={
        "case": lambda r: r.name,
        "implementation": lambda r: r.decision.implementation,
        **against_xla.TIMES,
        "of measured": lambda r: percent(r.share_of_measured),
        "TFLOP/s": lambda r: rate(r.tflops),
        "GB/s": lambda r: rate(r.gbytes),
        **against_xla.WORKSPACE,
        "temp MiB": lambda r: f"{r.ours_temp_bytes / 2**20:.1f}",
        "XLA temp MiB": lambda r: f"{r.xla_temp_bytes / 2**20:.1f}",
        **against_xla.ERRORS,
        "config": lambda r: r.config,
    },
    summary=summary,
)
main = BENCHMARK.main


if __name__ == "__main__":
    sys.exit(main())
