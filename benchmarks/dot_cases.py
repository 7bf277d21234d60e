"""Named matrix products with a long reduction: those that benchmarks.dot reports."""

import dataclasses
from collections.abc import Iterable

from jax_splitk.problems.dot_general import DotProblem


@dataclasses.dataclass(frozen=True)
class Case:
    """[k, m] by [k, n]: the gradient of a dense layer's weight.

    Attributes:
      xla_us, floor_us: as in `benchmarks.cases.Case`: records of one H200.
    """

    m: int
    n: int
    k: int
    xla_us: float | None = None
    floor_us: float | None = None
    dtype: str = "bfloat16"
    out_dtype: str = "float32"

    @property
    def name(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return (self.k, self.m), (self.k, self.n)

    def problem(self) -> DotProblem:
        return DotProblem(1, self.m, self.n, self.k, "bkm", "bkn", self.dtype, self.out_dtype)

    def shrunk(self, flops: float) -> "Case":
        """At most `flops` of work, by a shorter reduction; the records do not hold for it and are dropped."""
        if self.problem().flops <= flops:
            return self
        k = max(64, int(flops * self.k // self.problem().flops) // 64 * 64)
        return dataclasses.replace(self, k=k, xla_us=None, floor_us=None)


DOT_CASES: tuple[Case, ...] = (
    Case(64, 64, 65536, 8.3, 3.9),
    Case(64, 256, 32768, 9.7, 4.9),
    Case(128, 128, 16384, 7.3, 2.0),
    Case(128, 512, 8192, 10.0, 2.5),
    Case(256, 256, 4096, 6.9, 1.0),
    Case(256, 1024, 8192, 14.7, 5.4),
    Case(512, 512, 2048, 9.3, 1.4),
    Case(512, 512, 16384, 17.2, 10.9),
    Case(1024, 64, 65536, 40.8, 33.2),
    Case(1024, 1024, 2048, 12.2, 5.4),
    Case(1024, 256, 16384, 18.4, 10.9),
    Case(768, 768, 50176, 80.4, 74.9),
    Case(1024, 2048, 50304, 261.6, 267.1),
    Case(512, 512, 131072, 95.1, 87.0),
    Case(256, 256, 262144, 69.1, 62.5),
    Case(64, 576, 802816, 233.5, 239.0),
)


def find(names: Iterable[str]) -> list[Case]:
    """The cases of these names, in the table's order; all for no names. Raises ValueError for an unknown one."""
    wanted, known = set(names), [case.name for case in DOT_CASES]
    if unknown := sorted(wanted - set(known)):
        raise ValueError(f"cases={', '.join(unknown)}; accepted: {', '.join(known)}")
    return [case for case in DOT_CASES if not wanted or case.name in wanted]
