"""Times of kernels from JAX's profiler: what is read of a profile, and candidates that take turns in one."""

import pathlib
from collections.abc import Callable

import jax
import pytest

from benchmarks import profile
from benchmarks.profiled_bench import ProfiledBench
from jax_splitk.tuning import device
from jax_splitk.tuning.choice import Candidate
from jax_splitk.tuning.measure import Contestant
from tests.tuning_cache import bench_without_operands, start

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the profiles are of a CPU, or played")


NAMES = ("hlo_op", "hlo_module", "custom-call", "wgrad", "reduce", "MemcpyH2D", "python", "jit_wgrad")


@pytest.fixture
def profiled(tmp_path: pathlib.Path) -> pathlib.Path:
    """A profile as XLA writes it: three GPUs and the host."""
    number = {name: i + 1 for i, name in enumerate(NAMES)}

    def event(name: str, start: int, end: int) -> str:
        stats = {"hlo_op": "custom-call", "hlo_module": f"jit_{name}"} if name == "wgrad" else {}
        said = "".join(f"stats {{ metadata_id: {number[k]} ref_value: {number[v]} }}" for k, v in stats.items())
        times = f"offset_ps: {start * 1000} duration_ps: {(end - start) * 1000}"
        return f"events {{ metadata_id: {number[name]} {times} {said} }}"

    def plane(name: str, **lines: list[str]) -> str:
        found = "".join(f'lines {{ name: "{line}" {" ".join(events)} }}' for line, events in lines.items())
        kinds = ("event_metadata", "stat_metadata")
        named = [f'{kind} {{ key: {i} value {{ id: {i} name: "{n}" }} }}' for n, i in number.items() for kind in kinds]
        return f'planes {{ name: "{name}" {found} {" ".join(named)} }}'

    planes = [
        plane("/device:GPU:0", Stream1=[event("python", 0, 9)]),
        plane(
            "/device:GPU:1",
            Stream1=[event("wgrad", 1, 2), event("MemcpyH2D", 2, 3)],
            Stream2=[event("reduce", 1, 3)],
            Steps=[event("python", 0, 9)],
        ),
        plane("/device:GPU:11", Stream1=[event("python", 0, 9)]),
        plane("/host:CPU", Stream1=[event("python", 0, 9)]),
    ]
    path = tmp_path / "host.xplane.pb"
    path.write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace(" ".join(planes)))
    return path


def test_only_the_measured_devices_streams_count(profiled: pathlib.Path) -> None:
    data = jax.profiler.ProfileData.from_file(str(profiled))
    assert [event.name for event in profile.stream_events(data, 1)] == ["wgrad", "reduce"]
    assert profile.module_times(data, 1) == [("jit_wgrad", 1.0, 2.0), ("", 1.0, 3.0)]


def test_a_profile_is_taken_without_files(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Where JAX writes one it writes compressed JSON besides, while others wait for the device."""
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: pytest.fail("it writes files"))
    monkeypatch.chdir(tmp_path)
    ran: list[str] = []
    for _ in range(2):
        data = profile.recorded(lambda: ran.append("work"))
        assert isinstance(data, jax.profiler.ProfileData)
        assert list(profile.stream_events(data)) == []
    assert ran == ["work", "work"]
    with pytest.raises(ZeroDivisionError):
        profile.recorded(lambda: 1 / 0)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    with jax.profiler.trace(str(tmp_path)), pytest.raises(RuntimeError, match="already been started"):
        profile.recorded(lambda: ran.append("beside the user's"))
    assert len(ran) == 2
    assert list(tmp_path.rglob("*.xplane.pb")), "the user's profile is whole"


READ = """
import gc, sys, warnings
import jax
from benchmarks import profile
warnings.simplefilter("error")
for _ in range(2):
    print(len(profile.module_times(jax.profiler.ProfileData.from_file(sys.argv[1]), 1)))
    gc.collect()
"""


def test_a_profile_is_read_where_warnings_are_errors(profiled: pathlib.Path) -> None:
    """jaxlib warned about a type that it creates, which ended the process. It did so again after the type had been
    garbage-collected."""
    process = start(READ, profiled)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "2\n2\n"), err


def test_turns_are_told_apart_by_their_modules() -> None:
    a, b, c, d = ("one", 3.0, 90.0), ("other", 105.0, 107.0), ("one", 99.0, 100.0), ("one", 111.0, 112.0)
    beside = [("user's", 1.0, 2.0), ("user's", 95.0, 97.0), ("", 106.0, 106.5)]
    assert profile.turns([d, *beside, b, c, a], ["one", "other"]) == [("one", [a, c]), ("other", [b]), ("one", [d])]
    assert profile.turns(beside, ["one"]) == []


def test_a_kernel_that_was_held_up_does_not_count() -> None:
    """Two kernels overlap in eight executions. One execution took a hundred times as long, and one began late."""
    calls = [[(0.0, 3.0), (2.0, 4.0)] for _ in range(8)]
    calls[3] = [(0.0, 400.0)] * 2
    calls[6] = [(0.0, 3.0), (30.0, 32.0)]
    spans = [(start + 1000.0 * i, end + 1000.0 * i) for i, call in enumerate(calls) for start, end in call]
    assert profile.busy_time(spans) == 6 * 4 + 400 + 5
    assert profile.part_time(reversed(spans), 8) == 4.0
    assert profile.part_time(spans, 1) == profile.busy_time(spans)
    assert profile.part_time(spans[:-1], 8) == pytest.approx(profile.busy_time(spans[:-1]) / 8), "not told apart"


class FakeProfiler:
    """A GPU's profile of what contestants say they ran: each of their calls takes the next of their times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[tuple[str, float]] = []
        self.profiles = 0
        monkeypatch.setattr(profile, "recorded", self.recorded)
        monkeypatch.setattr(profile, "module_times", self.module_times)

    def contestant(self, name: str, us: float, beside: str = "") -> Contestant:
        def run() -> None:
            self.ran.append((name, us))
            if beside:
                self.ran.append((beside, us / 2))

        return Contestant(Candidate(name), run, module=name, warm_us=us)

    def recorded(self, work: Callable[[], object]) -> list[profile.Event]:
        assert device.state.lock.locked()
        self.profiles += 1
        self.ran.clear()
        work()
        now, events = 0.0, []
        for name, us in self.ran:
            events.append((name, now, now := now + 1e3 * us))
        return events

    def module_times(self, taken: list[profile.Event]) -> list[profile.Event]:
        assert not device.state.lock.locked(), "others may have it while a profile is read"
        return taken

    def bench(self) -> ProfiledBench:
        return bench_without_operands(ProfiledBench)


def test_one_profile_times_all_contestants(monkeypatch: pytest.MonkeyPatch) -> None:
    profiler = FakeProfiler(monkeypatch)
    times = {"a": 7.0, "b": 290.0, "c": 12000.0}
    contestants = [profiler.contestant(name, us) for name, us in times.items()]
    assert profiler.bench().time_on_device(contestants, rounds=1)
    assert [c.device_times for c in contestants] == [[pytest.approx(us)] for us in times.values()]
    assert profiler.profiles == 1
    assert profiler.bench().time_on_device(contestants)
    assert [c.device_times for c in contestants] == [[pytest.approx(us)] * 3 for us in times.values()]
    assert profiler.profiles == 1 + 1


def test_what_others_run_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    profiler = FakeProfiler(monkeypatch)
    contestants = [profiler.contestant("a", 7.0, beside="of another search"), profiler.contestant("b", 9.0)]
    assert profiler.bench().time_on_device(contestants)
    assert [c.us for c in contestants] == [pytest.approx(7.0), pytest.approx(9.0)]


def test_a_profile_that_is_spoilt_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    profiler = FakeProfiler(monkeypatch)
    contestants = [profiler.contestant("a", 7.0), profiler.contestant("b", 9.0)]

    def spoilt_at_first(work: Callable[[], object]) -> list[profile.Event]:
        events = profiler.recorded(work)
        return [] if profiler.profiles == 1 else events

    monkeypatch.setattr(profile, "recorded", spoilt_at_first)
    assert profiler.bench().time_on_device(contestants)
    assert profiler.profiles == 2
    assert [c.us for c in contestants] == [pytest.approx(7.0), pytest.approx(9.0)]


def test_contestants_that_a_profile_does_not_tell_apart_have_no_device_times(monkeypatch: pytest.MonkeyPatch) -> None:
    profiler = FakeProfiler(monkeypatch)
    contestants = [profiler.contestant("a", 7.0), profiler.contestant("b", 9.0, beside="a")]
    assert not profiler.bench().time_on_device(contestants, rounds=1)
    assert not profiler.bench().time_on_device(contestants)
    assert [c.device_times for c in contestants] == [[], []]
