"""The host product with packed weights and its family module, called directly: no primitive, no selection."""

import concurrent.futures
import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import jax_splitk  # noqa: F401 (registers the handler)
from jax_splitk.kernels.quantized.host import FAMILY, Config
from jax_splitk.problems.quantized_matmul import OUT_DTYPES, X_DTYPES, QuantizedMatmulProblem
from jax_splitk.quantized import prepack
from jax_splitk.quantized.formats import FORMATS
from jax_splitk.runtime.target import Target
from tests.formats import BITS, CASES, GROUPS, SCALE_DTYPES, every_code, table

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the host handler runs on the CPU")

FOUR_CORES = Target("cpu", "cpu", "", 4)


@dataclasses.dataclass(frozen=True)
class Weight:
    """A packed weight and its values in float64, [k, features]."""

    words: np.ndarray
    scale: np.ndarray
    zero: np.ndarray | None
    values: np.ndarray
    qtype: str
    group: int

    def problem(self, rows: int, x_dtype: str, out_dtype: str) -> QuantizedMatmulProblem:
        zero_dtype = "none" if self.zero is None else self.zero.dtype.name
        k, features = self.values.shape
        static = (self.qtype, self.group, self.scale.dtype.name, zero_dtype)
        problem = QuantizedMatmulProblem(rows, k, features, x_dtype, out_dtype, *static)
        problem.validate()
        assert problem.words_shape == self.words.shape
        assert problem.scale_shape == self.scale.shape
        return problem

    @property
    def operands(self) -> tuple[np.ndarray, ...]:
        return (self.words, self.scale) if self.zero is None else (self.words, self.scale, self.zero)


def pack_elements(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [k, features] as words, from the layout's description in quantized/packing.py."""
    k, f = (axis.reshape(-1) for axis in np.indices(codes.shape))
    block, half, g = f % 64 // 16, f % 16 // 8, f % 8
    step, octet, t, e = k % 64 // 16, k % 16 // 8, k % 8 // 2, k % 2
    if bits == 4:
        word, place = ((block * 8 + g) * 4 + t) * 4 + step, 4 * e + 2 * octet + half
    else:
        word, place = ((((block * 2 + step // 2) * 8 + g) * 4 + t) * 2 + step % 2) * 2 + half, 2 * e + octet
    shape = (-(-codes.shape[1] // 64), -(-codes.shape[0] // 64), 64 * 64 * bits // 32)
    words = np.zeros(shape, np.uint32)
    np.add.at(words, (f // 64, k // 64, word), codes.reshape(-1).astype(np.uint32) << (bits * place).astype(np.uint32))
    return words


def pack_scales(x: np.ndarray, k: int, group: int) -> np.ndarray:
    """Scales or zero points [groups, features] in the packed order."""
    groups = 1 if group == k else -(-k // 64) * 64 // group
    packed = np.zeros((-(-x.shape[1] // 64), groups, 64), x.dtype)
    i, f = (axis.reshape(-1) for axis in np.indices(x.shape))
    packed[f // 64, i, f % 64 // 16 * 16 + f % 8 * 2 + f % 16 // 8] = x.reshape(-1)
    return packed


def pack(name: str, patterns: np.ndarray, scale: np.ndarray, zero: np.ndarray | None) -> Weight:
    """A weight of bit patterns [k, features], with scales and zero points [groups, features]."""
    k, group = patterns.shape[0], patterns.shape[0] // scale.shape[0]
    codes = (patterns + FORMATS[name].code_bias) % 2 ** BITS[name]
    value = table(name)[patterns]
    if zero is not None:
        value = (value - np.repeat(zero.astype(np.float64), group, axis=0)).astype(np.float32).astype(np.float64)
    return Weight(
        pack_elements(codes, BITS[name]),
        pack_scales(scale, k, group),
        None if zero is None else pack_scales(zero, k, group),
        value * np.repeat(scale.astype(np.float64), group, axis=0),
        name,
        group,
    )


def random_weight(
    name: str, k: int, features: int, group: int, zero: str | None, scale_dtype: str, rng: np.random.Generator
) -> Weight:
    """Values that float32 sums exactly: bits of a limited range, scales that are powers of two, halves as zero points.

    `zero`: the dtype of the zero points or None; "own" for integers, which have the scale's dtype when packed.
    """
    usable = np.flatnonzero(np.abs(table(name)) <= (16 if name == "float8_e4m3fn" else np.inf))
    patterns = rng.choice(usable, (k, features))
    shape = (k // group, features)
    scale = (rng.choice([-2, -1, -0.5, 0.5, 1, 2], shape)).astype(jnp.dtype(scale_dtype))
    zero_point = None
    if zero is not None:
        integers = rng.integers(-8, 16, shape)
        dtype = jnp.dtype(scale_dtype if zero == "own" else zero)
        zero_point = (integers if zero == "own" else integers / 2).astype(dtype)
    return pack(name, patterns, scale, zero_point)


def as_dtype(values: Any, dtype: str) -> np.ndarray:
    return np.asarray(values).astype(jnp.dtype(dtype))


def run(problem: QuantizedMatmulProblem, config: Config, *operands: Any, **changes: Any) -> np.ndarray:
    """The custom call with its result and workspace full of NaN beforehand: donated arguments become its results."""
    plan = FAMILY.plan(problem, config).custom_call()
    out = changes.pop("out", jax.ShapeDtypeStruct(problem.out_shape, jnp.dtype(problem.out_dtype)))
    workspace = jax.ShapeDtypeStruct((changes.pop("size", plan.workspace_bytes),), np.uint8)
    call = jax.ffi.ffi_call(plan.target, (out, workspace))
    attributes = {**plan.attributes, **changes}

    @functools.partial(jax.jit, donate_argnums=(0, 1), keep_unused=True)
    def poisoned(out: jax.Array, workspace: jax.Array, *operands: jax.Array) -> list[jax.Array]:
        return call(*operands, **attributes)

    nan = jnp.full(out.shape, np.nan if jnp.issubdtype(out.dtype, jnp.floating) else -1, out.dtype)
    ones = jnp.full(workspace.shape, 255, workspace.dtype)
    addresses = [nan.unsafe_buffer_pointer(), ones.unsafe_buffer_pointer()]
    results = poisoned(nan, ones, *operands)
    assert [r.unsafe_buffer_pointer() for r in results] == addresses, "the poison did not arrive"
    return np.asarray(results[0])


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["uint4", "int8"])
def test_the_tests_pack_as_prepack_does(name: str) -> None:
    q, expected = every_code(name, 160, 70, 32, "bfloat16")
    packed = prepack(q)
    patterns = np.asarray(q.qvalue).astype(np.int32) % 2 ** BITS[name]
    weight = pack(name, patterns, np.asarray(q.scale), np.asarray(q.zero_point))
    np.testing.assert_array_equal(packed.words[:, :2], weight.words[:, :2])
    np.testing.assert_array_equal(packed.scale, weight.scale)
    np.testing.assert_array_equal(packed.zero_point, weight.zero)
    np.testing.assert_array_equal(expected, weight.values)


@pytest.mark.parametrize(("group", "scale_dtype"), GROUPS)
@pytest.mark.parametrize(("name", "zero"), CASES)
def test_one_hot_activations_decode_every_code(name: str, zero: str | None, group: int, scale_dtype: str) -> None:
    rng = np.random.default_rng(1)
    finite = np.flatnonzero(np.isfinite(table(name)))
    patterns = rng.permutation(np.resize(finite, 384 * 5)).reshape(384, 5)
    shape = (384 // group, 5)
    scale = as_dtype(rng.uniform(0.25, 4, shape) * rng.choice([-1, 1], shape), scale_dtype)
    zero_point = None
    if zero is not None:
        zero_point = rng.choice(table(name), shape) if zero == "own" else rng.uniform(-8, 8, shape)
        zero_point = as_dtype(zero_point, scale_dtype if zero == "own" else zero)
    weight = pack(name, patterns, scale, zero_point)
    x_dtype, out_dtype = X_DTYPES[group % 3], OUT_DTYPES[(group + len(name)) % 3]
    one_hot = as_dtype(np.eye(384), x_dtype)
    out = run(weight.problem(384, x_dtype, out_dtype), Config(3, 100), one_hot, *weight.operands)
    np.testing.assert_array_equal(out, as_dtype(weight.values.astype(np.float32), out_dtype))


def random_case(seed: int) -> tuple[Weight, np.ndarray, QuantizedMatmulProblem, Config]:
    rng = np.random.default_rng(seed)
    name, zero = CASES[seed % len(CASES)]
    group = int(rng.choice([32, 64, 128, 0]))
    k = group * int(rng.integers(1, 7)) if group else int(rng.choice([1, 2, 7, 63, 64, 65, 130, 300]))
    features, rows = (int(rng.choice(sizes)) for sizes in ([1, 3, 64, 65, 127, 200], [1, 2, 5, 6, 9, 24, 25, 61]))
    weight = random_weight(name, k, features, group or k, zero, str(rng.choice(SCALE_DTYPES)), rng)
    x_dtype, out_dtype = str(rng.choice(X_DTYPES)), str(rng.choice(OUT_DTYPES))
    x = as_dtype(rng.integers(-3, 4, (rows, k)), x_dtype)
    problem = weight.problem(rows, x_dtype, out_dtype)
    most = min(problem.k_tiles, 4)
    return weight, x, problem, Config(int(rng.integers(1, most + 1)), int(rng.choice([1, 7, 24, 30, 64])))


def exact(weight: Weight, x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) @ weight.values


@pytest.mark.parametrize("seed", range(36))
def test_integers_are_exact(seed: int) -> None:
    weight, x, problem, config = random_case(seed)
    assert FAMILY.refusal(problem, config) is None
    out = run(problem, config, x, *weight.operands)
    expected = as_dtype(exact(weight, x).astype(np.float32), problem.out_dtype)
    np.testing.assert_array_equal(out, expected, err_msg=f"{problem} {config}")


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("x_dtype", X_DTYPES)
@pytest.mark.parametrize("name", ["int4", "float8_e4m3fn", "nf4"])
def test_error_is_no_larger_than_that_of_a_float32_product(name: str, x_dtype: str, out_dtype: str) -> None:
    rng = np.random.default_rng(2)
    patterns = rng.choice(np.flatnonzero(np.isfinite(table(name))), (1024, 96))
    weight = pack(name, patterns, as_dtype(rng.uniform(0.5, 2, (16, 96)), "bfloat16"), None)
    x = as_dtype(rng.standard_normal((13, 1024)), x_dtype)
    product = jnp.matmul(x.astype(np.float32), weight.values.astype(np.float32), precision="highest")
    out = run(weight.problem(13, x_dtype, out_dtype), Config(4, 24), x, *weight.operands)

    def error(result: Any) -> float:
        return float(np.linalg.norm(np.asarray(result, np.float64) - exact(weight, x)))

    assert error(out) <= 2 * error(product.astype(out_dtype))


@pytest.mark.parametrize("magnitude", [1e-30, 1e30])
@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float32"])
def test_extreme_scales(scale_dtype: str, magnitude: float) -> None:
    rng = np.random.default_rng(3)
    scale = as_dtype(rng.uniform(0.5, 1, (4, 70)) * magnitude, scale_dtype)
    weight = pack("int4", rng.integers(0, 16, (128, 70)), scale, as_dtype(rng.integers(-8, 8, (4, 70)), scale_dtype))
    x = as_dtype(rng.standard_normal((5, 128)), "bfloat16")
    out = run(weight.problem(5, "bfloat16", "float32"), Config(2, 24), x, *weight.operands)
    expected = exact(weight, x)
    assert np.abs(out - expected).max() <= 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("x_dtype", X_DTYPES)
def test_every_activation_is_read_as_it_is(x_dtype: str) -> None:
    dtype = jnp.dtype(x_dtype)
    x = np.arange(2 ** (8 * dtype.itemsize)).astype(f"uint{8 * dtype.itemsize}").view(dtype).reshape(-1, 1)
    weight = pack("int8", np.array([[1]]), as_dtype([[1]], "float32"), None)
    # XLA runs with subnormal floats flushed to zero; those of bfloat16 are such.
    expected = np.where(np.abs(x.astype(np.float32)) < 2.0**-126, 0, x.astype(np.float32))
    out = run(weight.problem(x.size, x_dtype, "float32"), Config(1, 1024), x, *weight.operands)
    np.testing.assert_array_equal(out, expected)


def test_nan_reaches_only_what_depends_on_it() -> None:
    rng = np.random.default_rng(4)
    weight = random_weight("int4", 130, 70, 130, "own", "float32", rng)
    problem = weight.problem(9, "bfloat16", "float32")
    x = as_dtype(rng.integers(-3, 4, (9, 130)), "bfloat16")
    clean = run(problem, Config(2, 24), x, *weight.operands)
    x[4, 129] = np.nan
    scale = weight.scale.copy()
    scale[1, 0, 0] = np.inf  # feature 64
    out = run(problem, Config(2, 24), x, weight.words, scale, weight.zero)
    same = np.ones(out.shape, bool)
    same[4], same[:, 64] = False, False
    np.testing.assert_array_equal(out[same], clean[same])
    assert not np.isfinite(out[~same]).any()


# ---- order -----------------------------------------------------------------------------------------------------------

LARGER = ("int4", 1024, 200, 64, "own", "bfloat16")


def larger(rows: int = 61) -> tuple[Weight, np.ndarray, QuantizedMatmulProblem]:
    rng = np.random.default_rng(5)
    weight = random_weight(*LARGER, rng)
    x = as_dtype(rng.standard_normal((rows, 1024)), "bfloat16")
    return weight, x, weight.problem(rows, "bfloat16", "float32")


@pytest.mark.parametrize("splits", [1, 5, 16])
def test_results_repeat_bitwise_whatever_the_row_block(splits: int) -> None:
    weight, x, problem = larger()
    first = run(problem, Config(splits, 24), x, *weight.operands)
    for i in range(9):
        again = run(problem, Config(splits, (24, 7, 61)[i % 3]), x, *weight.operands)
        np.testing.assert_array_equal(again, first)


def test_concurrent_calls() -> None:
    weight, x, problem = larger(8)
    expected = run(problem, Config(3, 24), x, *weight.operands)
    call = FAMILY.plan(problem, Config(3, 24)).custom_call()
    results = (jax.ShapeDtypeStruct(expected.shape, "float32"), jax.ShapeDtypeStruct((call.workspace_bytes,), "uint8"))
    function = jax.jit(lambda *operands: jax.ffi.ffi_call(call.target, results)(*operands, **call.attributes)[0])
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for result in pool.map(lambda _: np.asarray(function(x, *weight.operands)), range(40)):
            np.testing.assert_array_equal(result, expected)


# ---- what is refused -------------------------------------------------------------------------------------------------


def small() -> tuple[Weight, np.ndarray, QuantizedMatmulProblem]:
    rng = np.random.default_rng(6)
    weight = random_weight("int4", 192, 70, 64, "own", "bfloat16", rng)
    return weight, as_dtype(np.ones((3, 192)), "bfloat16"), weight.problem(3, "bfloat16", "bfloat16")


def test_no_rows() -> None:
    weight, x, problem = small()
    empty = dataclasses.replace(problem, rows=0)
    assert run(empty, Config(2, 24), x[:0], *weight.operands).shape == (0, 70)
    assert all(FAMILY.estimate(empty, config, FOUR_CORES) > 0 for config in FAMILY.candidates(empty, FOUR_CORES))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 0}, "workspace has 0 bytes"),
        ({"splits": np.int64(0)}, "splits = 0 must lie within 1..3 for k = 192"),
        ({"splits": np.int64(4)}, "splits = 4 must lie within 1..3"),
        ({"row_block": np.int64(0)}, "row_block = 0 must lie within 1..1024"),
        ({"row_block": np.int64(1025)}, "row_block = 1025"),
        ({"group_size": np.int64(48)}, "group_size = 48 must be 32, 64 or 128 and divide k = 192, or be k"),
        ({"group_size": np.int64(128)}, "group_size = 128 must"),
        ({"group_size": np.int64(32)}, "do not fit for groups of 32"),
        ({"qtype": "int5"}, "qtype = int5 is not one of the six formats"),
        ({"qtype": "int8"}, r"words \(2, 3, 512\).* do not fit"),
        ({"out": jax.ShapeDtypeStruct((3, 129), jnp.bfloat16)}, "do not fit"),
        ({"out": jax.ShapeDtypeStruct((2, 70), jnp.bfloat16)}, "do not fit"),
        ({"out": jax.ShapeDtypeStruct((3, 70), jnp.int32)}, "element types"),
        ({"out": jax.ShapeDtypeStruct((210,), jnp.bfloat16)}, r"must be \[rows, k\] and \[rows, features\]"),
    ],
)
def test_invalid_calls_are_refused(changes: dict[str, Any], message: str) -> None:
    weight, x, problem = small()
    expected = f"INVALID_ARGUMENT: .*jax_splitk host quantized_matmul: .*{message}"
    with pytest.raises(jax.errors.JaxRuntimeError, match=expected):
        run(problem, Config(2, 24), x, *weight.operands, **changes)


def test_other_operands_are_refused() -> None:
    weight, x, problem = small()
    for operands, message in (
        ((x.astype(np.float32), *weight.operands), "element types"),
        ((x, weight.words.view(np.int32), *weight.operands[1:]), "element types"),
        ((x, *weight.operands[:2], weight.zero[:, :1]), "do not fit"),
        ((x, *weight.operands, weight.scale), "more than four operands"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            run(problem, Config(2, 24), *operands)


# ---- the family ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(36, 42))
def test_workspace_formulas_agree(seed: int) -> None:
    weight, x, problem, config = random_case(seed)
    size = FAMILY.workspace_bytes(problem, config)
    assert size == FAMILY.plan(problem, config).workspace_bytes
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"workspace has {size - 1} bytes, expected {size}"):
        run(problem, config, x, *weight.operands, size=size - 1)


def test_supports_names_value_and_range() -> None:
    problem = QuantizedMatmulProblem(8, 192, 70, "bfloat16", "bfloat16", "int4", 64, "bfloat16")
    assert FAMILY.refusal(problem, Config(3, 1024)) is None
    assert FAMILY.refusal(problem, Config(4, 24)) == "splits=4 is outside 1..3 (k / 64 rounded up, at most 256)."
    assert "splits=0" in str(FAMILY.refusal(problem, Config(0, 24)))
    assert FAMILY.refusal(problem, Config(1, 1025)) == "row_block=1025 is outside 1..1024."
    assert "row_block=0" in str(FAMILY.refusal(problem, Config(1, 0)))
    for argument in ("rows", "k", "features"):
        changed = dataclasses.replace(problem, **{argument: 2**31})
        assert FAMILY.refusal(changed) == f"{argument}={2**31}; at most {2**31 - 1} is supported."
    long = dataclasses.replace(problem, k=64 * 300)
    assert FAMILY.refusal(long, Config(256, 24)) is None
    assert "outside 1..256" in str(FAMILY.refusal(long, Config(257, 24)))


@pytest.mark.parametrize(("rows", "k", "features"), [(1, 1, 1), (16, 8192, 3584), (600, 192, 70), (0, 64, 64)])
def test_candidates_and_neighbours(rows: int, k: int, features: int) -> None:
    problem = QuantizedMatmulProblem(rows, k, features, "bfloat16", "bfloat16", "int4", k, "bfloat16")
    configs = FAMILY.candidates(problem, FOUR_CORES)
    assert configs
    assert len(set(configs)) == len(configs) <= 24
    for config in configs:
        assert FAMILY.refusal(problem, config) is None
        assert FAMILY.estimate(problem, config, FOUR_CORES) > 0
        for neighbour in FAMILY.neighbours(problem, config, FOUR_CORES):
            assert neighbour != config
            assert FAMILY.refusal(problem, neighbour) is None


def test_estimates_order_what_was_measured() -> None:
    def estimate(rows: int, config: Config, features: int = 1024) -> float:
        problem = QuantizedMatmulProblem(rows, 4096, features, "bfloat16", "bfloat16", "int4", 64, "bfloat16")
        return FAMILY.estimate(problem, config, FOUR_CORES)

    assert estimate(256, Config(1, 264)) < estimate(256, Config(1, 24))  # decoded once, not eleven times
    assert estimate(8, Config(4, 24), features=64) < estimate(8, Config(1, 24), features=64)  # else three idle
    assert estimate(8, Config(1, 24)) < estimate(8, Config(64, 24))


def test_preferred() -> None:
    problem = QuantizedMatmulProblem(8, 1024, 1024, "bfloat16", "bfloat16", "int4", 64, "bfloat16")
    assert FAMILY.unmeasured_refusal(problem) is None
    assert "rows=129" in str(FAMILY.unmeasured_refusal(dataclasses.replace(problem, rows=129)))
    tiny = dataclasses.replace(problem, rows=1, k=2, features=2, group_size=2)
    assert "so small" in str(FAMILY.unmeasured_refusal(tiny))
    assert FAMILY.unmeasured_refusal(dataclasses.replace(problem, rows=128)) is None
