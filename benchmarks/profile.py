"""Device times from JAX's profiler: what ran on the GPU's streams, without the host's part, kernel by kernel. Before
jax 0.12 the public API writes each profile to files, which takes longer than the profile itself."""

import functools
import itertools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

_HOST_COPIES = re.compile(r"Memcpy(H2D|D2H|HtoD|DtoH)", re.IGNORECASE)

Event = tuple[str, float, float]  # name, start and end in nanoseconds


def recorded(work: Callable[[], object]) -> Any:
    """JAX's profile of `work`, which must wait for its own results. Parsing it does not occupy the profiler.

    Raises:
      RuntimeError: a profile is being taken already.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 0
    # Do not record the programs of all executables: with 300 of them that takes longer than everything else.
    options.enable_hlo_proto = False
    return _profiled(work, options)


def _profiled(work: Callable[[], object], options: Any) -> Any:
    """JAX's profile (a `jax.profiler.ProfileData`) of everything that runs during `work`, without a file.

    jax 0.12 and later have a public session for this; in earlier versions the private session inside `stop_trace`
    returns the bytes.

    Raises:
      RuntimeError: another profile is being taken.
    """
    if hasattr(jax.profiler, "ProfileSession"):
        session: Any = jax.profiler.ProfileSession(profiler_options=options)  # pyright: ignore
        with session:
            work()
        return session.profile_data
    from jax._src import profiler  # noqa: PLC0415

    jax.profiler.start_trace("", profiler_options=options)
    state: Any = profiler._profile_state
    try:
        work()
    finally:
        with state.lock:
            try:
                data = state.profile_session.stop()
            finally:
                state.reset()
    return jax.profiler.ProfileData.from_serialized_xspace(data)


def stream_events(data: Any, ordinal: int | None = None) -> Iterator[Any]:
    """The events on one GPU's streams in a profile, except host copies; by default the process's first GPU, on which
    everything is measured. None on other platforms."""
    _type_of_stats()
    ordinal = jax.local_devices()[0].local_hardware_id if ordinal is None else ordinal
    for plane in data.planes:
        if plane.name != f"/device:GPU:{ordinal}":
            continue
        for line in plane.lines:
            # Other lines ("XLA Ops", "XLA Modules", "Steps") are derived from the streams'.
            if (line.name or "").startswith("Stream"):
                yield from (event for event in line.events if not _HOST_COPIES.match(event.name))


def module_times(data: Any, ordinal: int | None = None) -> list[Event]:
    """`stream_events`, each with the name of its module."""
    return [(stat(e, "hlo_module"), e.start_ns, e.end_ns) for e in stream_events(data, ordinal)]


def stat(event: Any, name: str) -> str:
    """What XLA recorded of an event of `stream_events` under a name; "" if nothing."""
    return next((str(value) for key, value in event.stats if key == name), "")


@functools.cache
def _type_of_stats() -> type | None:
    """Creates and keeps jaxlib's type of statistics.

    jaxlib creates the type on demand, without a module, which Python 3.12 and later warn about; where warnings are
    errors the process would end there. This function's cache keeps the type alive.
    """
    data = jax.profiler.ProfileData.from_text_proto("planes { lines { events { } } }")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        events = (event for plane in data.planes for line in plane.lines for event in line.events)
        return next((type(event.stats) for event in events), None)


def turns(events: Iterable[Event], modules: Iterable[str]) -> list[tuple[str, list[Event]]]:
    """The events of these modules in the order of their starts, grouped into runs of one module each."""
    wanted = set(modules)
    ordered = sorted((event for event in events if event[0] in wanted), key=lambda event: event[1:])
    return [(module, list(run)) for module, run in itertools.groupby(ordered, lambda event: event[0])]


def busy_time(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals: kernels that overlap (programmatic dependent launch) count once."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def part_time(intervals: Iterable[tuple[float, float]], parts: int) -> float:
    """`busy_time` of one of `parts` equal runs of intervals, each the same work: the mean of the middle half of the
    runs. One kernel of some microseconds that was held up would spoil the mean of all."""
    ordered = sorted(intervals)
    each, rest = divmod(len(ordered), parts)
    if rest or not each:
        return busy_time(ordered) / parts
    times = sorted(busy_time(ordered[i : i + each]) for i in range(0, len(ordered), each))
    middle = times[parts // 4 : parts - parts // 4]
    return sum(middle) / len(middle)
