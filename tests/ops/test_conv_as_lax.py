"""The cases of JAX's own tests of its convolution (lax_test, lax_autodiff_test, lax_vmap_test, pjit_test,
shape_poly_test), with our convolution in its place and lax as the reference, forward and in both modes of
differentiation."""

import contextlib
import functools
import itertools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax import export, lax
from jax import numpy as jnp
from jax.extend import core
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_splitk
from tests.problems import generator, on_device

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="these are the CPU's paths")

Function = Callable[..., jax.Array]


def substituted(function: Function) -> Function:
    """`function` with each of lax's convolutions replaced by ours."""

    def run(*args: jax.Array) -> jax.Array:
        closed = jax.make_jaxpr(function)(*args)
        found: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        found |= dict(zip(closed.jaxpr.invars, args, strict=True))
        read = lambda x: x.val if isinstance(x, core.Literal) else found[x]  # noqa: E731
        for eqn in closed.jaxpr.eqns:
            operands = [read(x) for x in eqn.invars]
            if eqn.primitive is lax.conv_general_dilated_p:
                out = jax_splitk.conv_general_dilated(*operands, **eqn.params)
            else:
                out = eqn.primitive.bind(*operands, **eqn.params)
            found |= dict(zip(eqn.outvars, out if eqn.primitive.multiple_results else [out], strict=True))
        return read(closed.jaxpr.outvars[0])

    return run


def drawn(axes: dict[str, Any], quick: int = 2, all_of_them: int = 20) -> list[Any]:
    """Cases of a product of axes, each an index into every axis: few for `make test`, more for `make test-all`. An axis
    with several names gives as many values."""
    names = [name for joined in axes for name in joined.split(",")]
    rng = np.random.default_rng(zlib.crc32(repr(names).encode()))
    cases = []
    for i in range(all_of_them):
        case: dict[str, Any] = {}
        for joined, values in axes.items():
            listed = list(values)
            value = listed[rng.integers(len(listed))]
            case |= dict(zip(joined.split(","), value if "," in joined else (value,), strict=True))
        cases.append(pytest.param(case, id=str(i), marks=[pytest.mark.exhaustive] * (i >= quick)))
    return cases


@contextlib.contextmanager
def small(*shapes: tuple[int, ...], dtypes: tuple[Any, ...]) -> Iterator[list[jax.Array]]:
    """Operands of small integers, in 64-bit mode for 64-bit dtypes."""
    wide = any(jnp.dtype(dtype).itemsize >= 8 and dtype != "complex64" for dtype in dtypes)
    with jax.enable_x64(wide):
        rng = generator(7)
        yield [jax.device_put(rng.integers(-2, 3, shape).astype(jnp.dtype(dtypes[0]))) for shape in shapes]


def assert_alike(ours: Any, theirs: Any) -> None:
    for a, b in zip(*(map(np.asarray, jax.tree.leaves(each)) for each in (ours, theirs)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if jnp.issubdtype(a.dtype, jnp.floating):
            scale = float(np.max(np.abs(b.astype(np.float32)), initial=0))
            tolerance = 4 * float(jnp.finfo(a.dtype).eps)
            np.testing.assert_allclose(a.astype(float), b.astype(float), rtol=tolerance, atol=tolerance * scale)
        else:
            np.testing.assert_array_equal(a, b)


def check(function: Function, *operands: jax.Array, order: int = 1) -> None:
    """Values and derivatives of `function` up to `order` are the same with our convolution and with lax's."""
    differentiable = jnp.issubdtype(operands[0].dtype, jnp.inexact)

    def gradients(f: Function, *operands: jax.Array) -> Any:
        out, vjp = jax.vjp(f, *operands)
        return vjp(out)

    def everything(f: Function, *operands: jax.Array) -> Any:
        if not differentiable:
            return f(*operands)
        if order == 2:  # the first is a part of these
            f = functools.partial(gradients, f)
        values, vjp = jax.vjp(f, *operands)
        return vjp(values), jax.jvp(f, operands, operands)

    # One program, in which XLA computes once what both have in common.
    both = jax.jit(lambda *operands: [everything(f, *operands) for f in (substituted(function), function)])
    assert_alike(*both(*operands))


FLOATS = ("bfloat16", "float16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
ALL_DTYPES = (*FLOATS, *INTEGERS, "complex64", "complex128", "bool")
TWO_OR_THREE = {name: (2, 3) for name in "bij"}
UP_TO_THREE = {name: (1, 2, 3) for name in "bij"}
WORDS = ("VALID", "SAME", "SAME_LOWER")
GROUPS = {"groups,batch_groups": ((1, 1), (1, 2), (2, 1))}
STRIDES = {"strides": ((1, 1), (1, 2), (2, 1))}
LAYOUTS = {
    "layout": (
        ("NCHW", "OIHW", "NCHW"), ("NHWC", "HWIO", "NHWC"), ("NCHW", "HWIO", "NHWC"), ("NHWC", "OIHW", "NCHW"),
        ("HWCN", "HWIO", "HWCN"),
    )
}  # fmt: skip


# ---- lax_test --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", drawn({**TWO_OR_THREE, **STRIDES, "dtype": FLOATS, "padding": WORDS}))
def test_conv(case: dict[str, Any]) -> None:
    b, i, j, dtype = (case.pop(name) for name in ("b", "i", "j", "dtype"))
    with small((b, i, 9, 10), (j, i, 4, 5), dtypes=(dtype,)) as operands:
        check(lambda lhs, rhs: lax.conv(lhs, rhs, case["strides"], case["padding"]), *operands)


PREFERRED = [
    *((dtype, wide) for dtype, wide in itertools.combinations_with_replacement(("float16", "float32", "float64"), 2)),
    *(("bfloat16", wide) for wide in ("bfloat16", "float32", "float64")),
    *itertools.combinations_with_replacement(("int8", "int16", "int32", "int64"), 2),
    ("complex64", "complex64"), ("complex64", "complex128"), ("complex128", "complex128"),
    *itertools.product(("int8", "int16"), FLOATS), ("int32", "float32"), ("int32", "float64"), ("int64", "float64"),
]  # fmt: skip


@pytest.mark.parametrize("case", drawn({**TWO_OR_THREE, "dtype,preferred": PREFERRED}, all_of_them=30))
def test_preferred_element_type(case: dict[str, Any]) -> None:
    b, i, j, dtype, preferred = (case[name] for name in ("b", "i", "j", "dtype", "preferred"))
    with small((b, i, 9, 10), (j, i, 4, 5), dtypes=(dtype, preferred)) as operands:
        check(lambda x, w: lax.conv(x, w, (1, 1), "VALID", preferred_element_type=preferred), *operands)


DILATIONS = ((1, 1), (1, 2), (2, 2))


@pytest.mark.parametrize("case", drawn({
    **UP_TO_THREE, **STRIDES, "dtype": FLOATS, "padding": (((0, 0), (0, 0)), ((1, 2), (2, 0))),
    "lhs_dilation": DILATIONS, "rhs_dilation": DILATIONS,
}))  # fmt: skip
def test_general_padding(case: dict[str, Any]) -> None:
    b, i, j, dtype = (case.pop(name) for name in ("b", "i", "j", "dtype"))
    conv = functools.partial(lax.conv_with_general_padding, window_strides=case.pop("strides"), **case)
    with small((b, i, 9, 10), (j, i, 4, 5), dtypes=(dtype,)) as operands:
        check(conv, *operands)


def general(case: dict[str, Any], order: int = 1, kernel: tuple[int, ...] = (4, 5)) -> None:
    """A case of `conv_general_dilated` in any layout and dtype."""
    b, i, j, layout, dtype, spatial = (case.pop(name) for name in ("b", "i", "j", "layout", "dtype", "spatial"))
    groups, batch_groups = (case.pop(name) for name in ("groups", "batch_groups"))
    lhs = dict(zip("NCHW", (b * batch_groups, i * groups, *spatial), strict=False))
    rhs = dict(zip("OIHW", (j * groups * batch_groups, i, *kernel), strict=False))
    shapes = [tuple(sizes[letter] for letter in spec) for sizes, spec in zip((lhs, rhs), layout, strict=False)]
    counts = {"feature_group_count": groups, "batch_group_count": batch_groups}
    conv = functools.partial(
        lax.conv_general_dilated, dimension_numbers=layout, window_strides=case.pop("strides"), **counts, **case
    )
    with small(*shapes, dtypes=(dtype,)) as operands:
        check(conv, *operands, order=order)


@pytest.mark.parametrize("case", drawn({
    **TWO_OR_THREE, **GROUPS, "dtype": ALL_DTYPES, "spatial": [()], "strides": [()], "padding": [()],
    "layout": [("NC", "OI", "NC")],
}))  # fmt: skip
def test_no_spatial_dimensions(case: dict[str, Any]) -> None:
    general(case, kernel=())


@pytest.mark.parametrize("case", drawn({
    **TWO_OR_THREE, **GROUPS, **LAYOUTS, "dtype": ALL_DTYPES, "spatial": ((9, 0), (9, 10)),
    "strides": ((1, 1), (2, 1)), "padding": (((1, 2), (2, 0)), ((10, 8), (7, 13))),
    "lhs_dilation": ((1, 1), (1, 2), (1, 4)), "rhs_dilation": ((1, 1), (1, 2), (1, 4)),
}, quick=3, all_of_them=40))  # fmt: skip
def test_general_dilated(case: dict[str, Any]) -> None:
    general(case)


@pytest.mark.parametrize("case", drawn({
    **TWO_OR_THREE, "k": (3, 4, 5), "rank,strides,rhs_dilation": [
        *itertools.product((2,), ((1, 1), (1, 2), (2, 1), (2, 2), (3, 3)), (None, (2, 2))),
        *itertools.product((1,), ((1,), (2,), (3,)), (None, (2,))), (0, (), None),
    ], "dtype": FLOATS, "padding": ("VALID", "SAME"), "transpose_kernel": (False, True),
}))  # fmt: skip
def test_conv_transpose(case: dict[str, Any]) -> None:
    b, i, j, k, rank, dtype = (case.pop(name) for name in ("b", "i", "j", "k", "rank", "dtype"))
    spatial = "HW"[:rank]
    layout = tuple(form.replace("S", spatial) for form in ("NSC", "SIO", "NSC"))
    channels = (j, i) if case["transpose_kernel"] else (i, j)
    conv = functools.partial(lax.conv_transpose, dimension_numbers=layout, **case)
    with small((b, *(9, 10)[:rank], i), (*(k,) * rank, *channels), dtypes=(dtype,)) as operands:
        check(conv, *operands)


@pytest.mark.parametrize("case", drawn({
    "shape,filter_shape,window_strides,padding,dimension_numbers": [
        ((2, 5), (), (), [], ("NC", "OI", "CN")),
        ((2, 3, 4), (2,), (2,), [(0, 2)], ("CNH", "OHI", "HNC")),
        ((3, 1, 4, 5), (1, 3), (1, 3), [(3, 1), (2, 2)], ("NCHW", "OIHW", "NCHW")),
        ((3, 2, 5, 6), (4, 3), (4, 3), [(5, 2), (2, 4)], None),
        ((1, 2, 3, 4), (3, 2), (1, 1), [(0, 0), (0, 0)], ("CWHN", "HOWI", "NCHW")),
        ((2, 3, 4, 5, 6), (2, 1, 3), (2, 1, 3), [(1, 2), (5, 3), (3, 5)], ("NHWDC", "HDIWO", "DCWNH")),
    ],
    "dtype": ALL_DTYPES, "precision": (None, *lax.Precision),
}))  # fmt: skip
def test_patches(case: dict[str, Any]) -> None:
    shape, dtype = case.pop("shape"), case.pop("dtype")
    with small(shape, dtypes=(dtype,)) as operands:
        check(functools.partial(lax.conv_general_dilated_patches, **case), *operands)


@pytest.mark.parametrize("case", drawn({
    "lhs_spec,rhs_spec,out_spec": [
        tuple("".join(np.random.default_rng(i).permutation(list(form[:rank]))) for form in ("NCHW", "OIHW", "NCHW"))
        for i in range(20) for rank in (3, 4)
    ],
    "dtype": (*FLOATS, "complex64"), "padding": ("SAME", "VALID"),
    "precision": (None, "default", "high", "highest", ("default", "highest")),
}))  # fmt: skip
def test_any_order_of_dimensions(case: dict[str, Any]) -> None:
    lhs_spec, rhs_spec, out_spec, dtype = (case.pop(name) for name in ("lhs_spec", "rhs_spec", "out_spec", "dtype"))
    lhs, rhs = (dict(zip(*pair, strict=True)) for pair in (("NCHW", (2, 4, 7, 6)), ("OIHW", (5, 4, 2, 3))))
    shapes = [tuple(sizes[c] for c in spec) for sizes, spec in ((lhs, lhs_spec), (rhs, rhs_spec))]
    rank = len(lhs_spec) - 2
    conv = functools.partial(
        lax.conv_general_dilated, window_strides=(1, 2)[:rank], rhs_dilation=(2, 1)[:rank],
        dimension_numbers=(lhs_spec, rhs_spec, out_spec), **case,
    )  # fmt: skip
    with small(*shapes, dtypes=(dtype,)) as operands:
        check(conv, *operands)


# ---- lax_autodiff_test -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", drawn({
    **TWO_OR_THREE, **STRIDES, "dtype": FLOATS,
    "padding": (*WORDS[:2], ((0, 0), (0, 0)), ((-1, 0), (0, -1)), ((1, 0), (0, 1))), "transposed": (1, 2),
}))  # fmt: skip
def test_derivatives_to_second_order(case: dict[str, Any]) -> None:
    b, i, j, dtype, factor = (case.pop(name) for name in ("b", "i", "j", "dtype", "transposed"))
    if not isinstance(case["padding"], str):
        case["lhs_dilation"] = (factor, 1)
    conv = functools.partial(lax.conv_general_dilated, window_strides=case.pop("strides"), precision="highest", **case)
    with small((b, i, 3, 4), (j, i, 1, 2), dtypes=(dtype,)) as operands:
        check(conv, *operands, order=2)


@pytest.mark.parametrize("case", drawn({
    **{name: (1, 2) for name in "bij"}, **GROUPS, **LAYOUTS, **STRIDES, "dtype": ("float32", "complex64"),
    "lhs_dilation": ((1, 1), (2, 1)), "rhs_dilation": ((1, 1), (2, 2)),
    "spatial,padding": [
        ((6, 7), ((0, -1), (0, 0))), *((spatial, padding) for spatial in ((6, 7), (0, 4))
                                       for padding in (((0, 0), (0, 0)), ((1, 0), (0, 1)))),
    ],
}, quick=2, all_of_them=30))  # fmt: skip
def test_general_derivatives_to_second_order(case: dict[str, Any]) -> None:
    general(case | {"precision": "highest"}, order=2, kernel=(1, 2))


# ---- lax_vmap_test ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", drawn({
    **{name: (1, 2) for name in "bij"}, **GROUPS, **STRIDES, "layout": LAYOUTS["layout"],
    "axes": [pair for pair in itertools.product((None, *range(5)), repeat=2) if pair != (None, None)],
    "padding": (((0, 0), (0, 0)), ((1, 0), (0, 1)), ((0, -1), (0, 0))),
    "lhs_dilation": ((1, 1), (2, 1)), "rhs_dilation": ((1, 1), (2, 2)), "size": range(5),
}, quick=5, all_of_them=50))  # fmt: skip
def test_vmap(case: dict[str, Any]) -> None:
    b, i, j, layout, size, axes = (case.pop(name) for name in ("b", "i", "j", "layout", "size", "axes"))
    groups, batch_groups = (case.pop(name) for name in ("groups", "batch_groups"))
    lhs, rhs = {"N": b * batch_groups, "C": i * groups, "H": 6, "W": 7}, {"O": j * groups * batch_groups, "I": i}
    rhs |= {"H": 1, "W": 2}
    shapes = []
    for sizes, spec, axis in zip((lhs, rhs), layout, axes, strict=False):
        shape = [sizes[letter] for letter in spec]
        shapes.append(tuple(shape if axis is None else [*shape[:axis], size, *shape[axis:]]))
    conv = functools.partial(
        lax.conv_general_dilated, dimension_numbers=layout, window_strides=case.pop("strides"),
        feature_group_count=groups, batch_group_count=batch_groups, precision="highest", **case,
    )  # fmt: skip
    with small(*shapes, dtypes=("float32",)) as operands:
        one = [jax.ShapeDtypeStruct(tuple(np.delete(x.shape, a) if a is not None else x.shape), x.dtype)
               for x, a in zip(operands, axes, strict=True)]  # fmt: skip
        ours = functools.partial(jax_splitk.conv_general_dilated, **conv.keywords)
        assert jax.eval_shape(ours, *one) == jax.eval_shape(conv, *one)

        def both_ways(f: Function, *operands: jax.Array) -> Any:
            out, vjp = jax.vjp(jax.vmap(f, axes), *operands)
            return out, vjp(out)

        assert_alike(*jax.jit(lambda *operands: [both_ways(f, *operands) for f in (ours, conv)])(*operands))


# ---- pjit_test -------------------------------------------------------------------------------------------------------


def explicit(*sizes: int) -> Any:
    return jax.set_mesh(jax.make_mesh(sizes, ("x", "y")[: len(sizes)], axis_types=(AxisType.Explicit,) * len(sizes)))


def test_explicit_sharding_of_pixels() -> None:
    with explicit(2, 2):
        lhs = jax.device_put(np.ones((16, 128, 8), np.float32), P("x", "y"))

        @jax.jit
        def layer(x: jax.Array) -> jax.Array:
            weight = np.ones((5, 8, 10), np.float32)
            return jax_splitk.conv_general_dilated(x, weight, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))

        assert layer(lhs).sharding.spec == P("x", "y", None)
        assert jax.jit(jax.grad(lambda x: layer(x).sum()))(lhs).sharding.spec == P("x", "y", None)
        with pytest.raises(Exception, match="Please specify the output sharding"):
            layer(jax.device_put(np.ones((16, 128, 8), np.float32), P("x", None, "y")))


def causal(layer: Function, **more: Any) -> Function:
    numbers = lax.ConvDimensionNumbers((0, 2, 1), (2, 1, 0), (0, 2, 1))

    def model(kernel: jax.Array, inputs: jax.Array) -> jax.Array:
        padded = jnp.pad(inputs, ((0, 0), (2, 0), (0, 0)))
        return layer(padded, kernel, window_strides=(1,), padding="VALID", dimension_numbers=numbers, **more)

    return model


def test_gradients_keep_explicit_shardings() -> None:
    rng = generator(2)
    kernel, inputs = (on_device(rng.integers(-2, 3, s), jnp.float32) for s in ((3, 1, 16), (64, 32, 1)))
    expected = jax.grad(lambda *xs: causal(lax.conv_general_dilated)(*xs).sum(), (0, 1))(kernel, inputs)
    with explicit(4):
        placed = jax.device_put(kernel, P()), jax.device_put(inputs, P("x"))
        model = causal(jax_splitk.conv_general_dilated)
        found = jax.jit(jax.grad(lambda *xs: model(*xs).sum(), (0, 1)))(*placed)
        for ours, theirs, operand in zip(found, expected, placed, strict=True):
            assert jax.typeof(ours).sharding == jax.typeof(operand).sharding
            np.testing.assert_array_equal(ours, theirs)


def test_vmap_of_an_explicitly_sharded_axis() -> None:
    rng = generator(3)
    kernel, inputs = (on_device(rng.integers(-2, 3, s), jnp.float32) for s in ((3, 1, 16), (64, 16, 32, 1)))
    expected = jax.vmap(causal(lax.conv_general_dilated), (None, 0), 1)(kernel, inputs)
    with explicit(2, 2):
        model = causal(jax_splitk.conv_general_dilated, out_sharding=P(None, None, None))
        mapped = jax.jit(jax.vmap(jax.jit(model), (None, 0), 1))
        out = mapped(jax.device_put(kernel, P()), jax.device_put(inputs, P("x")))
        assert out.sharding.spec == P(None, "x", None, None)
        np.testing.assert_array_equal(out, expected)


# ---- shape_poly_test -------------------------------------------------------------------------------------------------


def strided(stride: int, padding: str = "SAME") -> Callable[[Function], Function]:
    numbers = lax.ConvDimensionNumbers((0, 2, 1), (2, 1, 0), (0, 2, 1))
    return lambda conv: lambda lhs, rhs: conv(lhs, rhs, (stride,), padding, dimension_numbers=numbers)


def doubled(conv: Function) -> Function:
    function = functools.partial(lax.conv_transpose, strides=(2,), padding="SAME")
    return function if conv is lax.conv_general_dilated else substituted(function)


def plane(conv: Function) -> Function:
    return lambda lhs, rhs: conv(lhs, rhs, (2, 3), ((0, 0), (0, 0)), (1, 1), (1, 2), ("NCHW", "OIHW", "NCHW"))


@pytest.mark.parametrize(("function", "shape", "symbols", "rhs_shape", "reverse"), [
    (strided(1), (1, 12, 16), "_, b, _", (4, 16, 16), True),
    # lax itself has no symbolic weight gradient for these.
    (strided(2), (1, 12, 16), "_, b, _", (4, 16, 16), False),
    pytest.param(strided(2), (1, 13, 16), "_, b, _", (4, 16, 16), False, marks=pytest.mark.exhaustive),
    (strided(2, "VALID"), (1, 4, 16), "_, b, _", (8, 16, 16), False),
    pytest.param(doubled, (5, 12, 16), "b, _, _", (4, 16, 16), True, marks=pytest.mark.exhaustive),
    (doubled, (5, 12, 16), "_, b, _", (4, 16, 16), True),
    (plane, (7, 3, 9, 10), "b, ...", (3, 3, 4, 5), True),
])  # fmt: skip
def test_export_with_symbolic_shapes(
    function: Callable[[Function], Function],
    shape: tuple[int, ...],
    symbols: str,
    rhs_shape: tuple[int, ...],
    reverse: bool,
) -> None:
    def gradients(f: Function) -> Callable[..., Any]:
        return jax.grad(lambda lhs, rhs: (f(lhs, rhs) ** 2).sum(), (0, 1))

    with small(shape, rhs_shape, dtypes=("float32",)) as (lhs, rhs):
        symbolic = jax.ShapeDtypeStruct(export.symbolic_shape(symbols, like=lhs.shape), lhs.dtype)
        for of in (lambda f: f, gradients) if reverse else (lambda f: f,):
            exported = export.export(jax.jit(of(function(jax_splitk.conv_general_dilated))))(symbolic, rhs)
            assert_alike(exported.call(lhs, rhs), jax.jit(of(function(lax.conv_general_dilated)))(lhs, rhs))
