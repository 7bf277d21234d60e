"""Forward convolutions with a bias, ReLU and a residual: jax_splitk against XLA. See README.md beside this file.

python -m benchmarks.conv_epilogues [--cases EPILOGUE_LAYER_OR_NAME ...] [--quick] [--json FILE]
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import lax

import jax_splitk
from benchmarks import against_xla, conv
from benchmarks.against_xla import Benchmark, Result
from benchmarks.conv_cases import Case
from jax_splitk.tuning.options import Implementation

# "residual" is a ResNet's: ReLU(convolution + bias + residual).
EPILOGUES = ("none", "relu", "residual")
LAYERS = {
    "resnet": (
        Case("resnet", "fprop", 64, (56, 56), (64, 64), (3, 3), 1),
        Case("resnet", "fprop", 64, (28, 28), (128, 128), (3, 3), 1),
        Case("resnet", "fprop", 64, (14, 14), (256, 256), (3, 3), 1),
        Case("resnet", "fprop", 64, (56, 56), (128, 128), (3, 3), 1, 2),
        Case("resnet", "fprop", 64, (56, 56), (64, 256), (1, 1)),
        Case("resnet", "fprop", 64, (14, 14), (1024, 256), (1, 1)),
    ),
    "stem": (Case("stem", "fprop", 64, (224, 224), (3, 64), (7, 7), 3, 2),),
    "resnext": (Case("resnext", "fprop", 64, (28, 28), (256, 256), (3, 3), 1, 1, 32),),
    "unet": (
        Case("unet", "fprop", 8, (64, 64), (320, 320), (3, 3), 1),
        Case("unet", "fprop", 2, (256, 256), (64, 64), (3, 3), 1),
    ),
    "3d": (Case("3d", "fprop", 4, (16, 56, 56), (64, 64), (3, 3, 3), 1),),
}


@dataclasses.dataclass(frozen=True)
class EpilogueCase(Case):
    """A forward convolution and its epilogue, one of `EPILOGUES`."""

    epilogue: str = "none"

    @property
    def name(self) -> str:
        return f"{super().name}_{self.epilogue}"

    def shapes(self) -> list[tuple[int, ...]]:
        """Those of the input, the weight, the bias and the residual."""
        p = self.as_given()
        more = {"none": (), "relu": ((p.out_channels,),), "residual": ((p.out_channels,), p.g_shape)}
        return [*p.operand_shapes, *more[self.epilogue]]


def _cases() -> Iterator[EpilogueCase]:
    for layer in (layer for group in LAYERS.values() for layer in group):
        yield from (EpilogueCase(**vars(layer), epilogue=epilogue) for epilogue in EPILOGUES)


def functions(
    case: EpilogueCase, implementation: Implementation | None
) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
    """Our function, and lax's operations, of which XLA may fuse all."""
    arguments, convolved = case.arguments(), functools.partial(lax.conv_general_dilated, **case.arguments())
    activation = None if case.epilogue == "none" else "relu"

    def ours(x: jax.Array, w: jax.Array, bias: Any = None, residual: Any = None) -> jax.Array:
        epilogue = {"bias": bias, "activation": activation, "residual": residual, "activation_last": True}
        return jax_splitk.conv_fprop(x, w, **arguments, **epilogue, implementation=implementation)

    def xla(x: jax.Array, w: jax.Array, *after: jax.Array) -> jax.Array:
        out = convolved(x, w)
        for each in after:
            out = out + each
        return out if activation is None else jax.nn.relu(out)

    return ours, xla


def run(case: EpilogueCase, implementation: Implementation | None, quick: bool) -> Result:
    """Compiles, times and checks one case."""
    return Result.measured(case, case.shapes(), *functions(case, implementation), conv.difference, quick)


def summary(results: Sequence[Result]) -> tuple[dict[str, Any], list[str]]:
    """The geometric mean of XLA's time over ours for each epilogue."""
    speedups = {epilogue: [r.speedup for r in results if r.case.epilogue == epilogue] for epilogue in EPILOGUES}
    means = against_xla.geometric_means(speedups)
    return {"summary": means}, against_xla.mean_lines(means)


BENCHMARK = Benchmark(
    name="conv_epilogues",
    about="Forward convolutions with epilogues",
    ops=("conv_fprop",),
    cases=tuple(_cases()),
    groups=lambda case: (case.epilogue, case.group),
    cut="smaller cases (at most 20 MFLOP)",
    shrunk=lambda case: case.shrunk(conv.QUICK_CPU_FLOPS),
    run=run,
    columns={
        "case": lambda r: r.name,
        "family": lambda r: r.decision.family or "xla",
        "fused": lambda r: "yes" if r.decision.family and r.decision.problem != r.case.problem() else "",
        **against_xla.TIMES,
        "difference": lambda r: against_xla.error(r.ours_error),
        "config": lambda r: r.config,
    },
    summary=summary,
)
main = BENCHMARK.main


if __name__ == "__main__":
    sys.exit(main())
