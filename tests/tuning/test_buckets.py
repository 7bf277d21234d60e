"""Decisions that serve fewer rows than their own, or a dilated filter: which, when, and what they may cost."""

import dataclasses
import itertools
import math
import pathlib
from typing import Any

import jax
import pytest

import jax_splitk
from jax_splitk.kernels.quantized import fp8, stream, tiled
from jax_splitk.problems.conv_passes import ConvFpropProblem
from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.runtime.target import DEFAULT_CUDA, Target
from jax_splitk.tuning import buckets, decide, entry, lookup, measurement, model, search, select, tuner
from jax_splitk.tuning.choice import XLA, Candidate, Choice
from jax_splitk.tuning.entry import Entry, Found, Measurement
from jax_splitk.tuning.key import Key, key_for
from jax_splitk.tuning.lookup import Query
from jax_splitk.tuning.options import DEFAULT_WORKSPACE_LIMIT, Options
from jax_splitk.tuning.result import TuningResult
from tests.tuning_cache import new_session, product, put

pytestmark = pytest.mark.usefixtures("cache")

LIMIT = DEFAULT_WORKSPACE_LIMIT
SHAPES = [(8192, 8192), (8192, 28672), (4096, 1024)]  # k, features


def problem(rows: int, k: int = 8192, features: int = 8192, **changes: Any) -> QuantizedMatmulProblem:
    found = QuantizedMatmulProblem(rows, k, features, "bfloat16", "bfloat16", "int4", 64, "bfloat16")
    return dataclasses.replace(found, **changes)


def key_of(rows: int, target: Target = DEFAULT_CUDA, **changes: Any) -> Key:
    return key_for(problem(rows, **changes), target)


def decided(key: Key, choice: Candidate | None = None, us: float = 5.0, xla_us: float = 50.0) -> Entry:
    """The model's first candidate, or another choice."""
    ours = search.ranked(key)[0]
    return Entry.of(key, choice or ours, [Measurement(ours, us), Measurement(XLA, xla_us)])


# ---- which -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "expected"), [
    (1, [8]), (8, [8]), (9, [16]), (16, [16]), (17, [32]), (32, [32]), (33, [64]), (64, [64]), (65, [96]), (96, [96]),
    (97, [128]), (129, [192, 160]), (161, [192]), (193, [256, 224]), (225, [256]), (257, [320, 288]), (320, [320]),
    (321, [384, 352]), (512, [512]), (513, [640, 544]), (1024, [1024]), (1025, [1280, 1056]), (4097, [5120, 4128]),
])  # fmt: skip
def test_the_rows_that_decide(rows: int, expected: list[int]) -> None:
    assert [p.rows for p in problem(rows).representatives()] == expected
    assert [p for p in problem(rows).representatives() if p != problem(p.rows)] == []


def conv(dilation: int, padding: tuple[int, int], taps: int = 7) -> ConvFpropProblem:
    """A forward pass in 1D, with sizes of a vocoder's layer."""
    size = 8192 + sum(padding) - dilation * (taps - 1)
    fields = (16, (8192,), (size,), (taps,), 32, 32, (1,), (padding,), (1,), (dilation,), 1, "float32", "float32")
    found = ConvFpropProblem(*fields)
    found.validate()
    return found


@pytest.mark.parametrize(("dilation", "padding", "taps", "expected"), [
    (3, (9, 9), 7, (3, 3)), (5, (15, 15), 7, (3, 3)), (4, (24, 0), 7, (6, 0)), (2, (1, 1), 2, None),
    (3, (0, 0), 7, None), (3, (12, 6), 7, (4, 2)), (2, (7, 5), 7, None), (3, (9, 12), 7, None), (1, (3, 3), 7, None),
])  # fmt: skip
def test_a_dilated_filter_has_a_representative_of_the_same_sizes(
    dilation: int, padding: tuple[int, int], taps: int, expected: tuple[int, int] | None
) -> None:
    problem = conv(dilation, padding, taps)
    found = list(OPERATIONS[problem.op].representatives(problem))
    assert found == ([] if expected is None else [conv(1, expected, taps)])


def dilated(holds: bool) -> tuple[Key, Key]:
    """(a key without dilation, one with dilation), of which the first one's decision holds for the other, or not."""
    for taps, dilation in itertools.product((3, 5, 7, 11), (3, 5, 2, 9)):
        reach = (taps - 1) // 2
        own, other = (key_for(conv(d, (reach * d, reach * d), taps), DEFAULT_CUDA) for d in (1, dilation))
        if (buckets.to_tune(other, LIMIT) == [own, other]) == holds:
            return own, other
    raise AssertionError("the model says the same of all")


def test_a_decision_serves_dilated_filters_where_the_model_says_so(cache: pathlib.Path) -> None:
    """Otherwise the problem has a decision of its own."""
    (own, near), (other, far) = dilated(True), dilated(False)
    assert buckets.to_tune(far, LIMIT) == [far]
    entry = decided(own)
    put(cache, own, entry.dumps())
    found = decided_here(near)
    assert found is not None
    assert (found.entry.key, found.entry.choice) == (near, entry.choice)
    padding = own.problem.padding  # pyright: ignore[reportAttributeAccessIssue] - a convolution's
    assert found.where.startswith(f"user cache, decision of {padding} padding, (1,) rhs_dilation")
    assert buckets.derived(far, Found(decided(other), "user cache"), LIMIT) is None


def test_xlas_time_without_dilation_decides_nothing_for_a_dilated_filter() -> None:
    """cuDNN is much slower with some dilations."""
    own, other = dilated(True)
    held = decided(own, XLA, us=50.0, xla_us=5.0)
    assert buckets.choice_for(other, held, LIMIT) is None
    assert buckets.choice_for(other, decided(own), LIMIT) is not None


def test_they_follow_the_tiles_of_the_kernels() -> None:
    widths = {*stream.TILES_N, *tiled.TILES_N, *fp8.TILES_N}
    for width in widths:
        assert problem(width).representatives() == (problem(width),)
    for rows in range(65, 3000):
        coarse = problem(rows).representatives()[0].rows
        assert rows <= coarse < 1.5 * rows
        fine = -(-rows // 32) * 32
        assert all(math.ceil(rows / n) == math.ceil(fine / n) for n in widths if n >= 32)
        assert fine in {p.rows for p in problem(rows).representatives()}
    # All of whom it may serve, by their number of tiles.
    for rows in (8, 16, 32, 64, 96, 320, 352, 768):
        served = [n for n in range(1, 1000) if problem(rows) in problem(n).representatives()]
        few = [p.rows for p in problem(rows).represented()]
        counted = [n for n in widths if n >= (32 if rows > 64 else 16)]
        tiles = lambda some, counted=counted: {tuple(-(-n // width) for width in counted) for n in some}  # noqa: E731
        assert set(few) <= set(served)
        assert tiles(few) == tiles(served)
    assert list(problem(100).represented()) == []


# ---- when ------------------------------------------------------------------------------------------------------------


def test_a_decision_serves_fewer_rows_unless_they_have_one(
    cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = decided(key_of(32))
    family = held.choice.family
    assert family is not None
    put(cache, held.key, held.dumps())
    monkeypatch.setenv("JAX_SPLITK_CACHE_MODE", "frozen")

    def chosen(rows: int, **options: Any) -> select.Choice:
        return select.select(problem(rows), DEFAULT_CUDA, Options(**options), final=True)

    for rows in range(17, 32):
        seconds = family.estimate(problem(rows), held.choice.config, DEFAULT_CUDA)
        why = f"user cache, decision of 32 rows ({seconds * 1e6:.1f} us predicted)"
        assert (chosen(rows).candidate, chosen(rows).why) == (held.choice, why)
        assert chosen(rows).problem == problem(rows)
    assert chosen(32).because == "user cache"
    for rows in (16, 33):
        with pytest.raises(decide.FrozenCacheMiss, match=f'tune \'{{"op": .*"rows": {16 if rows == 16 else 64}, '):
            chosen(rows)
    # Another decision that holds for fewer rows, too.
    serves = lambda c: buckets.choice_for(key_of(21), Entry.of(key_of(32), c), LIMIT) == c  # noqa: E731
    own = next(c for c in search.ranked(key_of(32)) if c != held.choice and serves(c))
    put(cache, key_of(20), decided(key_of(20), own).dumps())
    assert (chosen(20).candidate, chosen(20).because) == (own, "user cache")
    assert chosen(21).candidate == held.choice
    with TuningResult(((key_of(32), decided(key_of(32), own)),)) as result:
        choice = chosen(21, tuning=result)
        assert (choice.candidate, choice.because) == (own, "the TuningResult in force, decision of 32 rows")
    # Processes of a job send each other what was decided.
    found = lookup.LOCAL(Query(key_of(21), Options(), LIMIT))
    assert found is not None
    assert entry.loads(found.entry.dumps(), key_of(21)).choice == held.choice


@pytest.mark.parametrize(("k", "features"), SHAPES)
@pytest.mark.parametrize(("rows", "of"), [(20, 32), (130, 192), (130, 160), (270, 320), (513, 640), (700, 768)])
def test_it_serves_where_it_is_legal_and_loses_little(k: int, features: int, rows: int, of: int) -> None:
    key, other = key_of(rows, k=k, features=features), key_of(of, k=k, features=features)
    seconds = lambda each, c: c.family.estimate(each.problem, c.config, DEFAULT_CUDA)  # noqa: E731
    best, best_of_other = (min(seconds(each, c) for c in search.ranked(each)) for each in (key, other))
    for candidate in search.ranked(other):
        family, config = candidate.family, candidate.config
        assert family is not None
        expected = None
        if family.refusal(key.problem, config, DEFAULT_CUDA) is None:
            here, there = seconds(key, candidate) / best, seconds(other, candidate) / best_of_other
            # Slow where it was measured to be fast is no argument.
            expected = candidate if here / max(1, there) - 1 <= 0.03 else None
        assert buckets.choice_for(key, Entry.of(other, candidate), LIMIT) == expected


def test_what_is_not_legal_or_slow_for_fewer_rows_does_not_serve(cache: pathlib.Path) -> None:
    """Both happen with the model's first candidates. The next representative then decides."""
    reasons = set()
    for (k, features), rows in itertools.product(SHAPES, range(257, 1100, 13)):
        key = key_of(rows, k=k, features=features)
        first = buckets.representatives(key)[:1]
        for other in first:
            choice = search.ranked(other)[0]
            if buckets.choice_for(key, Entry.of(other, choice), LIMIT) is None:
                reasons.add("slow" if choice.refusal(key.problem, DEFAULT_CUDA) is None else "not legal")
        # A multiple of 32 has the same tiles, so that its decision serves.
        assert buckets.to_tune(key, LIMIT)[:-1] or rows % 32 == 0
    assert reasons == {"slow", "not legal"}
    big = decided(key_of(320))
    need = big.choice.workspace_bytes(problem(300))
    assert buckets.choice_for(key_of(300), big, LIMIT) == big.choice
    assert need == 0 or buckets.choice_for(key_of(300), big, need - 1) is None


@pytest.mark.parametrize(("rows", "of"), [(20, 32), (513, 640)])
def test_xla_serves_fewer_rows_where_it_stays_the_faster(rows: int, of: int) -> None:
    """XLA's time does not grow with fewer rows, and ours falls as the model says."""
    here, there = (model.best(key_of(n), LIMIT) for n in (rows, of))
    assert here is not None
    assert there is not None
    ours = 100.0 * there[0] / here[0]  # 100 us for the fewer rows
    for xla_us, serves in ((90.0, True), (102.9, True), (103.1, False)):
        held = decided(key_of(of), XLA, ours, xla_us)
        assert buckets.choice_for(key_of(rows), held, LIMIT) == (XLA if serves else None)
    unknown = dataclasses.replace(decided(key_of(of), XLA), evidence={})
    assert buckets.choice_for(key_of(rows), unknown, LIMIT) is None
    smallest = decided(key_of(of), XLA, 5e-324, 1.0)  # of a damaged entry: what it becomes for fewer rows is zero
    assert buckets.choice_for(key_of(rows), smallest, LIMIT) is None


# ---- tuning ----------------------------------------------------------------------------------------------------------


def decided_here(key: Key) -> Found | None:
    """What a cache or a measurement decides for a lowering."""
    return decide.InCommon(lookup.LOCAL, measurement.measurement)(Query(key, Options(), LIMIT, here=True))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Entry | None]]:
    """What is tuned, and the earlier entry that it starts from; the model's first candidate wins."""
    found: list[tuple[int, Entry | None]] = []

    def tune(key: Key, workspace_limit: int, old: Entry | None, seconds: float | None) -> Entry:
        found.append((key.problem.rows, old))
        return decided(key)

    monkeypatch.setattr(tuner, "tune", tune)
    return found


def test_two_hundred_batch_sizes_are_tuned_eight_times(asked: list[tuple[int, Entry | None]]) -> None:
    for rows in range(1, 201):
        found = decided_here(key_of(rows))
        assert found is not None
        assert found.entry.key == key_of(rows)
        assert found.entry.choice.refusal(problem(rows), DEFAULT_CUDA) is None
    assert [rows for rows, _ in asked] == [8, 16, 32, 64, 96, 128, 192, 256]


def test_a_problem_whose_representatives_decision_does_not_hold_is_tuned_itself(
    asked: list[tuple[int, Entry | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "choice_for", lambda *arguments: None)
    assert decided_here(key_of(270)) == Found(decided(key_of(270)), "measured now")
    assert asked[-1][0] == 270
    assert {rows for rows, _ in asked[:-1]} <= {320, 288}


def test_a_siblings_times_are_tried_first_and_decide_nothing(
    asked: list[tuple[int, Entry | None]], cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    h100 = dataclasses.replace(DEFAULT_CUDA, device_kind="NVIDIA H100 80GB HBM3")
    theirs = decided(key_of(32, h100))
    put(cache, theirs.key, theirs.dumps())
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "off")
    assert decided_here(key_of(32)) is None
    monkeypatch.delenv("JAX_SPLITK_AUTOTUNE")
    found = decided_here(key_of(32))
    assert found is not None
    assert (found.entry.key, found.where) == (key_of(32), "measured now")
    assert asked == [(32, theirs)]
    # An H100 PCIe is another kind of GPU, so the stored entry does not serve it.
    pcie = dataclasses.replace(h100, device_kind="NVIDIA H100 PCIe", cores=114)
    decided_here(key_of(32, pcie))
    assert asked[1:] == [(32, None)]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="tunes the CPU's family")
def test_on_a_miss_the_representative_is_measured(
    asked: list[tuple[int, Entry | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "on_miss")
    x, weight = product(8)
    why = lambda: jax_splitk.explain(jax_splitk.quantized_matmul, x[:5], weight).decisions[0].why  # noqa: E731
    for rows in (3, 5, 8):
        jax.jit(jax_splitk.quantized_matmul).lower(x[:rows], weight)
    assert asked == [(8, None)]
    assert why().startswith("user cache, decision of 8 rows (")
    # Who asks for a problem gets its own.
    (decision,) = jax_splitk.explain(jax_splitk.quantized_matmul, x[:5], weight).decisions
    jax_splitk.tune_problems([decision.problem])
    ((rows, held),) = asked[1:]
    assert rows == 5 and held is not None and buckets.is_derived(held)
    assert why().startswith("user cache: ")


# ---- what is stored --------------------------------------------------------------------------------------------------


def choice_here(key: Key) -> Choice:
    """The choice of a lowering."""
    return select.select(key.problem, key.target, Options(), measure=True, final=True)


def test_another_process_asks_no_model_for_a_decision_that_holds(
    cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "off")
    own, other = key_of(32), key_of(27)
    put(cache, own, decided(own).dumps())
    first = choice_here(other)
    assert first.candidate == decided(own).choice and "decision of 32 rows" in first.why
    new_session(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(model, "best", lambda *_: pytest.fail("the model is asked"))
        assert (choice_here(other).candidate, choice_here(other).why) == (first.candidate, first.why)
        assert choice_here(other).times == first.times
        # Measured again, the representative has the same choice.
        put(cache, own, decided(own, us=4.0).dumps())
        assert choice_here(other).candidate == first.candidate
    # A representative without a decision, or with one that does not hold: the stored answer decides nothing.
    (cache / own.file).unlink()
    assert "the cost model" in choice_here(other).why
    with monkeypatch.context() as patch:
        patch.setattr(buckets, "MAX_LOSS", -1.0)
        put(cache, own, decided(own, search.ranked(own)[1]).dumps())
        assert "the cost model" in choice_here(other).why
    put(cache, own, decided(own).dumps())
    assert choice_here(other).why == first.why


def test_a_stored_answer_keeps_to_the_callers_limit() -> None:
    own, other = key_of(32), key_of(27)
    split = next(c for c in search.ranked(own) if c.workspace_bytes(own.problem) > 0)
    entry = Entry.of(other, split, metadata={buckets.REPRESENTATIVE: "32 rows"}, workspace_limit_bytes=0)
    found = Found(decided(own, split), "user cache")
    held = buckets.derived(other, found, LIMIT, entry)
    assert held is not None and held.entry.is_searched(LIMIT) and held.entry.choice == split
    held = buckets.derived(other, found, split.workspace_bytes(other.problem) - 1, entry)
    assert held is not None and held.entry.choice == decided(own).choice != split
