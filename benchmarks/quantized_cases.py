"""Products with a quantized weight that the benchmark reports: three weights of large models, one to 4096 rows."""

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence

from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.quantized.formats import FORMATS

# [features, k]: Llama 70B's feed-forward layer, a square weight, and the layer's part on one of 8 GPUs.
WEIGHTS = ((28672, 8192), (8192, 8192), (3584, 8192))
ROWS = (1, 8, 16, 32, 64, 128, 256, 1024, 4096)
QUICK_ROWS = 64
QUICK_DIVISOR = 16
# The columns of charts and tables, and the contestants among which each shows the fastest.
FASTEST = {
    "jax_splitk": ("ours",),
    "fp8 x fp8": ("xla_fp8", "torch_fp8"),
    "bf16": ("xla_16bit", "torch_bf16"),
    "XLA, quantized": ("xla_quantized",),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """x [rows, k] times a packed weight [k, features]; `group_size` None means scales per channel."""

    features: int
    k: int
    rows: int
    x_dtype: str = "bfloat16"
    qtype: str = "int4"
    group_size: int | None = 64
    scale_dtype: str = "bfloat16"
    zero_points: bool = False  # for each scale, of its dtype
    compute_dtype: str | None = None

    @property
    def weight(self) -> str:
        return f"{self.features}x{self.k}"

    @property
    def name(self) -> str:
        return f"{self.weight}_n{self.rows}"

    @property
    def out_dtype(self) -> str:
        return "bfloat16" if self.x_dtype == "float8_e4m3fn" else self.x_dtype

    @property
    def group(self) -> int:
        return self.k if self.group_size is None else self.group_size

    def problem(self) -> QuantizedMatmulProblem:
        types = (self.x_dtype, self.out_dtype, self.qtype, self.group, self.scale_dtype)
        zero_dtype = self.scale_dtype if self.zero_points else "none"
        compute_dtype = self.compute_dtype or "none"
        return QuantizedMatmulProblem(self.rows, self.k, self.features, *types, zero_dtype, compute_dtype=compute_dtype)

    def shrunk(self) -> "Case":
        """The same for a CPU: sides about 16 times smaller, of whole tiles and groups."""
        features, k = (
            max(unit, side // QUICK_DIVISOR // unit * unit) for side, unit in ((self.features, 64), (self.k, 128))
        )
        return dataclasses.replace(self, features=features, k=k)


def select(
    weights: Sequence[str],
    rows: Sequence[int],
    *,
    x_dtype: str = "bfloat16",
    qtype: str = "int4",
    group_size: int | None = 64,
    scale_dtype: str = "bfloat16",
    zero_points: bool = False,
    compute_dtype: str | None = None,
) -> list[Case]:
    """The cases, weight by weight; all of `WEIGHTS` and `ROWS` by default.

    Args:
      weights: "FEATURESxK" of any size.

    Raises:
      ValueError: a weight of another form, an unknown format or dtype of scales, a group size that does not exist or
        does not divide k, or zero points of elements that are no integers.
    """
    sides = [_sides(text) for text in weights] or list(WEIGHTS)
    if qtype not in FORMATS:
        raise ValueError(f"qtype={qtype!r}; accepted: {', '.join(FORMATS)}")
    if zero_points and not FORMATS[qtype].integer:
        integers = ", ".join(name for name, fmt in FORMATS.items() if fmt.integer)
        raise ValueError(f"zero_points with qtype={qtype!r}; accepted: {integers}")
    cases = [
        Case(features, k, n, x_dtype, qtype, group_size, scale_dtype, zero_points, compute_dtype)
        for features, k in dict.fromkeys(sides)
        for n in rows or ROWS
    ]
    for case in cases:
        case.problem().validate()
    return cases


def _sides(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if found is None:
        known = ", ".join(f"{features}x{k}" for features, k in WEIGHTS)
        raise ValueError(f"case {text!r}; accepted: FEATURESxK, for instance {known}")
    return int(found[1]), int(found[2])


def crossover(points: Iterable[tuple[int, float, float]]) -> float | None:
    """The number of rows from which on we are slower, interpolated between logarithms; None if never.

    Args:
      points: (rows, our time, the other's time).
    """
    ordered = sorted(points)
    slower = [i for i, (_, ours, other) in enumerate(ordered) if ours > other]
    for i in slower:
        if all(ours > other for _, ours, other in ordered[i:]):
            break
    else:
        return None
    if i == 0:
        return float(ordered[0][0])
    (n0, ours0, other0), (n1, ours1, other1) = ordered[i - 1], ordered[i]
    low, high = math.log(ours0 / other0), math.log(ours1 / other1)
    return math.exp(math.log(n0) + (math.log(n1) - math.log(n0)) * -low / (high - low))
