"""The packed layout: exact round trips, its formula, and the conversions of the kernels simulated bit by bit."""

import dataclasses
import re
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from jax_splitk.ops.quantized_matmul import quantized_matmul
from jax_splitk.quantized import PackedWeight, QuantizedArray, dequantize, prepack, quantize, unpack
from jax_splitk.quantized.packing import LAYOUT_VERSION
from tests.exhaustive import crossed, thinned
from tests.formats import BITS, CASES, GROUPS, every_code, table

LANES = np.arange(32)
G, T = LANES // 4, LANES % 4


def equal(left: QuantizedArray, right: QuantizedArray) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def code_of(name: str, q: QuantizedArray) -> np.ndarray:
    """Codes [k, features], from the elements' bits."""
    raw = np.asarray(q.qvalue)
    if name == "int4":
        return raw.astype(np.int64) + 8
    return raw.view(np.uint8).astype(np.int64) & (2 ** BITS[name] - 1)


# ---- round trips -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "zero", "group", "scale_dtype"), thinned([(*case, *group) for case in CASES for group in GROUPS], 5)
)
def test_round_trip_of_every_code(name: str, zero: str | None, group: int, scale_dtype: str) -> None:
    q, _ = every_code(name, 384, 70, group, zero, scale_dtype)
    packed = prepack(q)
    assert (packed.shape, packed.qtype, packed.group_size, packed.layout) == ((384, 70), name, group, LAYOUT_VERSION)
    assert packed.words.shape == (2, 6, 4096 * BITS[name] // 32)
    assert packed.scale.shape == (2, 384 // group, 64)
    assert (packed.scale.dtype, packed.dtype) == (scale_dtype, q.dtype)
    equal(unpack(packed), q)


@pytest.mark.parametrize(("k", "features", "name"), crossed(
    [(1, 1), (63, 65), (64, 64), (65, 63), (100, 3), (7, 130), (129, 200)], ["int4", "float8_e4m3fn"]
))  # fmt: skip
def test_round_trip_of_odd_shapes(name: str, k: int, features: int) -> None:
    q, _ = every_code(name, k, features, k)
    packed = prepack(q)
    assert packed.words.shape[:2] == (-(-features // 64), -(-k // 64))
    assert packed.scale.shape == (-(-features // 64), 1, 64)
    equal(unpack(packed), q)


@pytest.mark.parametrize("k", [32, 96, 160])
def test_groups_of_32_in_half_a_tile(k: int) -> None:
    q, _ = every_code("uint4", k, 5, 32, "own")
    packed = prepack(q)
    assert packed.scale.shape == packed.zero_point.shape == (1, 1 if k == 32 else k // 32 + 1, 64)
    equal(unpack(packed), q)


def test_nan_and_negative_zero_keep_their_bits() -> None:
    patterns = jnp.arange(256).astype(jnp.uint8).reshape(64, 4)
    q = QuantizedArray(jax.lax.bitcast_convert_type(patterns, jnp.float8_e4m3fn), jnp.ones((1, 4)))
    equal(unpack(prepack(q)), q)


def test_scales_keep_their_bits() -> None:
    scale = jax.lax.bitcast_convert_type(jnp.arange(2**16).astype(jnp.uint16).reshape(1, -1), jnp.float16)
    q = QuantizedArray(jnp.zeros((32, 2**16), jnp.int4), scale)
    equal(unpack(prepack(q)), q)


def test_integer_zero_points_of_other_dtypes() -> None:
    for dtype, values in (("int8", range(-128, 128)), ("uint8", range(256)), ("int4", range(-8, 8))):
        zero_point = jnp.asarray([list(values)], jnp.int32).astype(dtype)
        scale = jnp.ones(zero_point.shape, jnp.bfloat16)
        q = QuantizedArray(jnp.zeros((64, zero_point.size), jnp.int8), scale, zero_point)
        packed = prepack(q)
        assert (packed.zero_point.dtype, packed.zero_dtype) == (jnp.bfloat16, dtype)
        equal(unpack(packed), q)


def test_zero_points_of_four_bits_change_their_type_alone() -> None:
    """Beyond a barrier, so that XLA for GPUs does not fuse the conversion with the order that packing makes."""
    zero_point = jnp.zeros((2, 64), jnp.int4)
    q = QuantizedArray(jnp.zeros((128, 64), jnp.int4), jnp.ones((2, 64), jnp.bfloat16), zero_point)
    for function, given, converted in (
        (lambda q: prepack(q).zero_point, q, "-> tensor<2x64xi8>"),
        (lambda packed: unpack(packed).zero_point, prepack(q), "-> tensor<2x64xi4>"),
    ):
        lines = jax.jit(function).lower(given).as_text().splitlines()
        conversion = next(i for i, line in enumerate(lines) if "stablehlo.convert" in line and converted in line)
        barrier = next(i for i, line in enumerate(lines) if "optimization_barrier" in line)
        before, after = sorted((conversion, barrier))
        name = lines[before].split("=")[0].strip()
        assert after == before + 1 and name in lines[after].split("=")[1]


def test_one_scale_for_several_features_is_repeated() -> None:
    q, _ = every_code("int4", 128, 6, 64)
    shared = QuantizedArray(q.qvalue, q.scale[:, ::3])
    unpacked = unpack(prepack(shared))
    np.testing.assert_array_equal(unpacked.scale, jnp.repeat(q.scale[:, ::3], 3, axis=1))
    np.testing.assert_array_equal(dequantize(unpacked), dequantize(shared))


def test_padding_holds_zeros() -> None:
    for name in BITS:
        q, _ = every_code(name, 70, 3, 70)
        # Unpacked as if it had no padding.
        whole = dataclasses.replace(prepack(q), dims=(128, 64), group_size=128)
        decoded = np.asarray(dequantize(dataclasses.replace(unpack(whole), scale=jnp.ones((1, 64)))))
        assert not decoded[70:].any()
        assert not decoded[:, 3:].any()
        assert not np.asarray(whole.scale)[0, 0][np.isin(np.arange(64), [0, 2, 4], invert=True)].any()


# ---- transformations -------------------------------------------------------------------------------------------------


def test_transformations() -> None:
    w = jax.random.normal(jax.random.key(0), (3, 96, 70))
    q = jax.vmap(lambda w: quantize(w, "uint4", group_size=32, symmetric=False))(w)
    packed = jax.jit(jax.vmap(prepack))(q)
    assert packed.words.shape == (3, 2, 2, 512)
    equal(jax.vmap(unpack)(packed), q)
    _, scanned = jax.lax.scan(lambda carry, p: (carry, unpack(p)), 0, packed)
    equal(scanned, q)
    shapes = jax.eval_shape(lambda w: prepack(quantize(w, "int8", group_size=32)), w[0])
    assert (shapes.shape, shapes.words.shape, shapes.nbytes) == ((96, 70), (2, 2, 1024), 4 * 4096 + 2 * 4 * 64 * 4)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(packed)]
    words = ".words-uint4-group32-96x70-contracts0-zeros_uint4-layout1"
    guard = ".guard-use-jax_splitk-shardings"
    assert paths == [words, ".scale", ".zero_point", guard]  # the first key says what the arrays do not


def test_without_implicit_promotion_of_ranks() -> None:
    q, _ = every_code("int4", 64, 5, 64)
    before = jax.config.jax_numpy_rank_promotion
    jax.config.update("jax_numpy_rank_promotion", "raise")
    try:
        equal(unpack(prepack(q)), q)
    finally:
        jax.config.update("jax_numpy_rank_promotion", before)


def test_bytes() -> None:
    q = quantize(jnp.ones((8192, 128), jnp.bfloat16), "int4", group_size=64)
    assert prepack(q).nbytes == q.nbytes == 8192 * 128 // 2 + 128 * 128 * 2
    assert prepack(q).ndim == q.ndim == 2
    q = quantize(jnp.ones((64, 3)), "uint4", group_size=None, symmetric=False)
    assert q.nbytes == 64 * 3 // 2 + 3 * 4 + 2  # three zero points of four bits
    assert quantize(jnp.ones((64, 3)), "float8_e4m3fn", group_size=32).nbytes == 64 * 3 + 2 * 3 * 4


# ---- the layout ------------------------------------------------------------------------------------------------------


def nibble(row: int, k: int) -> tuple[int, int]:
    """(byte, bit) inside a 2048-byte tile of 4-bit elements."""
    lane = row % 8 * 4 + k % 8 // 2
    return row // 16 * 512 + lane * 16 + k // 16 * 4 + k % 2 * 2 + k // 8 % 2, row // 8 % 2 * 4


def byte(row: int, k: int) -> tuple[int, int]:
    """(byte, bit) inside a 4096-byte tile of 8-bit elements."""
    lane = row % 8 * 4 + k % 8 // 2
    inside = k // 16 % 2 * 8 + row // 8 % 2 * 4 + k % 2 * 2 + k // 8 % 2
    return row // 16 * 1024 + k // 32 * 512 + lane * 16 + inside, 0


@pytest.mark.parametrize("name", BITS)
def test_formula(name: str) -> None:
    k, features = 192, 130
    q, _ = every_code(name, k, features, 64)
    packed, codes = prepack(q), code_of(name, q)
    tiles = np.asarray(packed.words).view(np.uint8)
    at, mask = (nibble, 15) if BITS[name] == 4 else (byte, 255)
    for row, col in np.ndindex(features, k):
        where, bit = at(row % 64, col % 64)
        assert (tiles[row // 64, col // 64, where] >> bit) & mask == codes[col, row]
    scale = np.asarray(packed.scale)
    for row, group in np.ndindex(features, 3):
        where = row % 64 // 16 * 16 + row % 8 * 2 + row // 8 % 2
        assert scale[row // 64, group, where] == q.scale[group, row]


def fragment_a(matrix: np.ndarray) -> np.ndarray:
    """[16, 16] in registers, in PTX's layout of A of mma.m16n8k16:"""
    lane, register, half = np.meshgrid(LANES, range(4), range(2), indexing="ij")
    return matrix[lane // 4 + 8 * (register % 2), 2 * (lane % 4) + half + 8 * (register // 2)]


def loads(packed: PackedWeight, tile: tuple[int, int], block: int) -> np.ndarray:
    """The registers of a warp's lanes after their 16-byte loads, for rows from 16 * block on:"""
    return np.asarray(packed.words)[tile].reshape(4, -1, 32, 4)[block]


@pytest.fixture(scope="module")
def int4() -> tuple[PackedWeight, np.ndarray]:
    """A packed weight and its codes as rows of the product's A operand, [features, k]."""
    q, _ = every_code("int4", 128, 128, 64)
    return prepack(q), code_of("int4", q).T


def test_words_are_bfloat16_fragments(int4: tuple[PackedWeight, np.ndarray]) -> None:
    packed, rows = int4
    for mt, kt, block in np.ndindex(2, 2, 4):
        words = loads(packed, (mt, kt), block)[0]
        for j in range(4):
            registers = [(words[:, j] >> np.uint32(4 * i)) & 0x000F000F | 0x43004300 for i in range(4)]
            decoded = np.stack(registers, axis=1).view(jnp.bfloat16).reshape(32, 4, 2).astype(np.float64) - 128
            part = rows[mt * 64 + block * 16 :, kt * 64 + j * 16 :][:16, :16]
            np.testing.assert_array_equal(decoded, fragment_a(part))


def test_words_are_float16_fragments_by_two_masks(int4: tuple[PackedWeight, np.ndarray]) -> None:
    packed, rows = int4
    words = loads(packed, (1, 0), 2)[0]
    for j in range(4):
        registers = []
        for shifted in (words[:, j], words[:, j] >> np.uint32(8)):
            registers += [shifted & 0x000F000F | 0x64006400, shifted & 0x00F000F0 | 0x64006400]
        decoded = np.stack(registers, axis=1).view(np.float16).reshape(32, 4, 2).astype(np.float64) - 1024
        decoded[:, 1::2] /= 16
        np.testing.assert_array_equal(decoded, fragment_a(rows[96:112, j * 16 : j * 16 + 16]))


def permuted(k: np.ndarray) -> np.ndarray:
    """The k at each place of the packed order of e4m3 fragments, within blocks of 16."""
    place = k % 16
    return k // 16 * 16 + 2 * (place // 4) + np.array([0, 8, 1, 9])[place % 4]


def fragment_a8(matrix: np.ndarray) -> np.ndarray:
    """[16, 32] in registers, in PTX's layout of A of mma.m16n8k32:"""
    lane, register, part = np.meshgrid(LANES, range(4), range(4), indexing="ij")
    return matrix[lane // 4 + 8 * (register % 2), 4 * (lane % 4) + part + 16 * (register // 2)]


def test_words_are_e4m3_fragments_of_a_permuted_k(int4: tuple[PackedWeight, np.ndarray]) -> None:
    packed, rows = int4
    words = loads(packed, (0, 1), 3)[0]
    block = rows[48:64, 64:128][:, permuted(np.arange(64))]
    for pair in range(2):
        two = words[:, 2 * pair : 2 * pair + 2]
        registers = np.stack([two & 0x0F0F0F0F, (two >> np.uint32(4)) & 0x0F0F0F0F], axis=2).reshape(32, 4)
        values = table("float8_e4m3fn")[np.ascontiguousarray(registers).view(np.uint8).reshape(32, 4, 4)]
        np.testing.assert_array_equal(values * 2**9, fragment_a8(block[:, pair * 32 : pair * 32 + 32]))


def test_bytes_are_fragments() -> None:
    q, _ = every_code("int8", 64, 64, 64)
    packed, rows = prepack(q), np.asarray(q.qvalue, np.float64).T
    for block, j in np.ndindex(4, 4):
        words = loads(packed, (0, 0), block)[j // 2][:, j % 2 * 2 : j % 2 * 2 + 2]
        registers = []
        for i in range(4):
            pair = words[:, i % 2] >> np.uint32(8 * (i // 2))
            low = (pair & 0x007F007F | 0x43004300).view(jnp.bfloat16).astype(np.float64)
            sign = (pair & 0x00800080 | 0x43004300).view(jnp.bfloat16).astype(np.float64)
            registers.append((low - sign).reshape(32, 2))
        part = rows[block * 16 : block * 16 + 16, j * 16 : j * 16 + 16]
        np.testing.assert_array_equal(np.stack(registers, axis=1), fragment_a(part))


def test_bytes_are_e4m3_fragments_of_the_same_permuted_k() -> None:
    q, _ = every_code("float8_e4m3fn", 64, 64, 64)
    packed, rows = prepack(q), code_of("float8_e4m3fn", q).T[:, permuted(np.arange(64))]
    for block, h in np.ndindex(4, 2):
        registers = np.ascontiguousarray(loads(packed, (0, 0), block)[h]).view(np.uint8).reshape(32, 4, 4)
        part = rows[block * 16 : block * 16 + 16, h * 32 : h * 32 + 32]
        np.testing.assert_array_equal(registers, fragment_a8(part))


@pytest.mark.parametrize("symmetric", [True, False])
def test_no_features(symmetric: bool) -> None:
    q = quantize(jnp.ones((128, 0)), "int8", group_size=64, symmetric=symmetric)
    packed = prepack(q)
    assert (packed.shape, packed.words.shape, packed.group_size) == ((128, 0), (0, 2, 1024), 64)
    equal(unpack(packed), q)


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "scale_shape", "message"), [
    ((128, 4), (16, 4), "groups of 8 along axis 0 of a weight of shape (128, 4), scales of shape (16, 4); accepted: m"),
    ((4, 128), (4, 2), "groups of 1 along axis 0 of a weight of shape (4, 128), scales of shape (4, 2); accepted: mu"),
    ((0, 4), (0, 4), "a weight of shape (0, 4); accepted: k of at least 1"),
])  # fmt: skip
def test_prepack_errors(shape: tuple[int, ...], scale_shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        prepack(QuantizedArray(jnp.zeros(shape, jnp.int4), jnp.ones(scale_shape)))


@pytest.mark.parametrize("change", [
    {"words": np.zeros((1, 1, 512), np.uint32)},
    {"scale": np.zeros((2, 2, 64), np.float32)},
    {"zero_point": np.zeros((2, 2, 64), np.float32)},
    {"dims": (256, 5)},
])  # fmt: skip
def test_leaves_that_do_not_belong(change: dict[str, Any]) -> None:
    packed = prepack(every_code("int4", 64, 128, 64)[0])
    with pytest.raises(ValueError, match=r"accepted: \(\d, \d, 512\), \(\d, \d, 64\) and"):
        unpack(dataclasses.replace(packed, **change))


@pytest.mark.parametrize(("change", "message"), [
    ({"qtype": "int3"}, "of qtype 'int3'; accepted: int4, uint4, int8, "),
    ({"group_size": 48}, "group_size 48; accepted: 16, 32, 64, 128 where it divides k, or k"),
    ({"group_size": 256}, "of shape (192, 5) with group_size 256; accepted"),
    ({"group_size": 128}, "group_size 128; accepted"),
    ({"group_size": 0}, "group_size 0; accepted"),
    ({"group_size": 0, "dims": (0, 5)}, "group_size 0; accepted"),
])  # fmt: skip
def test_static_parts_that_no_kernel_reads(change: dict[str, Any], message: str) -> None:
    packed = dataclasses.replace(prepack(every_code("int4", 192, 5, 64)[0]), **change)
    for function in (unpack, lambda w: quantized_matmul(jnp.ones((3, 192)), w)):
        with pytest.raises(ValueError, match=re.escape(message)):
            function(packed)


def test_other_versions() -> None:
    packed = dataclasses.replace(prepack(every_code("int4", 64, 5, 64)[0]), layout=LAYOUT_VERSION + 1)
    with pytest.raises(ValueError, match=f"layout {LAYOUT_VERSION + 1}; accepted: {LAYOUT_VERSION}"):
        unpack(packed)


def test_types_that_cannot_be_packed() -> None:
    with pytest.raises(TypeError, match="a weight of type ArrayImpl; accepted: QuantizedArray"):
        prepack(jnp.ones((64, 4)))
    for function in (prepack, dequantize):
        with pytest.raises(TypeError, match=r"type PackedWeight; accepted: .*; jax_splitk\.unpack makes a Quant"):
            function(prepack(every_code("int4", 64, 5, 64)[0]))
    with pytest.raises(TypeError, match="packed of type QuantizedArray; accepted: PackedWeight"):
        unpack(every_code("int4", 64, 5, 64)[0])  # pyright: ignore[reportArgumentType]
