"""Counts searches."""

import pathlib

import pytest

from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.tuning import search
from jax_splitk.tuning.entry import Entry


@pytest.fixture
def tuned(cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> list[ConvWgradProblem]:
    """Turns tuning on, in a small search, and collects the problems that are tuned."""
    problems: list[ConvWgradProblem] = []
    run = search.Search.run

    def counting(this: search.Search) -> Entry:
        problems.append(this.key.problem)
        return run(this)

    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "on_miss")
    monkeypatch.setenv("JAX_SPLITK_TUNE_BUDGET_S", "0.05")
    monkeypatch.setattr(search, "FIRST_ROUND", 3)
    monkeypatch.setattr(search.Search, "run", counting)
    return problems
