"""The element types of quantized weights: their range, the values of their codes, and the codes themselves."""

import dataclasses
from typing import Any, Literal

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from jax_splitk.runtime.arguments import dtype_of

# NormalFloat4: quantiles of a normal distribution, from appendix E of Dettmers et al., QLoRA (arXiv:2305.14314), in
# float32. Tensor cores multiply in 16 bits, so the kernels for GPUs round these values to the dtype of x that they
# multiply: to bfloat16 at most 0.0017 away, to float16 at most 0.0002.
NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)


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
FLOAT_DTYPES = ("bfloat16", "float16", "float32")  # of scales and floating zero points
E8M0 = "float8_e8m0fnu"  # a byte s stands for 2**(s - 127), 255 for NaN
BYTE_SCALES = (E8M0, "float8_e4m3fn")  # scales of a byte: MXFP4's and NVFP4's
SCALE_DTYPES = (*FLOAT_DTYPES, *BYTE_SCALES)


def format_of(dtype: QType | np.dtype | type[Any]) -> Format:
    """The format of a dtype or a name. Raises TypeError if it is not in `FORMATS`."""
    name = "nf4" if isinstance(dtype, str) and dtype == "nf4" else dtype_of("dtype", dtype, tuple(FORMATS)).name
    return FORMATS[name]


def to_float32(scale: jax.Array) -> jax.Array:
    """Scales in float32, which holds them exactly. XLA:CPU takes the subnormal 2**-127 of E8M0 for 0."""
    if scale.dtype.name != E8M0:
        return scale.astype(jnp.float32)
    exponent = as_bytes(scale).astype(jnp.uint32)
    special = jnp.where(exponent == 0, np.uint32(0x00400000), np.uint32(0x7FC00000))  # 2**-127 and NaN
    bits = jnp.where((exponent == 0) | (exponent == 255), special, exponent << 23)
    return lax.bitcast_convert_type(bits, jnp.float32)


def as_bytes(x: Any) -> Any:
    """The bytes of an array of E8M0; any other array unchanged. Bytes can be padded with 0, a value that E8M0 does not
    have."""
    if x.dtype.name != E8M0:
        return x
    return x.view(np.uint8) if isinstance(x, np.ndarray) else lax.bitcast_convert_type(x, jnp.uint8)


def from_bytes(x: Any, dtype: Any) -> Any:
    """The inverse of `as_bytes` for an array of this dtype."""
    if jnp.dtype(dtype).name != E8M0:
        return x
    return x.view(dtype) if isinstance(x, np.ndarray) else lax.bitcast_convert_type(x, dtype)


def rounded_up(x: jax.Array, dtype: Any) -> jax.Array:
    """Positive `x`, rounded up to a dtype of scales and clipped to its range and to 2**-126..2**126: XLA:CPU flushes
    subnormal numbers and reciprocals."""
    if jnp.dtype(dtype).name == E8M0:
        bits = lax.bitcast_convert_type(rounded_up(x, jnp.float32), jnp.uint32)
        return from_bytes(((bits + np.uint32(2**23 - 1)) >> 23).astype(jnp.uint8), dtype)
    info = jnp.finfo(dtype)
    x = jnp.clip(x, max(float(info.smallest_subnormal), 2.0**-126), min(float(info.max), 2.0**126))
    rounded = x.astype(dtype)
    integer = jnp.dtype(f"uint{8 * rounded.dtype.itemsize}")
    above = lax.bitcast_convert_type(lax.bitcast_convert_type(rounded, integer) + integer.type(1), dtype)
    return jnp.where(rounded.astype(x.dtype) < x, above, rounded)


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
        # Comparisons of elements, which XLA fuses. jnp.searchsorted takes 8 bytes of memory for each element.
        middles, code = (NF4[1:] + NF4[:-1]) / 2, jnp.zeros(value.shape, jnp.uint8)
        for middle in middles.astype(value.dtype):
            code += (value > middle).astype(code.dtype)
        return code.astype(fmt.storage)
    if fmt.integer:
        value = jnp.round(value)
    return jnp.clip(value, fmt.low, fmt.high).astype(fmt.storage)


def from_4_bits(x: jax.Array) -> jax.Array:
    """An array of 4-bit integers as int8, any other one unchanged.

    A barrier keeps XLA from fusing the conversion with what follows. Fused with a transposition or a sum on a GPU, it
    gave 0 for some elements of some programs (jaxlib 0.11.2).
    """
    return lax.optimization_barrier(x.astype(jnp.int8)) if _has_4_bits(x.dtype) else x


def to_4_bits(x: jax.Array, dtype: Any) -> jax.Array:
    """`x` in the dtype. A barrier keeps XLA from fusing a conversion to 4 bits with what precedes it: see
    `from_4_bits`."""
    return (lax.optimization_barrier(x) if _has_4_bits(jnp.dtype(dtype)) else x).astype(dtype)


def _has_4_bits(dtype: Any) -> bool:
    return dtype.name in ("int4", "uint4")


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
