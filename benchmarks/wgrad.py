"""Convolution weight gradients: jax_splitk against XLA. See README.md beside this file.

python -m benchmarks.wgrad [--cases NAME_OR_TAG ...] [--quick] [--json FILE] [--implementation cutlass]
"""

import argparse
import dataclasses
import functools
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

import jax_splitk
from benchmarks import against_xla, cases, ceilings, report
from benchmarks.cases import Case
from benchmarks.report import on_gpu, percent, rate, say

QUICK_CPU_FLOPS = 2e9
QUICK_CPU_GROUPED_FLOPS = 2e8  # XLA:CPU takes seconds for more

Positions = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Result(against_xla.Result):
    """One case's figures."""

    @property
    def share_of_measured(self) -> float | None:
        """Of the rate of a matrix product or a copy in the same run, whichever bounds the problem."""
        found, problem = ceilings.measured(), self.case.problem()
        return None if found is None else found.share(problem.flops, problem.bytes_moved, self.ours.us)

    @property
    def speedup_of_main_kernel(self) -> float:
        """The time of XLA's longest kernel alone over ours."""
        return max(self.xla.kernels.values(), default=self.xla.us) / self.ours.us


def run(case: Case, implementation: str | None, samples: int, quick: bool) -> Result:
    """Compiles, times and checks one case."""

    def ours(x: jax.Array, dy: jax.Array) -> jax.Array:
        arguments = case.lax_arguments()
        return jax_splitk.conv_wgrad(x, dy, case.rhs_shape, **arguments, implementation=implementation)

    def xla(x: jax.Array, dy: jax.Array) -> jax.Array:
        w = jnp.zeros(case.rhs_shape, case.dtype)
        return jax.vjp(lambda w: lax.conv_general_dilated(x, w, **case.lax_arguments()), w)[1](dy)[0]

    check = functools.partial(errors, case, samples) if samples else lambda *_: (None, None)
    fields, *_ = against_xla.measure(case, (case.lhs_shape, case.g_shape), ours, xla, check, quick)
    return Result(**fields)


# ---- accuracy --------------------------------------------------------------------------------------------


def errors(
    case: Case, samples: int, functions: Iterable[Callable[..., Any]], lhs: jax.Array, g: jax.Array
) -> list[float]:
    """||out - reference|| / ||reference|| of each function, in float64 over `samples` random weights."""
    positions = sample_positions(case, samples)
    reference = sampled_wgrad(case, lhs, g, positions)
    found = []
    for function in functions:
        out = np.asarray(function(lhs, g).astype(jnp.float32), dtype=np.float64)
        values = pick(out, positions)
        found.append(float(np.linalg.norm(values - reference) / np.linalg.norm(reference)))
    return found


def sample_positions(case: Case, samples: int) -> Positions:
    """Random filter taps [t, 2], input channels of a group [c] and output channels [k].

    t * c * k is `samples` or the next multiple of c * k, less where the filter has fewer weights.
    """
    rng = np.random.default_rng(0)
    group_channels = case.in_channels // case.groups
    most = case.kernel[0] * case.kernel[1]
    channels = rng.permutation(group_channels)[:4]
    outputs = rng.permutation(case.out_channels)[:4]
    count = math.ceil(samples / (len(channels) * len(outputs)))
    flat = rng.permutation(most)[:count]
    return np.stack(np.unravel_index(flat, case.kernel), axis=1), channels, outputs


def pick(out: np.ndarray, positions: Positions) -> np.ndarray:
    """[t, c, k] entries of a weight."""
    taps, channels, outputs = positions
    return out[taps[:, 0], taps[:, 1]][:, channels][:, :, outputs]


def sampled_wgrad(case: Case, lhs: jax.Array, g: jax.Array, positions: Positions) -> np.ndarray:
    """Those entries of the weight gradient by their definition, in float64 on the host: [t, c, k]."""
    taps, channels, outputs = positions
    groups = outputs // (case.out_channels // case.groups)
    # Input channel of (c, k): it depends on k's group.
    inputs = channels[:, None] + groups[None, :] * (case.in_channels // case.groups)
    wanted, column = np.unique(inputs, return_inverse=True)
    column = column.reshape(inputs.shape)
    x = np.asarray(lhs[..., wanted].astype(jnp.float32))
    dy = np.asarray(g[..., outputs].astype(jnp.float32))
    out = np.empty((len(taps), *inputs.shape))
    for t, tap in enumerate(taps):
        (rows, in_rows), (columns, in_columns) = (window(case, axis, int(tap[axis])) for axis in range(2))
        a = x[:, in_rows][:, :, in_columns].reshape(-1, len(wanted)).astype(np.float64)
        b = dy[:, rows, columns].reshape(-1, len(outputs)).astype(np.float64)
        products = a.T @ b
        out[t] = products[column, np.arange(len(outputs))[None, :]]
    return out


def window(case: Case, axis: int, tap: int) -> tuple[slice, slice]:
    """Output indices whose window has this tap inside the image, and the input indices that they read."""
    stride, size = case.stride[axis], case.lhs_shape[1 + axis]
    start = tap * case.dilation[axis] - case.pads[axis][0]
    first = max(0, -(start // stride))
    last = min(case.output_spatial[axis], -((start - size) // stride))
    if last <= first:
        return slice(0, 0), slice(0, 0)
    return slice(first, last), slice(start + first * stride, start + (last - 1) * stride + 1, stride)


# ---- reports ---------------------------------------------------------------------------------------------


def table(results: Sequence[Result]) -> str:
    """The results in Markdown, columns aligned."""
    header = ["case", "implementation", "ours us", "XLA us", "XLA/ours", "TFLOP/s", "GB/s", "of floor", "of measured"]
    header += ["workspace MiB", "temp MiB", "XLA temp MiB", "error", "XLA error", "config"]
    rows = [header]
    for r in results:
        megabytes = [f"{b / 2**20:.1f}" for b in (r.workspace_bytes, r.ours_temp_bytes, r.xla_temp_bytes)]
        rows.append(
            [
                *(r.case.name, r.implementation, f"{r.ours.us:.1f}", f"{r.xla.us:.1f}", f"{r.speedup:.2f}"),
                *(rate(r.tflops), rate(r.gbytes)),
                *map(percent, (r.share_of_floor, r.share_of_measured)),
                *megabytes,
                *("" if e is None else f"{e:.1e}" for e in (r.ours_error, r.xla_error)),
                r.config,
            ]
        )
    return report.markdown(rows)


def geometric_means(results: Sequence[Result]) -> dict[str, float]:
    """Geometric mean of XLA's time over ours: over all cases, over those that a kernel of ours served, over the 16-bit
    ones, and of the time of XLA's longest kernel alone over the large 3x3 convolutions.
    """
    groups = {
        "all": [r.speedup for r in results],
        "kernels": [r.speedup for r in results if r.implementation != "xla"],
        "16-bit": [r.speedup for r in results if r.case.dtype != "float32"],
        "main kernel, large3x3": [r.speedup_of_main_kernel for r in results if "large3x3" in r.case.tags],
    }
    return {name: statistics.geometric_mean(group) for name, group in groups.items() if group}


# ---- command line ----------------------------------------------------------------------------------------


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = against_xla.parser(
        "wgrad",
        "Convolution weight gradients",
        "names or tags (also separated by commas); all",
        "smaller cases (at most 2 GFLOP)",
    )
    parser.add_argument(
        "--float64-check", type=int, default=64, metavar="N", help="sampled weights; 0 for no check; 64"
    )
    parser.add_argument("--list", action="store_true", help="print the cases and their tags, and end")
    return parser.parse_args(argv)


def write_report(options: argparse.Namespace, results: Sequence[Result], failures: dict[str, str]) -> None:
    if options.json:
        more = ("share_of_measured", "speedup_of_main_kernel")
        found = {
            **against_xla.header(options),
            "geometric_means": geometric_means(results),
            "results": [result.as_json(*more) for result in results],
            "failures": failures,
        }
        report.write(options.json, found)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    names = [name for part in options.cases for name in part.split(",") if name]
    selected = against_xla.selected(cases.find, names)
    if options.list:
        print("\n".join(f"{case.name}: {', '.join(case.tags)}" for case in selected))
        return 0
    if options.quick and not on_gpu():
        selected = [case.shrunk(QUICK_CPU_FLOPS if case.groups == 1 else QUICK_CPU_GROUPED_FLOPS) for case in selected]
        say(f"On the CPU: batches (then images) are cut to at most {QUICK_CPU_FLOPS / 1e9:.0f} GFLOP a case.")
    implementation = against_xla.implementation(options)
    results, failures = against_xla.run_all(
        selected,
        lambda case: run(case, implementation, options.float64_check, options.quick),
        functools.partial(write_report, options),
    )
    if results:
        say("\n" + table(results) + "\n")
    for group, mean in geometric_means(results).items():
        say(f"geometric mean of XLA/ours, {group}: {mean:.3f}")
    if (found := ceilings.measured()) is not None:
        say(f"in the same run: matrix product {found.flops * 1e-12:.0f} TFLOP/s, copy {found.bytes * 1e-12:.2f} TB/s")
    say(report.regret_line(results))
    if failures:
        say(f"failed: {', '.join(failures)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
