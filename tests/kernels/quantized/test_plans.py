"""Single plans of quantized products, and the order and arithmetic of the weights that they load. No GPU."""

import itertools

import numpy as np
import pytest
from jax import numpy as jnp

from jax_splitk.kernels.quantized import fp8, stream, tiled, tiles
from jax_splitk.kernels.quantized.dequantize import E4M3_FORMATS
from jax_splitk.quantized import prepack
from jax_splitk.runtime import plan
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import formats
from tests.products import E4M3, valid_problem

PLAIN = tiled.Config(128, 64, 4, 8, 1)


def test_plan_of_tiles() -> None:
    p = valid_problem(64, 1024, 1024)
    made = tiled.FAMILY.plan(p, PLAIN)
    assert [buffer.bytes for buffer in made.buffers] == [64 * 1024 * 2, 1024 * 512, 16 * 1024 * 2, 64 * 1024 * 2, 0]
    assert (made.maps[0].dims, made.maps[0].strides) == ((1024, 64), (2048,))
    (main,) = made.launches
    assert (main.kernel, main.grid, main.block) == ("quantized_tiled_int4", (8, 1, 1), (384, 1, 1))
    assert not main.programmatic
    assert main.shared_bytes < tiled.FAMILY.shared_bytes(p, PLAIN) <= tiles.SHARED_BYTES


def test_plan_with_everything() -> None:
    """x has rows that TMA cannot load, there are zero points, and tiles are cut."""
    p = valid_problem(70, 333, 200, qtype="uint4", group_size=333, zero_dtype="float32", scale_dtype="float32")
    config = tiled.Config(128, 32, 2, 4, 1)
    assert tiled.FAMILY.refusal(p, config) is None
    made = tiled.FAMILY.plan(p, config)
    assert [launch.kernel for launch in made.launches] == [
        f"quantized_tiled_uint4{role}" for role in ("_prepare", "", "_reduce")
    ]
    assert [launch.programmatic for launch in made.launches] == [False, True, True]
    x_map, workspace = made.maps[0], len(made.buffers) - 1
    assert (x_map.buffer, x_map.dims, x_map.strides) == (workspace, (333, 70), (336 * 2,))
    copy, sums, slots = -(-70 * 336 * 2 // 256) * 256, 3 * 96 * 4, 2 * 4 * 128 * 32 * 4
    assert made.workspace_bytes == copy + -(-sums // 256) * 256 + slots
    prepare, main, _ = made.launches
    assert prepare.grid[0] * 4 >= 96 * 3
    offsets = [param.offset for param in main.params if isinstance(param, plan.Pointer) and param.buffer == workspace]
    assert offsets == [copy, made.workspace_bytes - slots]


def test_activations_of_8_bits_are_copied_to_float16() -> None:
    made = tiled.FAMILY.plan(valid_problem(64, 1024, 1024, x_dtype=E4M3), PLAIN)
    assert [launch.kernel for launch in made.launches] == ["quantized_tiled_int4_prepare", "quantized_tiled_int4"]
    assert made.buffers[0].bytes == 64 * 1024
    assert made.workspace_bytes == 64 * 1024 * 2
    x_map = made.maps[0]
    assert (x_map.buffer, x_map.dtype, x_map.strides) == (len(made.buffers) - 1, "float16", (2048,))
    assert {("HALF", 1), ("X_E4M3", 1)} <= set(made.source.defines)


def test_plan_of_tiles_of_8_bits() -> None:
    p, config = valid_problem(256, 1024, 1024, x_dtype=E4M3), fp8.Config(128, 128, 4, 16, 1, multicast=2)
    made = fp8.FAMILY.plan(p, config)
    assert [buffer.bytes for buffer in made.buffers] == [256 * 1024, 1024 * 512, 16 * 1024 * 2, 256 * 1024 * 2, 0]
    # Pairs of e4m3; each block of a cluster loads half of a tile's rows.
    x_map = made.maps[0]
    assert (x_map.dims, x_map.strides, x_map.box) == ((512, 256), (1024,), (64, 64))
    (main,) = made.launches
    assert (main.kernel, main.grid, main.block) == ("quantized_fp8_int4", (16, 1, 1), (384, 1, 1))
    assert not main.programmatic
    assert main.shared_bytes < fp8.FAMILY.shared_bytes(p, config) <= tiles.SHARED_BYTES


@pytest.mark.parametrize(("k", "x_dtype", "by_tma"), [
    (4096, "bfloat16", True), (1000, "float16", True), (1004, "bfloat16", False), (999, "float16", False),
    (4096, E4M3, True), (1000, E4M3, False), (1008, E4M3, True),
])  # fmt: skip
def test_a_streams_x_comes_by_tma_where_its_rows_are_whole_16_bytes(k: int, x_dtype: str, by_tma: bool) -> None:
    p = valid_problem(5, k, 640, group_size=k, x_dtype=x_dtype)
    config = stream.FAMILY.candidates(p, DEFAULT_CUDA)[0]
    made = stream.FAMILY.plan(p, config)
    (launch,) = made.launches
    assert isinstance(launch.params[0], plan.MapParam) == by_tma
    if not by_tma:
        assert made.maps == ()
        return
    (x,) = made.maps
    assert isinstance(x, plan.TiledMap)
    item = 1 if x_dtype == E4M3 else 2
    assert (x.buffer, x.dtype) == (0, "bfloat16" if x_dtype == E4M3 else x_dtype)
    assert x.box[0] * 2 == 64 * item, "the width of the swizzle"
    assert x.swizzle == (2 if x_dtype == E4M3 else plan.SWIZZLE_128B)
    assert x.box[1] == config.tile_n
    if k % (64 * stream.stage_tiles(config)):  # a tile of 64 k
        assert (x.dims, x.strides, x.box[2:]) == ((k * item // 2, 5), (k * item,), ())
    else:  # a stage's tiles
        assert (x.dims, x.strides) == ((32 * item, 5, k // 64), (k * item, 64 * item))
        assert x.box[2:] == (stream.stage_tiles(config),)


@pytest.mark.parametrize("qtype", E4M3_FORMATS)
def test_two_lanes_words_hold_a_lanes_fragment(qtype: str) -> None:
    """`Words` of the device code: the bytes of the words that are row g (+ 8), k 4t to 4t + 3 of each 16."""
    q, _ = formats.every_code(qtype, 128, 64, 64)
    values = np.asarray(q.qvalue.astype(jnp.float32), np.float64)
    memory = np.asarray(prepack(q).words)[0].reshape(-1).view(np.uint8)
    eight = qtype == E4M3
    tile_bytes, table = 64 * 64 // (1 if eight else 2), formats.table(qtype)
    codes = np.roll(table, 8) if qtype == "int4" else table  # the codes of int4 are q + 8
    for warp, lane, step in itertools.product(range(4), range(32), range(4)):
        g, t = divmod(lane, 4)
        start = warp * (tile_bytes // 4) + (4 * g + t % 2 * 2) * 16 + step // 2 * tile_bytes + eight * step % 2 * 512
        words = memory[start : start + 32].reshape(2, 4, 4)
        for register in range(4):
            word = register if eight else step % 2 * 2 + register // 2
            picked = words[:, word, [0, 2] if t < 2 else [1, 3]].reshape(-1)
            if not eight:
                picked = picked >> 4 if register % 2 else picked & 15
            k = step * 32 + register // 2 * 16 + 4 * t
            np.testing.assert_array_equal(codes[picked], values[k : k + 4, warp * 16 + g + register % 2 * 8])


FOLDED = {"int4": (8, 0xBE00, ((0, 0x7F00), (4, 0x7D00))), "int8": (128, 0xC000, ((0, 0x7F00),))}


@pytest.mark.parametrize("qtype", FOLDED)
def test_scales_that_are_folded_into_the_decoding_round_once(qtype: str) -> None:
    """Every code times every scale from 2^-123 to below 2, as `fold` and `dequantize_scaled` of the device code compute
    it."""
    bias, minus_bits, fields = FOLDED[qtype]

    def value(bits: int) -> float:
        return float(np.array([bits], np.uint16).view(jnp.bfloat16)[0])

    def rounded(exact: np.ndarray) -> np.ndarray:
        single = exact.astype(np.float32)
        np.testing.assert_array_equal(single, exact)
        return single.astype(jnp.bfloat16).astype(np.float64)

    bits = np.arange(0x0200, 0x4000, dtype=np.uint16)  # 2^-123 to below 2
    scale = np.concatenate([bits, bits | 0x8000]).astype(np.uint16).view(jnp.bfloat16).astype(np.float64)
    minus = scale * value(minus_bits)
    np.testing.assert_array_equal(rounded(minus), minus)
    for shift, factor_bits in fields:
        factor = scale * value(factor_bits)
        np.testing.assert_array_equal(rounded(factor), factor)
        for code in range(2 * bias):
            fused = rounded((code << shift) * 2.0**-133 * factor + minus)
            np.testing.assert_array_equal(fused, rounded((code - bias) / 64 * scale))
