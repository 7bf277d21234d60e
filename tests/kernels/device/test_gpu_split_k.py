"""The reductions of partial sums on a GPU, with every number of threads that may share an element's splits."""

import dataclasses

import pytest

from benchmarks.cases import Case
from jax_splitk.kernels.device import split_k
from jax_splitk.kernels.wgrad import gather, halo, im2col
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import gpu_wgrad
from tests.kernels.wgrad.test_gather import conv

pytestmark = pytest.mark.gpu

LANES = (1, 2, 4, 8, 16, 32)
SPLITS = (2, 5, 9, 17, 33, 67, 131, 261)
# 405 results, the last group of four incomplete: with few lanes a block has more groups than there are.
ODD = conv((12, 12), (3, 3), (5, 9), batch=160)
TILES = Case("tiles", 70, 8, 16, 72, 64, (1, 2), padding=((0, 0), (1, 0))).problem("float32")


def of_splits(family, p, config, blocks):
    """The config with each split count of SPLITS, or the nearest whole one."""
    wanted = dict.fromkeys(split_k.whole_splits(blocks, splits) for splits in SPLITS)
    found = [dataclasses.replace(config, splits=splits) for splits in wanted]
    assert all(family.refusal(p, c) is None for c in found)
    return found


def lanes(family, p, config, index):
    return family.plan(p, config).launches[-1].params[-1].values[index]


def odd_configs(p):
    config = gather.FAMILY.candidates(p, DEFAULT_CUDA)[0]
    return of_splits(gather.FAMILY, p, config, gather.FAMILY.reduction_blocks(p, config))


def tile_configs(p):
    config = halo.Config(2, 16, 1, 2, 1)
    return of_splits(halo.FAMILY, p, config, halo.units_per_tile(p, config))


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16", "float16"])
def test_reduce_splits_is_exact_with_any_lanes(out_dtype):
    p = dataclasses.replace(ODD, dtype=out_dtype, out_dtype=out_dtype)
    configs = odd_configs(p)
    assert {lanes(gather.FAMILY, p, c, 3) for c in configs} == set(LANES)
    gpu_wgrad.check_exact(gather.FAMILY, p, configs)


def test_reduce_tiles_is_exact_with_any_lanes():
    configs = tile_configs(TILES)
    assert {lanes(halo.FAMILY, TILES, c, -1) for c in configs} == set(LANES)
    gpu_wgrad.check_exact(halo.FAMILY, TILES, configs)


@pytest.mark.parametrize("channels", [(96, 40), (72, 200)])
def test_reduce_splits_gives_up_lines_that_nobody_else_needs(channels, monkeypatch):
    """Where they are few, too, so that the next call's splits write lines that have just been given up."""
    monkeypatch.setattr(split_k, "DISCARD_BYTES", 0)
    p = conv((12, 12), (1, 1), channels, batch=160)
    configs = of_splits(im2col.FAMILY, p, im2col.Config(64, 64, 4, False, 1), im2col.k_tiles(p))
    assert all(dict(im2col.FAMILY.source(p, c).defines)["DISCARD"] == 1 for c in configs)
    assert {lanes(im2col.FAMILY, p, c, 3) for c in configs} >= {1, 2, 8, 32}
    gpu_wgrad.check_exact(im2col.FAMILY, p, configs)
