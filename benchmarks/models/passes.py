"""Divides the device time of a step among the passes of its convolutions, its products, and the rest."""

import dataclasses
import re
from collections.abc import Callable, Iterable

from benchmarks import profile

FORWARD, INPUT, WEIGHT, PRODUCT, OTHER = "forward", "input gradient", "weight gradient", "product", "other"
PASSES = (FORWARD, INPUT, WEIGHT, PRODUCT, OTHER)

# The pass of XLA's custom calls, by parts of their targets.
_TARGETS = {"convForward": FORWARD, "convBias": FORWARD, "convBackwardInput": INPUT, "convBackwardFilter": WEIGHT}
_TARGETS |= {"cublas": PRODUCT}
# The pass of kernels, by parts of their names: names of cuDNN's kernels and ours contain the pass.
_KERNELS = {"wgrad": WEIGHT, "dgrad": INPUT, "fprop": FORWARD, "gemm": PRODUCT, "nvjet": PRODUCT, "cublas": PRODUCT}
_KERNELS |= dict.fromkeys(("dot_tma", "dot_few_rows", "quantized_"), PRODUCT)
_CALL = re.compile(r'^\s*(?:ROOT )?%?([\w.-]+) = .*custom_call_target="([^"]+)"', re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel that ran, in nanoseconds; `instruction` is the HLO instruction that launched it, "" if the profile does
    not name it."""

    kernel: str
    instruction: str
    start: float
    end: float


def of_instructions(text: str) -> dict[str, str]:
    """The passes of XLA's library calls in a compiled program, by their names."""
    found = {}
    for name, target in _CALL.findall(text):
        if (matching := next((value for part, value in _TARGETS.items() if part in target), None)) is not None:
            found[name] = matching
    return found


def of_launch(launch: Launch, instructions: dict[str, str]) -> str:
    """The pass of a launch, by its instruction, else by the kernel's name. CUDA graphs hide the instruction."""
    name = launch.kernel.lower()
    by_name = (value for part, value in _KERNELS.items() if part in name)
    return instructions.get(launch.instruction) or next(by_name, OTHER)


def milliseconds(launches: Iterable[Launch], text: str, steps: int) -> dict[str, float]:
    """The milliseconds of each pass in a step: sums over kernels, which may overlap. "busy" is the time in which any
    kernel ran."""
    launches, instructions = list(launches), of_instructions(text)
    found: dict[str, float] = dict.fromkeys(PASSES, 0.0)
    for launch in launches:
        found[of_launch(launch, instructions)] += (launch.end - launch.start) * 1e-6 / steps
    busy = profile.busy_time((launch.start, launch.end) for launch in launches)
    return {"busy": busy * 1e-6 / steps, **found}


def launches_of(work: Callable[[], object]) -> list[Launch]:
    """The kernels that a GPU ran during `work`; none on a CPU."""
    events = profile.stream_events(profile.recorded(work))
    return [Launch(e.name, profile.stat(e, "hlo_op"), e.start_ns, e.end_ns) for e in events]
