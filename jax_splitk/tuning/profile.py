"""Device time from JAX's profiler: what ran on the GPU's streams, without the host in between."""

import math
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable

import jax

_HOST_COPIES = re.compile(r"Memcpy(H2D|D2H|HtoD|DtoH)", re.IGNORECASE)

Event = tuple[str, float, float]  # name, start and end in nanoseconds


def trace(work: Callable[[], None]) -> list[Event]:
    """What the streams of the process's first GPU, on which everything is measured, ran during `work`, which must wait
    for its own results; empty on other platforms.

    Raises:
      RuntimeError: a profile is being taken already.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    with tempfile.TemporaryDirectory(prefix="jax_splitk_trace_") as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            work()
        ordinal = jax.local_devices()[0].local_hardware_id
        return [event for path in pathlib.Path(folder).rglob("*.xplane.pb") for event in device_events(path, ordinal)]


def device_events(path: pathlib.Path, ordinal: int) -> list[Event]:
    """The events of one GPU's streams in a profile, except host copies."""
    events = []
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if plane.name != f"/device:GPU:{ordinal}":
            continue
        for line in plane.lines:
            # Other lines ("XLA Ops", "XLA Modules", "Steps") are derived from the streams'.
            if not (line.name or "").startswith("Stream"):
                continue
            for event in line.events:
                if not _HOST_COPIES.match(event.name):
                    events.append((event.name, event.start_ns, event.end_ns))
    return events


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
