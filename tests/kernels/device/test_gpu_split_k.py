"""The reductions of partial sums on a GPU, with every number of threads that may share an element's splits."""

import dataclasses
from typing import Any

import pytest

from jax_splitk.kernels.contraction import halo
from jax_splitk.kernels.contraction import wgrad as im2col
from jax_splitk.kernels.device import split_k
from jax_splitk.kernels.gather import wgrad as gather
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import on_gpu
from tests.problems import conv
from tests.structs import arguments

pytestmark = pytest.mark.gpu

LANES = (1, 2, 4, 8, 16, 32)
SPLITS = (2, 5, 9, 17, 33, 67, 131, 261)
# 405 results, the last group of four incomplete: with few lanes a block has more groups than there are.
ODD = conv((12, 12), (3, 3), (5, 9), batch=160, padding=1)
TILES = conv((8, 16), (1, 2), (72, 64), batch=70, padding=((0, 0), (1, 0)))


def of_splits(family: Any, p: ConvWgradProblem, config: Any, blocks: int) -> list[Any]:
    """The config with each split count of SPLITS, or the nearest legal one."""
    wanted = dict.fromkeys(split_k.whole_splits(blocks, splits) for splits in SPLITS)
    found = [dataclasses.replace(config, splits=splits) for splits in wanted]
    assert all(family.refusal(p, c) is None for c in found)
    return found


def lanes(family: Any, p: ConvWgradProblem, configs: list[Any], struct: str = "ReduceArgs") -> set[int]:
    return {arguments(family.plan(p, config), struct, launch=1)["lanes"] for config in configs if config.splits > 1}


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16", "float16"])
def test_reduce_splits_is_exact_with_any_lanes(out_dtype: str) -> None:
    p = dataclasses.replace(ODD, dtype=out_dtype, out_dtype=out_dtype)
    config = gather.FAMILY.candidates(p, DEFAULT_CUDA)[0]
    configs = of_splits(gather.FAMILY, p, config, gather.FAMILY.reduction_blocks(p, config))
    assert lanes(gather.FAMILY, p, configs) == set(LANES)
    on_gpu.check_exact(gather.FAMILY, p, configs)


def test_reduce_tiles_is_exact_with_any_lanes() -> None:
    config = halo.Config(2, 16, 1)
    configs = of_splits(halo.FAMILY, TILES, config, halo.FAMILY.reduction_blocks(TILES, config))
    assert lanes(halo.FAMILY, TILES, configs, "Args") == set(LANES)
    on_gpu.check_exact(halo.FAMILY, TILES, configs)


@pytest.mark.parametrize("channels", [(96, 40), (72, 200)])
def test_reduce_splits_gives_up_lines_that_nobody_else_needs(
    channels: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also runs few splits, so that the next call's splits write lines that have just been given up."""
    monkeypatch.setattr(im2col, "DISCARD_BYTES", 0)
    p = conv((12, 12), (1, 1), channels, batch=160)
    configs = of_splits(im2col.FAMILY, p, im2col.Config(64, 64, 4, False, 1), im2col.k_tiles(p))
    assert all(dict(im2col.FAMILY.source(p, c).defines)["DISCARD"] == 1 for c in configs)
    assert lanes(im2col.FAMILY, p, configs) >= {1, 2, 8, 32}
    on_gpu.check_exact(im2col.FAMILY, p, configs)
