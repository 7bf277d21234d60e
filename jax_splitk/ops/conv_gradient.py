"""Differentiation of a convolution's three passes, each of which is linear in its operands, and what else JAX needs to
transform and to lower them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.interpreters import ad
from jax.typing import DTypeLike

from jax_splitk.ops import checkpointing, conv_batching, lowering, taylor
from jax_splitk.ops.conv_calls import (
    ConvCall,
    ConvDgrad,
    ConvFprop,
    ConvWgrad,
    bind_wgrad,
    conv_dgrad_p,
    conv_fprop_p,
    conv_wgrad_p,
)
from jax_splitk.ops.tangents import bilinear
from jax_splitk.problems.conv_wgrad import DTYPES
from jax_splitk.runtime import _compat
from jax_splitk.runtime.arguments import wider
from jax_splitk.tuning.options import Options

# In a transpose the operand that is solved for is a placeholder that has only a type, `.aval`.


def _fprop_jvp(primals: Sequence[jax.Array], tangents: Sequence[Any], *, call: ConvFprop) -> tuple[jax.Array, Any]:
    # What a transpose keeps of an operand is its conversion, which may be smaller.
    lhs, rhs = (x.astype(call.compute_dtype) for x in primals)
    call = dataclasses.replace(call, options=dataclasses.replace(call.options, forward_only=False))
    return bilinear((lhs, rhs), tangents, call=call)


def _fprop_transpose(ct: Any, lhs: Any, rhs: Any, *, call: ConvFprop) -> tuple[Any, Any]:
    if isinstance(ct, ad.Zero):
        return None, None
    dtype, wgrad_options = call.compute_dtype, _wgrad_options(call)
    ct = ct.astype(dtype)
    if ad.is_undefined_primal(lhs):
        return _dgrad(call, ct, rhs.astype(dtype), lhs.aval, dtype, wgrad_options), None
    out_dtype = rhs.aval.dtype if rhs.aval.dtype.name in DTYPES else dtype
    d_rhs = bind_wgrad(call.convolution, lhs.astype(dtype), ct, rhs.aval.shape, out_dtype, wgrad_options)
    return None, _compat.placed_like(d_rhs.astype(rhs.aval.dtype), rhs.aval)


def _fprop(call: ConvCall, lhs: jax.Array, rhs: jax.Array, g: Any, wgrad_options: Options) -> jax.Array:
    """The forward pass of a call's convolution, as the cotangent of an output of the type `g`."""
    dtype = wider(lhs.dtype, rhs.dtype).name
    fprop = ConvFprop(
        convolution=call.convolution,
        compute_dtype=dtype,
        out_dtype=dtype,
        out_sharding=_compat.explicit_sharding(g),
        options=call.options.of_another_pass(),
        wgrad_options=wgrad_options,
    )
    return fprop.bind(lhs, rhs).astype(g.dtype)


def _dgrad(
    call: ConvCall, g: jax.Array, rhs: jax.Array, lhs: Any, dtype: DTypeLike, wgrad_options: Options
) -> jax.Array:
    """The input gradient of a call's convolution in `dtype`, as the cotangent of an input of the type `lhs`."""
    dgrad = ConvDgrad(
        convolution=call.convolution,
        shape=lhs.shape,
        out_dtype=jnp.dtype(dtype).name,
        out_sharding=_compat.explicit_sharding(lhs),
        options=call.options.of_another_pass(),
        wgrad_options=wgrad_options,
    )
    return dgrad.bind(g, rhs).astype(lhs.dtype)


def _wgrad_options(call: ConvCall) -> Options:
    return call.options if call.wgrad_options is None else call.wgrad_options


def _dgrad_transpose_g(ct: jax.Array, g: Any, rhs: jax.Array, *, call: ConvDgrad) -> jax.Array:
    return _fprop(call, ct, rhs, g.aval, _wgrad_options(call).without_config())


def _dgrad_transpose_rhs(ct: jax.Array, g: jax.Array, rhs: Any, *, call: ConvDgrad) -> jax.Array:
    wide, options = wider(ct.dtype, g.dtype), _wgrad_options(call).without_config()
    operands = (ct.astype(wide), g.astype(wide), rhs.aval.shape)
    return _compat.placed_like(bind_wgrad(call.convolution, *operands, rhs.aval.dtype, options), rhs.aval)


def _wgrad_transpose_lhs(ct: jax.Array, lhs: Any, g: jax.Array, *, call: ConvWgrad) -> jax.Array:
    wide = wider(ct.dtype, g.dtype)
    return _dgrad(call, g.astype(wide), ct.astype(wide), lhs.aval, wide, call.options.of_another_pass(implied=False))


def _wgrad_transpose_g(ct: jax.Array, lhs: jax.Array, g: Any, *, call: ConvWgrad) -> jax.Array:
    return _fprop(call, lhs, ct, g.aval, call.options.of_another_pass(implied=False))


ad.primitive_jvps[conv_fprop_p] = _fprop_jvp
ad.primitive_transposes[conv_fprop_p] = _fprop_transpose
ad.defbilinear(conv_dgrad_p, _dgrad_transpose_g, _dgrad_transpose_rhs)
ad.defbilinear(conv_wgrad_p, _wgrad_transpose_lhs, _wgrad_transpose_g)

for _primitive in (conv_fprop_p, conv_dgrad_p, conv_wgrad_p):
    conv_batching.define(_primitive)
    checkpointing.define(_primitive, lax.conv_general_dilated_p)
    taylor.define(_primitive, taylor.bilinear)
    lowering.define(_primitive)
