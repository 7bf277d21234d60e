"""Device time from JAX's profiler: what ran on the GPU's streams, without the host in between."""

import math
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax

_T = TypeVar("_T")

_HOST_COPIES = re.compile(r"Memcpy(H2D|D2H|HtoD|DtoH)", re.IGNORECASE)

Event = tuple[str, float, float]  # name, start and end in nanoseconds


def trace(work: Callable[[], None]) -> list[Event]:
    """What the streams of the process's first GPU, on which everything is measured, ran during `work`, which must wait
    for its own results; empty on other platforms.

    Raises:
      RuntimeError: a profile is being taken already.
    """
    return traced(work, device_events)


def traced(work: Callable[[], object], read: Callable[[pathlib.Path, int], list[_T]]) -> list[_T]:
    """`trace`, by what `read` finds in the profile's files for a GPU."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    with tempfile.TemporaryDirectory(prefix="jax_splitk_trace_") as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            work()
        ordinal = jax.local_devices()[0].local_hardware_id
        return [found for path in pathlib.Path(folder).rglob("*.xplane.pb") for found in read(path, ordinal)]


def device_events(path: pathlib.Path, ordinal: int) -> list[Event]:
    """The events of one GPU's streams in a profile, except host copies."""
    return [(event.name, event.start_ns, event.end_ns) for event in stream_events(path, ordinal)]


def stream_events(path: pathlib.Path, ordinal: int) -> Iterator[Any]:
    """The same as JAX's profile has them."""
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if plane.name != f"/device:GPU:{ordinal}":
            continue
        for line in plane.lines:
            # Other lines ("XLA Ops", "XLA Modules", "Steps") are derived from the streams'.
            if (line.name or "").startswith("Stream"):
                yield from (event for event in line.events if not _HOST_COPIES.match(event.name))


def bursts(events: Iterable[Event], pause_ns: float) -> list[list[Event]]:
    """The events in the order of their starts, parted where the device was idle for longer than `pause_ns`."""
    found: list[list[Event]] = []
    reached = -math.inf
    for event in sorted(events, key=lambda event: event[1:]):
        if event[1] - reached > pause_ns:
            found.append([])
        found[-1].append(event)
        reached = max(reached, event[2])
    return found


def busy_time(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals: kernels that overlap (programmatic dependent launch) count once."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
