"""Weights in `qweight`, `qzeros` and `scales`, the names that GPTQ and AWQ share: their sizes."""

import dataclasses
import re
from typing import Any

import numpy as np

from jax_splitk.checkpoints.weight import Module

ENDS = (".qweight", ".qzeros", ".scales", ".g_idx")
BITS = (4, 8)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a weight, from its tensors' shapes.

    Attributes:
      packed: the axis of `qweight` along which a word holds several elements: 0 for GPTQ, 1 for AWQ.
    """

    packed: int
    bits: int
    k: int
    features: int
    groups: int


def sizes(module: Module) -> Sizes:
    """Raises CheckpointError for shapes of neither format."""
    module.require(".qweight", ".scales", ".qzeros")
    words, zeros, scales = (module.shape(end) for end in (".qweight", ".qzeros", ".scales"))
    ints = module.dtype(".qweight") == module.dtype(".qzeros") == "int32"
    floats = module.dtype(".scales") in ("float16", "bfloat16", "float32")
    matrices = len(words) == len(zeros) == len(scales) == 2 and min(*words, *zeros, *scales) > 0
    known = "accepted: int32 words, matrices with elements, and scales of 16 or 32 bits"
    module.check(ints and floats and matrices, *ENDS, because=known)
    groups, features = scales
    bits, rest = divmod(32 * zeros[1], features)
    packed = 0 if words[1] == features else 1
    k = words[0] * 32 // bits if packed == 0 and bits else words[0]
    fits = rest == 0 and zeros[0] == groups and words[1] in (features, zeros[1]) and bits
    shapes = "accepted: GPTQ's [k / 8, n], [groups, n / 8], [groups, n], or AWQ's (gemm) [k, n / 8], the same, the same"
    module.check(bool(fits) and groups <= k, *ENDS, because=shapes)
    module.check(bits in BITS[: 2 - packed], *ENDS, because=f"{bits} bits; accepted: {'4' if packed else '4, 8'}")
    return Sizes(packed, bits, k, features, groups)


def group_size(module: Module, found: Sizes) -> int:
    """How many k share a scale.

    Raises CheckpointError if that, or the number of bits, is not what the checkpoint says.
    """
    bits = _said(module, "bits", "w_bit")
    if bits not in (None, found.bits):
        raise module.contradicts(f"has {found.bits} bits", "bits", "w_bit")
    group = _said(module, "group_size", "q_group_size")
    if group is None:
        even = found.k % found.groups == 0
        module.check(even, *ENDS, because=f"{found.groups} groups do not divide {found.k}, and nothing says their size")
        return found.k // found.groups
    size = found.k if group == -1 else group
    if not isinstance(size, int) or size < 1 or -(-found.k // size) != found.groups:
        raise module.contradicts(f"has {found.groups} groups of k = {found.k}", "group_size", "q_group_size")
    return min(size, found.k)


def _said(module: Module, *fields: str) -> Any:
    """A field of the checkpoint's description, or what GPTQModel's `dynamic` says instead for this module."""
    said = module.about.fields
    dynamic = said.get("dynamic")
    for pattern, fields_of_module in dynamic.items() if isinstance(dynamic, dict) else ():
        if isinstance(fields_of_module, dict) and re.match(pattern.removeprefix("+:"), module.stem):
            said = {**said, **fields_of_module}
            break
    return next((said[field] for field in fields if field in said), None)


def all_are(words: np.ndarray, bits: int, value: int) -> bool:
    """Whether every element of these int32 words is `value`."""
    word = sum(value << begin for begin in range(0, 32, bits))
    return bool((words.view(np.uint32) == word).all())
