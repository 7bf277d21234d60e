"""Quantized weights with every code of their format, and what they decode to, in numpy alone."""

import dataclasses
import itertools
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax import numpy as jnp

from jax_splitk.quantized import QuantizedArray
from tests.problems import on_device

BITS = {"int4": 4, "uint4": 4, "int8": 8, "float8_e4m3fn": 8, "float4_e2m1fn": 4, "nf4": 4}
INTEGERS = ("int4", "uint4", "int8")
FLOAT_DTYPES = ("bfloat16", "float16", "float32")
E8M0 = "float8_e8m0fnu"
SCALE_DTYPES = (*FLOAT_DTYPES, E8M0, "float8_e4m3fn")


def rounded_once(name: str) -> dict[str, bool]:
    """Options of a compilation: XLA:CPU without these emitters (tests/conftest.py) rounds to float4_e2m1fn twice."""
    return {"xla_cpu_use_fusion_emitters": True} if name == "float4_e2m1fn" and jax.__version_info__ < (0, 11) else {}


# Zero points as dtype names; None for none, "own" for the elements' dtype.
CASES = [
    (name, zero)
    for name, zero in itertools.product(BITS, (None, "own", "bfloat16"))
    if zero is None or name in INTEGERS
]

# Group sizes of k = 384, the last per channel, each with a dtype of the scales.
FLOAT_GROUPS = ((16, "bfloat16"), (32, "float32"), (64, "bfloat16"), (128, "float16"), (384, "float32"))
GROUPS = (*FLOAT_GROUPS, (32, E8M0), (16, "float8_e4m3fn"), (384, E8M0))

# The published table of NormalFloat4 (QLoRA, appendix E).
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@dataclasses.dataclass
class Foreign:
    """A tensor with the attributes of qwix's QArray, or of AQT's QTensor with a list of scales."""

    qvalue: Any
    scale: Any
    zero_point: Any = None
    qtype: Any = None
    scale_t: Any = None
    bias: Any = ()
    tiling_state: Any = None
    sparsity_mask: Any = None


def table(name: str, rounded: str = "float32") -> np.ndarray:
    """The value of every bit pattern of a format, in float64, by the pattern; NaN patterns hold NaN. `rounded`: the
    dtype of nf4's values, which kernels for GPUs round to what they multiply."""
    patterns = np.arange(2 ** BITS[name])
    if name == "nf4":
        return np.asarray(NF4, np.float32).astype(jnp.dtype(rounded)).astype(np.float64)
    if name in INTEGERS:
        negative = (name != "uint4") & (patterns >= patterns.size // 2)
        return np.where(negative, patterns - patterns.size, patterns).astype(np.float64)
    return patterns.astype(np.uint8).view(getattr(ml_dtypes, name)).astype(np.float64)


def storage(name: str) -> np.dtype:
    return jnp.dtype("uint4" if name == "nf4" else name)


def elements(name: str, patterns: np.ndarray) -> jax.Array:
    """Bit patterns as elements of a format."""
    if name.startswith("float"):
        return jax.device_put(patterns.astype(np.uint8).view(storage(name)))
    return on_device(table("uint4" if name == "nf4" else name)[patterns].astype(np.int32), storage(name))


def every_code(
    name: str,
    k: int,
    features: int,
    group: int,
    zero: str | None = None,
    scale_dtype: str = "bfloat16",
    seed: int = 0,
    *,
    channel: bool = False,
    rounded: str = "float32",
) -> tuple[QuantizedArray, np.ndarray]:
    """A weight [k, features] that holds every finite bit pattern if it is large enough, and its values in float64.
    `channel`: with channel scales, powers of two; `rounded` as in `table`."""
    rng = np.random.default_rng(seed)
    finite = np.flatnonzero(np.isfinite(table(name)))
    patterns = rng.permutation(np.resize(finite, k * features)).reshape(k, features)
    shape = (k // group, features)
    sign = rng.choice([-1, 1], shape)
    scale = on_device(rng.uniform(0.25, 4, shape) * (1 if scale_dtype == E8M0 else sign), scale_dtype)
    channel_scale = on_device(rng.choice([0.5, 1, 4], (1, features)), "float32") if channel else None
    value, zero_point = table(name, rounded)[patterns], None
    if zero == "own":
        zero_point = elements(name, rng.integers(0, 2 ** BITS[name], shape))
    elif zero is not None:
        zero_point = on_device(rng.uniform(-8, 8, shape), zero)
    q = QuantizedArray(elements(name, patterns), scale, zero_point, name, channel_scale)
    if zero_point is not None:
        # One rounding to float32, as the definition has it.
        difference = value - np.repeat(np.asarray(zero_point).astype(np.float64), group, axis=0)
        value = difference.astype(np.float32).astype(np.float64)
    value = value * np.repeat(np.asarray(scale).astype(np.float64), group, axis=0)
    return q, value if channel_scale is None else value * np.asarray(channel_scale, np.float64)
