"""The figures of a case that all benchmarks of an operation share."""

import dataclasses
from typing import Any, ClassVar

from benchmarks import report, timing
from jax_splitk.ops.decision import Decision
from jax_splitk.tuning.entry import Entry


@dataclasses.dataclass(frozen=True)
class Measured:
    """One case's figures. Times in microseconds.

    Attributes:
      case: its `problem()` was computed.
      decision: how our function computes it.
      entry: the caches' entry; None if nothing was tuned.
    """

    case: Any
    decision: Decision
    entry: Entry | None
    ours: timing.Timing

    # Properties that a report has beside the fields.
    FIGURES: ClassVar[tuple[str, ...]] = (
        *("name", "config", "regret", "tuning_seconds", "tflops", "gbytes", "floor_us", "share_of_floor"),
    )

    @property
    def name(self) -> str:
        return self.case.name

    @property
    def config(self) -> str:
        return "" if self.decision.config is None else str(self.decision.config)

    @property
    def regret(self) -> float | None:
        """How much slower the cost model's first choice was than our fastest candidate (0.05 for 5%)."""
        return None if self.entry is None else self.entry.regret

    @property
    def tuning_seconds(self) -> float | None:
        return None if self.entry is None else self.entry.metadata.get("seconds")

    @property
    def tflops(self) -> float:
        return self.case.problem().flops / self.ours.us * 1e-6

    @property
    def gbytes(self) -> float:
        return self.case.problem().bytes_moved / self.ours.us * 1e-3

    @property
    def floor_us(self) -> float | None:
        return report.floor_us(self.case.problem())

    @property
    def share_of_floor(self) -> float | None:
        return None if self.floor_us is None else self.floor_us / self.ours.us

    def as_json(self) -> dict[str, Any]:
        """The fields and figures as plain data."""
        fields = dataclasses.asdict(dataclasses.replace(self, entry=None))
        decision, _ = fields.pop("decision"), fields.pop("entry")
        fields |= {name: decision[name] for name in ("implementation", "family", "why", "workspace_bytes")}
        return fields | {name: getattr(self, name) for name in self.FIGURES}

    def line(self) -> str:
        """A line to print while the benchmark runs."""
        time = f"{self.ours.us:.1f} us ({self.ours.low_us:.1f}..{self.ours.high_us:.1f})"
        rates = f"{report.rate(self.tflops)} TFLOP/s | {report.rate(self.gbytes)} GB/s"
        return f" > {self.name} ({self.decision.implementation}): {time} | {rates}"
