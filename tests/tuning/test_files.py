"""Entries, results and their layers: written data is read again, and damaged data is a miss."""

import dataclasses
import json
import logging
import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest

from jax_splitk.cli import stored
from jax_splitk.runtime.target import DEFAULT_CUDA, Target
from jax_splitk.tuning import entry as entries
from jax_splitk.tuning import search, select, store
from jax_splitk.tuning.choice import XLA
from jax_splitk.tuning.entry import Entry, InvalidEntry, Measurement
from jax_splitk.tuning.key import SCHEMA, key_from_dict, problem_from_dict
from jax_splitk.tuning.options import Options
from jax_splitk.tuning.result import TuningResult
from tests.damage import nested
from tests.problems import generator, seeded
from tests.runtime.test_disk import endless, fifo, huge
from tests.tuning_cache import CPU, HUGE, entry_of, key_of, put, random_entry, random_key, served

pytestmark = pytest.mark.usefixtures("cache")


# ---- round trips ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "op"), served([CPU, DEFAULT_CUDA]), ids=str)
def test_what_is_dumped_is_loaded_again(target: Target, op: str, cache: pathlib.Path) -> None:
    with seeded(1) as rng:
        pairs = []
        for _ in range(6):
            key = random_key(rng, target, op)
            entry = random_entry(rng, key, target)
            assert entries.loads(entry.dumps(), key) == entry
            assert entries.loads(entry.dumps().encode(), key) == entry
            assert key_from_dict(json.loads(json.dumps(key.as_dict()))) == key
            assert problem_from_dict(key.problem.op, key.as_dict()["problem"]) == key.problem
            assert store.save(entry)
            assert store.lookup(key) == (entry, "user cache")
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
        dataclasses.replace(key, problem=dataclasses.replace(key.problem, batch=key.problem.batch + 1)),
        dataclasses.replace(key, problem=dataclasses.replace(key.problem, precision="highest")),
        *(
            dataclasses.replace(key, environment=dataclasses.replace(key.environment, **change))
            for change in (
                {"cores": 999},
                {"device_kind": "z80"},
                {"compute_capability": "9.1"},
                {"cuda_major": 14},
                {"abi": ("wgrad_host:999",)},
            )
        ),
    ]
    assert len({k.file for k in (key, *others)}) == len(others) + 1
    text = entry_of(key, search.ranked(key)[0].config).dumps()
    for other in others:
        with pytest.raises(InvalidEntry, match="another problem's or another machine's"):
            entries.loads(text, other)


def test_merging_keeps_what_was_not_timed_again() -> None:
    key = key_of()
    one, two, three = (c for c in search.ranked(key)[:3])
    old = Entry.of(key, one, (Measurement(one, 1.0), Measurement(two, 2.0)), one, {"date": "old"})
    new = Entry.of(key, three, (Measurement(three, 0.5), Measurement(one, None, "broken")), one, {"date": "new"})
    assert store.save(old)
    assert store.save(new)
    found = store.lookup(key)
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
    "a bool for an int": (
        _set("choice", "config", "splits", True),
        r"config has splits=True of type bool; accepted: int",
    ),
    "a float for an int": (_set("choice", "config", "splits", 1.0), r"config has splits=1\.0 of type float"),
    "a string for an int": (_set("choice", "config", "block", "128"), "config has block='128' of type str"),
    "a field too many": (_set("choice", "config", "stages", 3), "config .*; accepted: splits, block"),
    "a field too few": (lambda data: data["choice"]["config"].pop("block"), "config .*; accepted: splits, block"),
    "no config": (_set("choice", "config", None), "config None; accepted: splits, block"),
    "an unknown family": (
        _set("choice", "family", "wgrad_z80"),
        "family 'wgrad_z80'; accepted: .*wgrad_im2col, .*, xla",
    ),
    "another platform's family": (
        _set("choice", {"family": "wgrad_im2col", "config": {}}),
        "wgrad_im2col|config {}; accepted",
    ),
    "no choice": (lambda data: data.pop("choice"), "candidate None; accepted: an object with family and config"),
    "an illegal config": (_set("choice", "config", "splits", 10**6), "choice .* is not legal: splits 1000000"),
    "a huge config": (_set("choice", "config", "splits", int(HUGE)), "is not legal: splits 999"),
    "an illegal block": (_set("choice", "config", "block", 7), "is not legal: block 7"),
    "another key": (_set("key", "problem", "batch", 77), "its key is another problem's"),
    "no key": (lambda data: data.pop("key"), "its key is another problem's"),
    "a newer schema": (_set("schema", SCHEMA + 1), f"schema {SCHEMA + 1}; accepted: {SCHEMA}"),
    "no schema": (lambda data: data.pop("schema"), f"schema None; accepted: {SCHEMA}"),
    "no limit": (lambda data: data.pop("workspace_limit_bytes"), "workspace_limit_bytes None; accepted: an integer"),
    "a negative limit": (_set("workspace_limit_bytes", -1), "workspace_limit_bytes -1; accepted: "),
    "a limit that is true": (_set("workspace_limit_bytes", True), "workspace_limit_bytes True; accepted: "),
}


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_entry_is_a_miss_with_one_warning(
    change: Any, message: str, cache: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = key_of()
    good = Entry.of(key, search.ranked(key)[0], (Measurement(XLA, 5.0),))
    assert entries.loads(changed(good, lambda data: None), key) == good
    text = changed(good, change)
    with pytest.raises(InvalidEntry, match=message):
        entries.loads(text, key)
    path = put(cache, key, text)
    with caplog.at_level(logging.WARNING, "jax_splitk"):
        assert [store.lookup(key) for _ in range(3)] == [None] * 3
        assert select.select(key.problem, CPU, Options()).why.startswith("the cost model's best")
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{path} is ignored: ")
    assert re.search(message, record.getMessage())


def _row(**change: Any) -> Callable[[dict[str, Any]], None]:
    """Damages the only measurement, which is XLA's."""
    return lambda data: data["measurements"][0].update(change)


BROKEN_EVIDENCE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "measurements of a wrong type": (_set("measurements", {}), "measurements must be a list"),
    "no measurements": (lambda data: data.pop("measurements"), "measurements must be a list"),
    "a wrong measurement": (_set("measurements", [3]), "candidate 3; accepted: an object with family and config"),
    "of no family": (_row(family="wgrad_z80"), "family 'wgrad_z80'; accepted: "),
    "another family's": (_row(family="wgrad_host"), "config None; accepted: splits, block"),
    "a measured bool for an int": (
        _row(family="wgrad_host", config={"splits": True, "block": 128}),
        "config has splits=True of type bool; accepted: int",
    ),
    "a time of zero": (_row(us=0), "us 0; accepted: a finite number above 0"),
    "a negative time": (_row(us=-1.5), r"us -1\.5"),
    "no time": (_row(us=None), "us None; accepted: a finite number above 0"),
    "an infinite time": (_row(us=float("inf")), "us inf"),
    "not a time": (_row(us=float("nan")), "us nan"),
    "a time that is true": (_row(us=True), "us True"),
    "a time that is text": (_row(us="5"), "us '5'"),
    "a time beyond floats": (_row(us=int(HUGE)), "us 999"),
    "an error that is no text": (_row(us=None, error=3), "measurement .*; accepted: us or an error"),
    "a time and an error": (_row(us=3.0, error="x"), "measurement .*; accepted: us or an error"),
    "metadata of a wrong type": (_set("metadata", []), "metadata an object"),
    "a wrong prediction": (_set("predicted", 3), "candidate 3"),
}


@pytest.mark.parametrize(("change", "message"), BROKEN_EVIDENCE.values(), ids=BROKEN_EVIDENCE)
def test_broken_evidence_is_none_and_the_choice_holds(
    change: Any, message: str, cache: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = key_of()
    one, two = search.ranked(key)[:2]
    text = changed(Entry.of(key, one, (Measurement(XLA, 5.0),)), change)
    put(cache, key, text)
    with caplog.at_level(logging.WARNING, "jax_splitk"):
        choice = select.select(key.problem, CPU, Options())
        assert (choice.candidate, choice.why) == (one, "user cache")
        found, _ = store.lookup(key)
        assert (found.measurements, found.predicted, found.metadata, found.regret) == ((), None, {}, None)
        assert found.best(0) is None
        with pytest.raises(InvalidEntry, match=message):
            found.read_evidence()
        with pytest.raises(ValueError, match=message):
            TuningResult.loads(f"[{text}]")
        assert entries.loads(found.dumps(), key).choice == one
        assert store.save(Entry.of(key, two, (Measurement(two, 3.0),)))
    assert caplog.records == []
    assert store.lookup(key)[0].measurements == (Measurement(two, 3.0),)


@pytest.mark.parametrize("make", [fifo, endless, huge])
def test_what_is_no_regular_file_or_huge_is_a_miss_with_one_warning(
    make: Callable[[pathlib.Path], None], cache: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = key_of()
    path = cache / key.file
    path.parent.mkdir(parents=True)
    make(path)
    assert [store.lookup(key) for _ in range(3)] == [None] * 3
    assert [item.entry for item in stored.read_folder(cache)] == [None]
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{path} is not read: it ")


def test_a_file_at_the_wrong_place_is_a_miss(cache: pathlib.Path) -> None:
    """Each entry contains its key, so a copied or renamed file does not answer for another key."""
    rng = generator(3)
    one, two = (random_key(rng, CPU) for _ in range(2))
    put(cache, two, random_entry(rng, one, CPU).dumps())
    assert store.lookup(two) is None
    (cache / two.file).unlink()
    (cache / two.file).mkdir()  # nor does a folder
    assert store.lookup(two) is None


def test_any_depth_of_nesting_is_a_miss() -> None:
    """This includes depths that the parser can just read, but the message cannot print."""
    key = key_of()
    entry = Entry.of(key, search.ranked(key)[0], (Measurement(XLA, 5.0),), None, {})

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
        (f'"schema": {SCHEMA},\n', '"schema": %s,\n'),
        ('"predicted": null', '"predicted": %s'),
        ('"us": 5.0', '"us": %s'),
        ('"error": null', '"error": %s'),
    ]
    text = entry.dumps()
    text = re.sub(r'"splits": \d+', '"splits": 1', text)
    entries.loads(text, key)
    for old, new in places:
        assert old in text
        for depth in depths:
            with pytest.raises(InvalidEntry):
                entries.loads(text.replace(old, new % nested(depth)), key).read_evidence()


# ---- results, keys and problems ------------------------------------------------------------------------------------

RESULT_TEXTS = ["", "{}", "3", "null", "[3]", "[null]", "[[]]", "[{}]", '[{"key": 3}]', "[", "\ud800", nested(100_000)]


@pytest.mark.parametrize("text", RESULT_TEXTS, ids=lambda text: repr(text[:12]))
def test_what_is_no_result_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"not JSON|accepted"):
        TuningResult.loads(text)


@pytest.mark.parametrize(("field", "value"), [
    ("op", []),
    ("op", "conv_fwd"),
    ("environment", {}),
    ("problem", []),
    ("problem", {}),
    ("schema", SCHEMA + 1),
])  # fmt: skip
def test_a_key_is_checked(field: str, value: Any) -> None:
    data = key_of().as_dict()
    assert key_from_dict(data).as_dict() == data
    with pytest.raises(ValueError, match=r"accepted|unknown fields"):
        key_from_dict({**data, field: value})


@pytest.mark.parametrize(("field", "value"), [
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
])  # fmt: skip
def test_a_problem_from_a_file_is_checked(field: str, value: Any) -> None:
    fields = key_of().as_dict()["problem"]
    with pytest.raises(ValueError, match=r"accepted|the convolution gives"):
        problem_from_dict("conv_wgrad", {**fields, field: value})


def test_a_problem_has_one_to_three_spatial_dimensions() -> None:
    fields = key_of().as_dict()["problem"]
    vectors = ("input_spatial", "output_spatial", "kernel_spatial", "window_strides", "lhs_dilation", "rhs_dilation")
    for rank in (0, 4):
        resized = {name: [1] * rank for name in vectors} | {"padding": [[0, 0]] * rank}
        with pytest.raises(ValueError, match="accepted: one to three"):
            problem_from_dict("conv_wgrad", {**fields, **resized})
