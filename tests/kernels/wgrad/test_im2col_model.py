"""The Hopper family's candidates and cost model. Pure Python, no GPU."""

import dataclasses
import math

import pytest

from benchmarks import cases
from jax_splitk import kernels
from jax_splitk.kernels.wgrad import im2col
from jax_splitk.kernels.wgrad.im2col import FAMILY, Config
from jax_splitk.problems.conv_wgrad import ConvWgradProblem, conv_output_spatial
from jax_splitk.runtime.target import DEFAULT_CUDA, Target
from jax_splitk.tuning.options import Options
from jax_splitk.tuning.select import select
from tests.kernels.wgrad.test_im2col import matrix, problem
from tests.problems import random_case, seeded

LEGAL = [case for case in (*cases.WGRAD_CASES, *cases.SMALL_CASES) if FAMILY.refusal(case.problem()) is None]


@pytest.mark.parametrize("case", LEGAL, ids=lambda case: case.name)
def test_candidates_are_legal_unique_and_of_known_code(case: cases.Case) -> None:
    p = case.problem()
    configs = FAMILY.candidates(p, DEFAULT_CUDA)
    variants = [v for v in im2col.variants() if FAMILY.refusal(p, v) is None]
    assert 300 >= len(set(configs)) == len(configs) >= len(variants)
    for config in configs:
        assert FAMILY.refusal(p, config, DEFAULT_CUDA) is None, config
    plain = {dataclasses.replace(c, splits=1, whole_tiles=0) for c in configs}
    assert {dataclasses.replace(c, stages=min(c.stages, im2col.MAX_STAGES)) for c in plain} == set(variants)
    assert {config.splits for config in configs} >= {1}
    if im2col.k_tiles(p) >= 8 * DEFAULT_CUDA.cores:
        assert len({config.splits for config in configs}) > 5


def best_config(p: ConvWgradProblem) -> Config:
    return min(FAMILY.candidates(p, DEFAULT_CUDA), key=lambda config: FAMILY.estimate(p, config, DEFAULT_CUDA))


def test_select_respects_the_workspace_limit_and_takes_the_best_within(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernels.FAMILIES, "conv_wgrad", (FAMILY,))
    with seeded(4) as rng:
        for _ in range(40):
            p = random_case(rng).problem("float32")
            limit = int(10 ** rng.uniform(3, 8))
            choice = select(p, DEFAULT_CUDA, Options(implementation="cutlass", workspace_limit_bytes=limit))
            legal = [c for c in FAMILY.candidates(p, DEFAULT_CUDA) if FAMILY.workspace_bytes(p, c) <= limit]
            assert choice.config in legal
            assert choice.workspace_bytes == FAMILY.workspace_bytes(p, choice.config) <= limit
            best = min(FAMILY.estimate(p, c, DEFAULT_CUDA) for c in legal)
            assert FAMILY.estimate(p, choice.config, DEFAULT_CUDA) == best


def test_workspace_is_one_float_for_each_result_and_split() -> None:
    p = problem()
    for splits in (2, 3, 5):
        config = Config(64, 64, 4, False, splits)
        assert FAMILY.workspace_bytes(p, config) == splits * 3 * 3 * 64 * 64 * 4
    assert FAMILY.workspace_bytes(p, Config(64, 64, 4, False, 1)) == 0


def best_seconds(p: ConvWgradProblem, target: Target = DEFAULT_CUDA) -> float:
    return min(FAMILY.estimate(p, c, target) for c in FAMILY.candidates(p, target))


def test_estimate_is_positive_and_bounded_by_the_hardware() -> None:
    for case in LEGAL:
        p = case.problem()
        for config in FAMILY.candidates(p, DEFAULT_CUDA):
            seconds = FAMILY.estimate(p, config, DEFAULT_CUDA)
            assert math.isfinite(seconds)
            # No faster than the tensor cores (990 TFLOP/s) or the memory (4.8 TB/s) of an H200 could be, and no day.
            assert max(p.flops / 990e12, p.bytes_moved / 4.8e12) < seconds < 1, (case.name, config)


def test_more_work_never_takes_less_time() -> None:
    with seeded(5) as rng:
        for _ in range(25):
            case = random_case(rng)
            base = best_seconds(case.problem())
            for change in (
                {"batch": 2 * case.batch},
                {"in_channels": 2 * case.in_channels},
                {"out_channels": 2 * case.out_channels},
            ):
                grown = best_seconds(dataclasses.replace(case, **change).problem())
                assert grown >= base * (1 - 1e-9), (case, change)


def test_a_smaller_gpu_is_never_faster() -> None:
    for case in LEGAL[:12]:
        half = dataclasses.replace(DEFAULT_CUDA, cores=66)
        # Within the model's grain: memory is as fast, and fewer splits write fewer partial sums.
        assert best_seconds(case.problem(), half) >= 0.98 * best_seconds(case.problem())


@pytest.mark.parametrize("case", LEGAL, ids=lambda case: case.name)
def test_chosen_config_wastes_less_than_half_of_the_tiles(case: cases.Case) -> None:
    p = case.problem()
    config = best_config(p)
    tiles = math.prod(im2col.tile_counts(p, config))
    # Channels come in boxes of 64: less than that is not the config's to waste.
    m = p.taps * math.ceil(p.in_channels / 64) * 64
    n = math.ceil(p.out_channels / 64) * 64
    assert tiles * config.tile_m * config.tile_n < 2 * m * n, config


@pytest.mark.parametrize("case", [case for case in LEGAL if case.floor_us is not None], ids=lambda case: case.name)
def test_estimate_of_the_suite_is_near_what_the_hardware_allows(case: cases.Case) -> None:
    seconds = best_seconds(case.problem())
    assert 0.85 * case.floor_us < seconds * 1e6 < 2 * case.floor_us + 20


def test_small_outputs_with_long_reductions_are_split() -> None:
    case = next(case for case in cases.WGRAD_CASES if case.batch == 8 and case.in_channels == 64)
    config = best_config(case.problem())
    tiles = math.prod(im2col.tile_counts(case.problem(), config))
    assert config.splits > 1
    assert tiles * config.splits >= DEFAULT_CUDA.cores // 2, "most of the machine would idle"


def test_shared_memory_of_every_variant_fits() -> None:
    for config in im2col.variants():
        assert config.shared_bytes * config.blocks_per_sm <= 227 * 1024
        assert config.shared_bytes >= config.stages * (config.tile_m + config.tile_n) * 64 * 2 + 1024
        assert config.tile_m % (64 * config.consumers) == 0
    assert {config.blocks_per_sm for config in im2col.variants()} == {1, 2}


def test_neighbours_are_one_step_away_and_mostly_legal() -> None:
    p = next(case for case in cases.WGRAD_CASES if case.name == "c256k256_r3_14x14_b256").problem()
    for config in (
        Config(128, 128, 7, False, 7),
        Config(128, 256, 4, True, 2),
        Config(64, 64, 6, True, 1),
    ):
        near = FAMILY.neighbours(p, config, DEFAULT_CUDA)
        legal = [c for c in near if FAMILY.refusal(p, c) is None]
        assert config not in near
        assert len(legal) >= len(near) - 3
        changed = {
            tuple(f.name for f in dataclasses.fields(c) if getattr(c, f.name) != getattr(config, f.name)) for c in legal
        }
        assert changed >= {("swap",), ("stages",)} - ({("stages",)} if config.stages == 4 else set())
        assert changed <= {("swap",), ("stages",), ("splits",)}
        assert ("splits",) in changed


def test_rings_have_at_most_8_stages() -> None:
    """Deeper ones gain nothing, also where splits take turns."""
    p = matrix(64 * 33 * 16, 64, 256)
    for splits in (1, 33):
        config = Config(64, 64, 9, True, splits)
        assert FAMILY.refusal(p, config) == "stages 9; accepted with this tile: 2 to 8"
        assert FAMILY.refusal(p, dataclasses.replace(config, stages=8)) is None
    for case in cases.WGRAD_CASES:
        if case.groups == 1 and case.dtype == "bfloat16" and FAMILY.refusal(case.problem()) is None:
            found = FAMILY.candidates(case.problem(), DEFAULT_CUDA)
            assert max(config.stages for config in found) == 8


def test_every_output_problem_agrees_with_its_geometry() -> None:
    """The suite's problems are consistent, else all of the above is about nothing."""
    for case in LEGAL:
        p = case.problem()
        geometry = (p.kernel_spatial, p.window_strides, p.padding, p.lhs_dilation, p.rhs_dilation)
        assert conv_output_spatial(p.input_spatial, *geometry) == p.output_spatial
