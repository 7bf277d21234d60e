"""What the user sees of tuning: the bar, the log in its place, the closing line, a step's sum, choices that flip."""

import dataclasses
import io
import logging
import os
import re
import threading
import types
from typing import Any

import jax
import pytest
import tqdm.std
from jax import numpy as jnp

import jax_splitk
from benchmarks.cases import Case
from jax_splitk.kernels.cpu import wgrad as host
from jax_splitk.runtime import outcome
from jax_splitk.runtime.target import DEFAULT_CUDA
from jax_splitk.tuning import bar, flips, progress, search, searches, store
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.entry import Entry, Measurement
from jax_splitk.tuning.key import Key, key_for
from tests.documents import markdown
from tests.tuning_cache import CPU

pytestmark = [
    pytest.mark.usefixtures("cache"),
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="tunes the CPU's family"),
]

A, B = (Candidate(host.FAMILY, host.Config(splits, 128)) for splits in (1, 2))
KEYS = [key_for(Case("x", 4 + i, 8, 8, 8, 8, (3, 3), dtype="float32").problem(), CPU) for i in range(3)]


class Terminal(io.StringIO):
    """A stream whose `isatty` says that it is a terminal."""

    encoding = "utf-8"

    def fileno(self) -> int:
        return 2

    def isatty(self) -> bool:
        return True

    def seen(self) -> list[str]:
        """Everything that was drawn, a line over another or below it."""
        return [line.rstrip() for line in re.split(r"[\r\n]+", self.getvalue()) if line.strip()]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((110, 40)))
    monkeypatch.delenv("JAX_SPLITK_PROGRESS", raising=False)
    return on(monkeypatch, Terminal())


def on(monkeypatch: pytest.MonkeyPatch, stderr: Any) -> Any:
    """Puts a stream in place of stderr, which pytest changes by itself."""
    for module in (progress, bar):
        monkeypatch.setattr(module, "sys", types.SimpleNamespace(stderr=stderr))
    return stderr


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(progress, "time", found)
    monkeypatch.setattr(tqdm.std, "time", found.monotonic)
    return found


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> dict[Key, dict[Candidate, float]]:
    """What a search finds for a key, in place of searching."""
    times: dict[Key, dict[Candidate, float]] = {}

    def run(this: search.Search) -> Entry:
        found = times.get(this.key, {XLA: 30.0, A: 10.0, B: 20.0})
        searches.state.progress.best(this.key, found[A], found[XLA])
        searches.state.progress.tick(this.key)
        best = min(found, key=lambda c: found[c])
        return Entry.of(this.key, best, [Measurement(c, us) for c, us in found.items()], A, {"seconds": 1.0})

    monkeypatch.setattr(search.Search, "run", run)
    return times


def entry_of(key: Key, us: float, xla_us: float) -> Entry:
    return Entry.of(key, A, [Measurement(XLA, xla_us), Measurement(A, us)], A)


# ---- the bar ---------------------------------------------------------------------------------------------------------


def test_the_guide_shows_what_is_printed(terminal: Terminal, clock: Clock) -> None:
    """docs/guides/tuning.md: the bar while a step's problems are tuned, and the line at the end."""
    problem = Case("body", 256, 56, 56, 64, 64, (3, 3)).problem()
    keys = [key_for(dataclasses.replace(problem, batch=n), DEFAULT_CUDA) for n in (8, 64, 256)]
    with searches.state.progress.run(20, 3) as run:
        for key, us, xla_us, seconds in zip(keys, (7.4, 20.1, 81.0), (15.7, 33.5, 130.2), (4.0, 5.5, 6.0), strict=True):
            with searches.state.progress.measuring(key, 10.0) as measured:
                clock.now += seconds
                searches.state.progress.best(key, us, xla_us)
                searches.state.progress.tick(key)
                drawn = terminal.seen()[-1]
                measured.append(entry_of(key, us, xla_us))
        run.measured *= 7
        run.measured.pop()
        run.steps = [(18, run.measured[0]), (20, run.measured[1]), (15, run.measured[2])]
        clock.now += 92.6
    closing = terminal.seen()[-1]
    (block,) = [
        b.text for b in markdown.blocks(markdown.ROOT / "docs/guides/tuning.md") if "jax_splitk: tuned" in b.text
    ]
    assert block == f"{drawn}\n{closing}\n"
    assert drawn.startswith("tuning 3 of 20:  13%|")
    assert "00:15<01:43, best 81.0 us, XLA 130.2 us: conv_wgrad" in drawn


def test_problems_that_come_up_in_a_lowering_are_one_run(
    terminal: Terminal, played: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "on_miss")
    x, w = jnp.ones((4, 8, 8, 8)), jnp.ones((3, 3, 8, 8))
    jax.jit(jax.grad(step)).lower(w, x)
    seen = terminal.seen()
    assert any(line.startswith("tuning 1:") and "best 10.0 us, XLA 30.0 us: conv_wgrad" in line for line in seen)
    assert any(line.startswith("tuning 2:") for line in seen)
    (closing,) = [line for line in seen if line.startswith("jax_splitk: ")]
    assert seen[-1] == closing
    assert re.fullmatch(
        r"jax_splitk: tuned 2 problems in \d+\.\d s; one of each: 20\.0 us, XLA 60\.0 us, predicted gain 40\.0 us "
        r"\(3\.00 times as fast\)",
        closing,
    )
    jax.jit(jax.grad(lambda w, x: 2 * step(w, x))).lower(w, x)
    assert terminal.seen() == seen, "what a cache has is not worth a word"


def step(w: jax.Array, x: jax.Array) -> jax.Array:
    """Its gradient has three weight gradients, of two problems."""
    numbers = ("NHWC", "HWIO", "NHWC")
    for stride in (1, 1, 2):
        x = jax_splitk.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=numbers)
    return jnp.sum(x)


def test_off_and_without_a_terminal_the_log_has_it(
    terminal: Terminal, played: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def logged() -> list[str]:
        caplog.clear()
        jax_splitk.tune_problems([key.problem for key in KEYS[:2]], again=True)
        return [r.getMessage() for r in caplog.records if r.getMessage().startswith(("tuning", "tuned 2"))]

    with caplog.at_level(logging.INFO, "jax_splitk"):
        assert len(logged()) == 2
        assert terminal.seen()
        for set_up in (
            lambda: monkeypatch.setenv("JAX_SPLITK_PROGRESS", "off"),
            lambda: monkeypatch.delenv("JAX_SPLITK_PROGRESS") or on(monkeypatch, io.StringIO()),
            lambda: on(monkeypatch, None),
        ):
            terminal.truncate(0)
            set_up()
            first, second, closing = logged()
            assert [first, second] == [f"tuning {i + 1} of 2: {KEYS[i].problem}" for i in range(2)]
            assert re.match(
                r"tuned 2 problems in \d+\.\d s; one of each: 20\.0 us, XLA 60\.0 us, predicted gain", closing
            )
            assert terminal.seen() == []


def test_a_log_line_and_the_bar_do_not_share_a_line(terminal: Terminal, played: Any) -> None:
    handler, logger = logging.StreamHandler(terminal), logging.getLogger("jax_splitk")
    logger.addHandler(handler)
    try:
        with searches.state.progress.run(1), searches.state.progress.measuring(KEYS[0], 1.0):
            logger.warning("from below")
    finally:
        logger.removeHandler(handler)
    assert re.search(r"\r +\rfrom below\n", terminal.getvalue())
    assert not [f for f in logger.filters if isinstance(f, logging.Filter)]


def test_a_notebook_has_the_bar(played: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """ipykernel's stream is no terminal."""
    stream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    on(monkeypatch, stream)
    jax_splitk.tune_problems([KEYS[0].problem])
    assert "\rtuning 1 of 1:" in stream.getvalue()
    assert stream.getvalue().splitlines()[-1].startswith("jax_splitk: tuned 1 problem in ")


@pytest.mark.parametrize("error", [BrokenPipeError, ValueError])
def test_a_stream_that_fails_ends_nothing(error: type[Exception], played: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise error("scripted")

    broken = Terminal()
    monkeypatch.setattr(broken, "write", fail)
    on(monkeypatch, broken)
    assert len(jax_splitk.tune_problems([key.problem for key in KEYS])) == 3


def test_ctrl_c_closes_the_bar_and_says_so(terminal: Terminal, played: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    held, asked = threading.Event(), []
    run = search.Search.run

    def second_waits(this: search.Search) -> Entry:
        asked.append(this.key)
        if len(asked) == 2:
            held.wait(60)
        return run(this)

    wait = outcome.Outcome.wait

    def interrupted(this: outcome.Outcome[Any], seconds: float) -> bool:
        if len(asked) == 2:
            raise KeyboardInterrupt
        return wait(this, seconds)

    with monkeypatch.context() as patch:
        patch.setattr(search.Search, "run", second_waits)
        patch.setattr(outcome.Outcome, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            jax_splitk.tune_problems([key.problem for key in KEYS])
    held.set()
    assert terminal.seen()[-1].startswith("jax_splitk: tuning was given up: tuned 1 of 3 problems in ")
    assert logging.getLogger("jax_splitk").filters == []
    assert len(jax_splitk.tune_problems([key.problem for key in KEYS])) == 3
    assert re.search(r"tuned 2 problems in .* \(1 known before\); one of each: 20.0 us, ", terminal.seen()[-1])


# ---- the sum of a step -----------------------------------------------------------------------------------------------


def test_tune_and_explain_sum_a_step(terminal: Terminal, played: Any) -> None:
    """The sum counts each problem as often as the step computes it: one of the two occurs twice."""
    x, w = jnp.ones((4, 8, 8, 8)), jnp.ones((3, 3, 8, 8))
    counts = {d.problem: d.count for d in jax_splitk.explain(jax.grad(step), w, x).decisions}
    (once, twice) = sorted(counts, key=lambda problem: counts[problem])
    assert (counts[once], counts[twice]) == (1, 2)
    played[key_for(twice, CPU)] = {XLA: 21.0, A: 10.5}
    played[key_for(once, CPU)] = {XLA: 5.0, A: 9.0}
    said = "26.0 us{}, XLA 47.0 us, {}gain 21.0 us (1.81 times as fast)"
    for known in (0, 2):
        jax_splitk.tune(jax.grad(step), w, x)
        known_before = " (2 known before)" if known else ""
        assert re.fullmatch(
            rf"jax_splitk: tuned {2 - known} problems in \d+\.\d s{re.escape(known_before)}; "
            + re.escape(f"step of 3 operations: {said.format('', 'predicted ')}"),
            terminal.seen()[-1],
        )
    total = str(jax_splitk.explain(jax.grad(step), w, x)).splitlines()[-1]
    assert total == "sum of 3 operations: 21.0 of 47.0 us saved"


# ---- flips -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("times", "changed", "tie", "said"), [
    ({XLA: 30.0, A: 11.0, B: 20.0}, False, None, "the same choice"),
    ({XLA: 30.0, A: 10.1, B: 10.0}, True, True, f"the choice was {A}, now slower by 1.0%, within the tie band of 2%"),
    ({XLA: 30.0, A: 10.5, B: 10.0}, True, False, f"the choice was {A}, now slower by 5.0%, outside the tie band of 2%"),
    ({XLA: 8.0, B: 10.0, A: 8.1}, True, True, f"the choice was {A}, now slower by 1.2%, within the tie band of 2%"),
])  # fmt: skip
def test_choices_that_flip_are_counted(
    times: dict[Candidate, float], changed: bool, tie: bool | None, said: str, terminal: Terminal, played: Any
) -> None:
    (key,) = KEYS[:1]
    jax_splitk.tune_problems([key.problem])
    assert "measured again" not in terminal.seen()[-1]
    played[key] = times
    jax_splitk.tune_problems([key.problem], again=True)
    outside = int(tie is False)
    counted = f"; 1 measured again, {int(changed)} choices changed, {outside} outside the tie band of 2%"
    assert terminal.seen()[-1].endswith(counted)
    (stored, _) = store.lookup(key) or (None, "")
    assert flips.describe(stored) == f"measured again: {said}"
    found = stored.metadata["again"]
    assert (found["changed"], found.get("tie")) == (changed, tie)


def test_what_a_file_says_of_flips_is_not_trusted() -> None:
    for again in (None, [], "x", {}, {"changed": "yes"}, {"changed": True, "slower_by": "x", "tie": 1}):
        assert isinstance(flips.describe(Entry.of(KEYS[0], A, metadata={"again": again})), str)
    # A search within another limit had other candidates.
    old = dataclasses.replace(entry_of(KEYS[0], 1.0, 2.0), workspace_limit_bytes=0)
    new = entry_of(KEYS[0], 1.0, 2.0)
    assert flips.noted(old, new) == new == flips.noted(None, new)
