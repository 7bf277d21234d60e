"""What the GPU tests of matrix products run. To count it needs no GPU."""

import itertools

from jax_splitk.kernels.contraction import few_rows, products
from tests.kernels.dot import test_gpu_dot, test_gpu_few_rows


def test_exact_products_have_every_tile_and_reduction() -> None:
    runs = test_gpu_dot.EXACT
    assert {(c.tile_m, c.tile_n) for _, c in runs} == set(products.FAMILY.tiles(runs[0][0]))
    assert {(c.reduction, c.splits) for _, c in runs} == set(test_gpu_dot.REDUCTIONS)


def test_exact_products_of_few_rows_have_every_tile_and_cluster() -> None:
    runs = test_gpu_few_rows.EXACT
    assert {(c.tile_m, c.tile_n) for _, c in runs} == set(itertools.product(few_rows.TILES_M, few_rows.TILES_N))
    assert {c.splits for _, c in runs} == set(range(1, 9))
    assert {c.blocks_per_sm for _, c in runs} == set(range(1, few_rows.MAX_BLOCKS + 1))
