"""Each format is read bit for bit as its library dequantizes it."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import jax_splitk
from jax_splitk import PackedWeight, PermutedWeight, QuantizedArray
from tests.checkpoints import writers
from tests.checkpoints.writers import Written
from tests.problems import seeded

FORMATS: dict[str, Callable[[np.random.Generator, int, int], Written]] = {
    "gptq, version 1": lambda rng, k, n: writers.gptq(rng, 2 * k, n, 32),
    "gptq, version 2": lambda rng, k, n: writers.gptq(rng, 2 * k, n, 64, version=2),
    "gptq, symmetric": lambda rng, k, n: writers.gptq(rng, 2 * k, n, k, symmetric=True, dtype=writers.BF16),
    "gptq, symmetric, version 2": lambda rng, k, n: writers.gptq(rng, k, n, 32, symmetric=True, version=2),
    "gptq, act-order": lambda rng, k, n: writers.gptq(rng, 2 * k, n, 32, act_order=True),
    "gptq, act-order, symmetric": lambda rng, k, n: writers.gptq(rng, k, n, 32, act_order=True, symmetric=True),
    "gptq, one group": lambda rng, k, n: writers.gptq(rng, k, n, -1),
    "gptq without g_idx": lambda rng, k, n: writers.gptq(rng, k, n, 32, g_idx=False),
    "gptq, a last group that is smaller": lambda rng, k, n: writers.gptq(rng, 128 + 32, n, 128),
    "gptq, 8 bits": lambda rng, k, n: writers.gptq(rng, k, n, 32, bits=8),
    "gptq, 8 bits, version 2": lambda rng, k, n: writers.gptq(rng, k, n, 32, bits=8, version=2, act_order=True),
    "gptq, 8 bits, symmetric": lambda rng, k, n: writers.gptq(rng, k, n, 32, bits=8, symmetric=True),
    "awq": lambda rng, k, n: writers.awq(rng, 2 * k, n, 32),
    "awq, symmetric": lambda rng, k, n: writers.awq(rng, k, n, k, symmetric=True),
    "pack-quantized": lambda rng, k, n: writers.pack_quantized(rng, k, n + 3, 32),
    "pack-quantized, channels": lambda rng, k, n: writers.pack_quantized(rng, k + 3, n, None),
    "pack-quantized, zeros": lambda rng, k, n: writers.pack_quantized(rng, 2 * k, n, 64, zeros="packed"),
    "pack-quantized, int8 zeros": lambda rng, k, n: writers.pack_quantized(rng, k, n + 3, 32, zeros="int8"),
    "pack-quantized, g_idx": lambda rng, k, n: writers.pack_quantized(rng, 2 * k, n, 32, act_order=True),
    "pack-quantized, g_idx, zeros": lambda rng, k, n: writers.pack_quantized(
        rng, k, n, 32, act_order=True, zeros="packed"
    ),
    "pack-quantized, 8 bits": lambda rng, k, n: writers.pack_quantized(rng, k, n, 32, bits=8, zeros="packed"),
    "pack-quantized, experts": lambda rng, k, n: writers.stacked(
        [writers.pack_quantized(rng, k, n, 32, zeros="packed") for _ in range(3)]
    ),
    "nf4": writers.nf4,
    "nf4, nested": lambda rng, k, n: writers.nf4(rng, 64 * 5, 64, nested=True),
    "nf4, blocks across rows": lambda rng, k, n: writers.nf4(rng, 96, n),
    "nf4, blocks of several rows": lambda rng, k, n: writers.nf4(rng, 64, n, block=256),
    "nf4, stored as bfloat16": lambda rng, k, n: writers.nf4(rng, k, n, storage=writers.BF16),
    "mxfp4": lambda rng, k, n: writers.mxfp4(rng, 3, k, n),
    "nvfp4, compressed-tensors": lambda rng, k, n: writers.nvfp4(rng, k, n, library="compressed-tensors"),
    "nvfp4, modelopt": lambda rng, k, n: writers.nvfp4(rng, k, n, library="modelopt"),
    "nvfp4, experts": lambda rng, k, n: writers.stacked(
        [writers.nvfp4(rng, k, n, library="modelopt") for _ in range(2)]
    ),
    "fp8, blocks": lambda rng, k, n: writers.fp8_blocks(rng, 256, 128),
    "fp8, blocks that end within": lambda rng, k, n: writers.fp8_blocks(rng, 128 + 64, 128 + 8),
    "fp8, blocks of 64": lambda rng, k, n: writers.fp8_blocks(rng, k, n, (32, 64)),
    "fp8, experts": lambda rng, k, n: writers.stacked([writers.fp8_blocks(rng, 256, 128) for _ in range(2)]),
    "fp8, blocks of compressed-tensors": lambda rng, k, n: writers.fp8_compressed_blocks(rng, 64, 32),
    "fp8, features": lambda rng, k, n: writers.fp8(rng, k, n, shape=(n, 1)),
    "fp8, one scale": lambda rng, k, n: writers.fp8(rng, k, n, shape=(1,)),
    "fp8, one number": lambda rng, k, n: writers.fp8(rng, k, n, shape=()),
    "int8": writers.int8,
    "int8, zeros": lambda rng, k, n: writers.int8(rng, k, n, zeros=True),
}


def drawn(name: str, rng: np.random.Generator) -> Written:
    return FORMATS[name](rng, 64 * int(rng.integers(1, 3)), 8 * int(rng.integers(2, 10)))


def values(weight: Any, dtype: Any) -> np.ndarray:
    """The dequantized weight, in x's order of features."""
    if isinstance(weight, PermutedWeight):
        sorted_rows = values(weight.weight, dtype)
        found = np.empty_like(sorted_rows)
        found[np.asarray(weight.order)] = sorted_rows
        return found
    if isinstance(weight, PackedWeight):
        weight = jax_splitk.unpack(weight)
    assert isinstance(weight, QuantizedArray)
    return np.asarray(jax_splitk.dequantize(weight, dtype))


def same_bits(found: np.ndarray, expected: np.ndarray, units: int = 0) -> None:
    """`units`: allowed differences in units in the last place."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    if units:
        np.testing.assert_array_max_ulp(found, expected, units)
        return
    unsigned = np.dtype(f"u{found.dtype.itemsize}")
    wrong = (found.view(unsigned) != expected.view(unsigned)) & ~((found == 0) & (expected == 0))
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size}, first at {np.argwhere(wrong)[0]}"


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_those_of_the_library(name: str, tmp_path: pathlib.Path) -> None:
    with seeded(list(FORMATS).index(name)) as rng:
        written = drawn(name, rng)
        folder = writers.save(tmp_path, written)
        plain, packed = (jax_splitk.load_checkpoint(folder, pack=pack) for pack in (False, True))
        (weight,) = plain.read().values()
        key = "layers.0.up" + written.name
        assert list(plain) == list(packed) == [key]
        assert tuple(weight.shape) == plain.stored[key].shape == written.expected.shape
        same_bits(values(weight, written.expected.dtype), written.expected, written.units)
        (weight,) = packed.read().values()
        inner = weight.weight if isinstance(weight, PermutedWeight) else weight
        assert isinstance(inner, PackedWeight)
        assert weight.shape == written.expected.shape
        same_bits(values(weight, written.expected.dtype), written.expected, written.units)


@pytest.mark.parametrize(("name", "scale", "channel"), [
    ("mxfp4", "float8_e8m0fnu", False),
    ("nvfp4, compressed-tensors", "float8_e4m3fn", True),
    ("nvfp4, modelopt", "float8_e4m3fn", True),
])  # fmt: skip
def test_scales_keep_their_byte(name: str, scale: str, channel: bool, tmp_path: pathlib.Path) -> None:
    """Also in a file of packed weights, and in the bytes that a report shows."""
    with seeded(103) as rng:
        folder = writers.save(tmp_path, drawn(name, rng))
    for pack in (False, True):
        ((key, weight),) = jax_splitk.load_checkpoint(folder, pack=pack).read().items()
        assert (weight.scale.dtype, weight.channel_scale is not None) == (scale, channel)
        elements = 4 * weight.words.size if pack else weight.qvalue.size // 2
        assert weight.nbytes == elements + weight.scale.size + (4 * weight.channel_scale.size if channel else 0)
        jax_splitk.save_file({key: weight}, tmp_path / "again.safetensors")
        again = jax_splitk.load_file(tmp_path / "again.safetensors", {key: weight})[key]
        same_bits(values(again, np.float32), values(weight, np.float32))
        assert again.scale.dtype == scale


@pytest.mark.parametrize("name", list(FORMATS)[::3])
def test_strict_promotion_and_transfers(name: str, tmp_path: pathlib.Path) -> None:
    with seeded(99) as rng:
        folder = writers.save(tmp_path, drawn(name, rng))
    with (
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
        jax.transfer_guard("disallow"),
    ):
        jax_splitk.load_checkpoint(folder, pack=True).read()


@pytest.mark.parametrize(("name", "qtype", "zero"), [
    ("gptq, version 1", "uint4", "uint8"),
    ("gptq, symmetric", "int4", None),
    ("gptq, symmetric, version 2", "int4", None),
    ("gptq, 8 bits, symmetric", "int8", None),
    ("awq", "uint4", "uint8"),
    ("awq, symmetric", "int4", None),
    ("pack-quantized", "int4", None),
    ("pack-quantized, zeros", "int4", "int8"),
    ("nf4", "nf4", None),
    ("mxfp4", "float4_e2m1fn", None),
    ("fp8, blocks", "float8_e4m3fn", None),
    ("int8", "int8", None),
])  # fmt: skip
def test_elements_and_zero_points_have_these_types(
    name: str, qtype: str, zero: str | None, tmp_path: pathlib.Path
) -> None:
    with seeded(100) as rng:
        (weight,) = jax_splitk.load_checkpoint(writers.save(tmp_path, drawn(name, rng))).values()
    assert weight.qtype == qtype
    assert (None if weight.zero_point is None else weight.zero_point.dtype.name) == zero


def test_zero_points_of_sixteen(tmp_path: pathlib.Path) -> None:
    """Version 1 of GPTQ stores 15 for them."""
    with seeded(101) as rng:
        (weight,) = jax_splitk.load_checkpoint(writers.save(tmp_path, writers.gptq(rng, 64, 64, 32))).values()
    assert (int(weight.zero_point.min()), int(weight.zero_point.max())) == (1, 16)


@pytest.mark.parametrize("group", [256, 192, 96])
def test_packing_divides_groups_that_kernels_do_not_take(group: int, tmp_path: pathlib.Path) -> None:
    with seeded(102) as rng:
        written = writers.gptq(rng, 2 * group, 16, group)
        (weight,) = jax_splitk.load_checkpoint(writers.save(tmp_path, written), pack=True).values()
        assert weight.group_size == {256: 128, 192: 64, 96: 32}[group]
        same_bits(values(weight, np.float16), written.expected)


def test_groups_that_cannot_be_packed_stay_quantized_arrays(tmp_path: pathlib.Path) -> None:
    with seeded(108) as rng:
        written = writers.gptq(rng, 48, 16, 24)
        (weight,) = jax_splitk.load_checkpoint(writers.save(tmp_path, written), pack=True).values()
        assert isinstance(weight, QuantizedArray) and weight.group_size == 24
        same_bits(values(weight, np.float16), written.expected)


def test_scales_of_mxfp4_are_every_power_of_two_and_nan(tmp_path: pathlib.Path) -> None:
    """2**-127 is subnormal, and byte 255 is NaN. XLA may take subnormal numbers for 0, so the scale itself is
    compared."""
    scale = np.arange(256, dtype=np.uint8).reshape(1, 8, 32)
    blocks = np.full((1, 8, 32, 16), 0x22, np.uint8)
    folder = writers.write(tmp_path, {"w_blocks": blocks, "w_scales": scale}, {"quant_method": "mxfp4"})
    (weight,) = jax_splitk.load_checkpoint(folder).values()
    found = np.asarray(weight.scale)[0].T.ravel().astype(np.float64)
    assert np.array_equal(found[:255], 2.0 ** (np.arange(255) - 127))
    assert np.isnan(found[255])
    assert np.isnan(np.asarray(jax_splitk.dequantize(weight))[0, -32:, 7]).all()


def test_dense_mxfp4_and_mxfp8_of_compressed_tensors(tmp_path: pathlib.Path) -> None:
    with seeded(103) as rng:
        written = writers.mxfp4(rng, 1, 64, 24)
        packed = written.tensors["_blocks"].reshape(24, 32)
        tensors = {"a.weight_packed": packed, "a.weight_scale": written.tensors["_scales"][0]}
        config = writers.compressed("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 32})
        (weight,) = jax_splitk.load_checkpoint(writers.write(tmp_path / "4", tensors, config), pack=True).values()
        same_bits(values(weight, writers.BF16), written.expected[0])
        eight = rng.standard_normal((24, 64)).astype(writers.E4M3)
        tensors = {"a.weight": eight, "a.weight_scale": written.tensors["_scales"][0]}
        config = writers.compressed("mxfp8-quantized", {"num_bits": 8, "type": "float", "group_size": 32})
        (weight,) = jax_splitk.load_checkpoint(writers.write(tmp_path / "8", tensors, config), pack=True).values()
        powers = 2.0 ** (written.tensors["_scales"][0].astype(np.float64) - 127)
        expected = (eight.astype(np.float64) * np.repeat(powers, 32, axis=1)).T
        same_bits(values(weight, writers.BF16), expected.astype(writers.BF16))


def test_fused_weights_of_nvfp4_have_scales_of_their_own(tmp_path: pathlib.Path) -> None:
    """q, k and v have different global scales. Joined, each still has its own: the scales hold them."""
    with seeded(104) as rng:
        each = {name: writers.nvfp4(rng, 64, 16, library="modelopt") for name in "qkv"}
        tensors = {name + end: array for name, w in each.items() for end, array in w.tensors.items()}
        folder = writers.write(tmp_path, tensors, each["q"].config)
        weights = list(jax_splitk.load_checkpoint(folder).values())
        joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), *weights)
        same_bits(values(joined, np.float32), np.concatenate([w.expected for w in each.values()], axis=1))


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("name", ["gptq, act-order", "gptq, act-order, symmetric", "pack-quantized, g_idx"])
def test_product_with_act_order(name: str, pack: bool, tmp_path: pathlib.Path) -> None:
    with seeded(105) as rng:
        written = drawn(name, rng)
        (weight,) = jax_splitk.load_checkpoint(writers.save(tmp_path, written), pack=pack).values()
        x = rng.integers(-3, 4, (5, weight.shape[0])).astype(np.float32)
        y = jax.jit(lambda x, w: x @ w)(x, weight)
        given = jax_splitk.quantized_matmul(x[..., weight.order], weight.weight)
        np.testing.assert_array_equal(y, given)
        np.testing.assert_array_equal(y, x @ weight)  # with NumPy's array first
        w = written.expected.astype(np.float64)  # rounded to 16 bits, unlike those of a float32 product
        assert (np.abs(y - x @ w) <= 2**-8 * (np.abs(x) @ np.abs(w))).all()


@pytest.mark.parametrize("pack", [False, True])
def test_stacks_under_scan(pack: bool, tmp_path: pathlib.Path) -> None:
    """Layers with act-order, each in an order of its own."""
    with seeded(109) as rng:
        each = [writers.gptq(rng, 64, 64, 32, act_order=True, symmetric=True) for _ in range(3)]
        tensors = {f"{i}{end}": array for i, w in enumerate(each) for end, array in w.tensors.items()}
        weights = jax_splitk.load_checkpoint(writers.write(tmp_path, tensors, each[0].config), pack=pack).read()
        stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights.values())
        assert stack.shape == (3, 64, 64)
        x = jnp.asarray(rng.integers(-3, 4, (5, 64)), jnp.float32)
        found, _ = jax.lax.scan(lambda x, w: (x @ w, None), x, stack)
        expected = x
        for w in weights.values():
            expected = expected @ w
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        if pack:  # a QuantizedArray does not say which axes count weights
            y = jnp.stack([x] * 3) @ stack
            np.testing.assert_allclose(y, jnp.stack([x @ w for w in weights.values()]), rtol=1e-5, atol=1e-5)


def test_plain_arrays_stay_as_they_are(tmp_path: pathlib.Path) -> None:
    with seeded(106) as rng:
        tensors = {
            "embed.weight": rng.standard_normal((4, 6)).astype(writers.BF16),
            "norm.weight": rng.standard_normal(6).astype(np.float16),
            "head.weight": rng.standard_normal((3, 6)).astype(np.float32),
            "head.bias": rng.standard_normal(3).astype(np.float32),
            "steps": np.array([2**40, 1]),
            "none": np.zeros((0, 4), np.float32),
        }
        folder = writers.write(tmp_path, tensors, None)
        for pack in (False, True):
            checkpoint = jax_splitk.load_checkpoint(folder, pack=pack)
            found = checkpoint.read()
            assert set(found) == set(tensors)
            for name, array in tensors.items():
                assert isinstance(found[name], jax.Array if pack and name != "steps" else np.ndarray)
                assert found[name].dtype == array.dtype and np.array_equal(found[name], array)
        assert checkpoint.stored["head.weight"].bias == "head.bias"
        assert checkpoint.stored["norm.weight"].bias is None


def test_biases_are_named_by_their_weights(tmp_path: pathlib.Path) -> None:
    with seeded(107) as rng:
        one, other = writers.awq(rng, 64, 16, 32), writers.mxfp4(rng, 2, 32, 8)
        bias = np.ones(16, np.float16)
        tensors = {"up" + end: array for end, array in one.tensors.items()} | {"up.bias": bias, "norm.weight": bias}
        checkpoint = jax_splitk.load_checkpoint(writers.write(tmp_path / "awq", tensors, one.config))
        assert checkpoint.stored["up.weight"].bias == "up.bias"
        assert checkpoint.stored["up.weight"].tensors == ("up.qweight", "up.qzeros", "up.scales")
        assert [s.format for s in checkpoint.stored.values()] == ["awq", "array", "array"]
        assert np.array_equal(checkpoint["up.bias"], bias)
        tensors = {"experts.up" + end: array for end, array in other.tensors.items()}
        tensors["experts.up_bias"] = np.ones((2, 8), writers.BF16)
        checkpoint = jax_splitk.load_checkpoint(writers.write(tmp_path / "mxfp4", tensors, other.config))
        assert checkpoint.stored["experts.up"].bias == "experts.up_bias"
