"""Problems of grouped products, and their reference in plain lax against NumPy's float64, group by group."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jax_splitk.cli.defaults import with_defaults
from jax_splitk.problems.ragged_dot import RaggedDotProblem
from jax_splitk.problems.ragged_reference import DISTRIBUTIONS, group_sizes, ragged_dot, random_operands
from jax_splitk.tuning.key import problem_as_dict, problem_from_dict
from tests.problems import seeded
from tests.ragged_dots import exactly, integers, poisoned


def _problem(rng: np.random.Generator) -> RaggedDotProblem:
    mode = str(rng.choice(["forward", "rhs_gradient"]))
    groups, more = int(rng.integers(1, 7)), int(rng.integers(0, 4))
    dtype = str(rng.choice(["float32", "bfloat16"]))
    return RaggedDotProblem(
        mode=mode,  # pyright: ignore[reportArgumentType]
        groups=groups,
        m=int(rng.integers(1, 40)),
        k=int(rng.integers(1, 9)),
        n=int(rng.integers(1, 9)),
        dtype=dtype,
        out_dtype=str(rng.choice([dtype, "float32"])),
        precision="highest" if dtype == "float32" else "default",
        rhs_order=str(rng.choice(["gkn", "gnk"])) if mode == "forward" else "gkn",
        total_groups=int(rng.choice([0, groups + more])),
    )


def test_the_reference_is_exact_whatever_the_sizes() -> None:
    """Negative sizes, sums above m and above 2^31, offsets before the first and behind the last group."""
    with seeded(140) as rng:
        for i in range(12):
            p = _problem(rng)
            sizes = [None, rng.integers(-3, 8, p.size_count), rng.choice([2**31 - 1, 3, -(2**31)], p.size_count)][i % 3]
            operands = integers(p, rng, sizes)
            out = jax.jit(functools.partial(ragged_dot, p))(*operands)
            assert (out.shape, out.dtype) == (p.out_shape, p.out_dtype), p
            np.testing.assert_array_equal(np.asarray(out, np.float64), exactly(p, *operands), err_msg=str(p))


def test_rows_of_no_group_reach_nothing() -> None:
    with seeded(141) as rng:
        for _ in range(8):
            p = _problem(rng)
            operands = integers(p, rng)
            out = jax.jit(functools.partial(ragged_dot, p))(*poisoned(p, operands, matrices=False))
            np.testing.assert_array_equal(np.asarray(out, np.float64), exactly(p, *operands), err_msg=str(p))


def test_random_operands_are_valid_and_of_every_distribution() -> None:
    with seeded(142) as rng:
        p = dataclasses.replace(_problem(rng), groups=8, m=1000, total_groups=16)
        for seed in range(6):
            operands = random_operands(p, seed)
            assert [(x.shape, x.dtype.name) for x in operands] == list(p.operand_types)
            assert operands[2].sum() == p.m
            assert operands[3][0] in (0, 8)
        largest = [group_sizes(kind, 16, 1600, 5).max() for kind in DISTRIBUTIONS]
        assert 100 <= largest[0] < 200 < largest[1] < 1000 < largest[2] == 1600


def test_a_problem_survives_plain_data() -> None:
    with seeded(143) as rng:
        for _ in range(8):
            p = _problem(rng)
            fields = problem_as_dict(p)
            assert problem_from_dict(fields.pop("op"), fields) == p
    written = with_defaults("ragged_dot", {"groups": 8, "m": 64, "k": 16, "n": 32})
    expected = RaggedDotProblem("forward", 8, 64, 16, 32, "bfloat16", "bfloat16")
    assert problem_from_dict("ragged_dot", written) == expected


@pytest.mark.parametrize(("changed", "said"), [
    ({"mode": "backward"}, "mode='backward'"),
    ({"groups": -1}, "groups=-1"),
    ({"rhs_order": "nkg"}, "rhs_order='nkg'"),
    ({"mode": "rhs_gradient", "rhs_order": "gnk"}, "rhs_order='gnk'"),
    ({"total_groups": 3}, "total_groups=3"),
    ({"dtype": "int8"}, "dtype='int8'"),
])  # fmt: skip
def test_wrong_fields_are_refused(changed: dict[str, object], said: str) -> None:
    p = RaggedDotProblem("forward", 4, 8, 8, 8, "bfloat16", "bfloat16")
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(p, **changed).validate()


def test_work() -> None:
    """Rows are multiplied once, and a matrix without rows is not read."""
    p = RaggedDotProblem("forward", 8, 100, 16, 32, "bfloat16", "float32")
    assert p.flops == 2 * 100 * 16 * 32
    assert p.bytes_moved == 2 * (100 * 16 + 8 * 16 * 32) + 4 * 8 + 4 * 100 * 32
    few = dataclasses.replace(p, m=3)
    assert few.bytes_moved == 2 * (3 * 16 + 3 * 16 * 32) + 4 * 8 + 4 * 3 * 32
    gradient = dataclasses.replace(p, mode="rhs_gradient")
    assert gradient.flops == p.flops
    assert gradient.bytes_moved == 2 * (100 * 16 + 100 * 32) + 4 * 8 + 4 * 8 * 16 * 32
    part = dataclasses.replace(p, total_groups=32)
    assert part.flops == 2 * 25 * 16 * 32
    assert dataclasses.replace(p, m=0).refusal
    assert p.refusal is None
