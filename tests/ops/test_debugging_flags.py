"""JAX's debugging flags with every public operation, forward and gradients: they find the user's mistakes, not our
constants."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.experimental.compilation_cache import compilation_cache

import jax_splitk
from jax_splitk.quantized.formats import FORMATS, from_codes, table, values

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the CPU's kernels are named")

Operation = tuple[Callable[..., Any], tuple[Any, ...]]  # a function, and its operands as NumPy's arrays

NUMBERS = {"dimension_numbers": ("NWC", "WIO", "NWC")}


def _of(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.linspace(-1, 1, int(np.prod(shape))).reshape(shape).astype(dtype)


def _gradients(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Gradients with respect to the first operands. The result is its own cotangent, so that the test adds no
    constant."""

    def gradients(*operands: Any) -> Any:
        out, back = jax.vjp(lambda *leading: function(*leading, *operands[count:]), *operands[:count])
        return back(out)

    return gradients


def _with_numbers(name: str, **arguments: Any) -> Callable[..., Any]:
    return functools.partial(getattr(jax_splitk, name), **NUMBERS, **arguments)


def _convolutions() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], int]]:
    x, w, g = _of(2, 16, 4), _of(3, 4, 8), _of(2, 16, 8)
    for implementation in (None, "host"):
        same = {"window_strides": (1,), "padding": "SAME", "implementation": implementation}
        of = functools.partial(_with_numbers, **same)
        yield f"conv_fprop {implementation}", of("conv_fprop"), (x, w), 2
        yield f"conv_dgrad {implementation}", of("conv_dgrad", lhs_shape=x.shape), (g, w), 2
        yield f"conv_wgrad {implementation}", of("conv_wgrad", rhs_shape=w.shape), (x, g), 2
    yield "conv_general_dilated", _with_numbers("conv_general_dilated", window_strides=(1,), padding="SAME"), (x, w), 2


def _products() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], int]]:
    a, b, bias = _of(16, 32), _of(32, 8), _of(8)
    yield "matmul", jax_splitk.matmul, (a, b), 2
    activated = lambda a, b, bias: jax_splitk.matmul(a, b, bias=bias, activation="gelu")  # noqa: E731
    yield "matmul with an epilogue", activated, (a, b, bias), 3
    sizes = np.array([5, 0, 8, 2], np.int32)
    for implementation in ("host", "xla"):
        grouped = functools.partial(jax_splitk.ragged_dot, implementation=implementation)
        yield f"ragged_dot {implementation}", grouped, (_of(16, 8), _of(4, 8, 6), sizes), 2
    some = lambda x, w, sizes, first: jax_splitk.ragged_dot(x, w, sizes, group_offset=first)  # noqa: E731
    yield "ragged_dot with an offset", some, (_of(16, 8), _of(2, 8, 6), sizes, np.array([1], np.int32)), 2
    yield "dot_general", lambda a, b: jax_splitk.dot_general(a, b, (((1,), (0,)), ((), ()))), (a, b), 2


def _product(x: Any, q: Any, implementation: str) -> jax.Array:
    """A product with a weight that was packed, unpacked and packed again."""
    packed = jax_splitk.prepack(jax_splitk.unpack(jax_splitk.prepack(q)))
    return jax_splitk.quantized_matmul(x, packed, implementation=implementation)


def _experts(activation: Any, bias: Any, x: Any, q: Any, sizes: Any) -> jax.Array:
    return jax_splitk.ragged_dot(x, jax_splitk.prepack(q, stack=1), sizes, bias=bias, activation=activation)


def _quantized() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], int]]:
    w, x = _of(64, 16), _of(4, 64, dtype=jnp.bfloat16)
    for name in FORMATS:
        how = {"group_size": 32, "symmetric": name != "uint4"}
        q = jax.device_get(jax_splitk.quantize(w, name, **how))
        yield f"quantized_matmul {name}", functools.partial(_product, implementation="host"), (x, q), 1
        yield f"quantize {name}", functools.partial(jax_splitk.quantize, dtype=name, **how), (w,), 0
        yield f"dequantize {name}", jax_splitk.dequantize, (q,), 0
    yield "quantized_matmul by XLA", functools.partial(_product, implementation="xla"), (x, q), 1
    scaled = lambda scale, x, qvalue: jax_splitk.quantized_matmul(  # noqa: E731
        x, jax_splitk.QuantizedArray(qvalue, scale, qtype="nf4")
    )
    yield "scales", scaled, (q.scale, x, q.qvalue), 2
    of_experts = jax.device_get(jax_splitk.quantize(_of(3, 64, 16), "int4", group_size=32, axis=1))
    operands = (_of(3, 16), x, of_experts, np.array([2, 0, 1], np.int32))
    for activation in (None, "silu"):
        yield f"experts with a bias and {activation}", functools.partial(_experts, activation), operands, 2


@functools.cache
def operations() -> dict[str, Operation]:
    found: dict[str, Operation] = {}
    for name, function, operands, differentiated in (*_convolutions(), *_products(), *_quantized()):
        found[name] = (function, operands)
        if differentiated:
            found[f"gradients of {name}"] = (_gradients(function, differentiated), operands)
    return found


@contextlib.contextmanager
def _flags(*names: str) -> Iterator[None]:
    before = {name: getattr(jax.config, name) for name in names}
    for name in names:
        jax.config.update(name, True)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.fixture(scope="module", autouse=True)
def _compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """XLA compiles each program once for all tests here, which begin without JAX's caches."""
    kept = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs")),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in kept}
    for settings in (kept, before):
        compilation_cache.reset_cache()
        for name, value in settings.items():
            jax.config.update(name, value)
        if settings is kept:
            yield


def _rarely(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize("jitted", ["jit", _rarely("eager"), "disable_jit"])
@pytest.mark.parametrize("flags", [
    ("jax_debug_nans", "jax_debug_infs"), _rarely(("jax_enable_checks", "jax_check_tracer_leaks")),
], ids="-".join)  # fmt: skip
def test_every_operation_under_debugging_flags(flags: tuple[str, ...], jitted: str) -> None:
    """The guard against transfers of constants is at its strictest level: what passes it passes "disallow", and "log"
    has nothing to say. The flags themselves read results."""
    failed = {}
    jax.clear_caches()  # constants are met where a function is traced first
    for name, (function, operands) in operations().items():
        placed = jax.device_put(operands)
        # Under disable_jit JAX transfers the constants of any gradient one by one, which the guard refuses: of lax's,
        # too.
        own = jitted == "disable_jit" and name.startswith("gradients")
        guard = contextlib.nullcontext() if own else jax.transfer_guard_host_to_device("disallow_explicit")
        try:
            with _flags(*flags), guard, jax.disable_jit(jitted == "disable_jit"):
                (jax.jit(function) if jitted == "jit" else function)(*placed)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:300]
    assert not failed


def test_a_users_nan_is_found() -> None:
    """The flags still see the user's NaN."""
    with _flags("jax_debug_nans"), pytest.raises(FloatingPointError):
        jax_splitk.dequantize(jax_splitk.quantize(jnp.full((32, 2), jnp.inf), "int8", group_size=32))


@pytest.mark.parametrize("name", FORMATS)
def test_the_table_of_codes_is_what_jax_makes_of_them(name: str) -> None:
    fmt = FORMATS[name]
    codes = jnp.arange(2**fmt.bits)
    np.testing.assert_array_equal(table(fmt), values(fmt, from_codes(fmt, codes)))
