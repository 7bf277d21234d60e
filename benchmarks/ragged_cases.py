"""Named grouped products for benchmarks.ragged, and the division of their rows among the groups."""

import dataclasses
import itertools
from collections.abc import Iterable

import numpy as np

from jax_splitk.problems.ragged_dot import RaggedDotProblem
from jax_splitk.problems.ragged_reference import group_sizes

# Tokens, k, n and experts of layers in training, and of two layers in decoding.
TRAINING = (
    (393216, 2048, 768, 128),
    (131072, 4096, 1536, 128),
    (65536, 2880, 2880, 32),
    (32768, 6144, 2048, 32),
    (16384, 2048, 1408, 64),
    (8192, 4096, 14336, 8),
    (65536, 7168, 2048, 256),
)
DECODING = ((64, 4096, 14336, 8), (128, 2048, 1408, 64))
PASSES = ("forward", "lhs_gradient", "rhs_gradient")

# How rows are divided among groups: other benchmarks use "random".
SIZES = ("random", "zipf", "one_hot")


@dataclasses.dataclass(frozen=True)
class Case:
    """One pass of a layer: m tokens, [k, n] weights of each expert.

    Attributes:
      which: "forward", "lhs_gradient" or "rhs_gradient".
      kind: "training" or "decoding".
      out_dtype: of the result.
      dtype: of the operands.
      precision: "default" or "highest"; for float32 operands.
    """

    m: int
    k: int
    n: int
    experts: int
    which: str
    kind: str = "training"
    out_dtype: str = "bfloat16"
    dtype: str = "bfloat16"
    precision: str = "default"

    @property
    def layer(self) -> str:
        return f"{self.m}x{self.k}x{self.n}x{self.experts}"

    @property
    def name(self) -> str:
        operands = f"-operands-{self.precision}" if self.dtype == "float32" else ""
        return f"{self.layer}-{self.which}{'-float32' if self.out_dtype == 'float32' else ''}{operands}"

    @property
    def groups(self) -> Iterable[str]:
        """The words that select the case."""
        return self.layer, self.kind, self.which, self.out_dtype

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the two operands; the weights are [experts, k, n] in both passes that read them."""
        if self.which == "rhs_gradient":
            return (self.m, self.k), (self.m, self.n)
        return (self.m, self.k if self.which == "forward" else self.n), (self.experts, self.k, self.n)

    def problem(self) -> RaggedDotProblem:
        k, n = (self.n, self.k) if self.which == "lhs_gradient" else (self.k, self.n)
        mode = "rhs_gradient" if self.which == "rhs_gradient" else "forward"
        order = "gnk" if self.which == "lhs_gradient" else "gkn"
        dtypes = self.dtype, self.out_dtype, self.precision
        return RaggedDotProblem(mode, self.experts, self.m, k, n, *dtypes, rhs_order=order)

    def shrunk(self) -> "Case":
        """The case in a size for a CPU."""
        k, n = (max(8, side // 256 * 8) for side in (self.k, self.n))
        return dataclasses.replace(self, m=max(32, self.m // 512), k=k, n=n, experts=max(2, self.experts // 16))


CASES = tuple(
    Case(*layer, which, "decoding" if layer in DECODING else "training", out)
    for layer, which, out in itertools.product((*TRAINING, *DECODING), PASSES, ("bfloat16", "float32"))
    if out == "bfloat16" or which == "rhs_gradient"
)


def with_float32(cases: Iterable[Case], precision: str) -> list[Case]:
    """The layers in training among the cases, with float32 operands and results."""
    some = (case for case in cases if case.kind == "training" and case.out_dtype == "bfloat16")
    return [dataclasses.replace(case, dtype="float32", out_dtype="float32", precision=precision) for case in some]


def sizes_of(case: Case, kind: str, seed: int = 0) -> np.ndarray:
    """int32 [experts], whose sum is m.

    Args:
      kind: "random": rows have probabilities that are drawn uniformly for each expert; "zipf": 1 / rank; "one_hot": all
        rows are one expert's.
    """
    if kind != "random":
        return group_sizes({"zipf": "skewed"}.get(kind, kind), case.experts, case.m, seed)
    rng = np.random.default_rng(seed)
    weights = rng.uniform(size=case.experts)
    return rng.multinomial(case.m, weights / weights.sum()).astype(np.int32)
