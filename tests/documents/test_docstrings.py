"""The docstring of each public function has an entry for each argument, and a first line that says what it is for."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import jax_splitk

FUNCTIONS = [name for name in jax_splitk.__all__ if inspect.isfunction(getattr(jax_splitk, name))]


def entries(function: Callable[..., Any]) -> list[str]:
    """The argument names in a docstring's section "Args"."""
    section = re.search(r"^Args:\n((?:  .*\n|\n)+)", f"{inspect.getdoc(function)}\n", re.MULTILINE)
    return re.findall(r"^  (\S[^:]*):", section[1], re.MULTILINE) if section else []


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_argument_has_an_entry_in_the_signatures_order(name: str) -> None:
    function = getattr(jax_splitk, name)
    parameters = inspect.signature(function).parameters.values()
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    named = [f"{stars.get(parameter.kind, '')}{parameter.name}" for parameter in parameters]
    found = entries(function)
    assert set(found) == set(named)
    assert len(found) == len(named)


@pytest.mark.parametrize("name", [name for name in jax_splitk.__all__ if callable(getattr(jax_splitk, name))])
def test_the_first_line_is_a_sentence_of_its_own(name: str) -> None:
    first, _, rest = str(inspect.getdoc(getattr(jax_splitk, name))).partition("\n")
    assert first.endswith(".")
    assert not rest or rest.startswith("\n"), "an empty line follows"
    assert not first.startswith("Of ")
