"""The tables that ship with the package: written rows are found again, and damaged rows are a miss."""

import dataclasses
import json
import logging
import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import tables
from benchmarks.cases import Case
from benchmarks.pages import RESULTS
from jax_splitk.kernels.cpu import wgrad as wgrad_host
from jax_splitk.runtime import disk
from jax_splitk.runtime.target import DEFAULT_CUDA, Target
from jax_splitk.tuning import certainty, select, store, table
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.entry import Entry
from jax_splitk.tuning.key import key_for, key_from_dict
from jax_splitk.tuning.options import Options
from tests.problems import seeded
from tests.tuning_cache import CPU, random_entry, random_key, served, ship

pytestmark = pytest.mark.usefixtures("cache")

PROBLEMS = [Case("small", batch, 9, 8, 6, 10, (3, 2), dtype="float32").problem() for batch in (3, 4, 5)]
KEYS = [key_for(problem, CPU) for problem in PROBLEMS]
ONE, TWO = (Candidate(wgrad_host.FAMILY, wgrad_host.Config(splits, 64)) for splits in (3, 5))
SHIPPED = table.FOLDER


@pytest.mark.parametrize(("target", "op"), served([CPU, DEFAULT_CUDA]), ids=str)
def test_what_was_tuned_becomes_a_row(op: str, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    with seeded(51) as rng:
        wanted: dict[Any, Entry] = {}
        while len(wanted) < 6:
            entry = random_entry(rng, key := random_key(rng, target, op), target)
            if entry.us(entry.choice) is not None:
                wanted[key] = entry
        assert all(store.save(entry) for entry in wanted.values())
    assert tables.main([str(disk.cache_dir())]) == 0
    (path,) = table.FOLDER.rglob("*.json")
    assert path == table.path_for(op, target.device_kind)
    lines = [line for line in path.read_text().splitlines() if '"problem": ' in line]
    assert len(lines) == len(wanted)
    reads: list[Any] = []
    read = disk.read
    monkeypatch.setattr(disk, "read", lambda path: reads.append(path) or read(path))
    for key, entry in wanted.items():
        found = table.lookup(key)
        assert found is not None
        assert (found.choice, found.key) == (entry.choice, key)
        assert {found.us(c) for c in (found.choice, XLA)} == {entry.us(c) for c in (entry.choice, XLA)}
        elsewhere = dataclasses.replace(key, environment=dataclasses.replace(key.environment, cores=999))
        assert table.lookup(elsewhere) is None
    assert reads == [path]  # a process reads it once
    assert table.lookup(KEYS[0]) is None
    text = path.read_text()
    assert tables.main([str(disk.cache_dir())]) == 0
    assert path.read_text() == text


def test_rows_of_other_problems_stay() -> None:
    for key, choice in zip(KEYS, (ONE, ONE, XLA), strict=True):
        path = ship(key, choice)
    assert ship(KEYS[1], TWO, us=4.0) == path
    assert [table.lookup(key).choice for key in KEYS] == [ONE, TWO, XLA]
    rows = json.loads(path.read_text())["rows"]
    assert [row["problem"].get("batch") for row in rows] == [3, 4, 5]
    assert [(row["family"], row["us"], row["xla_us"]) for row in rows] == [
        ("wgrad_host", 5.0, 9.0),
        ("wgrad_host", 4.0, 9.0),
        ("xla", 9.0, 9.0),
    ]
    with pytest.raises(SystemExit):
        tables.main(["nowhere"])


def _row(**change: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["rows"][1].update(change)


UNUSABLE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "an unknown family": (_row(family="wgrad_z80"), "family 'wgrad_z80'; accepted: "),
    "a field too few": (_row(config={"splits": 3}), r"config \{'splits': 3\}; accepted: splits, block"),
    "a field of another type": (_row(config={"splits": 3.0, "block": 64}), r"config has splits=3\.0 of type float"),
    "an illegal config": (_row(config={"splits": 10**6, "block": 64}), "is not legal: splits 1000000"),
    "another platform's family": (_row(family="quantized_host"), "family 'quantized_host'"),
    "another version of the family": (
        lambda data: data["abi"].update(wgrad_host=999),
        rf"other versions than wgrad_host:{wgrad_host.FAMILY.ABI}$",
    ),
    "a family that it does not know": (lambda data: data["abi"].clear(), "other versions than wgrad_host"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_an_unusable_row_is_a_miss_with_one_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    change, message = UNUSABLE[name]
    for key in KEYS:
        path = ship(key, ONE)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with caplog.at_level(logging.WARNING, "jax_splitk"):
        for _ in range(2):
            assert select.select(PROBLEMS[1], CPU, Options()).why.startswith("the cost model's best")
        (record,) = caplog.records
        assert record.getMessage().startswith(f"{path}: the row of {PROBLEMS[1]} is ignored: ")
        assert re.search(message, record.getMessage())
        others = [table.lookup(key) is not None for key in (KEYS[0], KEYS[2])]
    assert others == [data["abi"] == {"wgrad_host": wgrad_host.FAMILY.ABI}] * 2


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"rows": []}', "\xff", "[" * 100_000, '{"abi": 3}', "null"])
def test_a_file_that_is_no_table_is_a_miss_with_one_warning(text: str, caplog: pytest.LogCaptureFixture) -> None:
    path = ship(KEYS[0], ONE)
    path.write_text(text, encoding="latin-1")
    assert [table.lookup(key) for key in KEYS] == [None] * 3
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{path} is ignored: it is not a table (")


@pytest.mark.parametrize(("change", "said"), [
    ({"cores": CPU.cores + 5.0}, "ValueError: environment "),
    ({"cores": True}, "ValueError: environment "),
    ({"device_kind": 3}, "ValueError: environment "),
    ({"abi": []}, "TypeError: "),
])  # fmt: skip
def test_a_table_of_no_machine_is_none(change: dict[str, Any], said: str) -> None:
    """Keys are kept by their value: one with 7.0 cores would stand for every later one with 7."""
    path = ship(KEYS[0], ONE)
    data = json.loads(path.read_text())
    data["machine"] = {**data["machine"], **change}
    path.write_text(json.dumps(data))
    (row,) = tables.stored.read_table(path)
    assert row.entry is None
    assert row.reason.startswith(f"it is not a table ({said}")
    key = key_for(PROBLEMS[0], dataclasses.replace(CPU, cores=CPU.cores + 5))
    assert key_from_dict(key.as_dict()) == key


@pytest.mark.parametrize("path", sorted(SHIPPED.rglob("*.json")), ids=lambda path: "/".join(path.parts[-2:]))
def test_every_row_that_ships_can_be_used(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "FOLDER", SHIPPED)
    entries = [item.entry for item in tables.stored.read_table(path)]
    assert None not in entries
    assert path == table.path_for(path.stem, entries[0].key.environment.device_kind)
    head = json.loads(path.read_text())
    assert tables.text_of(entries, head["versions"]) == path.read_text()  # as it is made
    assert all(entry.us(entry.choice) for entry in entries)
    # Grouped products whose configs were timed without lax's product, which often lacks memory.
    records = map(json.loads, (RESULTS / "ragged_configs_h200.jsonl").read_text().splitlines())
    alone = [{name: value for name, value in record["problem"].items() if name != "op"} for record in records]
    monkeypatch.setattr(certainty, "_jaxlib", lambda: certainty._FITTED_JAXLIB)
    for entry in entries:
        us, key = entry.us(entry.choice), entry.key
        left_out = certainty.far_slower_xla(us * 1e-6, key.problem, key.target) is not None
        assert entry.us(XLA) or left_out or key.as_dict()["problem"] in alone, key.problem
