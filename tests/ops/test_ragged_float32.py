"""Float32 grouped products by kernels that multiply bfloat16: a family of the CPU takes the place of Hopper's."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import export, lax
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_splitk
from jax_splitk.kernels import catalogue
from jax_splitk.kernels.cpu.ragged import Config, RaggedHost
from jax_splitk.kernels.ragged.ragged_k import _EXACT_CHAIN
from jax_splitk.ops import lowering
from jax_splitk.problems.ragged_dot import RaggedDotProblem
from jax_splitk.problems.ragged_parts import _PIECE, InParts, in_parts, split
from jax_splitk.problems.ragged_reference import by_blocks, ragged_dot
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import emulator, ragged_dots
from tests.every_kernel import ragged_config
from tests.exhaustive import crossed
from tests.kernels.ragged.test_ragged import family_of
from tests.kernels.wgrad.test_gather import truncated_sum
from tests.problems import on_device, seeded

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="these are the CPU's paths")

CONTRACTION = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
LARGEST = np.finfo(np.float32).max
PRECISIONS = ["default", "high", "highest"]
FORWARD = RaggedDotProblem("forward", 4, 70, 40, 24, "float32", "float32")
PROBLEMS = {
    "forward": FORWARD,
    "forward gnk": dataclasses.replace(FORWARD, rhs_order="gnk"),
    "odd k": dataclasses.replace(FORWARD, k=37),
    "pieces": dataclasses.replace(FORWARD, k=600),
    "odd pieces gnk": dataclasses.replace(FORWARD, k=531, rhs_order="gnk"),
    "16-bit result": dataclasses.replace(FORWARD, k=300, out_dtype="bfloat16"),
    "rhs gradient": dataclasses.replace(FORWARD, mode="rhs_gradient"),
    "some groups": dataclasses.replace(FORWARD, total_groups=9),
    "some groups' gradient": dataclasses.replace(FORWARD, mode="rhs_gradient", total_groups=9),
}


@functools.cache
def composition(p: RaggedDotProblem, product: Callable[..., jax.Array] | None = None) -> Callable[..., jax.Array]:
    parts = in_parts(p)
    assert parts is not None
    one = product or functools.partial(by_blocks, dataclasses.replace(parts.problem, precision="highest"))
    return jax.jit(lambda *given: parts(one, *given))


def composed(p: RaggedDotProblem, operands: Any, product: Callable[..., jax.Array] | None = None) -> np.ndarray:
    """The product in parts, with products of parts by plain lax, which sums in float32."""
    return np.asarray(composition(p, product)(*operands))


@functools.cache
def laxs(p: RaggedDotProblem) -> Callable[..., jax.Array]:
    return jax.jit(functools.partial(ragged_dot, p))


# ---- the parts -------------------------------------------------------------------------------------------------------


def test_parts_hold_a_number_exactly() -> None:
    """The compiled program must not remove the rounding of parts."""
    with seeded(500) as rng:
        x = rng.uniform(1, 2, 20_000) * rng.choice([-1, 1], 20_000) * 2.0 ** rng.integers(-102, 127, 20_000)
        x = np.concatenate([x, [0.0, -0.0, 2.0**24 - 1, LARGEST, -LARGEST]]).astype(np.float32)
        *parts, largest = (np.asarray(part, np.float64) for part in jax.jit(split)(x))
        np.testing.assert_array_equal(sum(parts), x.astype(np.float64))
        np.testing.assert_array_equal(parts[0], largest)
        assert (abs(x - parts[0]) <= abs(x) * 2.0**-8).all()
        assert (abs(x - parts[0] - parts[1]) <= abs(x) * 2.0**-16).all()


def test_parts_of_numbers_that_are_not_finite() -> None:
    *parts, largest = jax.jit(split)(np.array([np.inf, -np.inf, np.nan], np.float32))
    assert not np.any(np.stack(parts).astype(np.float32))
    np.testing.assert_array_equal(largest.astype(np.float32), [np.inf, -np.inf, np.nan])


def test_one_product_serves_unless_k_is_long() -> None:
    def summary(p: RaggedDotProblem) -> tuple[int, int, int, str]:
        parts = InParts(p)
        return parts.pieces, parts.problem.m, parts.problem.k, parts.note

    gradient = PROBLEMS["rhs gradient"]
    assert summary(FORWARD) == (1, 70, 120, "float32 as 3 products of bfloat16 parts")
    assert summary(gradient) == (1, 210, 40, "float32 as 3 products of bfloat16 parts")
    exact = dataclasses.replace(FORWARD, k=4096, precision="highest")
    assert summary(exact) == (16, 70, 6 * 256, "float32 as 6 products of bfloat16 parts, in 16 pieces of k")
    assert summary(dataclasses.replace(FORWARD, k=14336))[:3] == (2, 70, 3 * 7168)
    assert in_parts(dataclasses.replace(FORWARD, groups=1)) is None
    assert in_parts(dataclasses.replace(FORWARD, groups=1, total_groups=2)) is not None
    assert in_parts(dataclasses.replace(FORWARD, dtype="bfloat16")) is None
    assert in_parts(dataclasses.replace(FORWARD, out_dtype="float64")) is None


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "precision"), crossed([*PROBLEMS], PRECISIONS))
def test_exact_on_integers(name: str, precision: str) -> None:
    """One operand has integers of 24 bits (16 at the precisions that have three products), of which three are not zero
    in a sum, and the other has small ones."""
    p = dataclasses.replace(PROBLEMS[name], precision=precision, out_dtype="float32")
    bits = 22 if precision == "highest" else 14
    with seeded(501) as rng:
        for wide in (0, 1):
            operands = [x.astype(np.int64) for x in ragged_dots.integers(p, rng)]
            large = rng.integers(-(2**bits), 2**bits, operands[wide].shape) | 1
            some = rng.permuted(np.arange(operands[wide].shape[0]) % 30 < 1)
            # A sum of more than three such numbers may have more bits than float32.
            axis = p.rhs_order.index("k") if wide else 1
            if p.mode == "rhs_gradient":
                operands[wide] = np.where(some[:, None], large, 0)
            else:
                place = np.arange(operands[wide].shape[axis]) % max(1, operands[wide].shape[axis] // 3) == 0
                shape = [1] * operands[wide].ndim
                shape[axis] = -1
                operands[wide] = np.where(place.reshape(shape), large, 0)
            given = [x.astype(np.float32) for x in operands[:2]] + [x.astype(np.int32) for x in operands[2:]]
            exact = ragged_dots.exactly(p, *given)
            # Such sums are exact in every order. Parts of numbers may be a little larger than these.
            keeps = ragged_dots.exactly(p, *map(np.abs, given[:2]), *given[2:]) < 0.99 * 2**24
            assert keeps.mean() > 0.4
            np.testing.assert_array_equal(composed(p, given)[keeps], exact[keeps], err_msg=f"{p} {wide}")


def test_integers_of_24_bits_times_powers_of_two_are_exact() -> None:
    p = dataclasses.replace(FORWARD, k=1, n=3, precision="highest")
    with seeded(502) as rng:
        lhs, rhs = rng.integers(-(2**24) + 1, 2**24, (70, 1)), 2.0 ** rng.integers(-40, 40, (4, 1, 3))
        operands = lhs.astype(np.float32), rhs.astype(np.float32), np.array([20, 0, 30, 20], np.int32)
        np.testing.assert_array_equal(composed(p, operands), ragged_dots.exactly(p, *operands))


# Largest error of a product, relative to the norm of the result in float64, where sums are float32: three products
# leave out terms of 2^-16. Tensor cores' tf32 has 3e-4.
BOUNDS = {"default": 8e-6, "high": 8e-6, "highest": 1e-6}


@pytest.mark.parametrize(("name", "precision"), crossed([*PROBLEMS], PRECISIONS))
def test_errors(name: str, precision: str) -> None:
    """At HIGHEST the error is at most twice that of XLA's float32 product, or a rounding of a short sum."""
    p = dataclasses.replace(PROBLEMS[name], precision=precision, out_dtype="float32")
    with seeded(503) as rng:
        operands = ragged_dots.integers(p, rng)
        operands[:2] = [rng.standard_normal(x.shape).astype(np.float32) for x in operands[:2]]
        exact = ragged_dots.exactly(p, *operands)
        error = lambda out: float(np.linalg.norm(np.asarray(out, np.float64) - exact))  # noqa: E731
        ours, of = error(composed(p, operands)), np.linalg.norm(exact)
        assert ours <= BOUNDS[precision] * of
        if precision == "highest":
            xlas = error(laxs(p)(*operands))
            assert ours <= max(2 * xlas, 2**-22 * of), (ours / of, xlas / of)


@pytest.mark.parametrize("precision", ["default", "highest"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["forward", "forward gnk", "pieces", "rhs gradient"])
def test_numbers_that_are_not_finite_reach_only_their_results(name: str, bad: float, precision: str) -> None:
    """An infinity in an operand gives the results of float32: infinities of the right sign, and NaN where it meets zero
    or an infinity of the other sign. The other numbers have small parts that are zero. Rows of no group hold NaN."""
    p = dataclasses.replace(PROBLEMS[name], precision=precision)
    with seeded(504) as rng:
        for _ in range(3):
            operands = ragged_dots.integers(p, rng, np.array([20, 0, 30, 15]))
            rows = [int(rng.integers(65)), int(rng.integers(65))]
            operands[0][rows[0], rng.integers(p.k)] = bad
            if p.mode == "forward":
                operands[1][2, rng.integers(8), rng.integers(8)] = -bad
            else:
                operands[1][rows[1], rng.integers(p.n)] = -bad
            with np.errstate(invalid="ignore"):
                exact = ragged_dots.exactly(p, *operands)
            given = ragged_dots.poisoned(p, operands)
            np.testing.assert_array_equal(composed(p, given), exact.astype(np.float32))


# ---- the tensor cores' sums ------------------------------------------------------------------------------------------


def _as_wgmma_adds(x: np.ndarray, y: np.ndarray, length: int, interleaved: bool) -> np.ndarray:
    """The inner products of columns by six products of parts. The tensor cores add 16 products at a time and truncate
    (`truncated_sum`), for `length` products in a row; the sums of those are added in float32."""
    pairs = InParts(dataclasses.replace(FORWARD, precision="highest")).pairs
    parts = [np.stack([np.asarray(part, np.float64) for part in split(jnp.asarray(v))]) for v in (x, y)]
    out = np.zeros(x.shape[1], np.float32)
    products = np.stack([parts[0][i] * parts[1][j] for i, j in pairs], 1 if interleaved else 0)
    if interleaved:
        products = products.reshape(1, -1, x.shape[1])
    for first in range(0, products.shape[1], length):
        piece, sums = products[:, first : first + length].reshape(-1, x.shape[1]), np.zeros(x.shape[1])
        for step in range(0, len(piece), 16):
            sums = truncated_sum(sums, piece[step : step + 16])
        out = (out + sums.astype(np.float32)).astype(np.float32)
    return out


@pytest.mark.parametrize("interleaved", [False, True], ids=["forward", "rhs gradient"])
@pytest.mark.parametrize("signs", ["both", "one"])
def test_highest_has_at_most_twice_the_error_of_float32_sums(signs: str, interleaved: bool) -> None:
    """Compares with sums in float32, one product after the other. With sums of 2,048 elements, or of 16 stages, the
    error would be larger."""
    length, longer = (64 * _EXACT_CHAIN, 64 * 16) if interleaved else (_PIECE["highest"], 2048)
    for k in (128, 1024):
        with seeded(505) as rng:
            draw = rng.standard_normal if signs == "both" else rng.random
            x, y = (draw((k, 400)).astype(np.float32) for _ in range(2))
        exact, one_by_one = (x.astype(np.float64) * y).sum(0), np.zeros(400, np.float32)
        for a, b in zip(x, y, strict=True):
            one_by_one = (one_by_one + a.astype(np.float64) * b).astype(np.float32)
        most = 2 * np.linalg.norm(one_by_one - exact)
        assert np.linalg.norm(_as_wgmma_adds(x, y, length, interleaved) - exact) <= most
        if k == 1024:
            assert np.linalg.norm(_as_wgmma_adds(x, y, longer, interleaved) - exact) > most * 0.7


# ---- the kernels, in the emulator ------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["default", "highest"])
@pytest.mark.parametrize("name", ["forward", "pieces", "rhs gradient"])
def test_the_kernels_compute_it(name: str, precision: str) -> None:
    """Exact on integers that have two parts, with NaN in rows and matrices of no group."""
    p = dataclasses.replace(PROBLEMS[name], precision=precision, m=150)
    parts = InParts(p)
    config, inner = ragged_config(64, 128, 5), parts.problem
    assert family_of(inner).refusal(inner, config, DEFAULT_CUDA) is None
    plan = family_of(inner).plan(inner, config)

    def run(*operands: np.ndarray) -> np.ndarray:
        out = np.zeros(inner.out_shape, inner.out_dtype)
        emulator.run(plan, list(map(np.asarray, operands)), [out])
        return out

    def product(*operands: jax.Array) -> jax.Array:
        return jax.pure_callback(run, jax.ShapeDtypeStruct(inner.out_shape, inner.out_dtype), *operands)

    with seeded(506) as rng:
        operands = ragged_dots.integers(p, rng, np.array([65, 0, 30, 50]))
        operands[0] = (operands[0] * 300 + rng.integers(-2, 3, operands[0].shape)).astype(np.float32)
        found = composed(p, ragged_dots.poisoned(p, operands), product)
        np.testing.assert_array_equal(found, ragged_dots.exactly(p, *operands))


def test_short_chains_of_float32_parts() -> None:
    """At HIGHEST the sums of a gradient of rhs leave the tensor cores every three stages, into one more slot of the
    workspace for each worker."""
    p = InParts(dataclasses.replace(PROBLEMS["rhs gradient"], m=8192, precision="highest")).problem
    family, config = family_of(p), ragged_config(64, 128, 5)
    default = dataclasses.replace(p, precision="default")
    macros = [dict(family.macros(each, config))["CHAIN_STAGES"] for each in (p, default)]  # pyright: ignore[reportAttributeAccessIssue]
    assert macros == [_EXACT_CHAIN, 512]
    more = family.workspace_bytes(p, config) - family.workspace_bytes(dataclasses.replace(default, m=p.m // 6), config)
    assert more == config.workers * 64 * 128 * 4


# ---- the operation ---------------------------------------------------------------------------------------------------


class Of16Bits(RaggedHost):
    """The CPU's kernel, without float32 operands."""

    def problem_refusal(self, problem: RaggedDotProblem) -> str | None:
        reason = f"dtype {problem.dtype}; accepted: bfloat16, float16"
        return reason if problem.dtype == "float32" else super().problem_refusal(problem)


@pytest.fixture
def only_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel takes float32 operands."""
    monkeypatch.setitem(catalogue.FAMILIES, "ragged_dot", (Of16Bits(Config),))
    jax.clear_caches()
    lowering.jitted.cache_clear()


SIZES = jnp.array([20, 0, 33, 9])


def _operands(rng: np.random.Generator, k: int = 40) -> list[jax.Array]:
    return [on_device(rng.standard_normal(shape), jnp.float32) for shape in ((70, k), (4, k, 24))]


@pytest.mark.usefixtures("only_16_bits")
@pytest.mark.parametrize("precision", ["default", "highest"])
def test_every_pass_and_transformation(precision: str) -> None:
    """The forward pass, both gradients, vmap of each operand, scan and remat. Errors are relative to lax's HIGHEST."""
    product = functools.partial(jax_splitk.ragged_dot, precision=precision)
    theirs = functools.partial(jax_splitk.ragged_dot, precision="highest", implementation="xla")

    def results(f: Callable[..., jax.Array]) -> Callable[..., Any]:
        def all_of_them(x: jax.Array, w: jax.Array, xs: jax.Array, ws: jax.Array) -> Any:
            loss = lambda x, w: jnp.sum(jax.checkpoint(f)(x, w, SIZES) ** 2)  # noqa: E731
            loop = lax.scan(lambda x, w: (x + f(x, w, SIZES) @ w[0].T / 40, None), x, ws)[0]
            mapped = [jax.vmap(f, axes)(a, b, SIZES) for axes, a, b in (
                ((0, None, None), xs, w), ((None, 0, None), x, ws), ((0, 0, None), xs, ws)
            )]  # fmt: skip
            return f(x, w, SIZES), jax.grad(loss, (0, 1))(x, w), loop, mapped

        return jax.jit(all_of_them)

    with seeded(507) as rng:
        x, w = _operands(rng)
        given = x, w, x * jnp.arange(1.0, 3.0)[:, None, None], w * jnp.arange(1.0, 3.0)[:, None, None, None]
        decisions = jax_splitk.explain(results(product), *given).decisions
        assert sum(d.count for d in decisions) >= 8
        assert all("bfloat16 parts" in d.because and d.family == "ragged_host" for d in decisions)
        for ours, exact in zip(*map(jax.tree.leaves, (results(product)(*given), results(theirs)(*given))), strict=True):
            assert np.linalg.norm(ours - exact) <= BOUNDS[precision] * np.linalg.norm(exact)


@pytest.mark.usefixtures("only_16_bits")
def test_it_is_divided_and_exported() -> None:
    """The product is computed in three pieces of k."""

    def step(x: jax.Array, w: jax.Array, sizes: jax.Array) -> Any:
        product = functools.partial(jax_splitk.ragged_dot, precision="highest")
        out, back = jax.vjp(lambda x, w: product(x, w, sizes), x, w)
        return out, *back(out)

    def compare(found: Any) -> None:
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4)

    with seeded(508) as rng:
        x, w = _operands(rng, 600)
        plain = jax.jit(step)
        expected = plain(x, w, SIZES)
        exported = export.export(plain, disabled_checks=jax_splitk.EXPORT_CHECKS)(x, w, SIZES)
        compare(export.deserialize(bytearray(exported.serialize())).call(x, w, SIZES))
        mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
        of = lambda *axes: NamedSharding(mesh, P(*axes))  # noqa: E731
        compare(plain(jax.device_put(x, of("x")), jax.device_put(w, of(None, None, None)), SIZES))
        specs = P(None, None, "x"), P(None, "x")  # of the weights, and of the result
        # Each device has some columns, so that the gradients of the tokens are summed.
        inside = jax.shard_map(step, mesh=mesh, in_specs=(P(), specs[0], P()), out_specs=(specs[1], P(), specs[0]))
        compare(jax.jit(inside)(x, w, SIZES))


def test_explain_names_the_parts() -> None:
    """A kernel computes all three passes on a GPU, also those of lax's own product once it is routed. XLA computes
    products of one group, and what implementation="xla" asks for."""

    def loss(product: Callable[..., jax.Array], x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        return jnp.sum(product(x, w, sizes, precision="highest") ** 2)

    types = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (
        ((8192, 1024), jnp.float32), ((16, 1024, 512), jnp.float32), ((16,), jnp.int32)
    )]  # fmt: skip
    explained = functools.partial(jax_splitk.explain, platform="cuda")
    found = explained(jax.grad(functools.partial(loss, jax_splitk.ragged_dot), (0, 1)), *types).decisions
    assert [d.family for d in found] == ["ragged_m", "ragged_k", "ragged_m"]
    pieces = ("in 4 pieces of k", "bfloat16 parts", "in 2 pieces of k")
    for d, said in zip(found, pieces, strict=True):
        assert "float32 as 6 products of bfloat16 parts" in d.because and d.because.endswith(said), d.because
    unrouted = explained(jax.grad(functools.partial(loss, lax.ragged_dot), (0, 1)), *types).unrouted
    assert [(d.problem, d.family) for d in unrouted] == [(d.problem, d.family) for d in found]
    assert all("float32 as 6 products" in d.why for d in unrouted)
    single = [jax.ShapeDtypeStruct((1, *x.shape[1:]) if i else x.shape, x.dtype) for i, x in enumerate(types)]
    (alone,) = explained(jax_splitk.ragged_dot, *single).decisions
    assert (alone.implementation, "parts" in alone.because) == ("xla", False)
    laxs = functools.partial(jax_splitk.ragged_dot, implementation="xla")
    (asked,) = explained(laxs, *types).decisions
    assert asked.implementation == "xla"


def test_the_config_of_jax_says_the_precision() -> None:
    """Without `precision=` it is that of jax_default_matmul_precision, as in lax."""
    x, w = jax.ShapeDtypeStruct((64, 32), jnp.float32), jax.ShapeDtypeStruct((4, 32, 16), jnp.float32)

    def grouped(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax_splitk.ragged_dot(x, w, SIZES)

    def dense(x: jax.Array) -> jax.Array:
        return jax_splitk.dot_general(x, x, (((0,), (0,)), ((), ())))

    for name, expected in (("float32", "highest"), ("tensorfloat32", "high"), (None, "default")):
        with jax.default_matmul_precision(name):
            decisions = *jax_splitk.explain(grouped, x, w).decisions, *jax_splitk.explain(dense, x).decisions
            found: list[Any] = [d.problem for d in decisions]
            assert [problem.precision for problem in found] == [expected, expected]
