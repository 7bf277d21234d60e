"""Special properties of the implicit GEMM in TMA's im2col mode on a GPU: every variant, and every way to split."""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from jax import numpy as jnp

from benchmarks import cases
from jax_splitk.kernels.contraction import wgrad as im2col
from jax_splitk.kernels.contraction.wgrad import FAMILY, Config
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime import compiler
from tests import float64, on_gpu, poison
from tests.on_gpu import integers, normals
from tests.problems import conv

pytestmark = pytest.mark.gpu

SMALL = {case.name: case for case in cases.SMALL_CASES}
# Results of 16 bits leave the registers by other code.
SHAPES = [
    *(SMALL[name].problem("float32") for name in ("c136k200", "c72")),
    conv((56, 56), (3, 3), batch=8, padding=1),
    *(
        conv((8, 8), (3, 3), channels, padding=1, dtype="float16", out_dtype="float16")
        for channels in ((24, 136), (136, 200), (72, 8))
    ),
    dataclasses.replace(SMALL["c320k320"], batch=6).problem("bfloat16"),
]

# Matrix products, whose splits take turns: the last block is of 11, 9, 62 and 2 pixels, and splits differ by a block.
TURNS = (
    conv((5003,), (1,), (64, 200), batch=1),
    conv((17, 19), (1, 1), (136, 72), batch=3, out_dtype="bfloat16"),
    conv((33, 31), (1, 1), (192, 192), groups=3),
    conv((2, 5, 13), (1, 1, 1), (24, 8), batch=1, out_dtype="float16"),
)
TURNS_CONFIGS = (
    Config(64, 64, 8, True, 27),
    Config(64, 64, 8, False, 3),
    Config(64, 64, 6, False, 4),
    Config(128, 64, 8, False, 8),
    Config(256, 64, 5, True, 5),
    Config(64, 256, 5, False, 2),
)

# 3136 blocks of pixels, which the tensor cores do not add by themselves, in one, two or twelve splits.
LONG = conv((112, 112), (3, 3), (64, 128), batch=16, padding=1)
LONG_CONFIGS = (
    Config(128, 128, 7, True, 1),
    Config(128, 64, 8, False, 2),
    Config(64, 64, 6, True, 12),
    Config(64, 64, 8, False, 2, whole_tiles=4),
)


def turns(p: ConvWgradProblem) -> list[Config]:
    configs = [FAMILY.with_splits(p, given, given.splits) for given in TURNS_CONFIGS]
    return [config for config in configs if FAMILY.refusal(p, config) is None]


def splits(p: ConvWgradProblem, variant: Config) -> Iterator[Config]:
    """The config with one, few and many splits, and with whole tiles before the split tiles."""
    few = FAMILY.with_splits(p, variant, 3)
    tails = (dataclasses.replace(few, whole_tiles=whole) for whole in (1, 7))
    for config in dict.fromkeys((variant, few, FAMILY.with_splits(p, variant, 16), *tails)):
        if FAMILY.refusal(p, config) is None:
            yield config


def device_code() -> set[compiler.Source]:
    tried = [(p, config) for p, variant in itertools.product(SHAPES, im2col.VARIANTS) for config in splits(p, variant)]
    tried += [(p, config) for p in TURNS for config in turns(p)] + [(LONG, config) for config in LONG_CONFIGS]
    return {FAMILY.source(p, config) for p, config in tried}


@pytest.mark.parametrize("variant", im2col.VARIANTS, ids=str)
def test_every_variant_is_exact(variant: Config) -> None:
    tried = 0
    for p in SHAPES:
        configs = list(splits(p, variant))
        on_gpu.check_exact(FAMILY, p, configs, seed=tried)
        tried += len(configs)
    assert tried >= 3 * len(SHAPES)


@pytest.mark.parametrize("p", TURNS, ids=str)
def test_splits_that_take_turns_are_exact(p: ConvWgradProblem) -> None:
    configs = turns(p)
    assert len(configs) >= 4
    assert all(im2col.takes_turns(p, config) for config in configs)
    on_gpu.check_exact(FAMILY, p, configs)


@pytest.mark.parametrize("config", turns(TURNS[0]), ids=str)
def test_splits_that_take_turns_give_the_same_bits_and_keep_nan_in_its_channels(config: Config) -> None:
    p = TURNS[0]
    on_gpu.check_repeats(on_gpu.ours(FAMILY, p, config), *normals(p, seed=3))
    lhs, g = integers(p)
    expected = float64.conv_wgrad(p, lhs, g).astype(np.float32)
    lhs, g = lhs.at[0, 5002, 7].set(jnp.nan), g.at[0, 64, 197].set(jnp.inf)
    out = poison.run(on_gpu.plan(FAMILY, p, config), p, lhs, g)
    bad = np.zeros(out.shape, bool)
    bad[..., 7, :] = bad[..., 197] = True
    assert not np.isfinite(out[bad]).any()
    np.testing.assert_array_equal(out[~bad], expected[~bad])


def test_long_float32_sums_are_as_accurate_as_xlas() -> None:
    """All numbers have one sign, so that all truncation of the tensor cores has one sign as well."""
    assert all(im2col.chained_stages(LONG, config) for config in LONG_CONFIGS)
    positive = (jnp.abs(x) for x in normals(LONG, seed=4))
    on_gpu.check_accuracy_and_repeats(FAMILY, LONG, LONG_CONFIGS, *positive, times=10)
