"""compressed-tensors' format "pack-quantized": integers in words of 32 bits.

`weight_packed` int32 [n, k / 8] holds q + 8 (q + 128 of 8 bits), low bits first; `weight_scale` [n, groups];
`weight_shape` is (n, k); `weight_zero_point` int32 [n / 8, groups] is packed along its first dimension in the same way,
and `weight_g_idx` int32 [k] is the group of each k. Experts may be stacked along a leading dimension.
"""

import functools
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from jax_splitk.checkpoints import compressed
from jax_splitk.checkpoints.elements import quantized, shifts, unpacked
from jax_splitk.checkpoints.weight import Module, Parts, Stored
from jax_splitk.quantized.array import QuantizedArray

KEYS = (".weight_packed",)
METHODS = compressed.METHODS
_ENDS = (".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_g_idx", ".weight_shape")


def find(module: Module) -> Stored | None:
    """The weight of a module; None if it is not stored so."""
    if not module.has(".weight_packed") or module.dtype(".weight_packed") != "int32":
        return None
    module.is_said("compressed-tensors: weight_packed of int32", *METHODS)
    compressed.check_format(module, "pack-quantized")
    module.require(".weight_scale", ".weight_shape")
    words, scale = module.shape(".weight_packed"), module.shape(".weight_scale")
    shape = tuple(int(n) for n in module.array(".weight_shape").ravel())
    stack, (features, k) = words[:-2], (shape if len(shape) > 1 else (0, 0))[-2:]
    bits = next((bits for bits in (4, 8) if words[-1:] == (-(-k * bits // 32),)), 0)
    fits = len(words) in (2, 3) and words[:-1] == shape[:-1] and bits and k
    accepted = "accepted: weight_shape (n, k) of words [n, k / 8] (4 bits) or [n, k / 4] (8 bits)"
    module.check(bool(fits), *_ENDS, because=f"weight_shape says {shape}; {accepted}")
    scales = scale[: len(stack)] == stack and scale[-2:-1] in ((features,), (1,)) and len(scale) == len(words)
    module.check(
        scales or (not stack and scale in ((1,), ())),
        *_ENDS,
        because=f"accepted: scales {[*stack, features, 'groups']}",
    )
    parts = functools.partial(_parts, module, (k, features), bits)
    return module.stored("pack-quantized", (*stack, k, features), _ENDS, parts)


def _parts(module: Module, shape: tuple[int, int], bits: int) -> Parts:
    (k, features), stacked = shape, len(module.shape(".weight_packed")) == 3
    scale = module.array(".weight_scale")
    scale = scale if scale.ndim >= 2 else scale.reshape(1, 1)
    group = compressed.group_size(module, k, scale.shape[-1], bits)
    zeros = _zeros(module, scale.shape[-1], features, bits)
    order = _order(module, k, group)
    one = None if zeros is None else zeros.dtype == np.int32
    arrays = (module.array(".weight_packed"), scale, zeros, order)
    return Parts(_build, arrays, (bits, group, features // scale.shape[-2], shape, one), 3 * stacked, order)


def _build(
    words: Any, scale: Any, zeros: Any, order: Any, bits: int, group: int, shared: int, shape: Any, packed: Any
) -> QuantizedArray:
    k, features = shape
    codes = unpacked(words, bits, shifts(bits))[:, :k].T
    if order is not None:
        codes = jnp.take(codes, order, axis=0)
    if zeros is not None and packed:
        biased = unpacked(zeros, bits, shifts(bits), axis=0)[:features]
        zeros = biased.astype(jnp.int16) - 2 ** (bits - 1)
    if zeros is not None:
        zeros = zeros.astype(jnp.int8).T
    if bits == 8:
        codes = jax.lax.bitwise_xor(codes, jnp.uint8(128))  # q + 128 to the bits of q
    return quantized(f"int{bits}", codes, scale.T, zeros, (group, shared))


def _zeros(module: Module, groups: int, features: int, bits: int) -> np.ndarray | None:
    """Packed zero points, or older files' int8 [n, groups]; None if all are 0."""
    if not module.has(".weight_zero_point"):
        if compressed.says(module, "symmetric") == {False}:
            raise module.contradicts("has no weight_zero_point", "config_groups")
        return None
    zeros = module.array(".weight_zero_point")
    rows = -(-features * bits // 32) if zeros.dtype == np.int32 else features
    fits = zeros.dtype.name in ("int32", "int8") and zeros.shape[-2:] == (rows, groups)
    module.check(fits, *_ENDS, because=f"accepted: zero points of int32 {[-(-features * bits // 32), groups]}")
    return zeros


def _order(module: Module, k: int, group: int) -> np.ndarray | None:
    """The order of k that makes groups contiguous; None if they are. -1 stands for groups in order."""
    if not module.has(".weight_g_idx"):
        return None
    index = module.array(".weight_g_idx")
    expected = np.arange(k) // group
    if (index == -1).all() or np.array_equal(index, expected):
        return None
    order = np.argsort(index, kind="stable").astype(np.int32)
    full = index.shape == (k,) and np.array_equal(index[order], expected)
    module.check(full, *_ENDS, because=f"weight_g_idx does not give each group {group} of {k}")
    return order
