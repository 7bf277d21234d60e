"""The candidates of each family of weight gradients on Hopper, and their estimates."""

import dataclasses
import math
from collections.abc import Callable

import pytest

from benchmarks import cases
from benchmarks.cases import Case
from jax_splitk import kernels
from jax_splitk.kernels import Family
from jax_splitk.kernels.base.split import SplitFamily
from jax_splitk.kernels.contraction import wgrad as im2col
from jax_splitk.kernels.depthwise import wgrad as depthwise
from jax_splitk.kernels.device.wgmma_tile import MIN_STAGES
from jax_splitk.kernels.gather import wgrad as gather
from jax_splitk.kernels.grouped import wgrad as grouped
from jax_splitk.kernels.tf32 import wgrad as tf32
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime.target import DEFAULT_CUDA, Target
from jax_splitk.tuning.options import Options
from jax_splitk.tuning.select import select
from tests.exhaustive import thinned
from tests.grouped import DEPTHWISE, GROUPED, LONG_SEQUENCES, NETWORKS, SEQUENCES
from tests.problems import conv

FAMILIES = kernels.families("conv_wgrad", "cuda")
STEM = conv((224, 224), (7, 7), (3, 64), batch=256, stride=2, padding=((2, 3), (2, 3)))
OTHERS = (
    STEM,
    conv((28, 28), (5, 5), (1, 32), batch=256, padding=2),
    conv((55, 55), (3, 3), (65, 100), padding=1),
    conv((6, 7, 8), (3, 3, 3), (5, 12), padding=1, dtype="float32", precision="highest"),
    conv((500,), (9,), (2, 33), padding=4, lhs_dilation=2),
    conv((30000,), (2,), (64, 8), padding=1, rhs_dilation=9999, dtype="float32"),
    conv((330, 330), (12, 12), (8, 8), padding=6),
    conv((2, 2), (2, 2), (40, 40), batch=64),
    # The tf32 family sees these as one tall image, whose sums must still be cut into short chains.
    *(conv((224, 224), (1, 1), batch=batch, dtype="float32") for batch in (400, 512)),
    *(conv((16, 400), (3, 3), batch=1, padding=1, stride=(1, n), dtype="float32") for n in (9, 20, 33, 71)),
    *SEQUENCES,
    *LONG_SEQUENCES,
)
by_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
split_families = pytest.mark.parametrize(
    "family", [family for family in FAMILIES if isinstance(family, SplitFamily)], ids=lambda family: family.name
)


def served(family: Family, every: int = 1) -> list[ConvWgradProblem]:
    """Problems that a family serves: of the suite, small and odd ones, with 16-bit and float32 results."""
    all_cases = (*cases.WGRAD_CASES, *cases.SMALL_CASES, *NETWORKS, *DEPTHWISE, *GROUPED.values())
    all_cases = (*all_cases, *(dataclasses.replace(case, dtype="float32") for case in all_cases[::2]))
    found = [case.problem(out_dtype) for case in all_cases for out_dtype in ("bfloat16", "float32")]
    found = [p for p in (*OTHERS, *found) if family.refusal(p) is None]
    return found[::every]


def suite(family: Family, tag: str = "") -> list[Case]:
    """The benchmark's cases that this family serves."""
    found = [case for case in cases.WGRAD_CASES if family.refusal(case.problem()) is None]
    return [case for case in found if not tag or tag in case.tags]


def best_seconds(family: Family, p: ConvWgradProblem, target: Target = DEFAULT_CUDA) -> float:
    return min(family.estimate(p, config, target) for config in family.candidates(p, target))


@pytest.mark.parametrize("part", thinned(range(3), 3))
@by_family
def test_candidates_are_legal_unique_and_few(family: Family, part: int) -> None:
    # Candidates of the gathering family take a fortieth of a second for each problem.
    for p in served(family, every=8 if family is gather.FAMILY else 2)[part::3]:
        configs = family.candidates(p, DEFAULT_CUDA)
        assert 1 <= len(set(configs)) == len(configs) <= 60, p
        for config in configs:
            assert family.refusal(p, config, DEFAULT_CUDA) is None, (p, config)
            # Not faster than memory and tensor cores allow, and not absurdly long.
            least = max(p.bytes_moved / 4.8e12, p.flops / 990e12 if p.feature_group_count == 1 else 0)
            assert least < family.estimate(p, config, DEFAULT_CUDA) < 1, (p, config)
        near = family.neighbours(p, configs[0], DEFAULT_CUDA)
        assert configs[0] not in near
        assert [family.refusal(p, config) for config in near].count(None) >= min(1, len(near)), p


@split_families
def test_sums_of_float32_results_are_cut(family: SplitFamily) -> None:
    problems = [STEM, *(case.problem("float32") for case in (*suite(family)[::4], *NETWORKS[:2]))]
    for p in (p for p in problems if family.refusal(p) is None):
        for config in family.candidates(p, DEFAULT_CUDA):
            blocks = math.ceil(family.reduction_blocks(p, config) / config.splits)
            assert blocks <= max(1, family.longest_chain(p, config)), (p, config)
            assert family.least_splits(dataclasses.replace(p, out_dtype="bfloat16"), config) == 1


# Longest sum of the tensor cores in one register, with the fewest legal splits.
CHAINS: list[tuple[SplitFamily, ConvWgradProblem, object, Callable[[int], int], int]] = [
    (
        grouped.FAMILY, conv((56, 56), (3, 3), (128, 128), groups=32, batch=4096, padding=1),
        grouped.Config(32, 32, 1, 8, 56, 4, 3, 1),
        lambda splits: math.ceil(4096 * 7 / splits) * 8, grouped.MAX_FLOAT32_CHAIN,  # one strip a slice, 8 rows
    ),
    (
        tf32.FAMILY, conv((56, 56), (3, 3), batch=4096, padding=1, dtype="float32"),
        tf32.Config(3, 3, 1, 64, 1, 8, 56, 2, 1),
        lambda splits: math.ceil(4096 * 7 / splits) * 8 * 56, tf32.MAX_FLOAT32_CHAIN,
    ),
    (
        gather.FAMILY, conv((56, 56), (3, 3), batch=256, padding=1, dtype="float32"),
        gather.Config(1, 1, 64, 1, 8, 8, 64, 2, 1),
        lambda splits: math.ceil(256 * 49 / splits) * 4 * 3, gather.MAX_FLOAT32_CHAIN,  # two parts: three products
    ),
    (
        im2col.FAMILY, conv((56, 56), (3, 3), batch=256, padding=1), im2col.Config(128, 256, 4, False, 1),
        lambda splits: math.ceil(256 * 49 / splits), im2col.MAX_FLOAT32_CHAIN,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("family", "p", "config", "chain", "most"), CHAINS, ids=[c[0].name for c in CHAINS])
def test_the_least_splits_are_just_enough(
    family: SplitFamily, p: ConvWgradProblem, config: object, chain: Callable[[int], int], most: int
) -> None:
    assert family.refusal(p, config) is None
    least = family.least_splits(p, config)
    assert chain(least) <= most < chain(least - 1)


def test_long_float32_sums_of_im2col_leave_the_tensor_cores() -> None:
    """The tensor cores truncate them. Only tiles whose sums a thread can hold twice can do so."""
    p = conv((56, 56), (3, 3), (128, 128), batch=256, padding=1)
    narrow, wide = im2col.Config(128, 128, 7, False, 6), im2col.Config(128, 192, 5, False, 132)

    def stages(p: ConvWgradProblem, config: im2col.Config) -> int:
        return dict(im2col.FAMILY.source(p, config).defines)["CHAIN"]

    assert narrow in [dataclasses.replace(c, splits=6) for c in im2col.FAMILY.candidates(p, DEFAULT_CUDA)]
    assert stages(p, narrow) == im2col.MAX_FLOAT32_CHAIN
    assert stages(p, dataclasses.replace(narrow, splits=98)) == 0, "128 blocks each"
    assert stages(p, dataclasses.replace(narrow, splits=98, whole_tiles=1)) == im2col.MAX_FLOAT32_CHAIN
    assert stages(dataclasses.replace(p, out_dtype="bfloat16"), narrow) == 0
    assert stages(p, dataclasses.replace(wide, splits=6)) == 0, "it has too many sums"
    assert (im2col.FAMILY.least_splits(p, narrow), im2col.FAMILY.least_splits(p, wide)) == (1, 98)


def test_long_sums_of_chains_are_cut() -> None:
    p = conv((56, 56), (3, 3), batch=256, padding=1, dtype="float32", precision="highest")
    v = gather.volume(p)
    for config in gather.FAMILY.candidates(p, DEFAULT_CUDA):
        tiles = math.ceil(gather.FAMILY.reduction_blocks(p, config) / config.splits)
        assert config.pixels % (16 * gather.chain(v, config)) == 0
        assert tiles * (config.pixels // 16 // gather.chain(v, config)) <= gather.MAX_ROUNDED_CHAIN


@split_families
def test_workspace_is_one_float_for_each_result_and_split(family: SplitFamily) -> None:
    for p in served(family, every=12):
        config = next(c for c in family.candidates(p, DEFAULT_CUDA) if not getattr(c, "whole_tiles", 0))
        single, three = (family.with_splits(p, config, splits) for splits in (1, 3))
        assert family.workspace_bytes(p, single) == 0
        assert len(family.plan(p, single).launches) == 1
        if three.splits > 1:
            assert three.splits * math.prod(p.out_shape) * 4 <= family.workspace_bytes(p, three)
            _, reduce = family.plan(p, three).launches
            assert "_reduce" in reduce.kernel
            assert reduce.programmatic
            two = family.with_splits(p, config, 2)
            assert family.source(p, two) == family.source(p, three)
            # Where whole sums are another kernel, they are compiled by themselves.
            apart = family.roles[0] != family.roles[1]
            assert (family.source(p, single) != family.source(p, three)) == apart


@by_family
def test_more_work_never_takes_less_time(family: Family) -> None:
    for case in (*suite(family)[:6], *(NETWORKS[:2] if family is depthwise.FAMILY else ())):
        grown = [dataclasses.replace(case, batch=2 * case.batch)]
        if case.groups == 1 and family is im2col.FAMILY:
            grown += [dataclasses.replace(case, in_channels=2 * case.in_channels)]
            grown += [dataclasses.replace(case, out_channels=2 * case.out_channels)]
        for more in grown:
            assert best_seconds(family, more.problem()) >= best_seconds(family, case.problem()) * (1 - 1e-9), more


def test_a_smaller_gpu_is_never_faster() -> None:
    half = dataclasses.replace(DEFAULT_CUDA, cores=66)
    for case in suite(im2col.FAMILY)[:12]:
        # Within the model's precision: memory takes as long, and fewer splits write fewer partial sums.
        p = case.problem()
        assert best_seconds(im2col.FAMILY, p, half) >= 0.98 * best_seconds(im2col.FAMILY, p)


def test_grouped_and_depthwise_problems_are_their_families_before_any_other() -> None:
    for family, tag in ((grouped.FAMILY, "grouped"), (depthwise.FAMILY, "depthwise")):
        for case in cases.find([tag]):
            assert next(f for f in FAMILIES if f.refusal(case.problem()) is None) is family
            assert family.why_xla_untuned(case.problem()) is None


@pytest.mark.parametrize("p", [
    STEM,
    conv((112, 112), (7, 7), (8, 64), padding=None, batch=64),
    conv((64, 64), (3, 3), (320, 4), padding=None, batch=16, out_dtype="bfloat16"),
    conv((64, 64), (3, 3), (13, 53), padding=None, batch=16, out_dtype="bfloat16"),  # from 17 on they are padded
], ids=str)  # fmt: skip
def test_gathering_is_chosen_where_tma_cannot_or_wastes_most_of_a_box(p: ConvWgradProblem) -> None:
    choice = select(p, DEFAULT_CUDA, Options())
    assert choice.candidate.name == "wgrad_gather", choice.why


def test_smaller_tiles_with_more_stages_are_tried() -> None:
    p = suite(grouped.FAMILY, "grouped")[1].problem()
    near = grouped.FAMILY.neighbours(p, grouped.Config(32, 32, 2, 7, 14, 2, 3, 16), DEFAULT_CUDA)
    assert grouped.Config(32, 32, 1, 7, 14, 1, 6, 16) in near


# ---- the implicit GEMM of im2col mode ------------------------------------------------------------------------------


def test_several_variants_and_split_counts_are_tried() -> None:
    for case in suite(im2col.FAMILY)[::3]:
        p = case.problem()
        configs = im2col.FAMILY.candidates(p, DEFAULT_CUDA)
        tried = {dataclasses.replace(c, splits=1, whole_tiles=0) for c in configs}
        assert 10 < len(tried) <= len(tried & set(im2col.VARIANTS))
        if im2col.k_tiles(p) >= 8 * DEFAULT_CUDA.cores:
            assert len({config.splits for config in configs}) > 5


def test_shared_memory_of_every_variant_fits() -> None:
    for config in im2col.VARIANTS:
        assert config.shared_bytes * config.blocks_per_sm <= 227 * 1024
        assert config.shared_bytes >= config.stages * (config.tile_m + config.tile_n) * 64 * 2 + 1024
        # The pipeline's memory holds a tile of 16-bit results.
        assert config.tile_m * config.tile_n * 2 <= MIN_STAGES * config.stage_bytes
        assert config.tile_m % (64 * config.consumers) == 0
    assert {config.blocks_per_sm for config in im2col.VARIANTS} == {1, 2}


def test_neighbours_are_one_step_away_and_mostly_legal() -> None:
    (p,) = (case.problem() for case in cases.find(["c256k256_r3_14x14_b256"]))
    names = [field.name for field in dataclasses.fields(im2col.Config)]
    for config in (im2col.Config(128, 128, 7, False, 7), im2col.Config(64, 64, 6, True, 1)):
        near = im2col.FAMILY.neighbours(p, config, DEFAULT_CUDA)
        legal = [c for c in near if im2col.FAMILY.refusal(p, c) is None]
        assert len(legal) >= len(near) - 3
        changed = {tuple(name for name in names if getattr(c, name) != getattr(config, name)) for c in legal}
        assert changed == {("swap",), ("stages",), ("splits",)}
