"""Quantized weights with every code of their format, and what they decode to, in numpy alone."""

import dataclasses
import itertools
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax import numpy as jnp

from jax_splitk.quantized import QuantizedArray

BITS = {"int4": 4, "uint4": 4, "int8": 8, "float8_e4m3fn": 8, "float4_e2m1fn": 4, "nf4": 4}
INTEGERS = ("int4", "uint4", "int8")
SCALE_DTYPES = ("bfloat16", "float16", "float32")
# XLA:CPU without these emitters (tests/conftest.py) rounds to float4_e2m1fn twice.
ROUNDED_ONCE = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else {}
# Zero points as dtype names; None for none, "own" for the elements' dtype.
CASES = [
    (name, zero)
    for name, zero in itertools.product(BITS, (None, "own", "bfloat16"))
    if zero is None or name in INTEGERS
]

# Group sizes of k = 384, the last per channel, each with a dtype of the scales.
GROUPS = ((16, "bfloat16"), (32, "float32"), (64, "bfloat16"), (128, "float16"), (384, "float32"))

# The published table of NormalFloat4 (QLoRA, appendix E), to six digits.
NF4 = (-1, -0.696193, -0.525073, -0.394917, -0.284441, -0.184773, -0.091050, 0)
NF4 = (*NF4, 0.079580, 0.160930, 0.246112, 0.337915, 0.440710, 0.562617, 0.722957, 1)


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


def table(name: str) -> np.ndarray:
    """The value of every bit pattern of a format, in float64, by the pattern; NaN patterns hold NaN."""
    patterns = np.arange(2 ** BITS[name])
    if name == "nf4":
        return np.asarray(NF4).astype(ml_dtypes.bfloat16).astype(np.float64)
    if name in INTEGERS:
        negative = (name != "uint4") & (patterns >= patterns.size // 2)
        return np.where(negative, patterns - patterns.size, patterns).astype(np.float64)
    return patterns.astype(np.uint8).view(getattr(ml_dtypes, name)).astype(np.float64)


def storage(name: str) -> np.dtype:
    return jnp.dtype("uint4" if name == "nf4" else name)


def elements(name: str, patterns: np.ndarray) -> jax.Array:
    """Bit patterns as elements of a format."""
    if name.startswith("float"):
        return jnp.asarray(patterns.astype(np.uint8).view(storage(name)))
    return jnp.asarray(table("uint4" if name == "nf4" else name)[patterns].astype(np.int32), storage(name))


def every_code(
    name: str, k: int, features: int, group: int, zero: str | None = None, scale_dtype: str = "bfloat16", seed: int = 0
) -> tuple[QuantizedArray, np.ndarray]:
    """A weight [k, features] that holds every finite bit pattern if it is large enough, and its values in float64."""
    rng = np.random.default_rng(seed)
    finite = np.flatnonzero(np.isfinite(table(name)))
    patterns = rng.permutation(np.resize(finite, k * features)).reshape(k, features)
    shape = (k // group, features)
    scale = jnp.asarray(rng.uniform(0.25, 4, shape) * rng.choice([-1, 1], shape), scale_dtype)
    value, zero_point = table(name)[patterns], None
    if zero == "own":
        zero_point = elements(name, rng.integers(0, 2 ** BITS[name], shape))
    elif zero is not None:
        zero_point = jnp.asarray(rng.uniform(-8, 8, shape), zero)
    q = QuantizedArray(elements(name, patterns), scale, zero_point, name)
    if zero_point is not None:
        # One rounding to float32, as the definition has it.
        difference = value - np.repeat(np.asarray(zero_point.astype(jnp.float32), np.float64), group, axis=0)
        value = difference.astype(np.float32).astype(np.float64)
    return q, value * np.repeat(np.asarray(scale.astype(jnp.float32), np.float64), group, axis=0)
