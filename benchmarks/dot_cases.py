"""Named matrix products with a long reduction, for benchmarks.dot."""

import dataclasses
from typing import ClassVar

from jax_splitk.problems.dot_general import DotProblem


@dataclasses.dataclass(frozen=True)
class Case:
    """[k, m] by [k, n]: the gradient of a dense layer's weight."""

    m: int
    n: int
    k: int
    dtype: ClassVar[str] = "bfloat16"

    @property
    def name(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return (self.k, self.m), (self.k, self.n)

    def problem(self) -> DotProblem:
        return DotProblem(1, self.m, self.n, self.k, "bkm", "bkn", self.dtype, "float32")

    def shrunk(self, flops: float) -> "Case":
        """At most `flops` of work, by a shorter reduction."""
        if self.problem().flops <= flops:
            return self
        k = max(64, int(flops * self.k // self.problem().flops) // 64 * 64)
        return dataclasses.replace(self, k=k)


DOT_CASES: tuple[Case, ...] = (
    Case(64, 64, 65536),
    Case(64, 256, 32768),
    Case(128, 128, 16384),
    Case(128, 512, 8192),
    Case(256, 256, 4096),
    Case(256, 1024, 8192),
    Case(512, 512, 2048),
    Case(512, 512, 16384),
    Case(1024, 64, 65536),
    Case(1024, 1024, 2048),
    Case(1024, 256, 16384),
    Case(768, 768, 50176),
    Case(1024, 2048, 50304),
    Case(512, 512, 131072),
    Case(256, 256, 262144),
    Case(64, 576, 802816),
)
