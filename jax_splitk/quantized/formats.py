"""The element types of quantized weights: their range, the values of their codes, and the codes themselves."""

import dataclasses
from typing import Any, Literal

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from jax_splitk.runtime.arguments import dtype_of

# NormalFloat4: quantiles of a normal distribution, from appendix E of Dettmers et al., QLoRA (arXiv:2305.14314). They
# are rounded to bfloat16 (at most 0.0016 away), so that tensor cores on 16-bit operands decode the same bits as XLA.
NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
NF4 = NF4.astype(jnp.bfloat16).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Format:
    """One element type.

    A weight is (value(q) - zero_point) * scale. A packed weight stores the code of q: the bits of q, except that int4
    is biased by 8 to become unsigned.
    """

    name: str
    bits: int
    storage: np.dtype  # dtype of `QuantizedArray.qvalue`
    low: float  # least value of q
    high: float  # greatest value of q
    integer: bool = False
    code_bias: int = 0  # code = q + code_bias
    zero_code: int = 0  # the code of value 0


QType = Literal["int4", "uint4", "int8", "float8_e4m3fn", "float4_e2m1fn", "nf4"]
FORMATS = {
    fmt.name: fmt
    for fmt in (
        Format("int4", 4, jnp.dtype(jnp.int4), -8, 7, integer=True, code_bias=8, zero_code=8),
        Format("uint4", 4, jnp.dtype(jnp.uint4), 0, 15, integer=True),
        Format("int8", 8, jnp.dtype(jnp.int8), -128, 127, integer=True),
        Format("float8_e4m3fn", 8, jnp.dtype(jnp.float8_e4m3fn), -448, 448),
        Format("float4_e2m1fn", 4, jnp.dtype(jnp.float4_e2m1fn), -6, 6),
        Format("nf4", 4, jnp.dtype(jnp.uint4), -1, 1, zero_code=7),
    )
}
SCALE_DTYPES = ("bfloat16", "float16", "float32")


def format_of(dtype: QType | np.dtype | type[Any]) -> Format:
    """The format of a dtype or a name. Raises TypeError if it is not in `FORMATS`."""
    name = "nf4" if isinstance(dtype, str) and dtype == "nf4" else dtype_of("dtype", dtype, tuple(FORMATS)).name
    return FORMATS[name]


def values(fmt: Format, q: jax.Array) -> jax.Array:
    """The values of stored elements, in float32 (exact for every format)."""
    if fmt.name == "nf4":
        return jnp.take(jnp.asarray(NF4), q.astype(jnp.int32), mode="clip")
    return q.astype(jnp.float32)


def table(fmt: Format) -> np.ndarray:
    """The value of each code, in float32. A constant: Computed by NumPy, so that JAX's debugging flags do not see
    it."""
    codes = np.arange(2**fmt.bits)
    if fmt.name == "nf4":
        return NF4
    if fmt.code_bias:
        return (codes - fmt.code_bias).astype(np.float32)
    return codes.astype(np.uint8).view(fmt.storage).astype(np.float32)


def nearest(fmt: Format, value: jax.Array) -> jax.Array:
    """The stored elements closest to float values. Values outside the range are clipped."""
    if fmt.name == "nf4":
        middles = jnp.asarray((NF4[1:] + NF4[:-1]) / 2, value.dtype)
        return jnp.searchsorted(middles, value, method="compare_all").astype(fmt.storage)
    if fmt.integer:
        value = jnp.round(value)
    return jnp.clip(value, fmt.low, fmt.high).astype(fmt.storage)


def to_codes(fmt: Format, q: jax.Array) -> jax.Array:
    """The codes of stored elements as uint32, below 2**bits."""
    if fmt.code_bias:
        return (q.astype(jnp.int32) + fmt.code_bias).astype(jnp.uint32)
    unsigned = jnp.uint4 if fmt.bits == 4 else jnp.uint8
    return lax.bitcast_convert_type(q, unsigned).astype(jnp.uint32)


def from_codes(fmt: Format, codes: jax.Array) -> jax.Array:
    """The inverse of `to_codes`."""
    if fmt.code_bias:
        return (codes.astype(jnp.int32) - fmt.code_bias).astype(fmt.storage)
    unsigned = jnp.uint4 if fmt.bits == 4 else jnp.uint8
    return lax.bitcast_convert_type(codes.astype(unsigned), fmt.storage)
