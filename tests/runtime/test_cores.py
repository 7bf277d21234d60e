"""How many cores a process may use."""

import pathlib

import pytest

from jax_splitk.runtime import cores


@pytest.mark.parametrize(("v2", "v1", "expected"), [
    (None, None, 16),
    ("max 100000", None, 16),
    ("200000 100000", None, 2),
    ("250000 100000", None, 3),
    ("9000000 100000", None, 16),
    ("50000 100000", None, 1),
    ("", None, 16),
    (None, ("-1", "100000"), 16),
    (None, ("400000", "100000"), 4),
])  # fmt: skip
def test_the_containers_share_counts(
    v2: str | None, v1: tuple[str, str] | None, expected: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / name for name in ("max", "quota", "period")]
    for file, text in zip(files, (v2, *(v1 or (None, None))), strict=True):
        if text is not None:
            file.write_text(f"{text}\n")
    monkeypatch.setattr(cores, "_V2", files[0])
    monkeypatch.setattr(cores, "_V1", tuple(files[1:]))
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(range(16)))
    assert cores.usable_cores() == expected
