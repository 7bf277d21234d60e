"""Grouped products with packed weights: problems, operands whose results are exact, and the results in NumPy."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import numpy as jnp

from jax_splitk.kernels.quantized.experts import FAMILY, Config
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.problems.quantized_ragged import QuantizedRaggedDotProblem
from jax_splitk.problems.quantized_ragged_epilogue import QuantizedRaggedEpilogueProblem
from jax_splitk.problems.ragged_reference import DISTRIBUTIONS, group_sizes
from jax_splitk.quantized import prepack
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import float64, products, ragged_dots

E4M3 = "float8_e4m3fn"


def problem(groups: int, one: products.Case, total_groups: int = 0) -> QuantizedRaggedDotProblem:
    """The grouped product whose product of all rows with one weight is `one`, which may have a bias and an
    activation."""
    p = one.problem
    made = QuantizedRaggedDotProblem(
        groups=groups,
        m=p.rows,
        k=p.k,
        n=p.features,
        dtype=p.x_dtype,
        out_dtype=p.out_dtype,
        qtype=p.qtype,
        group_size=p.group_size,
        scale_dtype=p.scale_dtype,
        zero_dtype=p.zero_dtype,
        channel_dtype=p.channel_dtype,
        total_groups=total_groups,
    )
    if set(one.after.values()) != {"none"}:
        assert one.residual == "none", one
        made = QuantizedRaggedEpilogueProblem(**vars(made), bias_dtype=one.bias, activation=one.activation)
    made.validate()
    return made


def one_of(p: QuantizedRaggedDotProblem) -> products.Case:
    """The product of all rows with one weight, and its epilogue."""
    one = case_of(p.product)
    if not isinstance(p, QuantizedRaggedEpilogueProblem):
        return one
    return dataclasses.replace(one, bias=p.bias_dtype, activation=p.activation)


def case_of(p: QuantizedMatmulProblem) -> products.Case:
    """The product as a case."""
    zero = None if p.zero_dtype == "none" else p.zero_dtype
    sizes = (p.rows, p.k, p.features)
    types = (p.scale_dtype, p.x_dtype, p.out_dtype, p.channel_dtype != "none")
    return products.Case(*sizes, p.qtype, p.group_size, zero, *types)


def random_epilogue(seed: int, *, small: bool = False) -> tuple[QuantizedRaggedEpilogueProblem, Config]:
    """A problem with a bias or an activation whose results are exact on integers, and a legal config."""
    rng = products.random(seed, 9)
    case = dataclasses.replace(products.random_epilogue(rng), residual="none", norm="none")
    if case.activation == case.bias == "none":
        case = dataclasses.replace(case, bias="bfloat16")
    if small:
        rows, k = min(case.rows, 60), case.k if case.group_size == case.k else min(case.k, 2 * case.group_size)
        case = dataclasses.replace(case, rows=rows, k=k)
    groups = int(rng.choice([1, 3, 8, 33]))
    made: Any = problem(groups, case, groups + 3 if rng.random() < 0.3 else 0)
    found = FAMILY.candidates(made, DEFAULT_CUDA)
    config = found[rng.integers(len(found))]
    if config.splits == 1:
        config = dataclasses.replace(config, blocks=int(rng.integers(1, 8 if small else 600)))
    return made, config


def random_sizes(p: QuantizedRaggedDotProblem, rng: np.random.Generator) -> list[np.ndarray]:
    """group_sizes of any of the distributions whose sum is at most m, and a group_offset if the problem has one, which
    may leave some weights without a group."""
    kind, rest = str(rng.choice(DISTRIBUTIONS)), int(rng.integers(0, p.m + 1)) if rng.random() < 0.3 else 0
    found = [group_sizes(kind, p.size_count, p.m - rest, int(rng.integers(2**31)))]
    if p.has_offset:
        found.append(np.array([rng.integers(-1, p.total_groups - p.groups + 2)], np.int32))
    return found


def exact(
    p: QuantizedRaggedDotProblem, seed: int, sizes: Sequence[int] | None = None, *, poison: bool = True
) -> tuple[list[np.ndarray], np.ndarray]:
    """Operands of small integers, whose sums are exact, and the result.

    Args:
      sizes: group_sizes; None for random ones.
      poison: puts NaN into the rows of no group, and into the scales, zero points and biases of weights without rows.
    """
    one, rng = one_of(p), np.random.default_rng([seed, p.groups])
    x = products.integers(one, 1 if p.dtype == E4M3 else 2, seed)
    rest = random_sizes(p, rng) if sizes is None else [np.asarray(sizes, np.int32)]
    rows = ragged_dots.group_rows(p.m, rest[0], int(rest[1][0]) if p.has_offset else 0, p.groups)
    out, packed, biases = np.zeros(p.out_shape), [], []
    for i in range(p.groups):
        q, weight = products.exact_weight(one, seed + i, one.operand)
        bias, of_all = products.exact_epilogue(one, x @ weight, seed + i)
        out[rows[i]] = of_all[rows[i]]
        biases.append(bias)
        w = prepack(q)
        packed.append(
            [np.asarray(leaf) for leaf in (w.words, w.scale, w.zero_point, w.channel_scale) if leaf is not None]
        )
    leaves, after = ([np.stack(each) for each in zip(*arrays, strict=True)] for arrays in (packed, biases))
    if poison:
        free = np.ones(p.m, bool)
        for i, of in enumerate(rows):
            free[of] = False
            if of.start == of.stop:
                for leaf in (*leaves[1:], *after):
                    leaf[i] = np.nan
        x[free] = np.nan
    want = float64.rounded(out, p.out_dtype)
    return [x.astype(jnp.dtype(p.dtype)), *leaves, *rest, *after], want
