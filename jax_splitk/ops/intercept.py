"""Routing the convolutions, grouped products and products with quantized weights of code that cannot be changed:
`intercept`."""

import contextlib
import dataclasses
import functools
import inspect
import logging
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar, overload

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.typing import DTypeLike

from jax_splitk.ops import few_rows as few_row_products
from jax_splitk.ops import quantized_numpy
from jax_splitk.ops.conv import conv_general_dilated
from jax_splitk.ops.ragged_dot import ragged_dot, ragged_dot_general
from jax_splitk.problems.conv_reference import lax_conv
from jax_splitk.problems.conv_wgrad import DTYPES
from jax_splitk.problems.ragged_reference import lax_ragged_dot, lax_ragged_dot_general
from jax_splitk.runtime import _compat
from jax_splitk.runtime.arguments import Refusal, dtype_of, require, wider
from jax_splitk.tuning.options import Implementation, options

_logger = logging.getLogger("jax_splitk")

_P = ParamSpec("_P")
_R = TypeVar("_R")

# By name: lax's function, and ours.
_ROUTES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "conv_general_dilated": (lax_conv, conv_general_dilated),
    "ragged_dot": (lax_ragged_dot, ragged_dot),
    "ragged_dot_general": (lax_ragged_dot_general, ragged_dot_general),
}

# lax's functions that call lax.conv_general_dilated by its name in their own module.
_CALLERS = ("conv", "conv_with_general_padding", "conv_transpose")


@dataclasses.dataclass(frozen=True)
class _Route:
    """How the convolutions and products of a block are computed.

    Attributes:
      few_rows: whether products of few rows in bodies of `lax.scan` are routed.
      in_scan: whether the body of a scan is traced.
    """

    compute_dtype: np.dtype | None = None
    few_rows: bool = False
    in_scan: bool = False


# The route of the innermost block in this thread, None outside of all blocks. It is part of jit's cache key.
_context = jax.make_user_context(None)


@overload
def intercept(function: Callable[_P, _R], /) -> Callable[_P, _R]: ...
@overload
def intercept(
    *,
    compute_dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
    workspace_limit_bytes: int | None = None,
    few_rows: bool | None = None,
) -> contextlib._GeneratorContextManager[None]: ...
def intercept(
    function: Callable[..., Any] | None = None,
    /,
    *,
    compute_dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
    workspace_limit_bytes: int | None = None,
    few_rows: bool | None = None,
) -> Any:
    """Makes convolutions and products of unchanged code jax_splitk's: in a block it replaces those of JAX.

    A context manager and a decorator, for models of Equinox, Haiku, Flax's ConvTranspose and the like, and for mixtures
    of experts on `jax.lax.ragged_dot`, as those of MaxText:

        @jax_splitk.intercept(compute_dtype=jnp.bfloat16)
        def loss(model, images, labels): ...

    Without arguments, `@jax_splitk.intercept` is enough.

    It acts on what this thread traces inside the block: calls of `jax.lax.conv_general_dilated`, `conv_transpose`,
    `conv_with_general_padding`, `conv`, `ragged_dot` and `ragged_dot_general`. `jax.numpy.einsum`, `dot`, `matmul`,
    `tensordot` and `jax.lax.dot_general` take quantized weights, too; products of arrays stay JAX's, but for those of
    `few_rows`.

    Only the forward call must lie inside: the gradient may be taken outside, as in `jax.grad(loss)`. A function of
    `jax.jit` that was traced outside is traced again inside, and the other way round, because the block is part of
    jit's cache key; a function that was lowered or compiled ahead of time stays as it is. What lax accepts and
    jax_splitk does not is left to lax, with a line in the log.

    Blocks nest: an argument that an inner block does not name is the outer block's. `intercept()` inside of
    `jax_splitk.options` takes its defaults.

    While any block is open, in any thread, these attributes of `jax.lax` and `jax.numpy` are replaced, and the operator
    `@` of traced arrays; other threads reach JAX through them as before, and the last block that is left puts them
    back. The jaxpr is not rewritten instead: it shows neither the functions of a custom_vjp nor those that are traced
    later, and a convolution that is replaced in it is one that lax has differentiated or batched already. Nor is the
    primitive replaced: lax's own rules, which our backward pass uses, call it, too. So a function that was imported by
    its name (`from jax.lax import conv_general_dilated`) or bound as a default, as in flax.nnx.Conv, is not replaced
    (`jax_splitk.layers.flax_nnx.make_interceptable` changes that for a model); `jax_splitk.explain` lists what is left
    to lax.

    Args:
      function: the decorated function, if there are no other arguments.
      compute_dtype: as in `jax_splitk.conv_general_dilated` and `jax_splitk.ragged_dot`, for floating operands. The
        result keeps the dtype that lax gives it.
      implementation: as in `jax_splitk.conv_wgrad`, for every jax_splitk operation in the block.
      workspace_limit_bytes: as in `jax_splitk.conv_wgrad`, for every jax_splitk operation in the block.
      few_rows: whether products in bodies of `jax.lax.scan` are routed, too, if they have at most 64 rows, operands of
        bfloat16, float16 or float8_e4m3fn, and a weight of at least 1 MiB as the second operand: those of `x @ w`, of
        `jax.numpy.dot`, `matmul` and `einsum` and of `jax.lax.dot_general`. On a Hopper GPU a kernel reads the scanned
        weight where it lies in the stack, which XLA would copy first. Elsewhere, and in a program for several devices,
        they stay lax's.

    Raises:
      ValueError, TypeError: an argument outside its range.

    Examples:
      >>> @jax_splitk.intercept(compute_dtype=jnp.bfloat16)
      ... def loss(w, x):
      ...     return jnp.sum(jax.lax.conv_transpose(x, w, (2, 2), "SAME"))
      >>> w, x = jnp.ones((3, 3, 8, 4)), jnp.ones((2, 8, 8, 8))
      >>> (decision,) = jax_splitk.explain(jax.grad(loss), w, x).decisions
      >>> decision.problem.dtype, decision.problem.out_dtype
      ('bfloat16', 'float32')
    """
    if function is None:
        return _block(compute_dtype, implementation, workspace_limit_bytes, few_rows)
    # jnp.bfloat16 can be called, but is a class.
    decorated = callable(function) and not isinstance(function, type)
    require(decorated, f"intercept({function!r})", "a function, or compute_dtype= by its name", TypeError)
    return _block()(function)


@contextlib.contextmanager
def _block(
    compute_dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
    workspace_limit_bytes: int | None = None,
    few_rows: bool | None = None,
) -> Iterator[None]:
    """The block of `intercept`; a decorated function runs in one."""
    outer = _context.value or _Route()
    given = None if compute_dtype is None else dtype_of("compute_dtype", compute_dtype, DTYPES)
    require(few_rows in (None, True, False), f"few_rows={few_rows!r}", "None, True, False")
    wanted = outer.few_rows if few_rows is None else bool(few_rows)
    route = _Route(outer.compute_dtype if given is None else given, wanted, outer.in_scan)
    with options(implementation=implementation, workspace_limit_bytes=workspace_limit_bytes), _patch, _context(route):
        yield


class _Patch(contextlib.AbstractContextManager[None]):
    """Replaces the functions of `jax.lax` and `jax.numpy` while any block is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        # By module or class, and name: what was there, what is there now.
        self._replaced: dict[tuple[Any, str], tuple[Any, Any]] = {}

    def __enter__(self) -> None:
        with self._lock:
            self._blocks += 1
            if self._blocks == 1:
                self._replaced = {at: (getattr(*at), new) for at, new in _replacements().items()}
                for at, (_, new) in self._replaced.items():
                    _put(*at, new)

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._blocks -= 1
            if self._blocks == 0:
                for at, (old, new) in self._replaced.items():
                    if getattr(*at) is new:  # else somebody has replaced it in turn; it does no harm
                        _put(*at, old)


def _put(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Makes a function an attribute of a module, or a static method of a class."""
    setattr(owner, name, staticmethod(function) if isinstance(owner, type) else function)


# One for the process, which has each module once.
_patch = _Patch()


def _replacements() -> dict[tuple[Any, str], Callable[..., Any]]:
    """The functions that replace those of JAX, by module or class, and name."""
    routed = {name: functools.partial(_routed, theirs, ours) for name, (theirs, ours) in _ROUTES.items()}
    found = {name: _dispatcher(getattr(lax, name), inside) for name, inside in routed.items()}
    for name in _CALLERS:
        function = getattr(lax, name)
        # The same code with another conv_general_dilated; the module's own is what lax's rules call.
        namespace = {**function.__globals__, "conv_general_dilated": routed["conv_general_dilated"]}
        given = (function.__name__, function.__defaults__, function.__closure__)
        copy = types.FunctionType(function.__code__, namespace, *given)
        copy.__kwdefaults__ = function.__kwdefaults__
        found[name] = _dispatcher(function, copy)
    found["scan"] = _dispatcher(lax.scan, functools.partial(_scan, lax.scan))
    on_products = quantized_numpy.functions(_of_arrays)
    # `x @ w` takes quantized weights anyway: the weight's own operator computes it.
    on_products |= {at: _of_arrays("matmul", getattr(*at)) for at in _compat.matmul_operators()}
    products = {at: _dispatcher(getattr(*at), inside) for at, inside in on_products.items()}
    return {(lax, name): function for name, function in found.items()} | products


def _dispatcher(function: Callable[..., Any], inside: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, or `inside` in a thread that is in a block."""

    @functools.wraps(function)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        return (function if _context.value is None else inside)(*args, **kwargs)

    return dispatch


def _scan(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """lax.scan inside a block, whose body it traces."""
    route = _context.value
    if not route.few_rows:
        return theirs(*args, **kwargs)
    with _context(dataclasses.replace(route, in_scan=True)):
        return theirs(*args, **kwargs)


def _of_arrays(name: str, theirs: Callable[..., Any]) -> Callable[..., Any]:
    """The function that replaces a product of JAX for arrays: JAX's own, but in a scan with `few_rows` jax_splitk's."""
    ours = few_row_products.ROUTES.get(name)

    def product(*args: Any, **kwargs: Any) -> Any:
        route = _context.value
        if ours is None or route is None or not (route.few_rows and route.in_scan):
            return theirs(*args, **kwargs)
        return ours(theirs, *args, **kwargs)

    return product


def _routed(theirs: Callable[..., Any], ours: Callable[..., Any], *args: Any, **kwargs: Any) -> jax.Array:
    """A function of lax inside a block: ours for the same arguments, or theirs where ours refuses them."""
    try:
        arguments = inspect.signature(theirs).bind(*args, **kwargs).arguments
    except TypeError:
        return theirs(*args, **kwargs)  # which raises lax's error
    try:
        return ours(**_with_compute_dtype(arguments))
    except Refusal as error:
        # Where the arguments are wrong, this raises what lax does.
        out = theirs(*args, **kwargs)
        _logger.info("left to lax.%s: %s", theirs.__name__, error)
        return out


def _with_compute_dtype(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with the block's compute_dtype, if the operands are floating. The result keeps the dtype that it
    would have."""
    operands = ("lhs", "rhs") if "group_sizes" in arguments else ("lhs",)
    dtypes = [jnp.result_type(arguments[name]) for name in operands]
    compute_dtype = _context.value.compute_dtype
    if compute_dtype is None or not any(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        return arguments
    preferred = arguments.get("preferred_element_type")
    result = functools.reduce(wider, dtypes) if preferred is None else preferred
    return {**arguments, "preferred_element_type": result, "compute_dtype": compute_dtype}
