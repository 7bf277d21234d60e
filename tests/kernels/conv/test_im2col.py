"""The dense family of forward passes and input gradients, without a GPU: its device code, emulated."""

import dataclasses
import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jax_splitk.kernels.contraction import im2col, im2col_config, phases
from jax_splitk.kernels.contraction.im2col import Config
from jax_splitk.kernels.contraction.joined import joined
from jax_splitk.kernels.device.wgmma_tile import max_stages
from jax_splitk.problems.conv_passes import ConvFpropProblem, transposed
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.runtime import plan
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import emulator, float64, tf32
from tests.exhaustive import crossed
from tests.kernels import emulated
from tests.kernels.conv.tried import BOTH, IM2COL
from tests.problems import conv_of, seeded

FPROP, DGRAD = BOTH


def problem(kind: type[Any], size: tuple[int, ...], kernel: tuple[int, ...], *channels: int, **more: Any) -> Any:
    return conv_of(kind, size, kernel, (channels[0], channels[1]), **{"out_dtype": "bfloat16", **more})


def tile(tile_m: int, tile_n: int, splits: int = 1, reduction: str = "none") -> Config:
    return Config(tile_m, tile_n, max_stages(tile_m, tile_n), splits, reduction)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("kernel", [(3, 3), (1, 1)])
def test_float32_is_rounded_to_nearest(kind: type[Any], kernel: tuple[int, int]) -> None:
    """The loads of both operands round, in im2col mode and as a plain matrix."""
    p = problem(kind, (9, 10), kernel, 36, 40, dtype="float32", out_dtype="float32")
    with seeded(85) as rng:
        x, weight = (rng.normal(size=shape).astype(np.float32) for shape in p.operand_shapes)
        out = np.zeros(p.out_shape, np.float32)
        made = IM2COL.of(p).plan(p, im2col.Config(64, 64, 4))
        emulator.run(made, [x, weight], [out])
    want = float64.ON_HOST[p.op](p, tf32.nearest(x), tf32.nearest(weight))
    assert np.linalg.norm(out - want) <= 1e-6 * np.linalg.norm(want)


def test_weights_that_cannot_be_read_as_they_are_are_transposed_first() -> None:
    """The workspace begins with the weight; partial sums follow it."""
    for channels, changes, transposes in (
        ((64, 64), {"dtype": "float32"}, True),
        ((64, 2), {}, True),
        ((64, 64), {}, False),
        ((128, 136), {"groups": 2}, True),
        ((128, 144), {"groups": 2}, False),
    ):
        p, q = (problem(kind, (9, 10), (3, 3), *channels, **changes) for kind in BOTH)
        assert im2col.transposes(p) == transposes and not im2col.transposes(q)
        size = 9 * channels[0] // p.feature_group_count * channels[1] * (4 if changes.get("dtype") else 2)
        for config in (tile(64, 64), tile(64, 64, 2, "workspace")):
            made = im2col.FPROP.plan(p, config)
            partial = 2 * im2col.FPROP.partial_size(p, config) * 4 if config.splits > 1 else 0
            assert made.workspace_bytes == transposes * size + partial
            roles = ["_transpose"] * transposes + [""] + ["_reduce"] * (config.splits > 1)
            assert [launch.kernel.removeprefix("fprop_im2col") for launch in made.launches] == roles
            assert [launch.programmatic for launch in made.launches] == [False, *[True] * (len(roles) - 1)]
            if transposes and partial:
                assert plan.Pointer(3, size) in made.launches[1].params


@pytest.mark.parametrize(("kind", "channels", "kernel", "dtype", "reason"), [
    (FPROP, (64, 64), (3, 3), "float32", None),
    (DGRAD, (32, 64), (3, 3), "float32", None),
    (FPROP, (64, 96), (3, 3), "float32", None),
    (DGRAD, (96, 64), (3, 3), "float32", None),
    (FPROP, (64, 64), (1, 1), "float32", "products whose weight is transposed first were not measured"),
    (FPROP, (256, 2), (3, 3), "bfloat16", None),
    (FPROP, (256, 53), (3, 3), "bfloat16", "53 channels of the result, no multiple of 4 and more than 16, were"),
    (FPROP, (256, 256), (3, 3), "bfloat16", None),
])  # fmt: skip
def test_kinds_without_times_are_left_to_xla_untuned(
    kind: type[Any], channels: tuple[int, int], kernel: tuple[int, int], dtype: str, reason: str | None
) -> None:
    p = problem(kind, (28, 28), kernel, *channels, padding=kernel[0] // 2, dtype=dtype)
    found = IM2COL.of(p).why_xla_untuned(p)
    assert found is None if reason is None else str(found).startswith(reason)


@pytest.mark.parametrize(("channels", "size", "kernel", "changes", "by"), [
    (4, 84, 8, {"stride": 4}, 4),
    (4, 84, 8, {"stride": 4, "padding": ((0, 0), (2, 2))}, 2),
    (3, 84, 4, {"stride": 4}, 4),
    (3, 84, 4, {"stride": 2}, 1),
    (4, 86, 8, {"stride": 4}, 2),
    (4, 84, 7, {"stride": 2}, 1),
    (4, 84, 8, {}, 1),
    (64, 84, 8, {"stride": 4}, 4),
    (4, 84, 8, {"stride": 4, "rhs_dilation": 2}, 1),
    (4, 84, 8, {"stride": 4, "dtype": "bfloat16"}, 1),
])  # fmt: skip
def test_pixels_are_joined_where_windows_have_whole_ones(
    channels: int, size: int, kernel: int, changes: dict[str, Any], by: int
) -> None:
    p = problem(FPROP, (21, size), (4, kernel), channels, 32, **{"dtype": "float32", **changes})
    found = joined(p)
    assert (found.in_channels, found.input_spatial) == (channels * by, (21, size // by))
    assert (found.kernel_spatial[1] * by, found.window_strides[1] * by) == (kernel, p.window_strides[1])
    assert found.out_shape == p.out_shape and found.flops == p.flops and found.bytes_moved == p.bytes_moved


@pytest.mark.parametrize(("config", "reason"), [
    (Config(96, 64, 4), "tile 96x64; accepted"),
    (Config(64, 32, 8), "tile 64x32; accepted"),
    (Config(0, 0, 2), "tile 0x0; accepted"),
    (Config(64, 0, 2, workers=1), "tile 64x0; accepted"),
    (Config(64, 64, 4, taps=3), "taps 3; accepted: 1"),
    (Config(64, 64, 8, 5, "workspace"), "splits 5; accepted for 4 blocks of k: 1 to 4"),
    (Config(64, 64, 8, 4, "workspace"), None),
    (Config(64, 64, 8, 4, "cluster"), None),
    (Config(64, 64, 8, 4, "nowhere"), "reduction nowhere; accepted: none, workspace, cluster"),
    (Config(64, 64, 8, swap=True), "swap True; accepted: False"),
    (Config(64, 64, 8, swap=True, workers=1), None),
    (Config(64, 256, 5, swap=True, workers=1), "stages 5; accepted: 2 to 4"),
    (Config(64, 64, 8, workers=2), "workers 2; accepted: 1 to 1"),
    (Config(64, 64, 8, 2, "workspace", workers=1), "splits 2; accepted: 1"),
])  # fmt: skip
def test_refuses_configs(config: Config, reason: str | None) -> None:
    """Splits are counted in the longest phase."""
    p = problem(DGRAD, (8, 8), (3, 3), 64, 64, stride=2, padding=1)
    refusal = im2col.DGRAD.config_refusal(p, config)
    assert refusal is None if reason is None else str(refusal).startswith(reason)


def test_persistent_thread_blocks_have_room_for_two_stages() -> None:
    p = problem(FPROP, (40, 40), (3, 3), 64, 64, padding=1)
    config = Config(64, 256, 2, taps=3, swap=True, workers=1)
    assert im2col.FPROP.config_refusal(p, config) is None
    refusal = str(im2col.FPROP.config_refusal(p, dataclasses.replace(config, tile_m=128)))
    assert refusal.startswith("tile 128x256 of 3 taps in a stage; accepted: 2 stages that fit")


@pytest.mark.parametrize(("kind", "channels", "change"), [
    (FPROP, (64, 64), {"out_dtype": "float32"}),
    (DGRAD, (64, 64), {"dtype": "float32"}),
    (FPROP, (64, 64), {"dtype": "float32"}),
    (FPROP, (64, 2), {}),
    (DGRAD, (68, 64), {}),
])  # fmt: skip
def test_persistent_thread_blocks_store_16_bytes(kind: type[Any], channels: tuple[int, int], change: Any) -> None:
    p = problem(kind, (8, 8), (3, 3), *channels, **change)
    family, config = IM2COL.of(p), Config(64, 64, 8, workers=1)
    assert "accepted: 16 bits, multiples of 8 channels" in str(family.config_refusal(p, config))
    assert not any(c.workers for c in family.candidates(p, DEFAULT_CUDA))


def test_a_warp_may_come_late_to_its_teams_turn() -> None:
    """Tiles have one stage here. If one warp arrives for its whole team, the other team goes ahead, and a warp that has
    not waited yet misses the phase. One in ten orders of the threads then ends in a deadlock."""
    p, config = problem(FPROP, (14, 18), (1, 1), 24, 144, batch=3), Config(64, 64, 4, swap=True, workers=3)
    with seeded(93) as rng:
        for seed in (768281227, 768281249, *rng.integers(2**31, size=15)):
            emulated.check(IM2COL.of(p), p, config, seed=int(seed))


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(("kernel", "channels", "groups", "config"), [
    ((1, 1), (24, 144), 1, Config(64, 64, 4, swap=True, workers=3)),
    ((1, 1), (24, 144), 1, Config(192, 64, 2, swap=True, workers=2)),
    ((1, 1), (144, 96), 1, Config(128, 64, 6, workers=2)),
    ((1, 1), (192, 192), 3, Config(64, 64, 3, swap=True, workers=3)),
    ((3, 3), (16, 16), 1, Config(64, 64, 6, workers=2)),
    ((3, 3), (64, 64), 1, Config(64, 64, 3, taps=3, swap=True, workers=2)),
    ((2, 3), (80, 80), 1, Config(64, 80, 2, workers=2)),
    ((2, 3), (2 * 72, 2 * 72), 2, Config(128, 80, 2, taps=3, workers=2)),
    ((2, 3), (80, 96), 1, Config(64, 96, 2, taps=3, workers=2)),
    ((3, 3), (96, 64), 1, Config(64, 128, 2, taps=3, swap=True, workers=1)),
    ((2, 5), (80, 24), 1, Config(128, 64, 2, taps=3, workers=2)),
    ((1, 3), (32, 48), 1, Config(64, 64, 3, taps=3, workers=2)),
])  # fmt: skip
def test_thread_blocks_of_one_column_load_its_weight_once(
    kind: type[Any], kernel: tuple[int, int], channels: tuple[int, int], groups: int, config: Config
) -> None:
    channels = channels[::-1] if kind is DGRAD else channels
    p = problem(kind, (14, 18), kernel, *channels, groups=groups, padding=kernel[0] // 2, batch=3)
    family = IM2COL.of(p)
    assert im2col_config.is_stationary(p, config)
    with seeded(91) as rng:
        emulated.check(family, p, config, seed=int(rng.integers(2**31)))


def test_candidates_keep_their_weight_where_they_can() -> None:
    for size, channels in ((56, (24, 144)), (56, (96, 24)), (28, (40, 240)), (112, (16, 96))):
        p = problem(FPROP, (size, size), (1, 1), *channels, batch=128)
        persistent = [c for c in IM2COL.of(p).candidates(p, DEFAULT_CUDA) if c.workers]
        assert persistent and all(im2col_config.is_stationary(p, c) for c in persistent)
    # A 3x3 weight of 80 channels takes 115 KB beside two or more stages. One of 128 channels does not fit.
    for channels, fits in ((80, True), (128, False)):
        p = problem(DGRAD, (28, 28), (3, 3), channels, channels, padding=1, batch=256)
        persistent = [c for c in IM2COL.of(p).candidates(p, DEFAULT_CUDA) if c.workers]
        assert any(im2col_config.is_stationary(p, c) for c in persistent) == fits


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(("size", "kernel", "groups", "config", "box"), [
    ((13, 20), (3, 3), 1, Config(192, 64, 3, taps=3, workers=1), 64),
    ((13, 20), (3, 3), 2, Config(64, 128, 2, taps=3, swap=True, workers=3), 64),
    ((11, 5), (3, 3), 1, Config(64, 64, 3, taps=3, workers=2), 32),
    ((70,), (5,), 2, Config(64, 64, 2, taps=5, workers=2), 32),
    ((3, 4, 6), (3, 3, 3), 1, Config(128, 64, 2, taps=3, workers=2), 64),
    ((40, 1), (3, 3), 1, Config(64, 64, 2, taps=3, workers=3), 0),
])  # fmt: skip
def test_rows_between_the_lines_of_images_are_not_stored(
    kind: type[Any], size: tuple[int, ...], kernel: tuple[int, ...], groups: int, config: Config, box: int
) -> None:
    """TMA stores boxes of the other rows, which overlap. Where a tile may have fewer rows than a box, threads do."""
    channels, padding = 72 * groups, tuple((tap // 2, tap // 2) for tap in kernel)
    p = problem(kind, size, kernel, channels, channels, groups=groups, padding=padding, batch=3)
    macros = IM2COL.of(p).macros(p, config)
    assert (macros["RESULT_BOX"], macros["THREAD_STORES"]) == (box, box == 0)
    with seeded(97) as rng:
        emulated.check(IM2COL.of(p), p, config, seed=int(rng.integers(2**31)))


def test_groups_whose_weights_begin_off_16_bytes_are_transposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With such weights as they are TMA would end the GPU's context."""
    p = problem(FPROP, (6, 6), (1, 3), 64, 2 * 68, groups=2)
    emulated.check(im2col.FPROP, p, tile(64, 64))
    for module in (im2col, im2col_config):
        monkeypatch.setattr(module, "transposes", lambda _: False)
    x, w = (np.zeros(shape, ml_dtypes.bfloat16) for shape in p.operand_shapes)
    with pytest.raises(emulator.EmulationError, match="a tensor map's load from element 68"):
        emulator.run(im2col.FPROP.plan(p, tile(64, 64)), [x, w], [np.zeros(p.out_shape, ml_dtypes.bfloat16)])


def test_padded_groups_have_long_rows() -> None:
    """The fewest rows for TMA. Of the last row the kernel multiplies only what has channels."""
    of_groups = (24, 64, 4), (40, 128, 3), (48, 128, 3), (56, 128, 4), (72, 128, 1), (104, 128, 3), (64, 128, 4)
    for channels, row, steps in of_groups:
        p = problem(FPROP, (9, 10), (3, 3), 2 * channels, 2 * channels, groups=2)
        assert (im2col.row_bytes(p), im2col.last_steps(p)) == (row, steps)
        assert im2col.FPROP.why_xla_untuned(p) is None
        (dims, *_), groups = (each.dims for each in im2col.FPROP.maps(p, tile(64, 64))), channels != 64
        assert (dims[0], len(dims)) == ((channels, 5) if groups else (2 * channels, 4))


CUT_BLOCKS = [
    ((9, 10), (3, 3), 40, 2, Config(64, 48, 3, taps=3)),
    ((9, 10), (3, 3), 40, 2, Config(64, 64, 3, taps=3, swap=True, workers=2)),
    ((9, 10), (3, 3), 80, 2, Config(64, 80, 3, taps=3)),
    ((9, 10), (3, 3), 72, 2, Config(64, 64, 5, 5, "workspace")),
    ((9, 10), (3, 3), 80, 1, Config(128, 80, 3, workers=2)),
    ((9, 10), (2, 1), 144, 1, Config(64, 64, 4, 2, "cluster")),
    ((60,), (5,), 104, 3, Config(64, 112, 2, taps=5)),
    ((9, 10), (1, 1), 112, 1, Config(64, 64, 6, 2, "workspace")),
]  # fmt: skip


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(("size", "kernel", "channels", "groups", "config"), CUT_BLOCKS)
def test_last_blocks_of_channels_have_fewer_products(
    kind: type[Any], size: tuple[int, ...], kernel: tuple[int, ...], channels: int, groups: int, config: Config
) -> None:
    """Splits of the reduction begin at any block of a tap."""
    p = problem(kind, size, kernel, channels * groups, channels * groups, groups=groups, padding=1, batch=3)
    assert im2col.last_steps(p) < 4
    family, several = IM2COL.of(p), channels > 64
    macros = family.macros(p, config)
    assert (macros["LAST_STEPS"], macros["MIXED"]) == (-(-(channels % 64) // 16), several)
    assert family.filled(p, config) == pytest.approx(-(-channels // 16) / 4 / im2col.channel_blocks(p))
    with seeded(95) as rng:
        emulated.check(family, p, config, seed=int(rng.integers(2**31)))


@pytest.mark.parametrize(("channels", "groups", "config"), [
    (80, 1, Config(128, 80, 3, workers=2)),
    (72, 2, Config(64, 80, 2, taps=3, workers=1)),
    (72, 1, Config(128, 80, 2, taps=3, workers=1)),
    (144, 1, Config(64, 144, 3)),
    (80, 2, Config(64, 64, 4, 2, "workspace")),
])  # fmt: skip
def test_weights_of_large_passes_are_transposed_to_load_fewer_rows(
    channels: int, groups: int, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem(FPROP, (9, 10), (3, 3), channels * groups, channels * groups, groups=groups, batch=3)
    large = dataclasses.replace(p, batch=10**6)
    assert im2col.transposes(large) and not im2col.transposes(p)
    assert not im2col.transposes(problem(FPROP, (9, 10), (1, 1), 80, 80, batch=10**6))
    assert not im2col.transposes(problem(FPROP, (9, 10), (3, 3), 128, 112, batch=10**6))
    monkeypatch.setattr(im2col_config, "_TRANSPOSED_FLOPS", 0)
    assert im2col.FPROP.plan(p, config).launches[0].kernel == "fprop_im2col_transpose"
    with seeded(96) as rng:
        emulated.check(im2col.FPROP, p, config, seed=int(rng.integers(2**31)))


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(("channels", "changes", "row", "tile_n"), [
    ((64, 64), {}, 128, 64),
    ((32, 32), {}, 64, 32),
    ((24, 24), {}, 64, 32),
    ((16, 16), {}, 32, 16),
    ((8, 8), {}, 32, 16),
    ((40, 40), {}, 128, 48),
    ((60, 60), {}, 128, 64),
    ((64, 64), {"groups": 2}, 64, 32),
    ((192, 192), {"groups": 2}, 64, 64),
    ((192, 192), {"groups": 3}, 128, 64),
])  # fmt: skip
def test_few_channels_have_rows_and_columns_of_their_own_width(
    kind: type[Any], channels: tuple[int, int], changes: dict[str, Any], row: int, tile_n: int
) -> None:
    p = problem(kind, (9, 10), (3, 3), *channels, padding=1, **changes)
    assert im2col.row_bytes(p) == row
    assert min(config.tile_n for config in IM2COL.of(p).candidates(p, DEFAULT_CUDA)) == tile_n
    # With one tap, only the next group could fill the row.
    one = problem(kind, (9, 10), (1, 1), *channels, stride=2, **changes)
    assert im2col.row_bytes(one) == (row if changes else 128)


def test_partial_sums_that_integers_cannot_count_are_refused() -> None:
    """Tiles are wider than the result, which has the largest number of elements."""
    p = problem(FPROP, (2**20,), (9,), 8, 8, batch=200, padding=4)
    assert im2col.FPROP.refusal(p, tile(64, 16)) is None
    refusal = str(im2col.FPROP.refusal(p, tile(64, 16, 2, "workspace")))
    assert refusal == f"{200 * 2**20 * 16} partial sums of a split; accepted: at most {2**31 - 1 - 2**20}"
    assert all(im2col.FPROP.refusal(p, config) is None for config in im2col.FPROP.candidates(p, DEFAULT_CUDA))


def meeting(p: ConvProblem) -> list[set[tuple[int, int, int]]]:
    """For each spatial dimension, all (output pixel, tap, input pixel) that are multiplied."""
    forward = p if isinstance(p, ConvFpropProblem) else transposed(p)
    found = []
    for axis, (low, _) in enumerate(forward.padding):
        of = set()
        for pixel, tap in itertools.product(range(forward.output_spatial[axis]), range(forward.kernel_spatial[axis])):
            at = pixel * forward.window_strides[axis] - low + tap * forward.rhs_dilation[axis]
            if at % forward.lhs_dilation[axis] == 0:
                of.add((pixel, tap, at // forward.lhs_dilation[axis]))
        found.append(of)
    return found


@pytest.mark.parametrize(("kernel", "changes", "most", "tried"), [
    ((3, 3), {"padding": 1}, 3, {3}),
    ((3, 5), {"padding": 2, "rhs_dilation": (1, 2)}, 5, {5}),
    ((3, 3), {"stride": (2, 1)}, 3, {3}),
    ((3, 6), {"rhs_dilation": (1, 2)}, 5, {3}),
    ((3, 3), {"stride": (1, 2)}, 1, set()),
    ((3, 3), {"lhs_dilation": (2, 1)}, 1, set()),
    ((3, 1), {}, 1, set()),
    ((1, 11), {"padding": 5}, 9, {4, 6}),
    ((7, 7), {"padding": 3}, 7, {7}),
    ((2, 8), {"padding": 3}, 8, {4, 8}),
    ((1, 63), {"padding": 31}, 9, {3, 9}),
    ((1, 95), {"padding": 47}, 9, {5, 8}),
    ((1, 128), {"padding": 64}, 9, {4, 8}),
    ((1, 64), {"padding": 64, "rhs_dilation": (1, 2)}, 5, {4}),
    ((1, 64), {"rhs_dilation": (1, 9)}, 1, set()),
])  # fmt: skip
def test_taps_of_a_filter_row_share_pixels(
    kernel: tuple[int, ...], changes: dict[str, Any], most: int, tried: set[int]
) -> None:
    p = problem(FPROP, (90, 700), kernel, 64, 64, **changes)
    assert im2col.shared_taps(p) == tuple(range(1, most + 1))
    assert {config.taps for config in im2col.FPROP.candidates(p, DEFAULT_CUDA)} == {1, *tried}
    accepted = ", ".join(map(str, range(1, most + 1)))
    assert im2col.FPROP.refusal(p, Config(64, 64, 3, taps=10)) == f"taps 10; accepted: {accepted}"
    wide = str(im2col.FPROP.refusal(p, Config(128, 256, 2, taps=most)))
    assert most < 3 or wide.startswith(f"tile 128x256 of {most} taps in a stage; accepted: 2 stages that fit")


LONG_ROWS = [
    ((40,), (95,), 96, Config(256, 64, 3, taps=5), {"padding": 47, "groups": 2}),
    ((40,), (95,), 96, Config(64, 256, 2, taps=4, swap=True, workers=2), {"padding": 47, "groups": 2, "batch": 3}),
    ((40,), (128,), 96, Config(192, 64, 2, taps=8, workers=2), {"padding": ((64, 63),), "groups": 2, "batch": 3}),
    ((40,), (128,), 96, Config(64, 64, 3, 3, "workspace", 7), {"padding": ((64, 63),), "groups": 2}),
    ((6, 20), (1, 11), 64, Config(64, 128, 3, taps=4, swap=True, workers=2), {"padding": ((0, 0), (5, 5))}),
    ((6, 20), (2, 11), 40, Config(128, 64, 3, taps=3), {"padding": ((1, 0), (9, 4)), "rhs_dilation": (1, 2)}),
    ((2, 3, 9), (2, 2, 7), 72, Config(64, 64, 3, taps=4), {"padding": 2, "batch": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("size", "kernel", "channels", "config", "changes", "kind"), crossed(LONG_ROWS, BOTH))
def test_a_stage_has_a_part_of_a_long_filter_row(
    kind: type[Any], size: tuple[int, ...], kernel: tuple[int, ...], channels: int, config: Config, changes: Any
) -> None:
    """Its taps share their pixels, also where their number does not divide the row's length."""
    p = problem(kind, size, kernel, channels, channels, **changes)
    with seeded(94) as rng:
        for seed in rng.integers(2**31, size=2 if config.workers else 1):
            emulated.check(IM2COL.of(p), p, config, seed=int(seed))


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_no_infinity_leaves_its_window_by_taps_that_are_zeros(kind: type[Any], value: float) -> None:
    p = problem(kind, (60,), (11,), 64, 64, padding=5)
    emulated.check_not_finite(IM2COL.of(p), p, Config(64, 64, 3, taps=4), value)


def test_phases_meet_every_tap_of_every_pixel_once() -> None:
    with seeded(83) as rng:
        for given in (IM2COL.random(rng, BOTH[i % 2], 2e8) for i in range(80)):
            of, p = phases.axes(given), joined(given) if isinstance(given, ConvFpropProblem) else given
            if tuple(axis.out for axis in of) != p.out_shape[1:-1]:  # folded
                continue
            for axis, wanted in zip(of, meeting(p), strict=True):
                found = []
                for residue, i in itertools.product(axis.residues, range(axis.pixels)):
                    pixel = residue.place + i * axis.up
                    for tap in range(residue.taps):
                        place = axis.lower + i * axis.down + axis.offset(residue) + tap * axis.step
                        if pixel < axis.out:
                            found.append((pixel, residue.first + tap * axis.tap_step, place))
                assert len(found) == len(set(found)) and set(found) == wanted, str(p)
                # The box of origins has as many pixels as the phase.
                assert len(range(axis.lower, axis.size + axis.upper, axis.down)) == axis.pixels


def test_candidates_are_legal_and_their_arguments_fit() -> None:
    with seeded(84) as rng:
        for p in (IM2COL.random(rng, BOTH[i % 2], 2e8) for i in range(40)):
            family = IM2COL.of(p)
            found = family.candidates(p, DEFAULT_CUDA)
            assert found and len(set(found)) == len(found)
            for config in found:
                assert family.refusal(p, config) is None and family.estimate(p, config, DEFAULT_CUDA) > 0
            (main, *_) = family.plan(p, found[int(rng.integers(len(found)))]).launches
            assert sum(len(param.words()) for param in main.params) < 500  # 4 KiB
