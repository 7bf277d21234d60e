"""NVFP4: e2m1 elements in groups of 16, with e4m3 scales and a float32 scale of the whole weight.

compressed-tensors: `weight_packed` uint8 [n, k / 2], `weight_scale` e4m3 [n, k / 16], `weight_global_scale`, by which
the scales are divided. ModelOpt: `weight`, `weight_scale`, `weight_scale_2`, with which they are multiplied. The first
element is in the low half of a byte.

The scale of the whole weight becomes a channel scale, with which scales are multiplied. ModelOpt's values are equal bit
for bit. compressed-tensors' scale becomes its reciprocal, rounded to float32, so that values are at most two units in
the last place of float32 away. A division would be no more exact, since a GPU's is not rounded correctly.
"""

import functools

import numpy as np

from jax_splitk.checkpoints import compressed
from jax_splitk.checkpoints.elements import e2m1
from jax_splitk.checkpoints.weight import Module, Parts, Stored
from jax_splitk.runtime.safetensors_file import CheckpointError

KEYS = (".weight_packed", ".weight")
METHODS = ("modelopt", "modelopt_fp4", "nvfp4")
GROUP = 16
_DIVIDED = (".weight_packed", ".weight_scale", ".weight_global_scale")
_MULTIPLIED = (".weight", ".weight_scale", ".weight_scale_2")
# e4m3's largest value: a global scale makes the largest group's scale 448.
_LARGEST = 6 * 448


def find(module: Module) -> Stored | None:
    """The weight of a module; None if it is not stored as NVFP4."""
    if module.has(".weight_packed") and module.dtype(".weight_packed") == "uint8":
        module.require(".weight_scale")
        if module.dtype(".weight_scale") != "float8_e4m3fn":
            return None
        module.is_said("NVFP4 of compressed-tensors: weight_packed of uint8", *compressed.METHODS)
        compressed.check_format(module, "nvfp4-pack-quantized")
        return _stored(module, _DIVIDED)
    if module.has(".weight", ".weight_scale_2") and module.dtype(".weight") == "uint8":
        module.is_said("NVFP4 of ModelOpt: weight and weight_scale_2", *METHODS)
        return _stored(module, _MULTIPLIED)
    return None


def _stored(module: Module, ends: tuple[str, str, str]) -> Stored:
    module.require(*ends)
    words, scales, whole = map(module.shape, ends)
    *stack, features, size = words if len(words) in (2, 3) else (0, 0)
    fits = size > 0 and scales == (*stack, features, 2 * size // GROUP) and 2 * size % GROUP == 0
    types = (module.dtype(ends[1]), module.dtype(ends[2])) == ("float8_e4m3fn", "float32")
    module.check(fits and types, *ends, because="accepted: bytes [n, k / 2], e4m3 scales [n, k / 16], a float32 scale")
    count = int(np.prod(whole))
    one = "accepted: one global scale for a weight, or one for each of a stack"
    module.check(len(stack) == 0 or count in (1, stack[0]), *ends, because=one)
    parts = functools.partial(_parts, module, ends, len(stack))
    return module.stored("nvfp4", (*stack, 2 * size, features), ends, parts)


def _parts(module: Module, ends: tuple[str, str, str], stack: int) -> Parts:
    scales, whole = module.array(ends[1]).view(np.uint8), module.array(ends[2]).ravel()
    _check(module, ends, whole, stack)
    factors = np.float32(1) / whole if ends == _DIVIDED else whole
    factors = np.broadcast_to(factors, len(scales)) if stack else factors[0]
    return Parts(e2m1, (module.array(ends[0]), scales, factors), ("float8_e4m3fn", GROUP), 3 * stack)


def _check(module: Module, ends: tuple[str, str, str], whole: np.ndarray, stack: int) -> None:
    """Raises CheckpointError for global scales that are not positive, that differ within a weight, or that belong to
    the other convention: of them the largest weight follows."""
    name = module.stem + ends[2]
    if not (np.isfinite(whole) & (whole > 0)).all():
        raise CheckpointError(f"{name!r} is {whole}; accepted: positive numbers")
    if stack == 0 and (whole != whole[0]).any():
        accepted = "one for a weight; those of joined weights (q, k, v) must be stored apart"
        raise CheckpointError(f"{name!r} is {whole}: {len(whole)} global scales; accepted: {accepted}")
    largest = (_LARGEST / whole if ends == _DIVIDED else _LARGEST * whole).max()
    if largest > _LARGEST:
        use, other = ("divides", "multiplies") if ends == _DIVIDED else ("multiplies", "divides")
        raise CheckpointError(
            f"{name!r} is {whole.ravel()[0]:g}. A scale of this name {use}, so weights would be up to {largest:g}. "
            f"It looks like a scale that {other}"
        )
