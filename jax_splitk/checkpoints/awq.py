"""AWQ (Lin et al., arXiv:2306.00978), as AutoAWQ stores it in its layout "gemm".

`qweight` int32 [k, n / 8] holds in nibble i of column c the feature 8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]; `qzeros` int32
[groups, n / 8] in that order; `scales` [groups, n].
"""

import functools
from typing import Any

from jax_splitk.checkpoints import qweight
from jax_splitk.checkpoints.elements import unpacked
from jax_splitk.checkpoints.gptq import with_zeros
from jax_splitk.checkpoints.weight import Module, Parts, Stored
from jax_splitk.quantized.array import QuantizedArray

KEYS = (".qweight",)
METHODS = ("awq",)
# Where the features 8 c + 0, 1, 2, ... begin in a word.
_BEGINS = (0, 16, 4, 20, 8, 24, 12, 28)


def find(module: Module) -> Stored | None:
    """The weight of a module; None if it is not stored as AWQ."""
    if not module.has(".qweight") or (found := qweight.sizes(module)).packed == 0:
        return None
    module.is_said("AWQ: qweight [k, n / 8]", *METHODS)
    version = str(module.about.fields.get("version", "gemm")).lower()
    if version != "gemm":
        raise module.contradicts("is read in the layout 'gemm' only", "version")
    parts = functools.partial(_parts, module, found)
    return module.stored("awq", (found.k, found.features), qweight.ENDS[:3], parts)


def _parts(module: Module, found: qweight.Sizes) -> Parts:
    zeros, group = module.array(".qzeros"), qweight.group_size(module, found)
    symmetric = qweight.all_are(zeros, 4, 8)
    return Parts(_build, (module.array(".qweight"), module.array(".scales"), None if symmetric else zeros), (group,))


def _build(words: Any, scale: Any, zeros: Any, group: int) -> QuantizedArray:
    zeros = None if zeros is None else unpacked(zeros, 4, _BEGINS)
    return with_zeros(unpacked(words, 4, _BEGINS), scale, zeros, group, 4)
