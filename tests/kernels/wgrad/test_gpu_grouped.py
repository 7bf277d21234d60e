"""Special properties of grouped weight gradients on a GPU: every tiling of one problem."""

import pytest

from jax_splitk.kernels.grouped.wgrad import FAMILY, Config
from jax_splitk.runtime import compiler
from tests import on_gpu
from tests.grouped import grouped_case

pytestmark = pytest.mark.gpu

CASE = grouped_case((20, 20), (4, 4), 8, batch=3)
# Rows, columns, images and slices of every kind.
TILINGS = [
    Config(block, block, images, rows, columns, slices, stages, splits)
    for block, images, rows, columns, slices, stages, splits in [
        (32, 1, 20, 20, 1, 2, 1),
        (32, 2, 20, 16, 2, 2, 3),
        (32, 3, 7, 20, 4, 2, 5),
        (32, 2, 3, 20, 3, 3, 14),
        (16, 1, 5, 16, 1, 6, 2),
        (16, 3, 6, 8, 1, 4, 1),
        (16, 1, 4, 20, 2, 2, 7),
        (8, 2, 1, 20, 3, 6, 39),
    ]
]


def device_code() -> set[compiler.Source]:
    return {FAMILY.source(CASE.problem("float32"), config) for config in TILINGS}


@pytest.mark.parametrize("config", TILINGS, ids=str)
def test_every_tiling_is_exact(config: Config) -> None:
    p = CASE.problem("float32")
    config = FAMILY.with_splits(p, config, config.splits)
    assert FAMILY.refusal(p, config) is None
    on_gpu.check_exact(FAMILY, p, [config])
