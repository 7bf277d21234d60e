"""Convolution weight gradients: jax_splitk against XLA. See README.md beside this file.

python -m benchmarks.wgrad [--cases NAME_OR_TAG ...] [--quick] [--json FILE] [--implementation cutlass]
"""

import argparse
import dataclasses
import math
import pathlib
import statistics
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

import jax_splitk
from benchmarks import cases, ceilings, report, timing
from benchmarks.cases import Case
from benchmarks.report import on_gpu, percent, rate, say

QUICK_CPU_FLOPS = 2e9
QUICK_CPU_GROUPED_FLOPS = 2e8  # XLA:CPU takes seconds for more

Positions = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Result(report.Figures):
    """One case's figures. Times in microseconds; `ours_error` and `xla_error` are relative, against float64.

    Where the problem was tuned, `regret` is how much slower the cost model's first choice was than our fastest
    candidate (0.05 for 5%), and `tuning_seconds` what that took.
    """

    case: Case
    implementation: str
    config: str
    why: str
    ours: timing.Timing
    xla: timing.Timing
    floor_us: float | None
    workspace_bytes: int
    ours_temp_bytes: int
    xla_temp_bytes: int
    ours_error: float | None
    xla_error: float | None
    regret: float | None
    tuning_seconds: float | None

    @property
    def share_of_measured(self) -> float | None:
        """Of the rate of a matrix product or a copy in the same run, whichever bounds the problem."""
        found, problem = ceilings.measured(), self.case.problem()
        return None if found is None else found.share(problem.flops, problem.bytes_moved, self.ours.us)

    @property
    def speedup_of_main_kernel(self) -> float:
        """The time of XLA's longest kernel alone over ours."""
        return max(self.xla.kernels.values(), default=self.xla.us) / self.ours.us

    def as_json(self) -> dict[str, Any]:
        figures = ("speedup", "tflops", "gbytes", "share_of_floor", "share_of_measured", "speedup_of_main_kernel")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in figures}


def run(case: Case, implementation: str | None, samples: int, quick: bool) -> Result:
    """Compiles, times and checks one case."""
    lhs = jax.ShapeDtypeStruct(case.lhs_shape, case.dtype)
    g = jax.ShapeDtypeStruct(case.g_shape, case.dtype)

    def ours(x: jax.Array, dy: jax.Array) -> jax.Array:
        arguments = case.lax_arguments()
        return jax_splitk.conv_wgrad(x, dy, case.rhs_shape, **arguments, implementation=implementation)

    def xla(x: jax.Array, dy: jax.Array) -> jax.Array:
        w = jnp.zeros(case.rhs_shape, case.dtype)
        return jax.vjp(lambda w: lax.conv_general_dilated(x, w, **case.lax_arguments()), w)[1](dy)[0]

    compiled = {"ours": jax.jit(ours).lower(lhs, g).compile(), "xla": jax.jit(xla).lower(lhs, g).compile()}
    # After the compilation, which tunes what no cache has, if tuning is on.
    (decision,) = jax_splitk.explain(ours, lhs, g).decisions
    tuned = report.tuning_entry(case.problem())
    limits = {} if on_gpu() else {"minimum_bytes": 32 * 2**20, "maximum_sets": 4}
    input_sets = timing.random_input_sets([case.lhs_shape, case.g_shape], case.dtype, **limits)
    times = timing.compare(compiled, input_sets, rounds=3 if quick else 7)
    temp = {name: report.temp_bytes(function) for name, function in compiled.items()}
    ours_error = xla_error = None
    if samples:
        x, dy = input_sets[-1]
        ours_error, xla_error = errors(case, compiled.values(), x, dy, samples)
    return Result(
        case=case,
        implementation=decision.implementation,
        config="" if decision.config is None else str(decision.config),
        why=decision.why,
        ours=times["ours"],
        xla=times["xla"],
        floor_us=report.floor_us(case.problem()),
        workspace_bytes=decision.workspace_bytes,
        ours_temp_bytes=temp["ours"],
        xla_temp_bytes=temp["xla"],
        ours_error=ours_error,
        xla_error=xla_error,
        regret=None if tuned is None else tuned.regret,
        tuning_seconds=None if tuned is None else tuned.metadata.get("seconds"),
    )


# ---- accuracy --------------------------------------------------------------------------------------------


def errors(
    case: Case, functions: Iterable[Callable[..., Any]], lhs: jax.Array, g: jax.Array, samples: int
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


def perf_line(result: Result) -> str:
    spread = f"{result.ours.low_us:.1f}..{result.ours.high_us:.1f}"
    return (
        f" > {result.case.name} ({result.implementation}): {result.ours.us:.1f} us ({spread}) | "
        f"{rate(result.tflops)} TFLOP/s | {rate(result.gbytes)} GB/s | XLA {result.xla.us:.1f} us | "
        f"{result.speedup:.2f}x XLA"
    )


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
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.wgrad", description="Convolution weight gradients: jax_splitk against XLA."
    )
    parser.add_argument("--cases", nargs="*", default=[], help="names or tags (also separated by commas); all")
    parser.add_argument(
        "--quick",
        action=argparse.BooleanOptionalAction,
        default=not on_gpu(),
        help="fewer rounds, and on the CPU smaller cases (at most 2 GFLOP); the default on the CPU",
    )
    parser.add_argument("--json", type=pathlib.Path, help="write all figures to this file")
    parser.add_argument(
        "--implementation", choices=("auto", "cutlass", "host", "xla"), default="auto", help="ours; auto"
    )
    parser.add_argument(
        "--float64-check", type=int, default=64, metavar="N", help="sampled weights; 0 for no check; 64"
    )
    parser.add_argument("--list", action="store_true", help="print the cases and their tags, and end")
    return parser.parse_args(argv)


def write_report(options: argparse.Namespace, results: Sequence[Result], failures: dict[str, str]) -> None:
    found = {
        "environment": report.environment(),
        "ceilings": None if (measured := ceilings.measured()) is None else dataclasses.asdict(measured),
        "quick": options.quick,
        "implementation": options.implementation,
        "geometric_means": geometric_means(results),
        "results": [result.as_json() for result in results],
        "failures": failures,
    }
    report.write(options.json, found)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    try:
        selected = cases.find(name for part in options.cases for name in part.split(",") if name)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(f"{case.name}: {', '.join(case.tags)}" for case in selected))
        return 0
    if options.quick and not on_gpu():
        selected = [case.shrunk(QUICK_CPU_FLOPS if case.groups == 1 else QUICK_CPU_GROUPED_FLOPS) for case in selected]
        say(f"On the CPU: batches (then images) are cut to at most {QUICK_CPU_FLOPS / 1e9:.0f} GFLOP a case.")
    implementation = None if options.implementation == "auto" else options.implementation
    results: list[Result] = []
    failures: dict[str, str] = {}
    for case in report.progress(selected):
        try:
            results.append(run(case, implementation, options.float64_check, options.quick))
            say(perf_line(results[-1]))
        except Exception as error:  # one case must not cost the others
            failures[case.name] = traceback.format_exc()
            say(f" > {case.name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        if options.json:  # after every case, so that a run that is cut short loses nothing
            write_report(options, results, failures)
    if results:
        say("\n" + table(results) + "\n")
    means = geometric_means(results)
    for group, mean in means.items():
        say(f"geometric mean of XLA/ours, {group}: {mean:.3f}")
    if (found := ceilings.measured()) is not None:
        say(f"in the same run: matrix product {found.flops * 1e-12:.0f} TFLOP/s, copy {found.bytes * 1e-12:.2f} TB/s")
    say(report.regret_line(results))
    if failures:
        say(f"failed: {', '.join(failures)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
