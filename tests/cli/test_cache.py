"""`cache ls`, `show`, `merge` and `prune`."""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import stat
import sys
import time
from typing import Any

import jax
import pytest

from jax_splitk.runtime import compiler, disk, toolchain
from jax_splitk.runtime.source import Source
from jax_splitk.runtime.target import target_for
from jax_splitk.tuning import store, table
from jax_splitk.tuning.entry import Entry, Measurement
from jax_splitk.tuning.key import SCHEMA, key_for
from jax_splitk.tuning.result import TuningResult
from tests.command_line import command, refused, run, text
from tests.entries import NEW, OLD, PROBLEM, PROBLEMS, A, B, C, X, as_dict, entry_of, got, key_of, put
from tests.tuning_cache import ship

pytestmark = [
    pytest.mark.usefixtures("cache"),
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="the keys are the CPU's"),
]


def damage(folder: pathlib.Path, good: pathlib.Path) -> dict[pathlib.Path, str]:
    """Damaged files of every kind beside a good one, each with a part of the message about it."""
    whole = good.read_text()
    fields = json.loads(whole)
    environment = good.parent
    illegal = json.loads((folder / key_of(PROBLEMS[3]).file).read_text())
    illegal["choice"]["config"]["splits"] = 10**6
    (folder / key_of(PROBLEMS[3]).file).write_text(json.dumps(illegal))
    files = {
        "1" * 40: (whole[: whole.rindex("}")].encode(), "Expecting ',' delimiter"),
        "2" * 40: (b"\xff\x00\xfe", "can't decode"),
        "3" * 40: (b"[" * 100_000, "recursion"),
        "4" * 40: (b"[]", "key None"),
        "5" * 40: (json.dumps({**fields, "key": None}).encode(), "key None"),
        "6" * 40: (json.dumps({**fields, "metadata": 3}).encode(), "metadata"),
        "7" * 40: (whole.encode(), "it is not where lookups expect it"),
        "8" * 40: (b"", "Expecting value"),
        "9" * 40: (json.dumps({**fields, "schema": "1"}).encode(), f"schema '1'; accepted: {SCHEMA}"),
    }
    found = {folder / key_of(PROBLEMS[3]).file: "is not legal: splits 1000000"}
    for name, (data, part) in files.items():
        path = environment / f"{name}.json"
        path.write_bytes(data)
        found[path] = part
    (environment / f"{'a' * 40}.json").mkdir()
    found[environment / f"{'a' * 40}.json"] = "it cannot be read"
    return found


def foreign(folder: pathlib.Path, good: pathlib.Path) -> dict[pathlib.Path, str]:
    """Files that only another version of the package can use."""
    fields = json.loads(good.read_text())
    newer = folder / "tuning" / f"v{SCHEMA + 1}-0" / f"{'b' * 40}.json"
    newer.parent.mkdir()
    newer.write_text(json.dumps({**fields, "key": {**fields["key"], "schema": SCHEMA + 1}}))
    family = put(folder, key_of(PROBLEMS[0], abi=("wgrad_host:1", "wgrad_avx:1")), {X: 3.0, A: 2.0})
    family.write_text(family.read_text().replace('"family": "wgrad_host"', '"family": "wgrad_avx"'))
    return {newer: f"accepted: an object of schema {SCHEMA}", family: "family 'wgrad_avx'"}


# ---- ls and show ---------------------------------------------------------------------------------------------------


def test_ls_lists_the_users_cache_and_others_where_asked(
    cache: pathlib.Path, tmp_path: pathlib.Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert text(capsys, "cache", "ls") == f"user cache {cache}: no entries\n"
    other, file = tmp_path / "other", tmp_path / "some.json"
    impossible = str(tmp_path / ("a" * 300))
    monkeypatch.setenv("JAX_SPLITK_CACHE_PATH", os.pathsep.join([str(other), impossible]))
    mine = put(cache, key_of(), {X: 30.0, A: 20.0, B: 10.0}, NEW)
    theirs = put(other, key_of(PROBLEMS[1]), {X: 5.0, A: 10.0}, "nonsense")
    (layer,) = run(capsys, "cache", "ls")
    assert (layer["source"], layer["unusable"]) == (f"user cache {cache}", [])
    (first,) = layer["entries"]
    assert (first["path"], first["digest"], first["problem"]) == (str(mine), mine.stem, as_dict(PROBLEM))
    assert (first["us"], first["xla_us"], first["ratio"], first["regret"]) == (10.0, 30.0, 3.0, 1.0)
    assert first["metadata"] == {"date": NEW, "jax": "0"}
    ship(key_of(PROBLEMS[2]), B)
    layers = run(capsys, "cache", "ls", "--all")
    assert [layer["source"] for layer in layers] == [
        f"user cache {cache}",
        f"read-only cache {other}",
        f"read-only cache {impossible}",
        f"shipped table {table.FOLDER}",
    ]
    assert [len(layer["entries"]) for layer in layers] == [1, 1, 0, 1]
    assert layers[3]["unusable"] == []
    (row,) = layers[3]["entries"]
    assert (row["problem"], row["choice"], row["us"]) == (as_dict(PROBLEMS[2]), B.as_dict(), 5.0)
    shown = run(capsys, "cache", "show", row["digest"][:9])
    assert shown["measurements"][0] == {**B.as_dict(), "us": 5.0, "error": None}
    (second,) = layers[1]["entries"]
    assert (second["path"], second["choice"]["family"], second["ratio"]) == (str(theirs), "xla", 1.0)
    # Other folders and files by their names.
    file.write_text(TuningResult(((key_of(), entry_of(key_of(), {X: 3.0, A: 2.0})),)).dumps())
    named = run(capsys, "cache", "ls", other, file)
    assert named[0]["entries"] == [second]
    assert (named[1]["source"], named[1]["entries"][0]["us"]) == (str(file), 2.0)
    assert "PATH='nowhere'; accepted: a cache folder" in refused(capsys, "cache", "ls", "nowhere")
    assert "accepted: one of them" in refused(capsys, "cache", "ls", "--all", other)


def test_ls_fits_the_terminal(cache: pathlib.Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = dataclasses.replace(PROBLEM, input_spatial=(1024, 1024), output_spatial=(1024, 1024), dtype="bfloat16")
    for problem in (PROBLEM, wide):
        put(cache, key_of(problem), {X: 30.0, A: 20.0, B: 10.0})
    title, header, *rows = text(capsys, "cache", "ls").splitlines()
    assert title == f"user cache {cache}, {target_for('cpu').device_kind}, {target_for('cpu').cores} cores:"
    assert header.split() == ["digest", "us", "XLA", "us", "ratio", "problem", "choice"]
    # The problem without its operation, and short names of dtypes.
    assert "bf16->f32 lhs 4x1024x1024x8 g 4x1024x1024x8 kernel 3x3 stride 1x1" in rows[0]
    for part in (key_of().digest[:10], "10.0", "30.0", "3.00", "f32->f32 lhs 4x8x8x8", str(B)):
        assert part in rows[1]
    for columns in (60, 80, 100, 120, 200):
        with monkeypatch.context() as terminal:  # pytest asks for the size, too
            terminal.setattr(sys.stdout, "isatty", lambda: True, raising=False)
            terminal.setattr(shutil, "get_terminal_size", lambda columns=columns: os.terminal_size((columns, 24)))
            narrow = text(capsys, "cache", "ls").splitlines()[1:]
        assert max(map(len, narrow)) <= max(columns, 10 + 4 + 6 + 5 + 2 * 16 + 5 * 2)
        assert (narrow[1:] == rows) == (columns == 200)
        assert all("  30.0" in line and "  3.00  " in line for line in narrow[1:])


def test_show_sorts_the_measurements(cache: pathlib.Path, capsys: Any) -> None:
    path = put(cache, key_of(), {X: 30.0, A: 20.0, B: 10.0}, NEW)
    fields = json.loads(path.read_text())
    fields["measurements"].insert(0, Measurement(C, None, "wrong \x1b[2J result").as_dict())
    fields["metadata"]["note"] = "\ud800"
    path.write_text(json.dumps(fields))
    found = run(capsys, "cache", "show", path.stem[:6])
    assert [m["us"] for m in found["measurements"]] == [10.0, 20.0, 30.0, None]
    assert found["predicted"] == A.as_dict()
    assert found["metadata"]["jax"] == "0"
    assert run(capsys, "cache", "show", path) == found
    shown = text(capsys, "cache", "show", path.stem)
    assert "wrong \\x1b[2J result" in shown
    assert f"choice {B}: 10.0 us, XLA 30.0 us, ratio 3.00, regret of the cost model 100.0%" in shown
    put(cache, key_of(PROBLEMS[1]), {X: 1.0})
    put(cache, key_of(PROBLEMS[2]), {X: 1.0})
    (path.parent / f"{path.stem[:8]}{'f' * 32}.json").write_text("")
    assert "accepted: more characters of one of" in refused(capsys, "cache", "show", path.stem[:8])
    assert run(capsys, "cache", "show", path.parent / f"{path.stem[:8]}{'f' * 32}.json", code=1)["foreign"] is False
    for nothing in ("xyz", ""):
        assert "not found" in refused(capsys, "cache", "show", nothing)


def test_ls_shows_every_file_that_cannot_be_used(cache: pathlib.Path, capsys: Any) -> None:
    good = put(cache, key_of(), {X: 30.0, A: 20.0})
    put(cache, key_of(PROBLEMS[1], cores=999), {X: 30.0, A: 20.0})
    # Another version's files are not damaged.
    others = foreign(cache, good)
    (layer,) = run(capsys, "cache", "ls")
    assert (len(layer["entries"]), len(layer["unusable"])) == (2, 2)
    put(cache, key_of(PROBLEMS[3]), {X: 30.0, A: 20.0})
    damaged = damage(cache, good)
    (good.parent / "notes.txt").write_text("not ours")
    (layer,) = run(capsys, "cache", "ls", cache, code=1)
    assert len(layer["entries"]) == 2
    reasons = {pathlib.Path(item["path"]): item for item in layer["unusable"]}
    assert reasons.keys() == {*damaged, *others}
    for path, part in {**damaged, **others}.items():
        assert part in reasons[path]["reason"]
        assert reasons[path]["foreign"] == (path in others)
    shown = text(capsys, "cache", "ls", code=1)
    assert "999 cores:" in shown
    assert all(f"damaged: {path}: " in shown for path in damaged)
    assert "2 entries of other machines or versions cannot be read here" in shown


def test_stdout_is_left_to_json(cache: pathlib.Path) -> None:
    put(cache, key_of(), {X: 30.0, A: 20.0}).with_name("x.json").write_text("{")
    done = command("cache", "ls", "--json")
    assert done.returncode == 1, done.stderr
    assert len(json.loads(done.stdout)[0]["unusable"]) == 1
    done = command("cache", "merge", "nowhere", str(cache))
    assert (done.returncode, done.stdout) == (2, "")
    assert "SOURCE='nowhere'; accepted: a cache folder" in done.stderr
    done = command("cache", "--json")  # no command: the help, which stdout has then, would be no JSON
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage: python -m jax_splitk cache" in done.stderr


# ---- merge ---------------------------------------------------------------------------------------------------------


def test_merge_keeps_every_entry_and_the_newer_decision(tmp_path: pathlib.Path, capsys: Any) -> None:
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    keys = [key_of(p) for p in PROBLEMS]
    elsewhere = key_of(PROBLEMS[0], cores=999)
    put(a, keys[0], {X: 30.0, A: 20.0}, OLD)
    put(b, keys[0], {X: 29.0, B: 15.0}, NEW)
    put(c, keys[0], {X: 31.0, C: 10.0}, "2024-06-01T00:00:00")
    put(a, keys[1], {X: 30.0, A: 20.0})
    put(b, elsewhere, {X: 30.0, A: 20.0})
    put(c, keys[2], {X: 30.0, A: 20.0})
    found = run(capsys, "cache", "merge", a, b, c)
    counts = {"added": 2, "updated": 1, "unchanged": 0, "kernels": 0, "compiled": 0, "failed": 0}
    assert found == {"into": str(c), **counts, "unusable": []}
    merged = got(c, keys[0])
    assert merged is not None
    assert (merged.choice, merged.metadata["date"]) == (B, NEW)
    assert {m.candidate: m.us for m in merged.measurements} == {X: 29.0, A: 20.0, B: 15.0, C: 10.0}
    assert all(got(c, key) is not None for key in (keys[1], keys[2], elsewhere))
    # Again: nothing changes, and nothing is written.
    before = {path: path.stat().st_mtime_ns for path in store.files(c)}
    found = run(capsys, "cache", "merge", a, c)
    assert (found["added"], found["updated"], found["unchanged"]) == (0, 0, 2)
    assert {path: path.stat().st_mtime_ns for path in store.files(c)} == before
    # The sources are as they were, and a new folder may be the destination.
    assert "added 3" in text(capsys, "cache", "merge", a, b, tmp_path / "new")
    assert len(list(store.files(tmp_path / "new"))) == 3


def test_merge_skips_and_reports_damage(tmp_path: pathlib.Path, capsys: Any) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    good = put(a, key_of(), {X: 30.0, A: 20.0})
    put(a, key_of(PROBLEMS[3]), {X: 30.0, A: 20.0})
    damaged = damage(a, good)
    # A damaged file in the destination does not stand in a good one's way; a damaged source destroys nothing.
    broken = put(b, key_of(), {X: 1.0})
    broken.write_text("{")
    kept = put(b, key_of(PROBLEMS[3]), {X: 30.0, B: 20.0})
    before = kept.read_bytes()
    found = run(capsys, "cache", "merge", a, b, code=1)
    assert {item["path"] for item in found["unusable"]} == set(map(str, damaged))
    assert (found["added"], found["updated"]) == (1, 0)
    assert got(b, key_of()) == entry_of(key_of(), {X: 30.0, A: 20.0})
    assert kept.read_bytes() == before
    assert "SOURCE=" in refused(capsys, "cache", "merge", tmp_path, b)
    (tmp_path / "file").write_text("")
    assert run(capsys, "cache", "merge", b, tmp_path / "file", code=1)["failed"] == 2


def test_a_file_carries_entries_elsewhere(cache: pathlib.Path, tmp_path: pathlib.Path, capsys: Any) -> None:
    keys = [key_of(PROBLEMS[0]), key_of(PROBLEMS[1], cores=999)]
    for key in keys:
        put(cache, key, {X: 30.0, A: 20.0})
    bad = cache / key_of(PROBLEMS[2]).file
    bad.write_text("{")
    file = tmp_path / "tuned.json"
    found = run(capsys, "cache", "merge", cache, file, code=1)
    assert (found["added"], [item["path"] for item in found["unusable"]]) == (2, [str(bad)])
    assert {key for key, _ in TuningResult.loads(file.read_text())} == set(keys)
    before = {path: path.read_bytes() for path in store.files(cache) if path != bad}
    for path in [*before, bad]:
        path.unlink()
    assert run(capsys, "cache", "merge", file, cache)["added"] == 2
    assert {path: path.read_bytes() for path in store.files(cache)} == before
    assert run(capsys, "cache", "merge", file, cache)["unchanged"] == 2
    # A newer entry in the destination keeps its choice, and gets the other's times. A file keeps its other entries.
    put(cache, keys[0], {X: 30.0, B: 25.0}, NEW)
    assert run(capsys, "cache", "merge", file, cache)["updated"] == 1
    (cache / keys[1].file).unlink()
    assert run(capsys, "cache", "merge", cache, file)["updated"] == 1
    for entry in (got(cache, keys[0]), TuningResult.loads(file.read_text()).get(keys[0])):
        assert entry is not None
        assert (entry.choice, entry.us(A)) == (B, 20.0)
    assert len(TuningResult.loads(file.read_text())) == 2


@pytest.mark.parametrize("content", ["{", "{}", '[{"key": 1}]', "[" * 100_000, "[null]"])
def test_a_damaged_file_changes_nothing_and_stays(
    content: str, cache: pathlib.Path, tmp_path: pathlib.Path, capsys: Any
) -> None:
    file, a = tmp_path / "tuned.json", tmp_path / "a"
    file.write_text(content)
    found = run(capsys, "cache", "merge", file, cache, code=1)
    assert (found["added"], [item["path"] for item in found["unusable"]]) == (0, [str(file)])
    assert not cache.exists()
    put(a, key_of(), {X: 30.0, A: 20.0})
    assert "DEST=" in refused(capsys, "cache", "merge", a, file)
    assert file.read_text() == content


# ---- prune ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(toolchain.unavailable() is not None, reason="needs NVRTC")
def test_prune_deletes_only_what_was_asked(cache: pathlib.Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def code(name: str) -> pathlib.Path:
        made = Source("contraction/wgrad.cu", (("NAME", name),)), compiler.Compiled(b"machine code", "log")
        assert compiler.store(cache, *made)
        return cache / compiler._file(compiler.content_key(made[0]))

    good, old = (put(cache, key_of(problem), {X: 30.0, A: 20.0}) for problem in PROBLEMS[:2])
    gpu = put(cache, key_for(PROBLEM, target_for("cuda")), {X: 30.0})
    other, other_old = (put(cache, key_of(problem, cores=999), {X: 30.0, A: 20.0}) for problem in PROBLEMS[:2])
    current_code, old_code = code("current"), code("old")
    with monkeypatch.context() as patch:
        patch.setattr(toolchain, "package_versions", lambda: {"nvidia-cutlass": "0.1"})
        other_code, other_old_code = code("other"), code("other_old")
    put(cache, key_of(PROBLEMS[3]), {X: 30.0, A: 20.0})
    damaged, others = damage(cache, good), foreign(cache, good)
    damaged_code, notes = cache / "cubin" / f"{'0' * 64}.cubin", [good.parent / "notes.txt", cache / "cubin" / "x.txt"]
    fresh, dead = ([folder / f".tmp-{name}" for folder in (good.parent, cache / "cubin")] for name in ("fresh", "dead"))
    for path in (damaged_code, *notes, *fresh, *dead):
        path.write_text("")
    for days, paths in ((40, (old, other_old, old_code, other_old_code)), (1 / 12, dead)):
        for path in paths:
            os.utime(path, (time.time() - days * 86400, time.time() - days * 86400))
    everything = {path for path in cache.rglob("*") if path.is_file()}

    def gone() -> set[pathlib.Path]:
        return everything - {path for path in cache.rglob("*") if path.is_file()}

    def prune(*options: str, code: int = 0) -> set[pathlib.Path]:
        listed = run(capsys, "cache", "prune", "--dry-run", *options)
        assert listed["dry_run"]
        before = gone()
        found = run(capsys, "cache", "prune", *options, code=code)
        tried = {item["path"] for item in (*found["deleted"], *found["failed"])}
        assert tried == {item["path"] for item in listed["deleted"]}
        deleted = {pathlib.Path(item["path"]) for item in found["deleted"]}
        assert gone() - before == deleted
        return deleted

    run(capsys, "cache", "prune", "--environment", "all", "--damaged", "--dry-run")
    assert gone() == set()
    assert prune("--environment", "other", "--older-than", "30") == {other_old, other_old_code}
    assert prune("--older-than", "30") == {old, old_code}
    # This machine's entries stay, those for lowering to CUDA from here too; without a compiler, all machine code.
    with monkeypatch.context() as patch:
        patch.setattr(toolchain, "unavailable", lambda: "no compiler in this test")
        assert prune("--environment", "other") == {other, *others}
    assert prune("--environment", "other") == {other_code}
    folders = {path for path in damaged if path.is_dir()}
    assert prune("--damaged", code=1) == {*damaged, damaged_code, *dead} - folders
    for folder in folders:
        folder.rmdir()
    assert "deleted 0 files" in text(capsys, "cache", "prune", "--damaged")
    assert prune("--environment", "all") == {good, gpu, current_code}
    assert everything - gone() == {*notes, *fresh}


def test_wrong_arguments_are_refused(cache: pathlib.Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "accepted: --environment, --older-than, --damaged" in refused(capsys, "cache", "prune", "--dry-run")
    for days in ("-1", "0", "", "soon"):
        message = refused(capsys, "cache", "prune", f"--older-than={days}")
        assert f"--older-than={days!r}; accepted: a number of days above 0" in message
    put(cache, key_of(), {X: 30.0, A: 20.0})
    for mode in ("read", "off", "frozen"):
        monkeypatch.setenv("JAX_SPLITK_CACHE_MODE", mode)
        for words in (("merge", str(cache), str(cache)), ("prune", "--damaged")):
            assert f"JAX_SPLITK_CACHE_MODE='{mode}'; accepted by this command" in refused(capsys, "cache", *words)


# ---- what is not to be trusted ---------------------------------------------------------------------------------------


def test_a_file_that_is_no_regular_one_is_never_replaced(tmp_path: pathlib.Path, capsys: Any) -> None:
    put(tmp_path / "a", key_of(), {X: 30.0, A: 20.0})
    device, fifo, out = (tmp_path / f"{name}.json" for name in ("device", "fifo", "out"))
    device.symlink_to("/dev/null"), os.mkfifo(fifo), out.symlink_to("/proc/self/fd/1")
    node = tmp_path / "node.json"
    with contextlib.suppress(PermissionError):  # only root makes one
        os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    for path in filter(os.path.lexists, (device, fifo, out, node)):
        before = path.lstat()
        assert "it is not a regular file; accepted" in refused(capsys, "cache", "merge", tmp_path / "a", path)
        assert path.lstat() == before
        assert "accepted: a folder that is none of the caches" in refused(capsys, "cache", "export", path)
        assert path.lstat() == before
    assert "accepted: a cache folder" in refused(capsys, "cache", "merge", fifo, tmp_path / "a")


def test_prune_stays_in_the_cache(cache: pathlib.Path, tmp_path: pathlib.Path, capsys: Any) -> None:
    project, kernels = tmp_path / "project", tmp_path / "kernels"
    good = put(cache, key_of(), {X: 30.0, A: 20.0})
    for folder, name in ((project, "package.json"), (kernels, "x.cubin"), (kernels, ".tmp-1")):
        folder.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
        os.utime(folder / name, (0, 0))
    (cache / "tuning" / "evil").symlink_to(project)
    (cache / "cubin").symlink_to(kernels)
    link = good.with_name(f"{'c' * 40}.json")
    link.symlink_to(project / "package.json")
    deleted = run(capsys, "cache", "prune", "--damaged", "--environment", "all")["deleted"]
    assert {item["path"] for item in deleted} == {str(good), str(link)}
    assert len([*project.iterdir(), *kernels.iterdir()]) == 3


def test_ls_and_prune_read_kernels_too(cache: pathlib.Path, capsys: Any) -> None:
    key = f"{'0' * 64}-1"
    whole = compiler._pack(key, "compiler", Source("contraction/wgrad.cu", ()), compiler.Compiled(b"code", "log"))
    files = {cache / compiler._file(name): whole for name in (key, f"{'1' * 64}-1")}
    nested = b"[" * 100_000 + b"\0"
    files[cache / compiler._file(f"{'2' * 64}-1")] = compiler._FILE_MAGIC + hashlib.sha256(nested).digest() + nested
    for path, data in files.items():
        assert disk.write(path, data)
    good, *damaged = files
    (layer,) = run(capsys, "cache", "ls", code=1)
    assert layer["kernels"] == 3
    assert {item["path"] for item in layer["unusable"]} == set(map(str, damaged))
    assert "3 compiled kernels" in text(capsys, "cache", "ls", code=1)
    deleted = run(capsys, "cache", "prune", "--damaged")["deleted"]
    assert {item["path"] for item in deleted} == set(map(str, damaged))
    assert run(capsys, "cache", "ls")[0]["kernels"] == 1
    good.chmod(0o666)
    assert run(capsys, "cache", "ls", code=1)[0]["unusable"][0]["path"] == str(good)


def test_a_future_date_does_not_win(tmp_path: pathlib.Path, capsys: Any) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    put(a, key_of(), {X: 1.0, B: 0.5}, "9999-12-31T00:00:00+00:00")
    put(b, key_of(), {X: 30.0, A: 20.0}, OLD)
    run(capsys, "cache", "merge", a, b)
    found = got(b, key_of())
    assert found is not None
    assert (found.choice, found.metadata["date"]) == (A, OLD)


def test_a_choice_that_was_never_measured_is_refused_and_shown(
    cache: pathlib.Path, tmp_path: pathlib.Path, capsys: Any
) -> None:
    unmeasured = dataclasses.replace(entry_of(key_of(), {X: 30.0, A: 20.0}), choice=B)
    path = cache / key_of().file
    assert disk.write(path, unmeasured.dumps().encode())
    assert f"not measured: {B}" in text(capsys, "cache", "ls")
    found = run(capsys, "cache", "merge", cache, tmp_path / "b", code=1)
    assert found["unusable"][0]["reason"] == f"its choice {B} was not measured"
    assert not (tmp_path / "b").exists()


def test_a_choice_that_was_not_worth_a_measurement_is_kept_until_there_is_one(
    cache: pathlib.Path, tmp_path: pathlib.Path, capsys: Any
) -> None:
    path = cache / key_of().file
    assert disk.write(path, Entry.unmeasured(key_of(), B, "the cost model").also_left_by("a digest").dumps().encode())
    assert f"not measured: {B}" in text(capsys, "cache", "ls")
    shown = text(capsys, "cache", "show", path)
    assert "not measured, chosen by the cost model" in shown and "searched within" not in shown
    run(capsys, "cache", "merge", cache, tmp_path / "b")
    found = got(tmp_path / "b", key_of())
    assert found is not None and found.is_unmeasured and found.choice == B
    put(tmp_path / "c", key_of(), {X: 30.0, A: 20.0}, OLD)
    for source, destination in (("b", "c"), ("c", "b")):
        run(capsys, "cache", "merge", tmp_path / source, tmp_path / destination)
        found = got(tmp_path / destination, key_of())
        assert found is not None and found.choice == A and not found.is_unmeasured


@pytest.mark.parametrize("words", [("merge", "nowhere"), ("export",)])
def test_a_destination_that_is_no_local_path_is_refused(
    words: tuple[str, ...], cache: pathlib.Path, tmp_path: pathlib.Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "DEST='gs://bucket/cache'; accepted: a local path" in refused(capsys, "cache", *words, "gs://bucket/cache")
    monkeypatch.setenv("JAX_SPLITK_CACHE_DIR", "$HOME/cache")
    for arguments in (("ls",), ("ls", "--all"), ("prune",), ("export", "there")):
        assert "JAX_SPLITK_CACHE_DIR='$HOME/cache'; accepted: a local path" in refused(capsys, "cache", *arguments)
    assert list(tmp_path.iterdir()) == []
