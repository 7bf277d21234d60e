"""Every public operation under every transformation of JAX, nested twice, beside the same operation in plain lax.

A `Step` is a transformation with the operands that it acts on: mapped by `vmap` and `scan`, differentiated by `jvp` and
`vjp`. The other operands are constant for it. A step without operands is in the table, too: the operation then stands
inside a function that is mapped or differentiated with respect to another value.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

import jax_splitk
from tests.problems import generator

Function = Callable[..., jax.Array]
SIZE = 2  # size of a mapped axis


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation, the same in plain lax, and the shapes of its operands. Integers give `exact` results."""

    ours: Function
    theirs: Function
    shapes: tuple[tuple[int, ...], ...]
    exact: bool = True


# ---- operations ------------------------------------------------------------------------------------------------------

_NUMBERS = ("NHWC", "HWIO", "NHWC")
_LHS, _RHS, _G = (2, 4, 3, 2), (2, 2, 2, 4), (2, 4, 3, 4)
_GEOMETRY: dict[str, Any] = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": _NUMBERS}


def _lax_conv(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(lhs, rhs, **_GEOMETRY)


def _lax_dgrad(g: jax.Array, rhs: jax.Array) -> jax.Array:
    return jax.linear_transpose(lambda lhs: _lax_conv(lhs, rhs), jax.ShapeDtypeStruct(_LHS, g.dtype))(g)[0]


def _lax_wgrad(lhs: jax.Array, g: jax.Array) -> jax.Array:
    return jax.linear_transpose(lambda rhs: _lax_conv(lhs, rhs), jax.ShapeDtypeStruct(_RHS, g.dtype))(g)[0]


def _intercepted(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    with jax_splitk.intercept():
        return lax.conv_general_dilated(lhs, rhs, **_GEOMETRY)


def _convolutions() -> Iterator[tuple[str, Operation]]:
    """The four functions, with each implementation for a CPU."""
    for implementation in (None, "xla"):
        options = {**_GEOMETRY, "implementation": implementation}
        name = f"-{implementation}" if implementation else ""
        for function, theirs, shapes in (
            (jax_splitk.conv_general_dilated, _lax_conv, (_LHS, _RHS)),
            (jax_splitk.conv_fprop, _lax_conv, (_LHS, _RHS)),
        ):
            yield function.__name__ + name, Operation(lambda *x, f=function, o=options: f(*x, **o), theirs, shapes)
        dgrad = lambda g, rhs, o=options: jax_splitk.conv_dgrad(g, rhs, _LHS, **o)  # noqa: E731
        yield f"conv_dgrad{name}", Operation(dgrad, _lax_dgrad, (_G, _RHS))
        wgrad = lambda lhs, g, o=options: jax_splitk.conv_wgrad(lhs, g, _RHS, **o)  # noqa: E731
        yield f"conv_wgrad{name}", Operation(wgrad, _lax_wgrad, (_LHS, _G))
    yield "intercept", Operation(_intercepted, _lax_conv, (_LHS, _RHS))
    given = lambda *x, **more: jax_splitk.conv_general_dilated(*x, **_GEOMETRY, **more)  # noqa: E731
    sums = lambda x, w, bias, residual: given(x, w, bias=bias, residual=residual)  # noqa: E731
    in_lax = lambda x, w, bias, residual: _lax_conv(x, w) + bias + residual  # noqa: E731
    yield "conv_general_dilated-bias-residual", Operation(sums, in_lax, (_LHS, _RHS, _G[-1:], _G))
    last = {"activation": "silu", "activation_last": True}
    activated = lambda x, w, bias, residual: given(x, w, bias=bias, residual=residual, **last)  # noqa: E731
    silu = lambda x, w, bias, residual: jax.nn.silu(_lax_conv(x, w) + bias + residual)  # noqa: E731
    yield "conv_general_dilated-silu", Operation(activated, silu, (_LHS, _RHS, _G[-1:], _G), exact=False)


def _products() -> Iterator[tuple[str, Operation]]:
    numbers = (((2,), (1,)), ((0,), (0,)))
    ours, theirs = (lambda a, b, f=f: f(a, b, numbers) for f in (jax_splitk.dot_general, lax.dot_general))
    yield "dot_general", Operation(ours, theirs, ((2, 3, 4), (2, 4, 5)))
    yield "matmul", Operation(jax_splitk.matmul, jnp.matmul, ((3, 4), (4, 5)))
    epilogue = lambda a, b, bias, residual: jax_splitk.matmul(a, b, bias=bias, residual=residual)  # noqa: E731
    in_lax = lambda a, b, bias, residual: jnp.matmul(a, b) + bias + residual  # noqa: E731
    yield "matmul-bias-residual", Operation(epilogue, in_lax, ((3, 4), (4, 5), (5,), (3, 5)))
    activated = lambda a, b, bias: jax_splitk.matmul(a, b, bias=bias, activation="silu")  # noqa: E731
    silu = lambda a, b, bias: jax.nn.silu(jnp.matmul(a, b) + bias)  # noqa: E731
    yield "matmul-bias-silu", Operation(activated, silu, ((3, 4), (4, 5), (5,)), exact=False)


def _quantized() -> Iterator[tuple[str, Operation]]:
    """Products with operands in the order (x, scales, zero points). The elements are constants."""
    k, features, group = 64, 4, 32
    elements = generator(0).integers(-7, 8, (k, features))
    groups = (k // group, features)

    def dequantized(scale: jax.Array, zero: jax.Array | None) -> jax.Array:
        each = jnp.asarray(elements, jnp.float32).reshape(*groups[:1], group, features)
        shifted = each if zero is None else each - zero[:, None]
        return (shifted * scale[:, None]).reshape(k, features)

    def array(scale: Any, zero: Any = None, of: Any = elements) -> jax_splitk.QuantizedArray:
        return jax_splitk.QuantizedArray(jnp.asarray(of, jnp.int8), scale, zero)

    ours = lambda x, scale, zero: jax_splitk.quantized_matmul(x, array(scale, zero))  # noqa: E731
    theirs = lambda x, scale, zero=None: x @ dequantized(scale, zero)  # noqa: E731
    yield "quantized_matmul", Operation(ours, theirs, ((3, k), groups, groups))
    packed = lambda x, scale: jax_splitk.quantized_matmul(x, jax_splitk.prepack(array(scale)))  # noqa: E731
    yield "quantized_matmul-packed", Operation(packed, theirs, ((3, k), groups))
    wide = jnp.asarray(np.pad(elements, ((0, 0), (0, k - features))))

    @jax_splitk.chained
    def both(x: jax.Array, scale: jax.Array) -> jax.Array:
        square = array(jnp.full((k // group, k), 0.25), of=wide)
        return jax_splitk.quantized_matmul(jax_splitk.quantized_matmul(x, square), array(scale))

    yield "chained", Operation(both, lambda x, scale: theirs(x @ (wide * 0.25), scale), ((3, k), groups))


def _grouped_products() -> Iterator[tuple[str, Operation]]:
    """Six rows of four groups, of which one is empty, one has two rows and the last row is in none."""
    sizes = np.array([1, 2, 0, 2], np.int32)
    member = (np.array([0, 1, 1, 3, 3, -1])[:, None] == np.arange(4)).astype(np.float32)
    contraction = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    transposed = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
    batched = lax.RaggedDotDimensionNumbers((((2,), (2,)), ((0,), (0,))), [1], [1])
    forward = lambda x, w: jnp.einsum("mg,mk,gkn->mn", member, x, w)  # noqa: E731
    yield "ragged_dot", Operation(lambda x, w: jax_splitk.ragged_dot(x, w, sizes), forward, ((6, 3), (4, 3, 2)))
    offset = lambda x, w: jax_splitk.ragged_dot(x, w, sizes, group_offset=np.array([1], np.int32))  # noqa: E731
    some = lambda x, w: jnp.einsum("mg,mk,gkn->mn", member[:, 1:3], x, w)  # noqa: E731
    yield "ragged_dot-offset", Operation(offset, some, ((6, 3), (2, 3, 2)))
    elements = jnp.asarray(generator(50).integers(-4, 5, (4, 3, 2)), jnp.int8)

    def experts(x: jax.Array, scale: jax.Array) -> jax.Array:
        array = jax_splitk.QuantizedArray(elements, scale)
        return jax_splitk.ragged_dot(x, jax_splitk.prepack(array, stack=1), sizes)

    dequantized = lambda x, scale: forward(x, elements * scale)  # noqa: E731
    yield "ragged_dot-packed", Operation(experts, dequantized, ((6, 3), (4, 1, 2)))

    scale = jnp.array([[[1.0, 2.0]], [[2.0, 1.0]], [[0.5, 1.0]], [[1.0, 1.0]]])

    def with_bias(x: jax.Array, bias: jax.Array, activation: Any = None) -> jax.Array:
        array = jax_splitk.prepack(jax_splitk.QuantizedArray(elements, scale), stack=1)
        return jax_splitk.ragged_dot(x, array, sizes, bias=bias, activation=activation)

    plus_bias = lambda x, bias: dequantized(x, scale) + member @ bias  # noqa: E731
    yield "ragged_dot-packed-bias", Operation(with_bias, plus_bias, ((6, 3), (4, 2)))
    activated = lambda x, bias: with_bias(x, bias, "silu")  # noqa: E731
    silu = lambda x, bias: jax.nn.silu(plus_bias(x, bias))  # noqa: E731
    yield "ragged_dot-packed-bias-silu", Operation(activated, silu, ((6, 3), (4, 2)), exact=False)
    general = jax_splitk.ragged_dot_general
    yield (
        "ragged_dot_general-transposed",
        Operation(
            lambda x, w: general(x, w, sizes, transposed),
            lambda x, w: jnp.einsum("mg,mk,gnk->mn", member, x, w),
            ((6, 3), (4, 2, 3)),
        ),
    )
    yield (
        "ragged_dot_general-contraction",
        Operation(
            lambda x, y: general(x, y, sizes, contraction),
            lambda x, y: jnp.einsum("mg,mk,mn->gkn", member, x, y),
            ((6, 3), (6, 2)),
        ),
    )
    yield (
        "ragged_dot_general-batch",
        Operation(
            lambda x, w: general(x, w, sizes, batched),
            lambda x, w: jnp.einsum("mg,bmk,bgkn->bmn", member, x, w),
            ((2, 6, 3), (2, 4, 3, 2)),
        ),
    )


def operations() -> dict[str, Operation]:
    return dict(itertools.chain(_convolutions(), _products(), _quantized(), _grouped_products()))


# ---- transformations -------------------------------------------------------------------------------------------------

# Each takes a function of operands with these shapes, and indices of some operands. It returns another function of as
# many operands, and the shapes of its operands. Results are one array.
_Shapes = tuple[tuple[int, ...], ...]


def _numbers(shape: Sequence[int], seed: int) -> jax.Array:
    return jnp.asarray(generator(seed).integers(-2, 3, shape), jnp.float32)


def _weighted(x: jax.Array) -> jax.Array:
    """A weighted sum, which changes if elements change places."""
    return jnp.sum(x * _numbers(x.shape, 7))


def _mapped(shapes: _Shapes, those: Sequence[int]) -> _Shapes:
    return tuple((SIZE, *shape) if i in those else shape for i, shape in enumerate(shapes))


def _vmap(f: Function, shapes: _Shapes, those: Sequence[int]) -> tuple[Function, _Shapes]:
    if not those:
        return lambda *x: jax.vmap(lambda t: t * f(*x))(jnp.arange(1.0, SIZE + 1)), shapes
    axes = tuple(0 if i in those else None for i in range(len(shapes)))
    return jax.vmap(f, axes), _mapped(shapes, those)


def _scan(f: Function, shapes: _Shapes, those: Sequence[int]) -> tuple[Function, _Shapes]:
    def scanned(*x: jax.Array) -> jax.Array:
        def step(carry: jax.Array, some: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
            given = dict(zip(those, some, strict=True))
            return carry + 1, carry * f(*(given.get(i, whole) for i, whole in enumerate(x)))

        return lax.scan(step, jnp.float32(1), [x[i] for i in those], length=SIZE)[1]

    return scanned, _mapped(shapes, those)


def _of_those(f: Function, x: Sequence[jax.Array], those: Sequence[int]) -> tuple[Function, list[jax.Array]]:
    """A function of some of the operands, and their values; without any, a function of a factor."""
    if not those:
        return lambda t: t * f(*x), [jnp.float32(1)]

    def of_some(*some: jax.Array) -> jax.Array:
        given = dict(zip(those, some, strict=True))
        return f(*(given.get(i, whole) for i, whole in enumerate(x)))

    return of_some, [x[i] for i in those]


def _jvp(f: Function, shapes: _Shapes, those: Sequence[int]) -> tuple[Function, _Shapes]:
    def pushed(*x: jax.Array) -> jax.Array:
        of_some, some = _of_those(f, x, those)
        out, tangent = jax.jvp(of_some, some, [_numbers(each.shape, 3 + i) for i, each in enumerate(some)])
        return out + 2 * tangent

    return pushed, shapes


def _vjp(f: Function, shapes: _Shapes, those: Sequence[int]) -> tuple[Function, _Shapes]:
    def pulled(*x: jax.Array) -> jax.Array:
        of_some, some = _of_those(f, x, those)
        out, back = jax.vjp(of_some, *some)
        return out + sum(_weighted(each) for each in back(_numbers(out.shape, 5)))

    return pulled, shapes


def _jit(f: Function, shapes: _Shapes, those: Sequence[int]) -> tuple[Function, _Shapes]:
    del those
    return jax.jit(f), shapes


def _checkpoint(f: Function, shapes: _Shapes, those: Sequence[int]) -> tuple[Function, _Shapes]:
    del those
    return jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable), shapes


_ACTING = {"vmap": _vmap, "scan": _scan, "jvp": _jvp, "vjp": _vjp}
_WHOLE = {"jit": _jit, "checkpoint": _checkpoint}


@dataclasses.dataclass(frozen=True)
class Step:
    """A transformation and the operands that it maps or differentiates."""

    name: str
    those: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}({','.join(map(str, self.those))})"

    def __call__(self, f: Function, shapes: _Shapes) -> tuple[Function, _Shapes]:
        return {**_ACTING, **_WHOLE}[self.name](f, shapes, self.those)


def steps(operands: int, *, every: bool = True) -> list[Step]:
    """Every transformation of subsets of the operands: all subsets if `every`, else none of them, each alone, and
    all."""
    sizes = range(operands + 1) if every else sorted({0, 1, operands})
    subsets = [those for n in sizes for those in itertools.combinations(range(operands), n)]
    return [Step(name, those) for name in _ACTING for those in subsets] + [Step(name) for name in _WHOLE]


def assert_alike(operation: Operation, cases: Sequence[Sequence[Step]]) -> None:
    """The operation gives lax's results under each sequence of steps, of which the innermost comes first."""

    def results(function: Function) -> list[jax.Array]:
        found = []
        for case in cases:
            transformed, shapes = function, operation.shapes
            for step in case:
                transformed, shapes = step(transformed, shapes)
            try:
                found.append(transformed(*(_numbers(shape, 11 + i) for i, shape in enumerate(shapes))))
            except Exception as error:
                error.add_note(f"under {_named(case)}")
                raise
        return found

    # One program for all cases of both: XLA's compilation is most of the time.
    ours, theirs = jax.jit(lambda: [results(f) for f in (operation.ours, operation.theirs)])()
    for case, one, other in zip(cases, ours, theirs, strict=True):
        if operation.exact:
            np.testing.assert_array_equal(one, other, err_msg=_named(case))
        else:
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4, err_msg=_named(case))


def _named(case: Sequence[Step]) -> str:
    return " of ".join(map(str, case[::-1]))
