"""The host product with packed weights and its family, called directly: no primitive, no selection."""

import concurrent.futures
import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import jax_splitk  # noqa: F401 (registers the handler)
from jax_splitk.kernels.cpu.quantized import FAMILY, Config
from jax_splitk.problems.quantized_matmul import OUT_DTYPES, X_DTYPES, QuantizedMatmulProblem
from jax_splitk.quantized import QuantizedArray, prepack
from jax_splitk.runtime import execute
from jax_splitk.runtime.target import Target
from tests.exhaustive import crossed, thinned
from tests.float64 import rounded
from tests.formats import CASES, GROUPS, SCALE_DTYPES
from tests.products import Case, as_float32_product, error, exact_weight, integers, normal, operands

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the host handler runs on the CPU")

FOUR_CORES = Target("cpu", "cpu", "", 4)


def run(problem: QuantizedMatmulProblem, config: Config, *operands: Any, **changes: Any) -> np.ndarray:
    """Runs the custom call with result and workspace full of NaN beforehand: donated arguments become its results.
    Converts operands and result as `execute.call` does."""
    plan = FAMILY.plan(problem, config).custom_call()
    out = changes.pop("out", jax.ShapeDtypeStruct(problem.out_shape, jnp.float32))
    operands = tuple(
        np.asarray(operand).astype(np.float32) if jnp.issubdtype(operand.dtype, jnp.floating) else operand
        for operand in operands
    )
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
    return np.asarray(results[0]).astype(jnp.dtype(problem.out_dtype))


def product(case: Case, config: Config, q: QuantizedArray, x: Any) -> np.ndarray:
    return run(case.problem, config, *operands(prepack(q), x, case.x_dtype))


# ---- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "zero", "group", "scale_dtype"), thinned([(*c, *g) for g in GROUPS for c in CASES], 5)
)
def test_one_hot_activations_decode_every_code(name: str, zero: str | None, group: int, scale_dtype: str) -> None:
    x_dtype, out_dtype = X_DTYPES[group % 3], OUT_DTYPES[(group + len(name)) % 3]
    case = Case(384, 384, 5, name, group, zero, scale_dtype, x_dtype, out_dtype)
    q, weight = case.every_code()
    np.testing.assert_array_equal(product(case, Config(3, 100), q, np.eye(384)), rounded(weight, out_dtype))


def random_case(seed: int) -> tuple[Case, Config]:
    rng = np.random.default_rng(seed)
    name, zero = CASES[seed % len(CASES)]
    group = int(rng.choice([16, 32, 64, 128, 0]))
    k = group * int(rng.integers(1, 7)) if group else int(rng.choice([1, 2, 7, 63, 64, 65, 130, 300]))
    features, rows = (int(rng.choice(sizes)) for sizes in ([1, 3, 64, 65, 127, 200], [1, 2, 5, 6, 9, 24, 25, 61]))
    types = (str(rng.choice(each)) for each in (SCALE_DTYPES, X_DTYPES, OUT_DTYPES))
    case = Case(rows, k, features, name, group or k, zero, *types, channel=bool(rng.integers(2)))
    most = min(case.problem.k_tiles, 4)
    return case, Config(int(rng.integers(1, most + 1)), int(rng.choice([1, 7, 24, 30, 64])))


@pytest.mark.parametrize("seed", thinned(range(36), 3))
def test_integers_are_exact(seed: int) -> None:
    case, config = random_case(seed)
    assert FAMILY.refusal(case.problem, config) is None
    q, weight = exact_weight(case, seed)
    x = integers(case, 3, seed)
    np.testing.assert_array_equal(product(case, config, q, x), rounded(x @ weight, case.out_dtype), err_msg=str(case))


@pytest.mark.parametrize(("name", "x_dtype", "out_dtype"), crossed(
    ["int4", "float8_e4m3fn", "nf4"], X_DTYPES, ["float32", "bfloat16"]
))  # fmt: skip
def test_error_is_no_larger_than_that_of_a_float32_product(name: str, x_dtype: str, out_dtype: str) -> None:
    case = Case(13, 1024, 96, name, 64, None, "bfloat16", x_dtype, out_dtype)
    (q, weight), x = case.every_code(), normal(case)
    exact = np.asarray(x.astype(jnp.float32), np.float64) @ weight
    assert error(product(case, Config(4, 24), q, x), exact) <= 2 * error(as_float32_product(case, x, weight), exact)


@pytest.mark.parametrize("magnitude", [1e-30, 1e30])
@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float32"])
def test_extreme_scales(scale_dtype: str, magnitude: float) -> None:
    case = Case(5, 128, 70, "int4", 32, "own", scale_dtype, out_dtype="float32")
    (q, weight), x = case.every_code(), normal(case)
    scale = (q.scale.astype(jnp.float32) * magnitude).astype(scale_dtype)
    change = np.asarray(scale.astype(jnp.float32), np.float64) / np.asarray(q.scale.astype(jnp.float32), np.float64)
    exact = np.asarray(x.astype(jnp.float32), np.float64) @ (weight * np.repeat(change, 32, axis=0))
    out = product(case, Config(2, 24), dataclasses.replace(q, scale=scale), x)
    assert np.abs(out - exact).max() <= 1e-6 * np.abs(exact).max()


@pytest.mark.parametrize("x_dtype", X_DTYPES)
def test_every_activation_is_read_as_it_is(x_dtype: str) -> None:
    dtype = jnp.dtype(x_dtype)
    x = np.arange(2 ** (8 * dtype.itemsize)).astype(f"uint{8 * dtype.itemsize}").view(dtype).reshape(-1, 1)
    case = Case(x.size, 1, 1, "int8", 1, None, "float32", x_dtype, "float32")
    q = QuantizedArray(jnp.ones((1, 1), jnp.int8), jnp.ones((1, 1)))
    # XLA flushes subnormal floats to zero, also those of bfloat16.
    expected = np.where(np.abs(x.astype(np.float32)) < 2.0**-126, 0, x.astype(np.float32))
    np.testing.assert_array_equal(product(case, Config(1, 1024), q, x), expected)


def test_nan_reaches_only_what_depends_on_it() -> None:
    case = Case(9, 130, 70, "int4", 130, "own", "float32", out_dtype="float32")
    q, _ = exact_weight(case, 4)
    x = integers(case, 3, 4)
    clean = product(case, Config(2, 24), q, x)
    x[4, 129] = np.nan
    out = product(case, Config(2, 24), dataclasses.replace(q, scale=q.scale.at[0, 64].set(np.inf)), x)
    same = np.ones(out.shape, bool)
    same[4], same[:, 64] = False, False
    np.testing.assert_array_equal(out[same], clean[same])
    assert not np.isfinite(out[~same]).any()


# ---- order ---------------------------------------------------------------------------------------------------------

LARGER = Case(61, 1024, 200, "int4", 64, "own", out_dtype="float32")


@pytest.mark.parametrize("splits", [1, 5, 16])
def test_results_repeat_bitwise_whatever_the_row_block(splits: int) -> None:
    q, x = LARGER.every_code()[0], normal(LARGER)
    first = product(LARGER, Config(splits, 24), q, x)
    for i in range(9):
        np.testing.assert_array_equal(product(LARGER, Config(splits, (24, 7, 61)[i % 3]), q, x), first)


def test_concurrent_calls() -> None:
    q, x = LARGER.every_code()[0], normal(LARGER)
    expected = product(LARGER, Config(3, 24), q, x)
    call = FAMILY.plan(LARGER.problem, Config(3, 24)).custom_call()
    function = jax.jit(functools.partial(execute.call, call, LARGER.problem))
    given = operands(prepack(q), x, LARGER.x_dtype)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for result in pool.map(lambda _: np.asarray(function(*given)), range(40)):
            np.testing.assert_array_equal(result, expected)


# ---- what is refused -----------------------------------------------------------------------------------------------

SMALL = Case(3, 192, 70, "int4", 64, "own")


def small_operands() -> tuple[jax.Array, ...]:
    return operands(prepack(exact_weight(SMALL, 6)[0]), np.ones((3, 192)), SMALL.x_dtype)


def test_no_rows() -> None:
    x, *weight = small_operands()
    empty = dataclasses.replace(SMALL.problem, rows=0)
    assert run(empty, Config(2, 24), x[:0], *weight).shape == (0, 70)
    assert all(FAMILY.estimate(empty, config, FOUR_CORES) > 0 for config in FAMILY.candidates(empty, FOUR_CORES))


@pytest.mark.parametrize(("changes", "message"), [
    ({"size": 0}, "workspace has 0 bytes"),
    ({"splits": np.int64(0)}, "splits = 0 must lie within 1..3 for a reduction of 192"),
    ({"splits": np.int64(4)}, "splits = 4 must lie within 1..3"),
    ({"row_block": np.int64(0)}, "row_block = 0 must lie within 1..1024"),
    ({"row_block": np.int64(1025)}, "row_block = 1025"),
    ({"group_size": np.int64(48)}, "group_size = 48 must be 16, 32, 64 or 128 and divide k = 192, or be k"),
    ({"group_size": np.int64(128)}, "group_size = 128 must"),
    ({"group_size": np.int64(32)}, "do not fit for groups of 32"),
    ({"values": np.ones(32, np.float32)}, "values of 32 codes; accepted: 16 or 256"),
    ({"values": np.ones(256, np.float32)}, r"words \(2, 3, 512\).* do not fit"),
    ({"out": jax.ShapeDtypeStruct((3, 129), jnp.float32)}, "do not fit"),
    ({"out": jax.ShapeDtypeStruct((2, 70), jnp.float32)}, "do not fit"),
])  # fmt: skip
def test_invalid_calls_are_refused(changes: dict[str, Any], message: str) -> None:
    expected = f"INVALID_ARGUMENT: .*jax_splitk host product with packed weights: .*{message}"
    with pytest.raises(jax.errors.JaxRuntimeError, match=expected):
        run(SMALL.problem, Config(2, 24), *small_operands(), **changes)


def test_other_operands_are_refused() -> None:
    x, words, scale, zero = small_operands()
    for given, message in (
        ((x, words.view(np.int32), scale, zero), "expected U32 but got S32"),
        ((x[0], words, scale, zero), "expected 2 but got 1"),
        ((x, words, scale, zero[:, :1]), "do not fit"),
        ((x, words, scale, words), "zero points and channel scales must be of F32"),
        ((x, words, scale), "0 operands after scale; accepted: zero points"),
        ((x, words, scale, zero, scale), "2 operands after scale; accepted: zero points"),
        ((x, words[None], scale, zero), "1 operands after scale; accepted: .* of a stack of weights, group_sizes"),
        ((x, words[None], scale, zero, zero), "group_sizes must be of S32"),
        ((x, words[None], scale, zero, np.array([3], np.int32)), "do not fit"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            run(SMALL.problem, Config(2, 24), *given)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"channel scales \(2, 3, 64\) and out .* do not fit"):
        run(SMALL.problem, Config(2, 24), x, words, scale, zero, zero, has_channel=np.bool_(True))


# ---- the family ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(36, 42))
def test_workspace_formulas_agree(seed: int) -> None:
    case, config = random_case(seed)
    size = FAMILY.workspace_bytes(case.problem, config)
    assert size == FAMILY.plan(case.problem, config).workspace_bytes
    given = operands(prepack(case.every_code()[0]), np.ones((case.rows, case.k)), case.x_dtype)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"workspace has {size - 1} bytes, expected {size}"):
        run(case.problem, config, *given, size=size - 1)


def test_refusals_name_value_and_range() -> None:
    problem = QuantizedMatmulProblem(8, 192, 70, "bfloat16", "bfloat16", "int4", 64, "bfloat16")
    assert FAMILY.refusal(problem, Config(3, 1024)) is None
    assert FAMILY.refusal(problem, Config(4, 24)) == "splits 4; accepted: 1 to 3"
    assert "splits 0" in str(FAMILY.refusal(problem, Config(0, 24)))
    assert FAMILY.refusal(problem, Config(1, 1025)) == "row_block 1025; accepted: 1 to 1024"
    assert "row_block 0" in str(FAMILY.refusal(problem, Config(1, 0)))
    for argument in ("rows", "k", "features"):
        changed = dataclasses.replace(problem, **{argument: 2**31})
        assert FAMILY.refusal(changed) == f"{argument}={2**31}; accepted: at most {2**31 - 1}"
    long = dataclasses.replace(problem, k=64 * 300)
    assert FAMILY.refusal(long, Config(256, 24)) is None
    assert "accepted: 1 to 256" in str(FAMILY.refusal(long, Config(257, 24)))


@pytest.mark.parametrize(("rows", "k", "features"), [(1, 1, 1), (16, 8192, 3584), (600, 192, 70), (0, 64, 64)])
def test_candidates_and_neighbours(rows: int, k: int, features: int) -> None:
    problem = QuantizedMatmulProblem(rows, k, features, "bfloat16", "bfloat16", "int4", k, "bfloat16")
    configs = FAMILY.candidates(problem, FOUR_CORES)
    assert 1 <= len(set(configs)) == len(configs) <= 24
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

    assert estimate(256, Config(1, 264)) < estimate(256, Config(1, 24))  # the weight is decoded once, not eleven times
    assert estimate(8, Config(4, 24), features=64) < estimate(8, Config(1, 24), features=64)  # else three threads idle
    assert estimate(8, Config(1, 24)) < estimate(8, Config(64, 24))


def test_preferred_without_measurements() -> None:
    problem = QuantizedMatmulProblem(8, 1024, 1024, "bfloat16", "bfloat16", "int4", 64, "bfloat16")
    tiny = dataclasses.replace(problem, rows=1, k=2, features=2, group_size=2)
    for changed, reason in (
        (problem, None),
        (dataclasses.replace(problem, rows=128), None),
        (dataclasses.replace(problem, rows=129), "rows=129"),
        (tiny, "so small"),
    ):
        found = FAMILY.why_xla_untuned(changed)
        assert found is None if reason is None else reason in str(found)
