"""How the implicit GEMM in TMA's im2col mode sees a problem, and divides its work."""

import math

import pytest

from jax_splitk.kernels.base.geometry import is_matrix_product
from jax_splitk.kernels.contraction import wgrad as im2col
from jax_splitk.kernels.contraction.wgrad import FAMILY, Config
from jax_splitk.kernels.device.split_k import whole_splits
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from tests.problems import conv, seeded
from tests.structs import arguments

SMALL = Config(64, 64, 4, False, 1)


def matrix(rows: int, in_channels: int = 8, out_channels: int = 8) -> ConvWgradProblem:
    return conv((rows,), (1,), (in_channels, out_channels), batch=1)


# ---- dimensions in which nothing moves -----------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "batch", "size", "kernel"), [
    (conv((30,), (3,)), 2, (1, 30), (1, 3)),
    (conv((7, 30), (3, 3)), 2, (7, 30), (3, 3)),
    (conv((7, 30), (1, 3)), 14, (1, 30), (1, 3)),
    (conv((7, 30), (3, 1)), 2, (7, 30), (3, 1)),
    (conv((5, 7, 30), (2, 3, 3)), 2, (5, 7, 30), (2, 3, 3)),
    (conv((5, 7, 30), (1, 3, 3)), 10, (7, 30), (3, 3)),
    (conv((5, 7, 30), (3, 1, 1)), 2, (5, 210), (3, 1)),
    (conv((5, 7, 30), (3, 1, 3)), 2, (5, 7, 30), (3, 1, 3)),
    (conv((5, 7, 30), (1, 1, 3)), 70, (1, 30), (1, 3)),
    (conv((5, 7, 30), (1, 3, 1)), 10, (7, 30), (3, 1)),
    (conv((5, 7, 30), (1, 1, 1)), 2 * 5 * 7 * 30, (1, 1), (1, 1)),
    (conv((5, 7, 30), (1, 3, 3), stride=(2, 1, 1)), 2, (5, 7, 30), (1, 3, 3)),
    (conv((5, 7, 30), (1, 3, 3), padding=((1, 0), (1, 1), (1, 1))), 2, (5, 7, 30), (1, 3, 3)),
], ids=str)  # fmt: skip
def test_folding(given: ConvWgradProblem, batch: int, size: tuple[int, ...], kernel: tuple[int, ...]) -> None:
    folded = im2col.folded(given)
    folded.validate()
    assert (folded.batch, folded.input_spatial, folded.kernel_spatial) == (batch, size, kernel)
    assert (folded.gemm_shape, folded.bytes_moved) == (given.gemm_shape, given.bytes_moved)
    assert im2col.folded(folded) == folded
    assert dict(FAMILY.source(given, SMALL).defines)["RANK3"] == (len(size) == 3)


def test_folded_dimensions_have_no_limits() -> None:
    long = conv((3, 1000, 30), (1, 1, 3), rhs_dilation=99, padding=((0, 0), (0, 0), (0, 200)))
    assert FAMILY.refusal(long) is None


def test_matrix_products() -> None:
    assert is_matrix_product(conv((3, 4, 5), (1, 1, 1)))
    assert is_matrix_product(conv((12, 12), (1, 1), rhs_dilation=300))
    for other in (
        conv((12, 12), (1, 1), stride=(2, 1)),
        conv((12, 12), (1, 1), padding=((0, 1), (0, 0))),
        conv((12, 12), (1, 2)),
        conv((3, 4, 5), (1, 1, 1), stride=(1, 2, 1)),
    ):
        assert not is_matrix_product(other), other


# ---- splits and tiles ----------------------------------------------------------------------------------------------


def test_whole_splits_leaves_no_split_empty() -> None:
    with seeded(1) as rng:
        for blocks, wanted in rng.integers(1, (400, 400), (1000, 2)).tolist():
            splits = whole_splits(blocks, wanted)
            assert 1 <= splits <= min(wanted, blocks)
            # As in the kernels, split s has blocks [s, s + 1) * per_split.
            per_split = math.ceil(blocks / splits)
            sizes = [min(blocks, (s + 1) * per_split) - s * per_split for s in range(splits)]
            assert min(sizes) >= 1
            assert sum(sizes) == blocks
            # The nearest legal number: no number between it and the wanted one is legal.
            for other in range(splits + 1, min(wanted, blocks) + 1):
                assert (other - 1) * math.ceil(blocks / other) >= blocks, (splits, other, blocks)


# ---- what the device code does with its arguments ------------------------------------------------------------------


def test_blocks_of_splits_that_take_turns_start_within_32_bits() -> None:
    most = 2**31 - 1
    p = matrix(most - 64)
    config = FAMILY.with_splits(p, SMALL, 60_000)
    assert FAMILY.refusal(p, config) is None
    assert im2col.takes_turns(p, config)
    args = arguments(FAMILY.plan(p, config))
    last = (config.splits - 1) * 64 + (args["k_tiles_per_split"] - 1) * args["step"]  # the last split's last block
    assert 0 < last < p.reduction_size < most


def test_what_one_tile_reads_need_not_stay_in_the_cache() -> None:
    """Tiles of X have different filter rows and channels, so one tile of dY reads X only once."""
    wide, tall, image = matrix(64 * 100, 64, 256), matrix(64 * 100, 256, 64), conv((64,), (3,), batch=100)
    for p, config, expected in (
        (wide, Config(64, 64, 8, True, 33), (0, 1)),
        (wide, Config(64, 64, 8, False, 33), (0, 1)),
        (wide, Config(64, 256, 5, False, 33), (1, 1)),
        (wide, Config(64, 64, 8, False, 1), (0, 0)),
        (wide, Config(64, 64, 8, False, 4, whole_tiles=1), (0, 0)),
        (tall, Config(64, 64, 8, True, 33), (1, 0)),
        (image, Config(64, 64, 8, True, 33), (0, 0)),
    ):
        args = arguments(FAMILY.plan(p, config))
        assert (args["x_once"], args["dy_once"]) == expected, config
