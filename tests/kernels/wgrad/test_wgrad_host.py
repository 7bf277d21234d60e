"""The host handler and its family module, called directly: no primitive, no selection."""

import concurrent.futures
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax import numpy as jnp

import jax_splitk  # noqa: F401 (registers the handler)
from jax_splitk.kernels.cpu.wgrad import FAMILY, Config
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime import execute
from jax_splitk.runtime.plan import HOST_WGRAD_TARGET
from jax_splitk.runtime.target import Target
from tests.exhaustive import crossed, thinned
from tests.float64 import conv_wgrad_on_host
from tests.on_gpu import xla
from tests.problems import conv

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the host handler runs on the CPU")

FOUR_CORES = Target("cpu", "cpu", "", 4)
DTYPES = ("float32", "bfloat16", "float16")


def make_problem(
    size: tuple[int, ...], kernel: tuple[int, ...], channels: tuple[int, int] = (4, 6), **more: Any
) -> Any:
    dtype = more.pop("dtype", "float32")
    return conv(size, kernel, channels, dtype=dtype, **{"out_dtype": dtype, **more})


def random_problem(rng: np.random.Generator, seed: int) -> ConvWgradProblem:
    """A problem of any rank, grouping and geometry, with small integers as inputs, so that its sums are exact."""
    rank = int(rng.integers(1, 4))
    groups, group_in, group_out = (int(rng.choice(v)) for v in ([1, 1, 2, 5, 70], [1, 1, 3, 8], [1, 2, 4, 9]))
    if groups == 1:
        group_in, group_out = int(rng.choice([1, 3, 16, 70])), int(rng.choice([1, 3, 8, 65]))

    def some(low: int, high: int, part: float = 1) -> tuple[int, ...]:
        return tuple(int(v) for v in rng.integers(low, high, rank)) if rng.random() < part else (1,) * rank

    return make_problem(
        some(3, (30, 10, 7)[rank - 1]), some(1, 4), (groups * group_in, groups * group_out), groups=groups,
        batch=int(rng.integers(1, 4)), stride=some(1, 4), padding=tuple(zip(some(-1, 4), some(-1, 4), strict=True)),
        lhs_dilation=some(1, 3, 0.4), rhs_dilation=some(1, 3, 0.4), dtype=DTYPES[seed % 3],
        out_dtype=str(rng.choice(DTYPES)),
    )  # fmt: skip


def random_config(rng: np.random.Generator, problem: ConvWgradProblem) -> Config:
    config = Config(int(rng.choice([1, 1, 2, 3, 7])), int(rng.choice([8, 24, 256])))
    most = max(1, problem.reduction_size)
    return dataclasses.replace(config, splits=min(config.splits, most))


def as_dtype(values: np.ndarray, dtype: str) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def integers(problem: ConvWgradProblem, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    shapes = (problem.lhs_shape, problem.g_shape)
    lhs, g = (as_dtype(rng.integers(-2, 3, shape), problem.dtype) for shape in shapes)
    return lhs, g


def normals(problem: ConvWgradProblem, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    shapes = (problem.lhs_shape, problem.g_shape)
    lhs, g = (as_dtype(rng.standard_normal(shape), problem.dtype) for shape in shapes)
    return lhs, g


def call_raw(problem: ConvWgradProblem, size: int, attributes: dict[str, Any], lhs: Any, g: Any) -> jax.Array:
    """The custom call with any workspace size, attributes and operands, legal or not."""
    out = jax.ShapeDtypeStruct(problem.out_shape, jnp.float32)
    call = jax.ffi.ffi_call(HOST_WGRAD_TARGET, (out, jax.ShapeDtypeStruct((size,), jnp.uint8)))
    return call(lhs, g, **attributes)[0]


@functools.cache
def program(problem: ConvWgradProblem, config: Config) -> Callable[[Any, Any], jax.Array]:
    assert FAMILY.refusal(problem, config) is None
    return jax.jit(functools.partial(execute.call, FAMILY.plan(problem, config).custom_call(), problem))


def call_host(problem: ConvWgradProblem, config: Config, lhs: Any, g: Any) -> jax.Array:
    return program(problem, config)(lhs, g)


@pytest.mark.parametrize("seed", thinned(range(60), 3))
def test_integers_are_exact(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, seed)
    lhs, g = integers(problem, rng)
    got = np.asarray(call_host(problem, random_config(rng, problem), lhs, g))
    expected = as_dtype(conv_wgrad_on_host(problem, lhs, g).astype(np.float32), problem.out_dtype)
    np.testing.assert_array_equal(got, expected, err_msg=str(problem))


@pytest.mark.parametrize(("size", "dilation", "cut"), [(2, 2, 1), (3, 2, 2), (4, 3, 6)])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_dilated_input_of_its_own_size_is_no_plain_product(size: int, dilation: int, cut: int, groups: int) -> None:
    """Negative padding cuts the holes' extent off again."""
    pads = ((0, -cut), (0, -cut))
    problem = make_problem((size, size), (1, 1), (32, 48), padding=pads, lhs_dilation=dilation, groups=groups)
    assert problem.output_spatial == problem.input_spatial
    lhs, g = integers(problem, np.random.default_rng(size))
    got = np.asarray(call_host(problem, Config(1, 64), lhs, g))
    np.testing.assert_array_equal(got, conv_wgrad_on_host(problem, lhs, g).astype(np.float32))


LARGER = [
    make_problem((14, 14), (3, 3), (24, 40), batch=4, padding=1),
    make_problem((12, 12), (1, 1), (70, 130), batch=4),
    make_problem((16, 16), (3, 3), (3, 600), stride=2, padding=((0, 1), (0, 1))),
    make_problem((14, 14), (5, 5), (100, 100), padding=2, groups=100),
    make_problem((14, 14), (3, 3), (32, 64), padding=1, groups=8),
    make_problem((14, 14), (3, 3), (65, 130), padding=1, groups=65),
]


@pytest.mark.parametrize(("problem", "dtype"), crossed(LARGER, DTYPES))
def test_error_is_no_larger_than_xlas(problem: ConvWgradProblem, dtype: str) -> None:
    problem = dataclasses.replace(problem, dtype=dtype, out_dtype=dtype)
    lhs, g = normals(problem, np.random.default_rng(0))
    expected = conv_wgrad_on_host(problem, lhs, g)

    def error(result: jax.Array) -> float:
        return float(np.abs(np.asarray(result).astype(np.float64) - expected).max())

    scale = float(np.abs(expected).max())
    assert error(call_host(problem, Config(4, 128), lhs, g)) <= max(2 * error(xla(problem)(lhs, g)), 1e-6 * scale)


@pytest.mark.parametrize("problem", LARGER, ids=str)
def test_results_repeat_bitwise_whatever_the_block(problem: ConvWgradProblem) -> None:
    lhs, g = normals(problem, np.random.default_rng(1))
    first = np.asarray(call_host(problem, Config(5, 64), lhs, g))
    for i in range(20):
        np.testing.assert_array_equal(np.asarray(call_host(problem, Config(5, (64, 24, 300)[i % 3]), lhs, g)), first)


def assert_same_floats(got: Any, expected: np.ndarray) -> None:
    with np.errstate(invalid="ignore"):  # float16's signalling NaNs
        np.testing.assert_array_equal(np.asarray(got).reshape(-1).astype(np.float32), expected.astype(np.float32))


def test_special_values_and_rounding() -> None:
    """Each 16-bit pattern times one is read, carried and rounded as ml_dtypes does."""
    patterns = np.arange(2**16, dtype=np.uint16)
    problem = make_problem((1,), (1,), (2**16, 1), batch=1)
    for dtype in ("float16", "bfloat16"):
        lhs = patterns.view(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16).reshape(1, 1, -1)
        # XLA flushes subnormal float32 numbers to zero, so also bfloat16's subnormals, but not float16's.
        if dtype == "bfloat16":
            lhs = np.where(np.abs(lhs.astype(np.float32)) < 2.0**-126, 0, lhs).astype(lhs.dtype)
        one = as_dtype(np.ones((1, 1, 1)), dtype)
        same = dataclasses.replace(problem, dtype=dtype, out_dtype=dtype)
        assert_same_floats(call_host(same, Config(1, 8), lhs, one), lhs.reshape(-1))
    wide = (
        np.random.default_rng(0).standard_normal(2**16).astype(np.float32)
        * np.float32(2) ** np.tile(np.arange(-28, 20, dtype=np.float32), 1366)[: 2**16]
    )
    for dtype in ("float16", "bfloat16"):
        narrowing = dataclasses.replace(problem, out_dtype=dtype)
        got = call_host(narrowing, Config(1, 8), wide.reshape(1, 1, -1), np.ones((1, 1, 1), np.float32))
        with np.errstate(over="ignore"):
            assert_same_floats(got, as_dtype(wide, dtype))


@pytest.mark.parametrize("empty", ["batch", "output", "channels"])
def test_empty_reductions_give_zeros(empty: str) -> None:
    problem = {
        "batch": make_problem((4, 4), (3, 3), batch=0),
        "output": make_problem((2, 2), (3, 3)),
        "channels": make_problem((4, 4), (3, 3), (0, 6)),
    }[empty]
    result = call_host(
        problem, Config(1, 8), np.ones(problem.lhs_shape, np.float32), np.ones(problem.g_shape, np.float32)
    )
    np.testing.assert_array_equal(np.asarray(result), np.zeros(problem.out_shape, np.float32))


SMALL = make_problem((5, 5), (3, 3))


def small_call(**changes: Any) -> jax.Array:
    call = FAMILY.plan(SMALL, Config(2, 8)).custom_call()
    lhs, g = (changes.pop(name, np.ones(getattr(SMALL, f"{name}_shape"), np.float32)) for name in ("lhs", "g"))
    size = changes.pop("size", call.workspace_bytes)
    problem = dataclasses.replace(SMALL, **changes.pop("problem", {}))
    return call_raw(problem, size, {**call.attributes, **changes}, lhs, g)


def geometry(place: int, value: int) -> np.ndarray:
    changed = FAMILY.attributes(SMALL)["geometry"].copy()
    changed[place] = value
    return changed


@pytest.mark.parametrize(("changes", "message"), [
    ({"size": 0}, "workspace has 0 bytes"),
    ({"splits": np.int64(0)}, "splits = 0 must lie within 1..18"),
    ({"splits": np.int64(19)}, "splits = 19 must lie within 1..18"),
    ({"block": np.int64(7)}, "block = 7 must lie within 8..4096"),
    ({"block": np.int64(4097)}, "block = 4097 must lie within"),
    ({"span": np.int64(0)}, "span = 0 of 1 groups"),
    ({"span": np.int64(2)}, "span = 2 of 1 groups must divide them"),
    ({"geometry": np.ones(24, np.int64)}, "geometry has 24 numbers, expected 25"),
    ({"geometry": geometry(0, -1)}, r"geometry\[0\] = -1 must lie within 0..2147483647"),
    ({"geometry": geometry(12, 0)}, r"geometry\[12\] = 0 must lie within 1.."),
    ({"geometry": geometry(21, 2**40)}, r"geometry\[21\] = 1099511627776 must lie within 1.."),
    ({"geometry": geometry(24, -(2**31))}, r"geometry\[24\] = -2147483648 must lie within -2147483647.."),
    ({"geometry": geometry(12, 3)}, "3 groups must divide 4 and 6 channels"),
    ({"geometry": geometry(12, 2)}, r"the weight \(3, 3, 4, 6\) are not of the geometry's sizes"),
    ({"geometry": geometry(3, 2**31 - 1)}, "are not of the geometry's sizes"),
    ({"lhs": np.ones((2, 5, 5, 5), np.float32)}, r"lhs \(2, 5, 5, 5\), .* are not of"),
    ({"g": np.ones((2, 3, 3, 5), np.float32)}, r"g \(2, 3, 3, 5\) .* are not of"),
    ({"problem": {"out_channels": 5}}, r"the weight \(3, 3, 4, 5\) are not of"),
])  # fmt: skip
def test_invalid_calls_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT: .*jax_splitk host wgrad: .*{message}"):
        small_call(**changes)


@pytest.mark.parametrize("name", ["lhs", "g"])
def test_operands_of_other_types_are_refused(name: str) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="Wrong buffer dtype: expected F32 but got F16"):
        small_call(**{name: np.ones(getattr(SMALL, f"{name}_shape"), np.float16)})


def workspace_cases() -> Iterator[tuple[ConvWgradProblem, Config]]:
    for seed in range(100, 115):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, seed)
        yield problem, random_config(rng, problem)
    for problem, dtype in itertools.product(LARGER, ("float32", "bfloat16")):
        yield dataclasses.replace(problem, dtype=dtype), Config(3, 64)


@pytest.mark.parametrize(("problem", "config"), list(workspace_cases()), ids=str)
def test_workspace_formulas_agree(problem: ConvWgradProblem, config: Config) -> None:
    call = FAMILY.plan(problem, config).custom_call()
    lhs, g = (np.zeros(shape, np.float32) for shape in (problem.lhs_shape, problem.g_shape))
    size = FAMILY.workspace_bytes(problem, config)
    assert size == call.workspace_bytes
    call_raw(problem, size, dict(call.attributes), lhs, g).block_until_ready()
    # A call that JAX does not wait for ends in a ValueError.
    wrong = (jax.errors.JaxRuntimeError, ValueError)
    with pytest.raises(wrong, match=f"workspace has {size - 1} bytes, expected {size}"):
        call_raw(problem, size - 1, dict(call.attributes), lhs, g).block_until_ready()


def test_concurrent_calls() -> None:
    problems = (LARGER[0], LARGER[3])
    inputs = [integers(problem, np.random.default_rng(3)) for problem in problems]

    def calls(index: int) -> list[np.ndarray]:
        problem = problems[index % 2]
        function = jax.jit(lambda lhs, g: call_host(problem, Config(4, 64), lhs, g))
        return [np.asarray(function(*inputs[index % 2])) for _ in range(50)]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(calls, range(4)))
    for index, repeated in enumerate(results):
        expected = conv_wgrad_on_host(problems[index % 2], *inputs[index % 2])
        for result in repeated:
            np.testing.assert_array_equal(result, expected)


def test_refusals_name_value_and_range() -> None:
    assert FAMILY.refusal(SMALL) is None
    assert "dtype int8" in str(FAMILY.refusal(dataclasses.replace(SMALL, dtype="int8")))
    assert "splits 19; accepted: 1 to 18" in str(FAMILY.refusal(SMALL, Config(19, 8)))
    assert "splits 0" in str(FAMILY.refusal(SMALL, Config(0, 8)))
    assert "block 4097; accepted: 8 to 4096" in str(FAMILY.refusal(SMALL, Config(1, 4097)))
    rank4 = make_problem((3, 3, 3, 3), (1, 1, 1, 1))
    assert "4 spatial dimensions" in str(FAMILY.refusal(rank4))
    wide = make_problem((3,), (1,), stride=2**31)
    assert str(2**31) in str(FAMILY.refusal(wide))


@pytest.mark.parametrize("problem", LARGER, ids=str)
def test_candidates_are_legal_and_estimated(problem: ConvWgradProblem) -> None:
    configs = FAMILY.candidates(problem, FOUR_CORES)
    assert configs
    assert len(set(configs)) == len(configs)
    for config in configs:
        assert FAMILY.refusal(problem, config) is None
        assert 0 < FAMILY.estimate(problem, config, FOUR_CORES) < 1


def dense(channels: tuple[int, int], dtype: str = "float32", **changes: Any) -> ConvWgradProblem:
    return make_problem((14, 14), (3, 3), channels, dtype=dtype, **changes)


@pytest.mark.parametrize(("problem", "most"), [
    (dense((64, 128)), 8192),
    (dense((1024, 8), "bfloat16"), 8192),
    (dense((256, 128), stride=2), 32768),
    (dense((128, 128), rhs_dilation=2), 8192),
    (make_problem((512,), (9,), (64, 128)), 8192),
], ids=str)  # fmt: skip
def test_wide_dense_problems_are_left_to_xla(problem: ConvWgradProblem, most: int) -> None:
    reason = str(FAMILY.why_xla_untuned(problem))
    assert f" = {problem.in_channels * problem.out_channels} of a dense convolution " in reason
    assert reason.endswith(f"preferred below {most}")
    assert FAMILY.refusal(problem) is None


@pytest.mark.parametrize("problem", [
    dense((64, 127)),
    dense((3, 64), stride=2),
    dense((128, 128), "bfloat16", stride=2),
    dense((512, 512), groups=4),
    dense((128, 128), lhs_dilation=2),
    make_problem((14, 14), (1, 1), (1024, 1024), dtype="float16"),
    make_problem((14, 14), (2, 2), (256, 256), stride=2),
    make_problem((8, 8, 8), (3, 3, 3), (128, 128)),
], ids=str)  # fmt: skip
def test_what_xla_is_slower_at_is_preferred(problem: ConvWgradProblem) -> None:
    assert FAMILY.why_xla_untuned(problem) is None


def test_calls_that_take_longer_than_their_work_are_xlas() -> None:
    assert "so small" in str(FAMILY.why_xla_untuned(make_problem((2,), (1,), (4, 4))))
