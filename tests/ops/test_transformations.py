"""Every operation is lax's under every transformation: the table of `tests.transformations`."""

import jax
import pytest

from tests.problems import seeded
from tests.transformations import Operation, Step, assert_alike, operations, steps

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="these are the CPU's paths")

OPERATIONS = operations()


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_transformation(name: str) -> None:
    operation = OPERATIONS[name]
    assert_alike(operation, [(step,) for step in steps(len(operation.shapes))])


@pytest.mark.parametrize("name", OPERATIONS)
def test_some_transformations_of_transformations(name: str) -> None:
    operation = OPERATIONS[name]
    every = steps(len(operation.shapes))
    with seeded(61) as rng:
        assert_alike(operation, [[every[i] for i in rng.integers(len(every), size=2)] for _ in range(10)])


def _nested() -> list[tuple[Operation, Step]]:
    """Operations that differ by implementation alone are left out: the rules do not look at it."""
    found = {name: operation for name, operation in OPERATIONS.items() if not name.endswith("-xla")}
    return [
        pytest.param(operation, inner, id=f"{name}-{inner}")
        for name, operation in found.items()
        for inner in steps(len(operation.shapes), every=False)
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("operation", "inner"), _nested())
def test_every_transformation_of_each_transformation(operation: Operation, inner: Step) -> None:
    assert_alike(operation, [(inner, outer) for outer in steps(len(operation.shapes), every=False)])
