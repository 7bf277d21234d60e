"""The examples in the docstrings of the layers' modules run."""

import doctest
import importlib
import types

import jax
import pytest
from jax import numpy as jnp

import jax_splitk


@pytest.mark.parametrize(("name", "framework", "count"), [
    ("flax_nnx", "flax.nnx", 6), ("flax_linen", "flax.linen", 1), ("qwix", "qwix", 1),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::DeprecationWarning:qwix.*")  # it uses names that flax deprecates
def test_examples(name: str, framework: str, count: int) -> None:
    pytest.importorskip(framework.partition(".")[0])
    module = importlib.import_module(f"jax_splitk.layers.{name}")
    assert isinstance(module, types.ModuleType)
    names = {"jax": jax, "jnp": jnp, "jax_splitk": jax_splitk, name: module}
    names |= {"nnx": importlib.import_module(framework)} if framework == "flax.nnx" else {}
    found = [test for test in doctest.DocTestFinder().find(module, name, globs=names) if test.examples]
    assert len(found) == count
    for example in found:
        lines: list[str] = []
        runner = doctest.DocTestRunner()
        runner.run(example, out=lines.append)
        assert not runner.failures, "".join(lines)
