"""Files: the cache's folder, reading files, owners of code, and temporary files."""

import errno
import functools
import hashlib
import json
import os
import pathlib
import pwd
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from jax_splitk.runtime import compiler, disk
from jax_splitk.runtime.source import Source

SOURCE = Source("contraction/wgrad.cu", (("VALUE", 1),))
CODE = compiler.Compiled(b"machine code", "log")


def kernel(cache: pathlib.Path, data: bytes | None = None) -> pathlib.Path:
    """The file of `SOURCE`'s code, or of other data with a right checksum."""
    key = compiler.content_key(SOURCE)
    path = cache / compiler._file(key)
    whole = compiler._pack(key, "compiler", SOURCE, CODE)
    if data is not None:
        whole = compiler._FILE_MAGIC + hashlib.sha256(data).digest() + data
    assert disk.write(path, whole)
    return path


def load() -> compiler.Compiled | None:
    return compiler._load(compiler.content_key(SOURCE))


# ---- where -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chosen", "base", "home", "entry", "expected"), [
    ("/a/b", "/x", "/home/me", "/root", "/a/b"),
    ("relative", "/x", "/home/me", "/root", "relative"),
    ("~/mine", None, "/home/me", "/root", "/home/me/mine"),
    (None, "/x", "/home/me", "/root", "/x/jax_splitk"),
    (None, "relative", "/home/me", "/root", "/home/me/.cache/jax_splitk"),
    (None, "", "/home/me", "/root", "/home/me/.cache/jax_splitk"),
    (None, None, "", "/root", "/root/.cache/jax_splitk"),
    (None, None, None, "/root", "/root/.cache/jax_splitk"),
    (None, None, "", None, None),
    (None, "relative", None, None, None),
    ("~/mine", None, None, None, None),
])  # fmt: skip
def test_where_the_cache_is(
    chosen: str | None,
    base: str | None,
    home: str | None,
    entry: str | None,
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def passwd(uid: int) -> Any:
        if entry is None:
            raise KeyError(uid)
        return pwd.struct_passwd(("me", "x", uid, 0, "", entry, ""))

    monkeypatch.setattr(pwd, "getpwuid", passwd)
    for name, value in (("JAX_SPLITK_CACHE_DIR", chosen), ("XDG_CACHE_HOME", base), ("HOME", home)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    disk._cache_dir.cache_clear()
    try:
        assert disk.cache_dir() == (None if expected is None else pathlib.Path(expected))
    finally:
        disk._cache_dir.cache_clear()


def test_kernels_come_from_the_read_only_caches_too(
    cache: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel(tmp_path / "theirs")
    assert load() is None
    monkeypatch.setenv("JAX_SPLITK_CACHE_PATH", f"{tmp_path / 'none'}:{tmp_path / 'theirs'}")
    assert load() == CODE
    assert not cache.exists()


# ---- what is read ----------------------------------------------------------------------------------------------------


def fifo(path: pathlib.Path) -> None:
    os.mkfifo(path)


def endless(path: pathlib.Path) -> None:
    path.symlink_to("/dev/zero")


def huge(path: pathlib.Path) -> None:
    with path.open("wb") as file:
        file.truncate(10 * 2**30)


def forbidden(path: pathlib.Path) -> None:
    path.write_text("secret")
    path.chmod(0)


def not_allowed(path: pathlib.Path, opens: Callable[..., int], name: Any, *arguments: Any) -> int:
    if pathlib.Path(name) == path:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
    return opens(name, *arguments)


@pytest.mark.parametrize("make", [fifo, endless, huge, forbidden, pathlib.Path.mkdir])
def test_what_is_no_file_is_not_read(
    make: Callable[[pathlib.Path], None],
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make(tmp_path / "file")
    if make is forbidden and os.geteuid() == 0:  # who may read everything
        monkeypatch.setattr(os, "open", functools.partial(not_allowed, tmp_path / "file", os.open))
    assert [disk.read(tmp_path / "file") for _ in range(3)] == [None] * 3
    (record,) = caplog.records
    assert f"{tmp_path / 'file'} is not read: " in record.getMessage()
    assert disk.read(tmp_path / "none") is None
    assert disk.read(tmp_path / "file" / "below") is None
    assert len(caplog.records) == 1


KEYED = functools.partial(
    dict,
    origin="",
    log="",
    compiler="",
    file="",
    structs="",
    defines=[["VALUE", "1"]],
    key=compiler.content_key(SOURCE),
)


@pytest.mark.parametrize("data", [
    b"",
    b"no header",
    b"\0",
    b"{}\0code",
    b"[]\0code",
    b"3\0code",
    b"\xff\0code",
    b"[" * 100_000 + b"\0code",
    json.dumps({"key": compiler.content_key(SOURCE)}).encode() + b"\0code",
    json.dumps(KEYED(key=["list"])).encode() + b"\0code",
    json.dumps(KEYED(log=3)).encode() + b"\0code",
    json.dumps(KEYED(more="")).encode() + b"\0code",
    *(json.dumps(KEYED(defines=odd)).encode() + b"\0code" for odd in (None, 3, "ab", ["abc"], [[1, 1]], [["A", 1]])),
    json.dumps(KEYED(key="another compilation's")).encode() + b"\0code",
], ids=lambda data: repr(data[:12]))  # fmt: skip
def test_a_kernel_of_odd_content_is_a_miss_said_once(
    data: bytes, cache: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = kernel(cache, data)
    assert [load() for _ in range(3)] == [None] * 3
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{path} is damaged")
    assert list(compiler.cached(cache)) == [(path, None)]


# ---- whose code is run -----------------------------------------------------------------------------------------------


def foreign(path: pathlib.Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(path, 12345, -1)


def open_to_all(path: pathlib.Path) -> None:
    path.chmod(0o777)


@pytest.mark.parametrize("change", [foreign, open_to_all])
@pytest.mark.parametrize("which", ["file", "folder", "cache"])
def test_code_that_others_may_have_written_is_not_used(
    which: str, change: Callable[[pathlib.Path], None], cache: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = kernel(cache)
    assert load() == CODE
    change({"file": path, "folder": path.parent, "cache": cache}[which])
    assert [load() for _ in range(3)] == [None] * 3
    (record,) = caplog.records
    reason = "it belongs to another user (12345)" if change is foreign else "anybody may write to it"
    assert reason in record.getMessage()
    assert (disk.code_refusal(cache) is None) is (which == "file")


def test_what_we_write_is_ours_alone_under_any_umask(cache: pathlib.Path) -> None:
    before = os.umask(0)
    try:
        kernel(cache)
    finally:
        os.umask(before)
    assert load() == CODE


# ---- what is left behind ---------------------------------------------------------------------------------------------


def test_the_next_writer_deletes_what_dead_ones_left(tmp_path: pathlib.Path) -> None:
    old, fresh, other = (tmp_path / name for name in (".tmp-1-a", ".tmp-2-b", "notes"))
    for path in (old, fresh, other):
        path.write_text("")
    for path in (old, other):
        os.utime(path, (time.time() - 3700, time.time() - 3700))
    assert disk.write(tmp_path / "file", b"data")
    assert {path.name for path in tmp_path.iterdir()} == {fresh.name, other.name, "file"}


def test_files_are_never_found_through_links(tmp_path: pathlib.Path) -> None:
    cache, outside = tmp_path / "cache", tmp_path / "project"
    (cache / "tuning" / "v3-x").mkdir(parents=True)
    outside.mkdir()
    for folder in (cache / "tuning" / "v3-x", outside):
        (folder / "package.json").write_text("{}")
    (cache / "tuning" / "evil").symlink_to(outside)
    assert list(disk.files(cache, "tuning/*/*.json")) == [cache / "tuning" / "v3-x" / "package.json"]
    (tmp_path / "linked").symlink_to(cache)  # the cache itself may lie elsewhere
    assert len(list(disk.files(tmp_path / "linked", "tuning/*/*.json"))) == 1
    assert list(disk.files(cache, "tuning/evil/package.json")) == []


def test_a_single_file_is_found_without_a_list_of_its_folder(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache of thousands of kernels is asked for one of them many times."""
    (tmp_path / "cubin").mkdir()
    (tmp_path / "cubin" / "a.cubin").write_bytes(b"")

    def scandir(path: Any = ".") -> NoReturn:
        raise AssertionError(path)

    monkeypatch.setattr(os, "scandir", scandir)
    monkeypatch.setattr(os, "listdir", scandir)
    assert list(disk.files(tmp_path, "cubin/a.cubin")) == [tmp_path / "cubin" / "a.cubin"]
    assert list(disk.files(tmp_path, "cubin/b.cubin")) == []


# ---- the environment -------------------------------------------------------------------------------------------------


def test_mistakes_are_said_once_on_import() -> None:
    wrong = {
        "CASH_DIR": "/x",
        "AUTOTUNE": "always",
        "TUNE_BUDGET_S": "soon",
        "CACHE_PATH": "/no/such",
        "TEST_SEED": "1",
    }
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    environment |= {f"JAX_SPLITK_{name}": value for name, value in wrong.items()}
    script = "import jax_splitk, jax_splitk.tuning.select\nfrom jax_splitk import tune"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    said = done.stderr.splitlines()
    assert [line.split("=")[0].split(":")[0].split(" ")[0] for line in said] == [
        "JAX_SPLITK_CASH_DIR",
        "JAX_SPLITK_AUTOTUNE",
        "JAX_SPLITK_TUNE_BUDGET_S",
        "JAX_SPLITK_CACHE_PATH",
    ]
    assert all("accepted" in line or "not a folder" in line for line in said)
