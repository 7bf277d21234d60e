"""Kernels that are compiled before the lowering, or the search, that needs them: which, when and how often. No test
here compiles: machine code is played."""

import contextlib
import dataclasses
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

import jax_splitk
from benchmarks.cases import WGRAD_CASES, Case
from jax_splitk.ops import lowering, tune
from jax_splitk.problems.conv_epilogue import with_epilogue
from jax_splitk.problems.conv_passes import ConvFpropProblem
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime import _compat, compiler, outcome, pool, toolchain
from jax_splitk.runtime.source import Source
from jax_splitk.runtime.target import DEFAULT_CUDA, target_for
from jax_splitk.tuning import ahead, buckets, measurement, search, searches, select, store, tuner, worth, xla_choices
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.entry import Entry, Measurement
from jax_splitk.tuning.key import Key, key_for
from jax_splitk.tuning.measure import Bench, Contestant
from jax_splitk.tuning.options import Options
from jax_splitk.tuning.worth import Operation
from tests.problems import conv_of
from tests.tuning_cache import put, wgrad

pytestmark = [
    pytest.mark.usefixtures("cache"),
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="plays a GPU"),
    pytest.mark.skipif(toolchain.unavailable() is not None, reason="needs NVRTC and CUTLASS's headers"),
]

# Each has a kernel of its own.
CASES = [case for case in WGRAD_CASES if "resnet" in case.tags and case.kernel == (3, 3) and case.stride == (1, 1)][:4]


class Compilations:
    """The sources that workers were given, and those that callers compiled themselves, in order.

    Attributes:
      held, held_here: called before a worker's compilation ends, and before a caller's.
    """

    def __init__(self) -> None:
        self.workers: list[Source] = []
        self.here: list[Source] = []
        self.held: Callable[[Source], None] = lambda source: None
        self.held_here: Callable[[Source], None] = lambda source: None
        self._changed = threading.Condition()

    def machine_code(self, source: Source, *, in_worker: bool) -> tuple[bytes, str]:
        with self._changed:
            (self.workers if in_worker else self.here).append(source)
            self._changed.notify_all()
        (self.held if in_worker else self.held_here)(source)
        return b"machine code", ""

    def wait_for(self, *sources: Source) -> None:
        """Waits until workers were given the sources."""
        with self._changed:
            assert self._changed.wait_for(lambda: set(sources) <= set(self.workers), 20), len(self.workers)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Compilations:
    played = Compilations()
    monkeypatch.setattr(compiler, "_machine_code", played.machine_code)
    monkeypatch.setattr(compiler, "_memory", {})
    monkeypatch.setattr(compiler, "_in_flight", {})
    monkeypatch.setattr(compiler, "pool", pool.Pool())
    monkeypatch.setattr(pool, "cores", lambda: 8)
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "off")
    monkeypatch.setenv("JAX_SPLITK_TUNE_LOSS", "0")  # with "on_miss" every problem is measured
    monkeypatch.setattr(xla_choices, "likely", lambda operations: [])
    jax.clear_caches()  # what another test has traced would not be traced again
    return played


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces are for a GPU of this process."""
    monkeypatch.setattr(ahead, "_is_for_this_gpu", lambda: True)


def source(case: Case) -> Source:
    """The source that lowering a case needs without a measurement."""
    return select.select(case.problem(), DEFAULT_CUDA, Options()).candidate.plan(case.problem()).source


def operands(case: Case) -> tuple[Any, Any]:
    return jax.ShapeDtypeStruct(case.lhs_shape, case.dtype), jax.ShapeDtypeStruct(case.g_shape, case.dtype)


def program(*given: Case, **options: Any) -> Any:
    """A jitted function of the weight gradients, and its operands."""
    run = jax.jit(lambda all_of: [wgrad(x, g, case, **options) for case, (x, g) in zip(given, all_of, strict=True)])
    return run, [operands(case) for case in given]


def lowered(traced: Any) -> str:
    return traced.lower(lowering_platforms=("cuda",)).as_text()


# ---- a program -----------------------------------------------------------------------------------------------------


def test_all_kernels_compile_while_the_first_operation_is_lowered(compilations: Compilations) -> None:
    """No compilation ends before all have begun: one after the other they would never end. A lowering compiles what no
    worker has begun, so the first one's has to wait, too."""
    sources = list(map(source, CASES))
    assert len(set(sources)) == len(CASES) == 4
    compilations.held = compilations.held_here = lambda _: compilations.wait_for(*sources[1:])
    run, args = program(*CASES, *CASES)
    traced = run.trace(args)
    assert compilations.workers == compilations.here == [], "it is not known what it will be lowered for"
    lowered(traced)
    assert sorted(map(sources.index, compilations.workers + compilations.here)) == [0, 1, 2, 3], "each once"
    assert sources[0] in compilations.here, "its own operation has no worker to wait for"
    lowered(run.trace(args))
    assert len(compilations.workers + compilations.here) == 4


@pytest.mark.usefixtures("gpu")
def test_where_the_platform_is_known_the_trace_begins(compilations: Compilations) -> None:
    run, args = program(*CASES)
    traced = run.trace(args)
    compilations.wait_for(*map(source, CASES))
    lowered(traced)
    assert compilations.here == []
    assert len(compilations.workers) == 4


@pytest.mark.usefixtures("gpu")
def test_a_look_at_a_trace_begins_nothing(compilations: Compilations) -> None:
    run, args = program(*CASES)
    assert len(jax_splitk.explain(run, args, platform="cuda").decisions) == 4
    assert compiler.pool._outcomes == {}
    lowered(run.trace(args))  # its trace is that of `explain`, which has taken note
    assert len(compilations.workers + compilations.here) == 4


@pytest.mark.usefixtures("gpu")
def test_it_can_be_turned_off(compilations: Compilations, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_SPLITK_COMPILE_AHEAD", "off")
    run, args = program(*CASES)
    lowered(run.trace(args))
    assert (len(compilations.here), compilations.workers) == (4, [])


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("what", "count"), [("xla", 0), ("symbolic", 0), ("config", 1), ("vmap", 1), ("eval_shape", 1)]
)
def test_what_begins_is_what_would_be_lowered(what: str, count: int, compilations: Compilations) -> None:
    case = CASES[0]
    x, g = operands(case)
    choice = select.select(case.problem(), DEFAULT_CUDA, Options())
    if what == "xla":
        jax.jit(lambda x, g: wgrad(x, g, case, implementation="xla")).trace(x, g)
    elif what == "symbolic":
        (n,) = jax.export.symbolic_shape("n")
        x, g = (jax.ShapeDtypeStruct((n, *one.shape[1:]), one.dtype) for one in (x, g))
        jax.jit(lambda x, g: wgrad(x, g, case)).trace(x, g)
    elif what == "config":
        jax.jit(lambda x, g: wgrad(x, g, case, config=choice.config)).trace(x, g)
    elif what == "vmap":  # as two groups, and not as one of the two
        x, g = (jax.ShapeDtypeStruct((2, *one.shape), one.dtype) for one in (x, g))
        jax.jit(jax.vmap(lambda x, g: wgrad(x, g, case))).trace(x, g)
    else:
        jax.eval_shape(lambda x, g: wgrad(x, g, case), x, g)
    begun = list(compiler.pool._outcomes)
    assert len(begun) == count
    own = compiler.source_key(choice.candidate.plan(case.problem()).source)
    assert (begun == [own]) is (what in ("config", "eval_shape"))


@pytest.mark.parametrize(("divided", "started", "count"), [(False, True, 0), (True, True, 1), (True, False, 0)])
def test_over_several_devices_only_what_shard_map_has_divided_begins(
    divided: bool, started: bool, count: int, compilations: Compilations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """jit may divide the rest. Backends that are not started are left so: it is not known what there is."""
    monkeypatch.setattr(ahead, "local_platform", lambda: "cuda")
    monkeypatch.setattr(_compat, "backends_are_started", lambda: started)
    devices = jax.device_count()
    case = dataclasses.replace(CASES[0], batch=CASES[0].batch // devices)
    x, g = operands(CASES[0] if divided else case)
    run = lambda x, g: wgrad(x, g, case)[None]  # noqa: E731
    if divided:
        over = jax.sharding.PartitionSpec("data")
        mesh = jax.sharding.Mesh(np.array(jax.devices()), "data")
        run = jax.shard_map(run, mesh=mesh, in_specs=over, out_specs=over)
    assert devices > 1
    jax.eval_shape(run, x, g)
    own = compiler.source_key(source(case))
    assert list(compiler.pool._outcomes) == [own] * count


@pytest.mark.parametrize("measured", [True, False])
def test_over_several_devices_the_parts_of_a_batch_begin_with_the_first_operation(
    measured: bool, compilations: Compilations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA's partitioner asks for one after the other, when the lowering is over."""
    devices = jax.device_count()
    whole = [dataclasses.replace(case, batch=32 * devices) for case in CASES]
    whole[0] = dataclasses.replace(whole[0], batch=devices + 1)  # which the devices cannot divide
    parts = [dataclasses.replace(case, batch=32) for case in CASES[1:]]
    if measured:
        monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "on_miss")
        monkeypatch.setattr(lowering, "_may_measure", lambda ctx, target: True)
    place = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(jax.devices()), "data"), jax.sharding.PartitionSpec())
    run, args = program(*whole)
    args = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=place), args)
    lowered(run.trace(args))
    if measured:
        assert [key.problem for key, _ in searches.state.queue] == [case.problem() for case in parts]
    else:
        compilations.wait_for(*map(source, parts))
    assert len(compilations.workers) == (0 if measured else len(parts))


@pytest.mark.usefixtures("gpu")
def test_a_trace_neither_fails_nor_speaks(
    cache: pathlib.Path, compilations: Compilations, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache, key_for(CASES[0].problem(), DEFAULT_CUDA), "damaged")
    run, args = program(CASES[0])
    traced = run.trace(args)
    assert caplog.records == []
    lowered(traced)
    assert [record.getMessage().rpartition(".json is ")[2][:7] for record in caplog.records] == ["ignored"]
    monkeypatch.setenv("JAX_SPLITK_CACHE_MODE", "frozen")
    run, args = program(CASES[1])
    traced = run.trace(args)
    with pytest.raises(jax_splitk.FrozenCacheMiss):
        lowered(traced)
    monkeypatch.setattr(ahead, "select", lambda *_: 1 / 0)
    run, args = program(CASES[2], implementation="cutlass")
    run.trace(args)


# ---- searches ------------------------------------------------------------------------------------------------------


class Searches:
    """The keys that were searched, by a search that is played."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.keys: list[Key] = []
        self.during: Callable[[Key], None] = lambda key: None

        def run(this: search.Search) -> Entry:
            self.keys.append(this.key)
            self.during(this.key)
            return Entry.of(this.key, XLA)

        monkeypatch.setattr(search.Search, "run", run)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Searches:
    return Searches(monkeypatch)


def first_kernels(key: Key) -> set[Source]:
    return {c.plan(key.problem).source for c in search.first_round(key, search.predicted(key))}


def lower(*problems: Problem) -> None:
    """The lowering of a program of these problems begins, and may measure."""
    operations = [Operation(problem, Options(), 1) for problem in problems]
    ahead.begin(operations, DEFAULT_CUDA, measure=True, under_way=None)


KEYS = [key_for(case.problem(), DEFAULT_CUDA) for case in CASES]
LIMIT = Options().workspace_limit


def test_the_next_problems_kernels_compile_while_one_is_measured(
    compilations: Compilations, played: Searches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "cores", lambda: 1000)
    every = set().union(*map(first_kernels, KEYS))
    played.during = lambda key: compilations.wait_for(*every)
    with tuner.queued((key, LIMIT) for key in KEYS):
        for key in KEYS:
            tuner.tune(key)
    assert played.keys == KEYS
    assert len(compilations.workers) == len(set(compilations.workers)), "each once, whichever problems share it"
    assert searches.state.queue == {}


def test_there_is_only_so_much_ahead(
    compilations: Compilations, played: Searches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is enough for the cores, of which a measurement has two."""
    monkeypatch.setattr(pool, "cores", lambda: 3)
    monkeypatch.setattr(tuner, "cores", lambda: 3)
    ended, running = threading.Event(), []
    compilations.held = lambda source: running.append(source) or ended.wait(60)

    def during(key: Key) -> None:
        while compiler.pool.queued < 6:
            threading.Event().wait(0.01)
        assert len(running) <= 3

    played.during = during
    with tuner.queued((key, LIMIT) for key in KEYS):
        tuner.tune(KEYS[0])
        waiting = [key for (key, _), one in searches.state.queue.items() if not one.compiling]
        assert waiting and waiting == KEYS[-len(waiting) :]
        assert compiler.pool.queued > 0
    assert compiler.pool.queued == 0, "what has not begun is dropped at the end"
    ended.set()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_nothing_more_is_compiled_after_an_error(
    error: type[BaseException], compilations: Compilations, played: Searches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "cores", lambda: 1)
    ended = threading.Event()
    compilations.held = lambda _: ended.wait(60)

    def fails(key: Key) -> None:
        while not compiler.pool.queued:
            threading.Event().wait(0.01)
        raise error("scripted")

    played.during = fails
    with pytest.raises(error, match="scripted"), tuner.queued((key, LIMIT) for key in KEYS):
        tuner.tune(KEYS[0])
    assert (compiler.pool.queued, searches.state.queue) == (0, {})
    ended.set()


@pytest.mark.usefixtures("gpu")
def test_a_miss_is_compiled_when_it_comes_to_be_measured(
    compilations: Compilations, monkeypatch: pytest.MonkeyPatch, played: Searches
) -> None:
    """With tuning on, a trace starts no compilation: a search tries ten kernels for each problem."""
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "on_miss")
    run, args = program(*CASES)
    run.trace(args)
    assert compiler.pool._outcomes == {}
    lower(*(case.problem() for case in CASES))
    assert [key for key, _ in searches.state.queue] == KEYS
    assert compiler.pool._outcomes == {}
    played.during = lambda key: compilations.wait_for(*first_kernels(KEYS[1]))
    tuner.tune(KEYS[0])


@pytest.mark.usefixtures("gpu")
def test_while_models_rank_a_new_program_likely_measurements_are_prepared(
    compilations: Compilations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA chooses for them, and their first kernels compile, once for a program."""
    events: list[Any] = []

    @contextlib.contextmanager
    def begun(problems: list[Problem]) -> Iterator[None]:
        events.append(problems)
        yield
        events.append("ended")

    def left(*_: Any) -> frozenset[Key]:
        compilations.wait_for(*first_kernels(KEYS[1]))
        events.append("ranked")
        return frozenset()

    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "on_miss")
    monkeypatch.setattr(xla_choices, "likely", lambda operations: [(KEYS[1], LIMIT)])
    monkeypatch.setattr(xla_choices, "begun", begun)
    monkeypatch.setattr(worth, "_left", left)
    lower(*(case.problem() for case in CASES))
    assert events == [[KEYS[1].problem], "ranked", "ended"]
    monkeypatch.setenv("JAX_SPLITK_COMPILE_AHEAD", "off")
    monkeypatch.setattr(worth, "_left", lambda *_: frozenset())
    lower(*(case.problem() for case in CASES))
    assert len(events) == 3, "nothing begins before it is asked for"


def test_the_steps_from_the_fastest_compile_while_others_are_timed(
    compilations: Compilations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have kernels of their own, and are asked for when the first round is over."""
    key = KEYS[1]
    one = search.Search(key, LIMIT, None, 1e3)
    first = one._first_candidates()
    others = (c for c in first[1:] if {n.plan(key.problem).source for n in one._neighbours(c)} - first_kernels(key))
    fastest = next(others)  # the neighbours of the model's own choice are not tried
    bench = Bench.__new__(Bench)
    bench.problem, bench.platform, bench.given_up = key.problem, "cpu", one.given_up
    prepared: list[Candidate] = []

    def prepare(candidates: list[Candidate]) -> tuple[list[Contestant], list[Any]]:
        if fastest in prepared:
            compilations.wait_for(*{n.plan(key.problem).source for n in one._neighbours(fastest)})
        prepared.extend(candidates)
        return [Contestant(c, lambda: None) for c in candidates], []

    monkeypatch.setattr(bench, "prepare", prepare)
    monkeypatch.setattr(bench, "_round", lambda c: 5.0 if c.candidate == fastest else 9.0)
    one._prepare_first(bench, [fastest, *(c for c in first if c != fastest)])
    assert len(prepared) == len(first)
    assert all(contestant.times for contestant in one.contestants)


def test_a_problem_is_ranked_once_and_not_before_its_search(
    compilations: Compilations, played: Searches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ranking takes a tenth of a second for some problems, under Python's lock. So the search and the compilations
    ahead of it share one, and `tune` does not rank all problems before the first search."""
    search._ranking.cache_clear()
    ranked_before: list[int] = []
    monkeypatch.setattr(tuner, "cores", lambda: 1000)
    monkeypatch.setattr(tune, "local_platform", lambda: "cuda")
    monkeypatch.setattr(tune, "target_for", lambda _: DEFAULT_CUDA)
    measured = measurement.tuned

    def tuned(*args: Any) -> Any:
        ranked_before.append(search._ranking.cache_info().misses)
        return measured(*args)

    monkeypatch.setattr(measurement, "tuned", tuned)
    result = jax_splitk.tune_problems([case.problem() for case in CASES])
    assert [key for key, _ in result] == KEYS
    assert ranked_before[0] == 0
    assert search._ranking.cache_info().misses == len(KEYS)


@pytest.mark.parametrize("limit", [0, 2**20, LIMIT])
def test_what_is_served_is_what_has_a_ranking(limit: int) -> None:
    small = key_for(dataclasses.replace(CASES[0], in_channels=3, batch=1).problem(), DEFAULT_CUDA)
    for key in (*KEYS, small, key_for(CASES[0].problem(), target_for("cpu"))):
        assert search.is_served(key, limit) == bool(search.ranked(key, limit))


# ---- searches at once ------------------------------------------------------------------------------------------------


class Together:
    """Simulated searches, and the largest number of them that ran at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tuner, "cores", lambda: 1000)
        monkeypatch.setattr(tuner, "_AT_ONCE", 4)
        self.begun: list[Key] = []
        self.most = 0
        self.held: dict[Key, threading.Event] = {}
        self.ends: Callable[[search.Search], Entry] = lambda this: Entry.of(this.key, XLA)
        self._under_way = 0
        self._lock = threading.Lock()

        def run(this: search.Search) -> Entry:
            with self._lock:
                self.begun.append(this.key)
                self._under_way += 1
                self.most = max(self.most, self._under_way)
            try:
                hold = self.held.get(this.key)
                while hold is not None and not hold.wait(0.01) and not this.given_up.is_set():
                    pass
                return self.ends(this)
            finally:
                with self._lock:
                    self._under_way -= 1

        monkeypatch.setattr(search.Search, "run", run)

    def wait_for(self, count: int) -> None:
        """Waits until `count` searches have begun."""
        self.wait_until(lambda: len(self.begun) >= count)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        for _ in range(2000):
            if condition():
                return
            threading.Event().wait(0.01)
        raise AssertionError(self.begun)


@pytest.fixture
def together(compilations: Compilations, monkeypatch: pytest.MonkeyPatch) -> Together:
    return Together(monkeypatch)


MANY = [key_for(dataclasses.replace(CASES[0], batch=8 + i).problem(), DEFAULT_CUDA) for i in range(9)]


def test_the_next_searches_are_under_way_while_one_is_waited_for(together: Together) -> None:
    together.held = {key: threading.Event() for key in MANY[:4]}
    found: dict[Key, Entry] = {}

    def work() -> None:
        with tuner.queued((key, LIMIT) for key in MANY):
            for key in MANY:
                found[key] = tuner.tune(key, LIMIT)

    thread = threading.Thread(target=work)
    thread.start()
    together.wait_for(4)
    threading.Event().wait(0.3)
    assert together.begun == MANY[:4], "as many as there is room for, in the order in which they are asked for"
    for event in reversed(together.held.values()):
        event.set()
    thread.join(60)
    assert [entry.key for entry in found.values()] == list(found) == MANY
    assert sorted(map(MANY.index, together.begun)) == list(range(9)), "each once"
    assert together.most == 4
    assert (searches.state.running, searches.state.abandoned, searches.state.queue) == ({}, [], {})


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("holds", [True, False])
def test_a_decision_prepares_what_it_decides_besides(
    holds: bool, compilations: Compilations, together: Together, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dilated problem takes the decision of the one without dilation: its kernel compiles before it is asked for.
    Where the decision does not hold, the dilated problem is searched next."""
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "on_miss")
    for plain in (case.problem() for case in CASES):
        dilated = dataclasses.replace(plain, rhs_dilation=(2, 2), padding=((2, 2), (2, 2)))
        key, own = (key_for(problem, DEFAULT_CUDA) for problem in (plain, dilated))
        if buckets.to_tune(own, LIMIT)[0] == key:
            break
    best = search.ranked(key)[0]
    together.ends = lambda this: Entry.of(this.key, best if holds else XLA, workspace_limit_bytes=LIMIT)
    lower(plain, dilated)
    assert list(searches.state.queue) == [(key, LIMIT)], "the model says that no decision holds"
    assert best.plan(dilated).source not in compilations.workers
    tuner.tune(key, LIMIT)
    if holds:
        compilations.wait_for(best.plan(dilated).source)
    assert list(searches.state.queue) == ([] if holds else [(own, LIMIT)])
    assert searches.state.awaiting == {}


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("fused", [True, False])
def test_a_decision_prepares_the_kernel_with_an_epilogue(
    fused: bool, compilations: Compilations, together: Together, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the kernel computes it; else the kernel alone is compiled."""
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "on_miss")
    groups = 1 if fused else 64  # no kernel of depthwise convolutions computes epilogues
    alone = conv_of(ConvFpropProblem, (28, 28), (3, 3), (64, 64), groups=groups, batch=64, padding=1, dtype="bfloat16")
    whole = with_epilogue(alone, activation="relu")
    key = key_for(whole, DEFAULT_CUDA)
    best = next(c for c in search.ranked(key) if c.family.finishes(whole, c.config) == fused)
    together.ends = lambda this: Entry.of(this.key, best, workspace_limit_bytes=LIMIT)
    lower(whole)
    tuner.tune(key, LIMIT)
    compilations.wait_for(best.plan(whole if fused else alone).source)


@pytest.mark.usefixtures("gpu")
def test_a_choice_of_xla_needs_no_kernel_with_an_epilogue(together: Together, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "on_miss")
    alone = conv_of(ConvFpropProblem, (28, 28), (3, 3), (64, 64), batch=64, padding=1, dtype="bfloat16")
    wholes = [with_epilogue(alone, activation=name) for name in ("relu", "silu")]
    lower(*wholes)
    key = key_for(alone, DEFAULT_CUDA)
    assert searches.state.awaiting == {(key, LIMIT): wholes}
    tuner._prepare_represented(Entry.of(key, XLA), LIMIT)
    assert (searches.state.awaiting, list(searches.state.queue)) == ({}, [(key, LIMIT)])


def test_large_operands_are_alone(together: Together) -> None:
    large = [key_for(dataclasses.replace(CASES[0], batch=4096 + i).problem(), DEFAULT_CUDA) for i in range(3)]
    with tuner.queued((key, LIMIT) for key in large):
        for key in large:
            tuner.tune(key, LIMIT)
    assert (together.most, together.begun) == (1, large)


def test_what_nobody_waits_for_is_given_up_and_kept(together: Together, cache: pathlib.Path) -> None:
    """Searches are given up when a lowering ends, or when an error ends the block."""
    together.held = {MANY[2]: threading.Event()}

    def ends(this: search.Search) -> Entry:
        if this.key == MANY[0]:
            together.wait_for(3)
            together.wait_until(searches.state.running[MANY[1], LIMIT].result.done)
        return Entry.of(this.key, XLA)

    together.ends = ends
    with tuner.queued((key, LIMIT) for key in MANY[:3]):
        tuner.tune(MANY[0], LIMIT)
        running = searches.state.running[MANY[2], LIMIT]
        assert not running.search.given_up.is_set()
    assert running.search.given_up.is_set()
    assert not running.thread.is_alive()
    assert searches.state.running == {}
    assert [store.lookup(key) is not None for key in MANY[:3]] == [False, True, False], "the caller stores its own"
    together.held.clear()
    tuner.tune(MANY[2], LIMIT)
    assert together.begun == [*MANY[:3], MANY[2]]


@pytest.mark.parametrize("divided", [True, False])
def test_searches_end_with_what_asks_for_them(divided: bool, together: Together) -> None:
    """The lowering, or, where XLA's partitioner divides the program and asks for the parts, the compilation."""
    measurement._listen()
    searches.state.program.is_divided = divided
    for event, ends in ((measurement._LOWERED, not divided), (measurement._COMPILED, True)):
        with searches.state.progress.measuring(MANY[0], 1.0) as measured:
            measured.append(tuner.tune(MANY[0], LIMIT))
        tuner._begin(MANY[1], LIMIT, None, 1.0)
        jax.monitoring.record_event_duration_secs(event, 1.0)
        assert (searches.state.running == {}) == ends


def test_ctrl_c_gives_up_all_that_are_under_way(together: Together, monkeypatch: pytest.MonkeyPatch) -> None:
    together.held = {MANY[0]: threading.Event(), MANY[2]: threading.Event()}

    def interrupted(*_: Any) -> None:
        together.wait_for(4)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(outcome.Outcome, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt), tuner.queued((key, LIMIT) for key in MANY):
            tuner.tune(MANY[0], LIMIT)
    assert (searches.state.running, searches.state.queue) == ({}, {})
    assert all(running.search.given_up.is_set() for running in searches.state.abandoned)
    assert [store.lookup(key) is not None for key in MANY[:4]] == [False, True, False, True]
    tuner.tune(MANY[5], LIMIT)
    assert searches.state.abandoned == []


def test_a_search_that_does_not_come_back_ends_the_others(together: Together, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them wait for the device. Its entry says which candidate it was."""
    together.held = {key: threading.Event() for key in MANY[:4]}
    stuck = search.ranked(MANY[1])[0]
    monkeypatch.setattr(search.Search, "stuck", lambda this: stuck if this.key == MANY[1] else None)

    def without(this: search.Search, candidate: Candidate) -> Entry:
        this.failures.append(Measurement(candidate, None, "it did not come back"))
        return Entry.of(this.key, XLA, tuple(this.failures))

    monkeypatch.setattr(search.Search, "entry_without", without)
    with pytest.raises(RuntimeError, match="beside it does not come back"), tuner.queued((k, LIMIT) for k in MANY):
        tuner.tune(MANY[0], LIMIT)
    assert searches.state.running == {}
    found = store.lookup(MANY[1])
    assert found is not None
    assert found[0].measurements[0].candidate == stuck
    monkeypatch.setattr(search.Search, "stuck", lambda this: None)
    together.held.clear()
    assert tuner.tune(MANY[0], LIMIT).key == MANY[0], "once they have ended"


# ---- the first round -------------------------------------------------------------------------------------------------


def test_few_are_tried_where_the_model_is_sure() -> None:
    ranking = search.predicted(KEYS[0])
    candidates = [candidate for _, candidate in ranking]
    sure = search.first_round(KEYS[0], [(1.0 + 9.0 * (i > 1), c) for i, c in enumerate(candidates)])
    close = search.first_round(KEYS[0], [(1.0 + 0.001 * i, c) for i, c in enumerate(candidates)])
    unsplit = next(candidate for candidate in candidates if candidate.config.splits == 1)
    for first, count in ((sure, search.FEWEST), (close, search.FIRST_ROUND)):
        assert first[count:] in ([], [unsplit])
        assert first[: count * 2 // 3] == candidates[: count * 2 // 3]
        assert len(set(map(search._variant, first[:count]))) <= search.KERNELS
        assert len(set(first)) == len(first)
    assert unsplit in close
    assert len(set(map(search._variant, sure))) > len(set(map(search._variant, candidates[: search.FEWEST])))
    assert search.first_round(KEYS[0], []) == []
    assert search.first_round(KEYS[0], ranking[:1]) == candidates[:1]
