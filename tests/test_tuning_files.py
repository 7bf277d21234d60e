"""Entries, results and the layers they come from: what is written is read again, and what is damaged is a miss."""

import copy
import dataclasses
import functools
import itertools
import json
import logging
import os
import pathlib
import pwd
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import jax_splitk
from benchmarks.cases import Case
from jax_splitk import kernels
from jax_splitk.kernels import wgrad_host
from jax_splitk.problem import ConvWgradProblem
from jax_splitk.target import DEFAULT_CUDA, Target, target_for
from jax_splitk.tuning import agreement, select, store, tuner
from jax_splitk.tuning import entry as entries
from jax_splitk.tuning import result as results
from jax_splitk.tuning.entry import XLA, Candidate, Entry, InvalidEntry, Measurement
from jax_splitk.tuning.key import SCHEMA, Key, key_for, problem_from_dict
from jax_splitk.tuning.options import Options, check_options, current
from jax_splitk.tuning.result import TuningResult
from tests.problems import generator, random_case, seeded

CPU = target_for("cpu")
CASE = Case("small", 3, 9, 8, 6, 10, (3, 2), dtype="float32")
HUGE = "9" * 400  # an integer of JSON that no float holds
ENVIRONMENT = ("CACHE_DIR", "CACHE_PATH", "CACHE_MODE", "AUTOTUNE", "TUNE_BUDGET_S", "AGREEMENT_TIMEOUT_S")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """Empty layers of this test's own; the writable one is returned."""
    for name in ENVIRONMENT:
        monkeypatch.delenv(f"JAX_SPLITK_{name}", raising=False)
    monkeypatch.setenv("JAX_SPLITK_CACHE_DIR", str(tmp_path / "user"))
    monkeypatch.setattr(store, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(store, "_warned", set())
    return tmp_path / "user"


def random_key(rng: np.random.Generator, target: Target) -> Key:
    """A key with at least four legal candidates."""
    dtypes = ("bfloat16", "float16") if target.platform == "cuda" else ("float32", "bfloat16", "float16")
    while True:
        dtype = str(rng.choice(dtypes))
        problem = random_case(rng, dtype).problem(str(rng.choice([dtype, "float32"])))
        limit = None if rng.random() < 0.7 else int(rng.integers(2**20, 2**26))
        options = Options(deterministic=bool(rng.random() < 0.5), workspace_limit_bytes=limit)
        key = key_for(problem, target, options)
        if len(tuner.ranked(key, target)) >= 4:
            return key


def random_entry(rng: np.random.Generator, key: Key, target: Target) -> Entry:
    """A legal choice, timings of several candidates and XLA, and failures."""
    ranked = tuner.ranked(key, target)
    picked = [ranked[i] for i in rng.permutation(len(ranked))[:12]]
    failed = max(0, len(picked) - 3)
    measurements = [Measurement(Candidate(XLA), float(rng.uniform(1, 1e4)))]
    measurements += [Measurement(c, float(rng.uniform(1, 1e4))) for c in picked[:failed]]
    measurements += [Measurement(c, None, f"wrong result: {rng.random()} \u00b5 \"'\n") for c in picked[failed:]]
    choice = Candidate(XLA) if rng.random() < 0.2 else picked[0]
    predicted = ranked[0] if rng.random() < 0.8 else None
    return Entry(key.as_dict(), choice, tuple(measurements), predicted, {"date": "now", "seconds": float(rng.random())})


def entry_of(key: Key, config: Any, family: str = "wgrad_host") -> Entry:
    return Entry(key.as_dict(), Candidate(family, config), (), None, {})


def put(folder: pathlib.Path, key: Key, text: str | bytes) -> pathlib.Path:
    path = folder / key.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def assert_legal(candidate: Candidate, key: Key, target: Target) -> None:
    """By the family's own predicate, and with fields of exactly the right types."""
    if candidate == Candidate(XLA):
        return
    family = next(f for f in kernels.families(key.problem.op, target.platform) if f.name == candidate.family)
    assert type(candidate.config) is family.Config
    for field in dataclasses.fields(family.Config):
        assert type(getattr(candidate.config, field.name)) is field.type
    assert family.supports(key.problem, candidate.config, target) is None
    assert family.workspace_bytes(key.problem, candidate.config) <= key.workspace_limit_bytes


# ---- round trips ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [CPU, DEFAULT_CUDA], ids=["cpu", "cuda"])
def test_what_is_dumped_is_loaded_again(target: Target, cache: pathlib.Path) -> None:
    with seeded(1) as rng:
        pairs = []
        for _ in range(20):
            key = random_key(rng, target)
            entry = random_entry(rng, key, target)
            assert entries.loads(entry.dumps(), key, target) == entry
            assert entries.loads(entry.dumps().encode(), key, None) == entry
            assert results.key_from_dict(json.loads(json.dumps(key.as_dict()))) == key
            assert problem_from_dict(key.problem.op, key.as_dict()["problem"]) == key.problem
            assert store.save(key, entry)
            assert store.lookup(key, target) == (entry, "user cache")
            pairs.append((key, entry))
        result = TuningResult(tuple(pairs))
        assert TuningResult.loads(result.dumps()) == result
        assert TuningResult.loads(result.dumps().encode()).dumps() == result.dumps()
        assert hash(TuningResult.loads(result.dumps())) == hash(result)
        assert [result.get(key) for key, _ in pairs] == [dict(pairs)[key] for key, _ in pairs]
        assert sorted(store.files(cache)) == sorted({cache / key.file for key, _ in pairs})
        assert all(str(key.problem) in str(result) for key, _ in pairs)


def test_keys_differ_where_a_decision_may() -> None:
    key = random_key(generator(2), CPU)
    others = [
        dataclasses.replace(key, deterministic=not key.deterministic),
        dataclasses.replace(key, workspace_limit_bytes=key.workspace_limit_bytes + 1),
        dataclasses.replace(key, problem=dataclasses.replace(key.problem, batch=key.problem.batch + 1)),
        dataclasses.replace(key, problem=dataclasses.replace(key.problem, precision="highest")),
        *(
            dataclasses.replace(key, environment=dataclasses.replace(key.environment, **change))
            for change in ({"cores": 999}, {"device_kind": "z80"}, {"cuda_major": 14}, {"abi": ("wgrad_host:999",)})
        ),
    ]
    assert len({k.file for k in (key, *others)}) == len(others) + 1
    text = entry_of(key, tuner.ranked(key, CPU)[0].config).dumps()
    for other in others:
        with pytest.raises(InvalidEntry, match="another problem's or another machine's"):
            entries.loads(text, other, CPU)


def test_merging_keeps_what_was_not_timed_again() -> None:
    key = key_for(CASE.problem(), CPU, Options())
    one, two, three = (c for c in tuner.ranked(key, CPU)[:3])
    old = Entry(key.as_dict(), one, (Measurement(one, 1.0), Measurement(two, 2.0)), one, {"date": "old"})
    new = Entry(key.as_dict(), three, (Measurement(three, 0.5), Measurement(one, None, "broken")), one, {"date": "new"})
    assert store.save(key, old)
    assert store.save(key, new)
    found = store.lookup(key, CPU)
    assert found is not None
    assert (found[0].choice, found[0].metadata) == (three, {"date": "new"})
    assert [(m.candidate, m.us) for m in found[0].measurements] == [(three, 0.5), (one, None), (two, 2.0)]
    assert entries.merge(None, new) is new


# ---- strictness ----------------------------------------------------------------------------------------------------


def changed(entry: Entry, change: Callable[[dict[str, Any]], Any]) -> str:
    data = json.loads(entry.dumps())
    change(data)
    return json.dumps(data)


def _set(*path: Any) -> Callable[[dict[str, Any]], None]:
    *parents, last, value = path

    def change(data: dict[str, Any]) -> None:
        for name in parents:
            data = data[name]
        data[last] = value

    return change


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a bool for an int": (_set("choice", "config", "splits", True), r"config field splits=True; accepted: .*int"),
    "a float for an int": (_set("choice", "config", "splits", 1.0), r"config field splits=1\.0"),
    "a string for an int": (_set("choice", "config", "block", "128"), "config field block='128'"),
    "a field too many": (_set("choice", "config", "stages", 3), "config .*; accepted: splits, block"),
    "a field too few": (lambda data: data["choice"]["config"].pop("block"), "config .*; accepted: splits, block"),
    "no config": (_set("choice", "config", None), "config None; accepted: splits, block"),
    "an unknown family": (_set("choice", "family", "wgrad_z80"), "family 'wgrad_z80'; accepted: wgrad_sm90, .*, xla"),
    "another platform's family": (
        _set("choice", {"family": "wgrad_sm90", "config": {}}),
        "wgrad_sm90|config {}; accepted",
    ),
    "no choice": (lambda data: data.pop("choice"), "candidate None; accepted: an object with family and config"),
    "an illegal config": (_set("choice", "config", "splits", 10**6), "choice .* is not legal: splits=1000000"),
    "a huge config": (_set("choice", "config", "splits", int(HUGE)), "is not legal: splits=999"),
    "an illegal block": (_set("choice", "config", "block", 12), "is not legal: block=12"),
    "another key": (_set("key", "problem", "batch", 77), "its key is another problem's"),
    "no key": (lambda data: data.pop("key"), "its key is another problem's"),
    "a newer schema": (_set("schema", SCHEMA + 1), f"schema {SCHEMA + 1}; accepted: {SCHEMA}"),
    "no schema": (lambda data: data.pop("schema"), f"schema None; accepted: {SCHEMA}"),
    "measurements of a wrong type": (_set("measurements", {}), "measurements must be a list"),
    "a wrong measurement": (_set("measurements", [3]), "candidate 3"),
    "a time of zero": (_set("measurements", [{"family": XLA, "config": None, "us": 0}]), "measurement us=0"),
    "a negative time": (_set("measurements", [{"family": XLA, "config": None, "us": -1.5}]), r"measurement us=-1\.5"),
    "no time": (_set("measurements", [{"family": XLA, "config": None, "us": None}]), "measurement us=None"),
    "an infinite time": (_set("measurements", [{"family": XLA, "us": float("inf")}]), "measurement us=inf"),
    "not a time": (_set("measurements", [{"family": XLA, "us": float("nan")}]), "measurement us=nan"),
    "a time that is true": (_set("measurements", [{"family": XLA, "us": True}]), "measurement us=True"),
    "a time beyond floats": (_set("measurements", [{"family": XLA, "us": int(HUGE)}]), "measurement us="),
    "an error that is no text": (_set("measurements", [{"family": XLA, "us": None, "error": 3}]), "error=3"),
    "a time and an error": (_set("measurements", [{"family": XLA, "us": 3.0, "error": "x"}]), "error='x'"),
    "metadata of a wrong type": (_set("metadata", []), "metadata an object"),
    "a wrong prediction": (_set("predicted", 3), "candidate 3"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_entry_is_a_miss_with_one_warning(
    name: str, cache: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    change, message = BROKEN[name]
    key = key_for(CASE.problem(), CPU, Options())
    good = Entry(key.as_dict(), tuner.ranked(key, CPU)[0], (Measurement(Candidate(XLA), 5.0),), None, {})
    assert entries.loads(changed(good, lambda data: None), key, CPU) == good
    text = changed(good, change)
    with pytest.raises(InvalidEntry, match=message):
        entries.loads(text, key, CPU)
    path = put(cache, key, text)
    with caplog.at_level(logging.WARNING, "jax_splitk"):
        assert [store.lookup(key, CPU) for _ in range(3)] == [None] * 3
        assert select.select(key.problem, CPU, Options()).why.startswith("the cost model's best")
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{path} is ignored: ")
    assert re.search(message, record.getMessage())


def test_a_choice_over_the_workspace_limit_is_a_miss() -> None:
    problem = CASE.problem()
    config = wgrad_host.Config(4, 128)
    size = wgrad_host.workspace_bytes(problem, config)
    enough = key_for(problem, CPU, Options(workspace_limit_bytes=size))
    assert entries.loads(entry_of(enough, config).dumps(), enough, CPU).choice.config == config
    key = key_for(problem, CPU, Options(workspace_limit_bytes=size - 1))
    with pytest.raises(InvalidEntry, match=f"not legal: {size} bytes of workspace; accepted: at most {size - 1}"):
        entries.loads(entry_of(key, config).dumps(), key, CPU)


def test_a_file_at_the_wrong_place_is_a_miss(cache: pathlib.Path) -> None:
    """Each entry says which key it is for; a copied or renamed file does not answer for another."""
    rng = generator(3)
    one, two = (random_key(rng, CPU) for _ in range(2))
    put(cache, two, random_entry(rng, one, CPU).dumps())
    assert store.lookup(two, CPU) is None
    (cache / two.file).unlink()
    (cache / two.file).mkdir()  # nor does a folder
    assert store.lookup(two, CPU) is None


def nested(depth: int, inner: str = "") -> str:
    return "[" * depth + inner + "]" * depth


def test_any_depth_of_nesting_is_a_miss() -> None:
    """Also the depths that the parser just manages, and the message about them may not."""
    key = key_for(CASE.problem(), CPU, Options())
    entry = Entry(key.as_dict(), tuner.ranked(key, CPU)[0], (Measurement(Candidate(XLA), 5.0),), None, {})

    def parses(depth: int) -> bool:
        try:
            json.loads(nested(depth))
        except RecursionError:
            return False
        return True

    low, high = 1, 200_000
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if parses(middle) else (low, middle)
    assert 10 < low < 199_999
    depths = [*range(max(1, low - 120), low + 5), 200_000]
    places = [
        ('"splits": 1', '"splits": %s'),
        ('"choice": {', '"choice": %s, "other": {'),
        ('"key": {', '"key": %s, "other": {'),
        ('"schema": 1,\n', '"schema": %s,\n'),
        ('"us": 5.0', '"us": %s'),
        ('"predicted": null', '"predicted": %s'),
        ('"error": null', '"error": %s'),
    ]
    text = entry.dumps()
    text = re.sub(r'"splits": \d+', '"splits": 1', text)
    entries.loads(text, key, CPU)
    for old, new in places:
        assert old in text
        for depth in depths:
            with pytest.raises(InvalidEntry):
                entries.loads(text.replace(old, new % nested(depth)), key, CPU)


# ---- ten thousand damaged files ------------------------------------------------------------------------------------

ODD_VALUES: list[Any] = [None, True, False, 0, 1, -1, 2, 3, 64, 128, 129, 1.5, 1.0, -0.0, 2**31, 2**63, 2**64, 10**30]
ODD_VALUES += ["", "x", "xla", "wgrad_host", "wgrad_sm90", "\ud800", [], {}, [[]], [1, 2], {"family": "xla"}]
ODD_VALUES += [float("nan"), float("inf"), float("-inf"), 1e308, 5e-324, {"family": "wgrad_host", "config": {}}]
ODD_TEXTS = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", HUGE, "9" * 5000, "1" + "0" * 300, '"\\ud800"', "\0"]


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, index) of a JSON value."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for index, value in items:
        yield data, index
        yield from places(value)


def mutate_json(rng: np.random.Generator, text: str, other: str) -> str:
    data = json.loads(text)
    for _ in range(int(rng.integers(1, 4))):
        found = list(places(data))
        if not found:
            break
        # Half of the changes go to what decides: the choice.
        if rng.random() < 0.5 and isinstance(data, dict) and isinstance(data.get("choice"), dict):
            found = list(places(data["choice"])) or found
        container, index = found[rng.integers(len(found))]
        kind = rng.integers(8)
        if kind == 0 and isinstance(container, dict):
            del container[index]
        elif kind == 1 and isinstance(container, dict):
            container[str(rng.integers(100))] = container[index]
        elif kind == 2:
            container[index] = [container[index]]
        elif kind == 3:
            source, at = found[rng.integers(len(found))]
            container[index] = copy.deepcopy(source.get(at) if isinstance(source, dict) else source[at])
        elif kind == 4 and isinstance(container[index], int):
            container[index] = container[index] + int(rng.integers(-3, 4)) * int(rng.choice([1, 8, 64]))
        elif kind == 5:
            theirs = json.loads(other)
            name = str(rng.choice(list(theirs)))
            if isinstance(data, dict):
                data[name] = theirs[name]
        else:
            container[index] = copy.deepcopy(ODD_VALUES[rng.integers(len(ODD_VALUES))])
    return json.dumps(data)


def mutate_text(rng: np.random.Generator, text: str) -> bytes:
    kind = rng.integers(7)
    data = bytearray(text.encode())
    at = int(rng.integers(len(data)))
    if kind == 0:
        for _ in range(int(rng.integers(1, 6))):
            data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        del data[at:]
    elif kind == 2:
        del data[at : at + int(rng.integers(1, 40))]
    elif kind == 3:
        data[at:at] = rng.bytes(int(rng.integers(1, 20)))
    elif kind == 4:
        numbers = list(re.finditer(r"(?<=[ \[])-?\d[\d.e+-]*", text))
        spot = numbers[rng.integers(len(numbers))]
        odd = ODD_TEXTS[rng.integers(len(ODD_TEXTS))]
        return (text[: spot.start()] + odd + text[spot.end() :]).encode()
    elif kind == 5:
        depth = int(rng.choice([3, 50, 500, 900, 990, 2000, 50_000]))
        spot = list(re.finditer(r'(?<=": )', text))[rng.integers(text.count('": '))]
        return (text[: spot.start()] + nested(depth, "1") + "," * int(rng.integers(2)) + text[spot.end() :]).encode()
    else:
        words = [b"\xff\xfe", b"\xef\xbb\xbf", b"\x00", b"\xc3\x28", text.encode(), text.encode("utf-16")]
        data[0:0] = words[rng.integers(len(words))]
    return bytes(data)


@pytest.mark.filterwarnings("error")
def test_ten_thousand_damaged_files(cache: pathlib.Path) -> None:
    """Nothing escapes, and whatever is still taken from a damaged file is legal for its problem."""
    outcomes = {"miss": 0, "hit": 0, "changed": 0}
    with seeded(4) as rng:
        cases = []
        for target in (CPU, DEFAULT_CUDA):
            for _ in range(8):
                key = random_key(rng, target)
                entry = random_entry(rng, key, target)
                limit, deterministic = key.workspace_limit_bytes, key.deterministic
                options = Options(deterministic=deterministic, workspace_limit_bytes=limit)
                assert store.lookup(key, target) is None
                cases.append((key, target, options, entry, entry.dumps()))
        for i in range(10_000):
            key, target, options, entry, text = cases[rng.integers(len(cases))]
            other = cases[rng.integers(len(cases))][-1]
            if i % 50 == 0:
                damaged: str | bytes = other  # a whole file under another key's name
            elif i % 2:
                damaged = mutate_json(rng, text, other)
            else:
                damaged = mutate_text(rng, text)
            path = put(cache, key, damaged)
            try:
                found = store.lookup(key, target)
                assert found == (None if found is None else (store.read(path, key, target), "user cache"))
                outcomes["miss" if found is None else "hit"] += 1
                if found is not None:
                    assert_legal(found[0].choice, key, target)
                    assert found[0].key == key.as_dict()
                    outcomes["changed"] += found[0] != entry
                for implementation in (None, "host" if target is CPU else "cutlass"):
                    asked = dataclasses.replace(options, implementation=implementation)
                    choice = select.select(key.problem, target, asked)
                    if choice.family is not None:
                        assert_legal(Candidate(choice.family.name, choice.config), key, target)
            except BaseException as error:
                error.add_note(f"case {i}, key {key}, file {damaged[:5000]!r}")
                raise
    # The test means something only if many are refused, and some are taken with other content.
    assert outcomes["miss"] > 5000
    assert outcomes["changed"] > 100


RESULT_TEXTS = ["", "{}", "3", "null", "[3]", "[null]", "[[]]", "[{}]", '[{"key": 3}]', "[", "\ud800", nested(100_000)]


@pytest.mark.parametrize("text", RESULT_TEXTS, ids=lambda text: repr(text[:12]))
def test_what_is_no_result_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"not JSON|accepted"):
        TuningResult.loads(text)


def test_damaged_results_are_value_errors() -> None:
    with seeded(5) as rng:
        key = random_key(rng, CPU)
        result = TuningResult(((key, random_entry(rng, key, CPU)),))
        refused = 0
        for _ in range(1500):
            item = json.dumps(json.loads(result.dumps())[0])
            text: str | bytes = f"[{mutate_json(rng, item, item)}]"
            if rng.random() < 0.5:
                text = mutate_text(rng, result.dumps())
            try:
                loaded = TuningResult.loads(text)
            except ValueError:
                refused += 1
                continue
            except BaseException as error:
                error.add_note(repr(text[:5000]))
                raise
            for loaded_key, entry in loaded:
                assert_legal(entry.choice, loaded_key, results.local_target(loaded_key))
        assert 500 < refused < 1500


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("deterministic", 1),
        ("workspace_limit_bytes", -1),
        ("workspace_limit_bytes", True),
        ("op", []),
        ("op", "conv_fwd"),
        ("environment", {}),
        ("problem", []),
        ("problem", {}),
        ("schema", SCHEMA + 1),
    ],
)
def test_a_key_is_checked(field: str, value: Any) -> None:
    data = key_for(CASE.problem(), CPU, Options()).as_dict()
    assert results.key_from_dict(data).as_dict() == data
    with pytest.raises(InvalidEntry, match=r"accepted|unknown fields|unhashable"):
        results.key_from_dict({**data, field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch", True),
        ("batch", -1),
        ("batch", 2.0),
        ("input_spatial", []),
        ("input_spatial", [9, 8, 1]),
        ("output_spatial", [9, 9]),
        ("kernel_spatial", [0, 2]),
        ("padding", [[1, 1]]),
        ("padding", [[1, 1], [0]]),
        ("dtype", "int8"),
        ("dtype", ["float32"]),
        ("window_strides", [1, 2**70]),
        ("rhs_dilation", [2**39, 2**39]),
        ("feature_group_count", 4),
    ],
)
def test_a_problem_from_a_file_is_checked(field: str, value: Any) -> None:
    fields = key_for(CASE.problem(), CPU, Options()).as_dict()["problem"]
    with pytest.raises(ValueError, match=r"accepted|the convolution gives"):
        problem_from_dict("conv_wgrad", {**fields, field: value})


def test_a_problem_has_one_to_three_spatial_dimensions() -> None:
    fields = key_for(CASE.problem(), CPU, Options()).as_dict()["problem"]
    vectors = ("input_spatial", "output_spatial", "kernel_spatial", "window_strides", "lhs_dilation", "rhs_dilation")
    for rank in (0, 4):
        resized = {name: [1] * rank for name in vectors} | {"padding": [[0, 0]] * rank}
        with pytest.raises(ValueError, match="accepted: one to three"):
            problem_from_dict("conv_wgrad", {**fields, **resized})


# ---- results as values and contexts --------------------------------------------------------------------------------


def operands(rng: np.random.Generator, case: Case = CASE) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """(lhs, g, the weight gradient)."""
    lhs, g = (
        jnp.asarray(rng.integers(-3, 4, shape), jnp.dtype(case.dtype)) for shape in (case.lhs_shape, case.g_shape)
    )
    rhs = jnp.zeros(case.rhs_shape, lhs.dtype)
    forward = lambda w: jax.lax.conv_general_dilated(lhs, w, **case.lax_arguments())  # noqa: E731
    return lhs, g, np.asarray(jax.vjp(forward, rhs)[1](g)[0])


def wgrad(lhs: jax.Array, g: jax.Array, case: Case = CASE, **options: Any) -> jax.Array:
    return jax_splitk.conv_wgrad(lhs, g, case.rhs_shape, **case.lax_arguments(), **options)


def lower(fn: Callable[..., Any], *args: Any) -> Any:
    """The lowered program of a function that jit has not seen before."""
    return jax.jit(functools.partial(fn)).lower(*args)


def lowered_config(fn: Callable[..., Any], *args: Any) -> wgrad_host.Config | None:
    """The host family's config in the lowered program; None where there is no such call."""
    text = lower(fn, *args).as_text()
    found = re.search(r"block = (\d+) : i64.*splits = (\d+) : i64", text)
    return None if found is None else wgrad_host.Config(int(found[2]), int(found[1]))


def result_of(config: Any, case: Case = CASE, options: Options | None = None) -> TuningResult:
    key = key_for(case.problem(), CPU, options or Options())
    return TuningResult(((key, entry_of(key, config)),))


ONE, TWO, THREE, FOUR, FIVE, SIX = (wgrad_host.Config(s, b) for s, b in itertools.product((3, 5, 7), (64, 96)))


def test_or_has_both_and_the_right_one_where_they_meet() -> None:
    other = dataclasses.replace(CASE, batch=5)
    left = result_of(ONE) | result_of(ONE, other)
    right = result_of(TWO)
    assert (len(left), len(right), len(left | right)) == (2, 1, 2)
    key, other_key = (key_for(case.problem(), CPU, Options()) for case in (CASE, other))
    configs = [(left | right).get(key).choice.config, (left | right).get(other_key).choice.config]
    assert configs == [TWO, ONE]
    assert (right | left).get(key).choice.config == ONE
    assert left | TuningResult() == left == TuningResult() | left
    assert left.get(key_for(CASE.problem("bfloat16"), CPU, Options())) is None
    assert list(left) == list(left.entries)


def test_a_result_rules_inside_its_block() -> None:
    lhs, g, expected = operands(generator(6))
    predicted = lowered_config(wgrad, lhs, g)
    assert predicted not in (ONE, TWO, None)
    outer, inner = result_of(ONE), result_of(TWO)
    with outer as entered:
        assert entered is outer
        assert lowered_config(wgrad, lhs, g) == ONE
        with inner:
            assert lowered_config(wgrad, lhs, g) == TWO
            with outer, outer:
                assert lowered_config(wgrad, lhs, g) == ONE
            assert lowered_config(wgrad, lhs, g) == TWO
            np.testing.assert_array_equal(wgrad(lhs, g), expected)
            with TuningResult():  # an inner block replaces the outer one
                assert lowered_config(wgrad, lhs, g) == predicted
        assert lowered_config(wgrad, lhs, g) == ONE
        np.testing.assert_array_equal(wgrad(lhs, g), expected)
        with pytest.raises(KeyError), inner:
            raise KeyError
        assert current().tuning == outer
    assert lowered_config(wgrad, lhs, g) == predicted
    assert current() == Options()


def test_a_result_reaches_the_gradient_of_a_convolution() -> None:
    lhs, g, expected = operands(generator(7))

    def loss(w: jax.Array) -> jax.Array:
        return jnp.sum(jax_splitk.conv_general_dilated(lhs, w, **CASE.lax_arguments()) * g)

    w = jnp.zeros(CASE.rhs_shape, lhs.dtype)
    with result_of(FOUR):
        assert lowered_config(jax.grad(loss), w) == FOUR
        np.testing.assert_array_equal(jax.grad(loss)(w), expected)
    assert lowered_config(jax.grad(loss), w) != FOUR


def test_jit_traces_again_where_the_context_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    lhs, g, expected = operands(generator(8))
    traces, plans = [], []
    make_plan = wgrad_host.make_plan

    def planned(problem: ConvWgradProblem, config: Any) -> Any:
        plans.append(config)
        return make_plan(problem, config)

    monkeypatch.setattr(wgrad_host, "make_plan", planned)

    @jax.jit
    def run(lhs: jax.Array, g: jax.Array) -> jax.Array:
        traces.append(current())
        return wgrad(lhs, g)

    def check(count: int, config: wgrad_host.Config | None) -> None:
        plans.clear()
        np.testing.assert_array_equal(run(lhs, g), expected)
        assert len(traces) == count
        assert plans == ([] if config is None else [config])

    one, two = result_of(ONE), result_of(TWO)
    predicted = lowered_config(wgrad, lhs, g)
    assert predicted is not None
    check(1, predicted)
    check(1, None)
    with one:
        check(2, ONE)
        check(2, None)
        with two:
            check(3, TWO)
        check(3, None)
    check(3, None)
    with TuningResult.loads(two.dumps()):  # equal to one that has been
        check(3, None)
    with jax_splitk.options(workspace_limit_bytes=10**6):
        check(4, predicted)
        with one:  # made for another limit
            check(5, predicted)
    with jax_splitk.options(implementation="xla"):
        plans.clear()
        np.testing.assert_array_equal(run(lhs, g), expected)
        assert (len(traces), plans) == (6, [])


def test_one_result_in_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one result that overlap in two threads end where they began."""
    result = result_of(ONE)
    first_in, second_in, first_out = (threading.Event() for _ in range(3))
    seen: dict[str, list[Any]] = {"first": [], "second": []}

    def first() -> None:
        with result:
            first_in.set()
            assert second_in.wait(10)
        seen["first"].append(current())
        first_out.set()

    def second() -> None:
        assert first_in.wait(10)
        with jax_splitk.options(implementation="xla"):
            with result:
                second_in.set()
                assert first_out.wait(10)
                seen["second"].append(current())
            seen["second"].append(current())

    errors: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert errors == []
    assert seen == {
        "first": [Options()],
        "second": [Options(implementation="xla", tuning=result), Options(implementation="xla")],
    }


def test_options_hold_inside_their_block() -> None:
    lhs, g, expected = operands(generator(9))
    predicted = lowered_config(wgrad, lhs, g)
    with jax_splitk.options(implementation="xla"):
        assert lowered_config(wgrad, lhs, g) is None
        np.testing.assert_array_equal(wgrad(lhs, g), expected)
        assert lowered_config(lambda x, y: wgrad(x, y, implementation="host"), lhs, g) == predicted
        with jax_splitk.options(implementation="host", workspace_limit_bytes=123_456):
            assert current() == Options(None, "host", True, 123_456)
            with jax_splitk.options(deterministic=False):
                assert current() == Options(None, "host", False, 123_456)
            with result_of(ONE, options=Options(workspace_limit_bytes=123_456)):
                assert lowered_config(wgrad, lhs, g) == ONE
                with jax_splitk.options(implementation="xla"):
                    assert lowered_config(wgrad, lhs, g) is None
        assert current() == Options(None, "xla")
    assert current() == Options()
    with jax_splitk.options(workspace_limit_bytes=0):
        assert lowered_config(wgrad, lhs, g) is None
        assert lowered_config(lambda x, y: wgrad(x, y, workspace_limit_bytes=2**28), lhs, g) == predicted


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"implementation": "nvcc"}, "implementation='nvcc'; accepted: None, 'cutlass', 'host', 'xla'"),
        ({"workspace_limit_bytes": -1}, "workspace_limit_bytes=-1; accepted: None or an integer of at least 0"),
        ({"workspace_limit_bytes": True}, "workspace_limit_bytes=True; accepted"),
        ({"deterministic": 1}, "deterministic=1; accepted: True or False"),
    ],
)
def test_options_are_checked_on_entry(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(error)), jax_splitk.options(**arguments):
        pytest.fail("the block was entered")
    assert current() == Options()
    with pytest.raises((ValueError, TypeError), match=re.escape(error)):
        check_options("conv_wgrad", Options(**arguments))


# ---- layers and modes ----------------------------------------------------------------------------------------------


def test_precedence(monkeypatch: pytest.MonkeyPatch, cache: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """config argument, TuningResult, user's cache, read-only layers in order, shipped table, cost model."""
    lhs, g, expected = operands(generator(10))
    problem = CASE.problem()
    key = key_for(problem, CPU, Options())
    near, far = tmp_path / "near", tmp_path / "far"
    monkeypatch.setenv("JAX_SPLITK_CACHE_PATH", f"{near}{os.pathsep}{os.pathsep}{far}{os.pathsep}")
    layers = [(cache, TWO), (near, THREE), (far, FOUR), (store.SHIPPED, FIVE)]
    for folder, config in layers:
        put(folder, key, entry_of(key, config).dumps())
    folders = [("user cache", cache), ("read-only cache", near), ("read-only cache", far)]
    assert store.layers() == [*folders, ("shipped table", store.SHIPPED)]
    assert store.shipped(key, CPU) == entry_of(key, FIVE)

    def found(**options: Any) -> tuple[Any, str]:
        config = lowered_config(lambda x, y: wgrad(x, y, **options), lhs, g)
        choice = select.select(problem, CPU, dataclasses.replace(current(), **options))
        assert choice.config == config
        np.testing.assert_array_equal(wgrad(lhs, g, **options), expected)
        return config, choice.why

    with result_of(ONE):
        assert found(config=SIX) == (SIX, "the config was given explicitly")
        assert found() == (ONE, "the TuningResult in force")
    assert found(config=SIX) == (SIX, "the config was given explicitly")
    for (folder, config), (name, _) in zip(layers, store.layers(), strict=True):
        assert found() == (config, name)
        # Without a time for the host family the decision stands; XLA's would not do for an explicit "host".
        assert found(implementation="host") == (config, name)
        (folder / key.file).unlink()
    config, why = found()
    assert config not in (ONE, TWO, THREE, FOUR, FIVE, SIX)
    assert why.startswith("the cost model's best of ")


def test_a_damaged_layer_is_passed_over(monkeypatch: pytest.MonkeyPatch, cache: pathlib.Path) -> None:
    key = key_for(CASE.problem(), CPU, Options())
    put(cache, key, entry_of(key, TWO).dumps()[:-20])
    put(store.SHIPPED, key, entry_of(key, FIVE).dumps())
    assert select.select(CASE.problem(), CPU, Options()).config == FIVE


def test_an_entry_where_xla_won(cache: pathlib.Path) -> None:
    lhs, g, expected = operands(generator(11))
    key = key_for(CASE.problem(), CPU, Options())
    times = (
        Measurement(Candidate(XLA), 1.0),
        *(Measurement(Candidate("wgrad_host", c), us) for c, us in ((ONE, 3.0), (TWO, 2.0))),
    )
    assert store.save(key, Entry(key.as_dict(), Candidate(XLA), times, None, {}))
    assert lowered_config(wgrad, lhs, g) is None
    assert select.select(CASE.problem(), CPU, Options()).why == "user cache: XLA 1.0 us, ours 2.0 us"
    np.testing.assert_array_equal(wgrad(lhs, g), expected)
    choice = select.select(CASE.problem(), CPU, Options(implementation="host"))
    assert (choice.config, choice.why) == (TWO, "user cache: 2.0 us, XLA 1.0 us")


@pytest.mark.parametrize("mode", store.MODES)
def test_modes(mode: str, monkeypatch: pytest.MonkeyPatch, cache: pathlib.Path) -> None:
    lhs, g, _ = operands(generator(12))
    key = key_for(CASE.problem(), CPU, Options())
    monkeypatch.setenv("JAX_SPLITK_CACHE_MODE", mode)
    assert store.mode() == mode
    if mode == "frozen":
        with pytest.raises(
            store.FrozenCacheMiss, match=r"no entry, and JAX_SPLITK_CACHE_MODE=frozen; .*python -m jax_"
        ):
            lower(wgrad, lhs, g)
        # What needs no decision is no miss.
        assert lowered_config(lambda x, y: wgrad(x, y, config=THREE), lhs, g) == THREE
        assert lowered_config(lambda x, y: wgrad(x, y, implementation="xla"), lhs, g) is None
        with result_of(FOUR):
            assert lowered_config(wgrad, lhs, g) == FOUR
    assert store.save(key, entry_of(key, TWO)) is (mode == "update")
    assert list(store.files(cache)) == ([cache / key.file] if mode == "update" else [])
    put(cache, key, entry_of(key, ONE).dumps())
    assert (lowered_config(wgrad, lhs, g) == ONE) is (mode != "off")
    assert (store.lookup(key, CPU) is None) is (mode == "off")


def test_update_is_the_default_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.mode() == "update"
    monkeypatch.setenv("JAX_SPLITK_CACHE_MODE", "")
    assert store.mode() == "update"


def test_a_miss_says_how_to_tune(caplog: pytest.LogCaptureFixture) -> None:
    lhs, g, _ = operands(generator(13))
    with caplog.at_level(logging.INFO, "jax_splitk"):
        lower(wgrad, lhs, g)
    (line,) = [r.getMessage() for r in caplog.records if "not tuned" in r.getMessage()]
    found = re.search(r"python -m jax_splitk tune '(.*)'$", line)
    assert found is not None
    fields = json.loads(found[1])
    assert problem_from_dict(fields.pop("op"), fields) == CASE.problem()


WRONG = {
    "CACHE_MODE": ("readonly", ["'off'", "'read'", "'update'", "'frozen'"], store.mode),
    "AUTOTUNE": ("always", ["'off'", "'on_miss'"], lambda: select.autotune(CPU)),
    "TUNE_BUDGET_S": ("-3", ["seconds above 0"], tuner.budget_seconds),
    "AGREEMENT_TIMEOUT_S": ("soon", ["seconds above 0"], agreement.timeout_seconds),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_variable_is_an_error_that_says_what_is_accepted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value, accepted, read = WRONG[name]
    read()
    values = {value}
    if name in ("TUNE_BUDGET_S", "AGREEMENT_TIMEOUT_S"):
        values |= {"0", "nan", "ten", "-inf"}
    for wrong in values:
        monkeypatch.setenv(f"JAX_SPLITK_{name}", wrong)
        with pytest.raises(ValueError, match=rf"^JAX_SPLITK_{name}='{wrong}'; accepted: ") as caught:
            read()
        assert all(word in str(caught.value) for word in accepted)


@pytest.mark.parametrize("name", ["CACHE_MODE", "AUTOTUNE", "TUNE_BUDGET_S"])
def test_a_wrong_variable_is_an_error_of_the_users_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lhs, g, _ = operands(generator(14))
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "on_miss")
    monkeypatch.setenv(f"JAX_SPLITK_{name}", WRONG[name][0])
    with pytest.raises(ValueError, match=f"JAX_SPLITK_{name}="):
        lower(wgrad, lhs, g)


def test_an_endless_wait_is_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Infinity is a number of seconds above 0, or it is refused as one: it is not a crash."""
    monkeypatch.setenv("JAX_SPLITK_AGREEMENT_TIMEOUT_S", "inf")
    waits = []

    class Client:
        def wait_at_barrier(self, name: str, milliseconds: int) -> None:
            waits.append(milliseconds)
            raise TimeoutError

    monkeypatch.setattr(agreement._compat, "distributed", lambda: (Client(), 0, 2))
    key = key_for(CASE.problem(), CPU, Options())
    try:
        assert agreement.agree(key, CPU, lambda: None) == (False, None)
    except ValueError as error:
        assert "accepted" in str(error)
    else:
        assert waits


def test_on_miss_is_the_default_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (select.autotune(CPU), select.autotune(DEFAULT_CUDA)) == (False, True)
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "off")
    assert select.autotune(DEFAULT_CUDA) is False
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "on_miss")
    assert select.autotune(CPU) is True
    assert tuner.budget_seconds() == 10
    monkeypatch.setenv("JAX_SPLITK_TUNE_BUDGET_S", "2.5")
    assert tuner.budget_seconds() == 2.5


@pytest.mark.parametrize("obstacle", ["a file in its place", "a file for a folder", "a folder for the entry"])
def test_a_cache_that_cannot_be_written_is_no_error(
    obstacle: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    lhs, g, expected = operands(generator(15))
    key = key_for(CASE.problem(), CPU, Options())
    folder = tmp_path / "there"
    monkeypatch.setenv("JAX_SPLITK_CACHE_DIR", str(folder))
    if obstacle == "a file in its place":
        folder.write_text("")
    elif obstacle == "a file for a folder":
        folder.mkdir()
        (folder / "tuning").write_text("")
    else:
        (folder / key.file).mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "jax_splitk"):
        assert store.save(key, entry_of(key, ONE)) is False
    assert "cannot write" in caplog.text
    assert store.lookup(key, CPU) is None
    np.testing.assert_array_equal(wgrad(lhs, g), expected)


def test_without_a_home_there_is_no_cache_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers that run under a number that is no user's."""

    def nobody(uid: int) -> Any:
        raise KeyError(uid)

    lhs, g, expected = operands(generator(16))
    monkeypatch.delenv("JAX_SPLITK_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    np.testing.assert_array_equal(lower(wgrad, lhs, g).compile()(lhs, g), expected)


def test_a_layer_of_an_unknown_user_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    lhs, g, expected = operands(generator(17))
    monkeypatch.setenv("JAX_SPLITK_CACHE_PATH", "~no_such_user_here/cache")
    np.testing.assert_array_equal(lower(wgrad, lhs, g).compile()(lhs, g), expected)
