"""Weights of one byte an element: fp8 (e4m3) and int8.

`weight` [n, k] and its scales, which are multiplied: one for the weight, [n] or [n, 1] for each feature, or [n / 128,
k / 128] for each block (`weight_scale_inv` of DeepSeek's checkpoints, arXiv:2412.19437). Weights of compressed-tensors
may have groups [n, k / group], and int8 zero points. Scales of uint8 are E8M0: s stands for 2**(s - 127). Experts may
be stacked along a leading dimension.
"""

import functools
from typing import Any

import numpy as np
from jax import numpy as jnp

from jax_splitk.checkpoints import compressed
from jax_splitk.checkpoints.elements import quantized
from jax_splitk.checkpoints.weight import Module, Parts, Stored
from jax_splitk.quantized.array import QuantizedArray
from jax_splitk.quantized.formats import E8M0, FLOAT_DTYPES

KEYS = (".weight",)
METHODS = ("fp8", "fbgemm_fp8", "modelopt", *compressed.METHODS)
_TYPES = ("float8_e4m3fn", "int8")
_ENDS = (".weight", ".weight_scale_inv", ".weight_scale", ".weight_zero_point")
_BYTES = ("uint8", E8M0)
_BLOCK = (128, 128)


def find(module: Module) -> Stored | None:
    """The weight of a module; None if it is not stored so."""
    if not module.has(".weight") or module.dtype(".weight") not in _TYPES:
        return None
    ends = [end for end in _ENDS[1:3] if module.has(end)]
    if not ends:
        return None
    module.check(len(ends) == 1, *_ENDS, because="accepted: weight_scale_inv or weight_scale")
    qtype, shape = module.dtype(".weight"), module.shape(".weight")
    module.is_said(f"{qtype} with {ends[0][1:]}", *METHODS)
    if module.about.method in compressed.METHODS:
        formats = ("float-quantized", "mxfp8-quantized") if qtype == _TYPES[0] else ("int-quantized",)
        compressed.check_format(module, *formats, "naive-quantized")
    module.check(len(shape) in (2, 3) and min(shape) > 0, *_ENDS, because="accepted: weights [n, k] or [experts, n, k]")
    known = module.dtype(ends[0]) in (*FLOAT_DTYPES, *_BYTES)
    module.check(known, *_ENDS, because=f"accepted: scales of {', '.join((*FLOAT_DTYPES, *_BYTES))}")
    scales = _matrix(module, ends[0])
    *stack, features, k = shape
    tile = _tile(module, ends[0], (features, k), scales)
    parts = functools.partial(_parts, module, ends[0], scales, tile)
    return module.stored(qtype, (*stack, k, features), _ENDS, parts)


def _matrix(module: Module, end: str) -> tuple[int, ...]:
    """The shape of the scales with as many dimensions as the weight: [n] and single numbers have fewer in files."""
    weight, scales = module.shape(".weight"), module.shape(end)
    if len(scales) == len(weight):
        return scales
    count = int(np.prod(scales))
    stack = weight[:-2]
    for full in ((*stack, weight[-2], 1), (*stack, 1, 1)):
        if count == np.prod(full):
            return full
    return (1,) * len(weight) if count == 1 else scales


def _tile(module: Module, end: str, shape: tuple[int, int], scales: tuple[int, ...]) -> tuple[int, int]:
    """How many (features, k) share a scale. Raises CheckpointError if that is not what the checkpoint says."""
    known = "accepted: one scale, one for each feature, or one for each block"
    module.check(len(scales) == len(module.shape(".weight")), *_ENDS, because=known)
    features, k = shape
    if scales[-2:] in ((1, 1), (features, 1)):
        return (features // scales[-2], k)
    said = module.about.fields.get("weight_block_size") or compressed.block(module)
    block = tuple(said) if isinstance(said, list | tuple) else _BLOCK
    if scales[-2] == features and k % scales[-1] == 0:
        return (1, compressed.group_size(module, k, scales[-1]))
    positive = len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    if not positive or scales[-2:] != tuple(-(-n // b) for n, b in zip(shape, block, strict=True)):
        expected = [-(-n // b) for n, b in zip(shape, block, strict=True)] if positive else known
        if said:
            where = "weight_block_size" if "weight_block_size" in module.about.fields else "config_groups"
            raise module.contradicts(f"has {end[1:]} of {list(scales)}, where blocks need {expected}", where)
        module.check(False, *_ENDS, because=f"{known} of {block}: {expected}")
    return block


def _parts(module: Module, end: str, scales: tuple[int, ...], tile: tuple[int, int]) -> Parts:
    weight, scale = module.array(".weight"), module.array(end)
    if scale.dtype.name in _BYTES:
        scale = scale.view(jnp.dtype(E8M0))
    stack = len(weight.shape) - 2
    scale = np.broadcast_to(scale.reshape(scales), (*weight.shape[:stack], *scales[stack:]))
    zeros = None
    if module.has(".weight_zero_point") and weight.dtype == np.int8:
        zeros = module.array(".weight_zero_point").astype(np.int8)
        zeros = np.broadcast_to(zeros.reshape(scale.shape) if zeros.size == scale.size else zeros, scale.shape)
        zeros = zeros if zeros.any() else None
    return Parts(_build, (weight, scale, zeros), (weight.dtype.name, tile), 3 * stack)


def _build(weight: Any, scale: Any, zeros: Any, qtype: str, tile: tuple[int, int]) -> QuantizedArray:
    codes = weight.view(jnp.uint8).T
    zeros = None if zeros is None else zeros.T
    features, k = tile
    return quantized(qtype, codes, scale.T, zeros, (k, features))
