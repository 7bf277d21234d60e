"""MXFP4 (OCP Microscaling Formats, version 1.0): e2m1 elements in groups of 32 with power-of-two scales (E8M0).

gpt-oss: `NAME_blocks` uint8 [experts, n, k / 32, 16], the first element in the low half of a byte, and `NAME_scales`
uint8 [experts, n, k / 32]. compressed-tensors: `weight_packed` uint8 [n, k / 2], `weight_scale` uint8 [n, k / 32]. A
scale byte s stands for 2**(s - 127), 255 for NaN.
"""

import functools

import numpy as np

from jax_splitk.checkpoints import compressed
from jax_splitk.checkpoints.elements import e2m1
from jax_splitk.checkpoints.weight import Module, Parts, Stored
from jax_splitk.quantized.formats import E8M0

KEYS = ("_blocks", ".weight_packed")
METHODS = ("mxfp4",)
GROUP = 32
_BLOCKS, _SCALES = "_blocks", "_scales"
_PACKED = (".weight_packed", ".weight_scale")
_BYTES = ("uint8", "float8_e8m0fnu")


def find(module: Module) -> Stored | None:
    """The weight of a module; None if it is not stored as MXFP4."""
    if module.has(_BLOCKS, _SCALES) and module.dtype(_BLOCKS) == "uint8":
        module.is_said("MXFP4: _blocks and _scales", *METHODS)
        return _stored(module, (_BLOCKS, _SCALES), "", "_bias")
    if module.has(*_PACKED) and module.dtype(_PACKED[0]) == "uint8" and module.dtype(_PACKED[1]) in _BYTES:
        module.is_said("MXFP4 of compressed-tensors: weight_packed and weight_scale of uint8", *compressed.METHODS)
        compressed.check_format(module, "mxfp4-pack-quantized")
        return _stored(module, _PACKED, ".weight", ".bias")
    return None


def _stored(module: Module, ends: tuple[str, str], end: str, bias: str) -> Stored:
    blocks, scales = module.shape(ends[0]), module.shape(ends[1])
    if ends[0] == _BLOCKS and blocks[-1:] == (GROUP // 2,):
        blocks = (*blocks[:-2], blocks[-2] * blocks[-1])
    *stack, features, size = blocks if len(blocks) in (2, 3) else (0, 0)
    fits = size > 0 and scales == (*stack, features, 2 * size // GROUP) and 2 * size % GROUP == 0
    accepted = "blocks [experts, n, k / 32, 16] and scales [experts, n, k / 32], or bytes [n, k / 2] and scales"
    module.check(fits and module.dtype(ends[1]) in _BYTES, *ends, because=f"accepted: {accepted}")
    parts = functools.partial(_parts, module, ends, len(stack))
    return module.stored("mxfp4", (*stack, 2 * size, features), ends, parts, end=end, bias=bias)


def _parts(module: Module, ends: tuple[str, str], stack: int) -> Parts:
    scales = module.array(ends[1]).view(np.uint8)
    blocks = module.array(ends[0])
    return Parts(e2m1, (blocks.reshape(*scales.shape[:-1], -1), scales, None), (E8M0, GROUP), 2 * stack)
