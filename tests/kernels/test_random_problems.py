"""The random problems of test_gpu_random.py: their coverage, and their reference."""

import collections
import dataclasses
import itertools

import numpy as np
from jax import numpy as jnp

from jax_splitk.problems import conv_reference
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.tuning.options import DEFAULT_WORKSPACE_LIMIT
from tests import float64, random_problems
from tests.problems import seeded
from tests.random_problems import FAMILIES, TARGET

DTYPES = ("bfloat16", "float16", "float32")


def traits(p: ConvWgradProblem) -> dict[str, bool]:
    """The properties of a problem that random problems must cover."""
    groups = p.feature_group_count
    each = p.in_channels // groups
    padding = list(itertools.chain.from_iterable(p.padding))
    return {
        **{f"rank {rank}": p.rank == rank for rank in (1, 2, 3)},
        **{f"{a} to {b}": (p.dtype, p.out_dtype) == (a, b) for a, b in itertools.product(DTYPES, DTYPES)},
        **{name: (p.dtype, p.precision) == ("float32", name) for name in ("default", "highest")},
        "stride": max(p.window_strides) > 1,
        "stride above 4": max(p.window_strides) > 4,
        "unequal strides": len(set(p.window_strides)) > 1,
        "rhs_dilation": max(p.rhs_dilation) > 1,
        "lhs_dilation": max(p.lhs_dilation) > 1,
        "stride and rhs_dilation": max(p.window_strides) > 1 and max(p.rhs_dilation) > 1,
        "asymmetric padding": any(low != high for low, high in p.padding),
        "negative padding": min(padding) < 0,
        "no padding": not any(padding),
        "even filter": any(k % 2 == 0 for k in p.kernel_spatial),
        "one tap": p.taps == 1,
        "matrix product": p.taps == 1 and not any(padding) and set(p.window_strides) == {1},
        "odd channels": p.in_channels % 2 == 1 or p.out_channels % 2 == 1,
        "few channels": p.in_channels <= 4,
        "ungrouped": groups == 1,
        "wide groups": groups > 1 and each >= 64,
        "small groups": groups > 1 and 1 < each < 64,
        "depthwise": groups == p.in_channels == p.out_channels and groups > 1,
        "depthwise with a multiplier": 1 < groups == p.in_channels < p.out_channels,
        "several images": p.batch > 1,
        "one image": p.batch == 1,
        "short reduction": p.reduction_size < 64,
        "long reduction": p.reduction_size > 1000,
    }


def test_coverage() -> None:
    with seeded(41) as rng:
        problems = random_problems.problems(rng, mixtures=20)
        assert len(problems) == 500
        counts: collections.Counter[str] = collections.Counter()
        for p in problems:
            counts.update(traits(p))
        assert min(counts.values()) > 0, counts
        for p in problems:
            p.validate()
        serving = collections.Counter(f.name for p in problems for f in FAMILIES if f.refusal(p) is None)
        assert all(serving[family.name] >= 60 for family in FAMILIES), serving
        assert len(set(problems)) > 450


def test_configs_are_legal_and_share_device_code() -> None:
    with seeded(42) as rng:
        configs, runs = random_problems.Configs(rng), 0
        single: collections.Counter[bool] = collections.Counter()
        for p in random_problems.problems(rng, mixtures=2):
            for family in FAMILIES:
                if family.refusal(p, None, TARGET) is None:
                    config = configs.draw(family, p)
                    assert family.refusal(p, config, TARGET) is None
                    assert family.workspace_bytes(p, config) <= DEFAULT_WORKSPACE_LIMIT
                    assert random_problems.device_plan(family, p, config).source in configs.sources
                    single[config.splits == 1] += 1
                    runs += 1
        assert len(configs.sources) < runs
        assert min(single[True], single[False]) >= runs / 10, single


def test_reference_agrees_with_lax() -> None:
    with seeded(43) as rng:
        for p in random_problems.problems(rng, mixtures=1):
            if p.flops > 2e7:  # XLA takes seconds for some
                continue
            lhs, g = random_problems.integers(rng, p)
            exact = float64.conv_wgrad_on_host(p, lhs, g)
            in_float32 = dataclasses.replace(p, dtype="float32", out_dtype="float32")
            theirs = conv_reference.conv_wgrad(jnp.asarray(lhs), jnp.asarray(g), in_float32)
            np.testing.assert_array_equal(exact, np.asarray(theirs), err_msg=str(p))


def test_what_is_reached_is_what_nan_reaches() -> None:
    with seeded(44) as rng:
        for p in random_problems.problems(rng, mixtures=2):
            lhs, g = random_problems.integers(rng, p)
            in_lhs, in_g = (random_problems.place(rng, shape) for shape in (p.lhs_shape, p.g_shape))
            lhs[in_lhs] = g[in_g] = np.nan
            found = np.isnan(float64.conv_wgrad_on_host(p, lhs, g))
            certain, possible = random_problems.reached(p, in_lhs, in_g)
            assert not (certain & ~found).any(), str(p)
            assert not (found & ~possible).any(), str(p)
