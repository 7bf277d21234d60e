"""GPTQ (Frantar et al., arXiv:2210.17323), as AutoGPTQ and GPTQModel store it.

`qweight` int32 [k / 8, n] holds row 8 r + i in nibble i of row r; `qzeros` int32 [groups, n / 8]; `scales` [groups, n];
`g_idx` int32 [k], the group of each row. With 8 bits a word has 4 elements. Version 1 (`checkpoint_format` "gptq")
stores the zero point minus 1, version 2 ("gptq_v2") the zero point.

Version 1 stores the zero point 0 as 15. AutoGPTQ, and vLLM's kernels, read that as 16. GPTQModel subtracts 1
from each zero point of a word when it writes, and adds 1 when it reads, with a borrow or carry to the next one: it gets
the zero points that it had. The description of its checkpoints has its name in `meta`.
"""

import functools
from typing import Any

import numpy as np
from jax import numpy as jnp

from jax_splitk.checkpoints import qweight
from jax_splitk.checkpoints.elements import quantized, shifts, unpacked
from jax_splitk.checkpoints.weight import Module, Parts, Stored
from jax_splitk.quantized.array import QuantizedArray

KEYS = (".qweight",)
METHODS = ("gptq", "gptq_v2")
_VERSIONS = {None: 1, "gptq": 1, "gptq_v2": 2}
_SAMPLE = 1 << 16  # words
_ENOUGH = 1 << 14  # elements


def find(module: Module) -> Stored | None:
    """The weight of a module; None if it is not stored as GPTQ."""
    if not module.has(".qweight") or (found := qweight.sizes(module)).packed == 1:
        return None
    module.is_said("GPTQ: qweight [k / 8, n]", *METHODS)
    parts = functools.partial(_parts, module, found)
    return module.stored("gptq", (found.k, found.features), qweight.ENDS, parts)


def _parts(module: Module, found: qweight.Sizes) -> Parts:
    group = qweight.group_size(module, found)
    order = _order(module, found, group)
    words, zeros = module.array(".qweight"), module.array(".qzeros")
    version = _version(module)
    _check_zeros(module, found, group, version)
    added = 1 if version == 1 else 0  # to what is stored
    symmetric = qweight.all_are(zeros, found.bits, 2 ** (found.bits - 1) - added)
    carries = added == 1 and "gptqmodel" in str(module.about.fields.get("meta")).lower()
    arrays = (words, module.array(".scales"), None if symmetric else zeros, order)
    return Parts(_build, arrays, (found.bits, group, added, carries), order=order)


def _build(
    words: Any, scale: Any, zeros: Any, order: Any, bits: int, group: int, added: int, carries: bool
) -> QuantizedArray:
    codes = unpacked(words, bits, shifts(bits), axis=0)
    if order is not None:
        codes = jnp.take(codes, order, axis=0)
    if zeros is not None and carries:
        zeros, added = zeros + np.int32(sum(1 << begin for begin in shifts(bits))), 0
    if zeros is not None:
        zeros = unpacked(zeros, bits, shifts(bits)).astype(jnp.int16) + added  # up to 2**bits
    return with_zeros(codes, scale, zeros, group, bits)


def with_zeros(codes: Any, scale: Any, zeros: Any, group: int, bits: int) -> QuantizedArray:
    """(codes - zeros) * scale for unsigned codes; None for the zeros of a symmetric weight, 2**(bits - 1)."""
    if bits == 4:
        zeros = None if zeros is None else zeros.astype(jnp.uint8)
        return quantized("int4" if zeros is None else "uint4", codes, scale, zeros, (group, 1))
    zeros = None if zeros is None else (zeros - 128).astype(scale.dtype)  # -128 to 128, exact in 16 bits
    return quantized("int8", codes ^ jnp.uint8(128), scale, zeros, (group, 1))


def _version(module: Module) -> int:
    said = module.about.fields
    name = said.get("checkpoint_format", said.get("format"))
    if name is None and module.about.method == "gptq_v2":
        return 2
    if name not in tuple(_VERSIONS):
        raise module.contradicts("is read in the layouts 'gptq' and 'gptq_v2' only", "checkpoint_format", "format")
    return _VERSIONS[name]


def _order(module: Module, found: qweight.Sizes, group: int) -> np.ndarray | None:
    """The rows sorted by group; None if they are in order."""
    if not module.has(".g_idx"):
        if module.about.fields.get("desc_act") and found.groups > 1:
            raise module.contradicts("has no g_idx", "desc_act")
        return None
    module.check(module.shape(".g_idx") == (found.k,), *qweight.ENDS, because=f"accepted: g_idx of [{found.k}]")
    index = module.array(".g_idx")
    expected = np.arange(found.k) // group
    if np.array_equal(index, expected):
        return None
    order = np.argsort(index, kind="stable").astype(np.int32)
    full = np.array_equal(index[order], expected)
    module.check(full, *qweight.ENDS, because=f"g_idx does not give each of {found.groups} groups {group} rows")
    if module.about.fields.get("desc_act") is False:
        raise module.contradicts("has rows in another order (act-order)", "desc_act")
    return order


def _check_zeros(module: Module, found: qweight.Sizes, group: int, version: int) -> None:
    """Raises CheckpointError if the values look like the other version's.

    Symmetric weights have the zero point 2**(bits - 1) everywhere. Otherwise the mean element is near the zero point,
    since the mean weight is near 0; steps of 8 bits are too small to see that.
    """
    if module.about.asked:
        return
    zeros, bits, middle = module.array(".qzeros"), found.bits, 2 ** (found.bits - 1)
    seen = {1: qweight.all_are(zeros, bits, middle - 1), 2: qweight.all_are(zeros, bits, middle)}
    fields = ("checkpoint_format", "format", "sym")
    other = 3 - version
    hint = f"; format={METHODS[other - 1]!r} reads it so"
    if seen[other]:
        stored = f"{middle - 1} (version 1)" if other == 1 else f"{middle} (version 2)"
        raise module.contradicts(f"has qzeros that are all {stored}{hint}", *fields)
    if seen[version] or bits != 4:
        return
    mean, count = _mean_above_zeros(module, found, group)
    if count >= _ENOUGH and abs(mean - (1 if other == 1 else 0)) < 0.25:
        raise module.contradicts(f"has elements {mean:.2f} above qzeros in the mean: version {other}{hint}", *fields)


def _mean_above_zeros(module: Module, found: qweight.Sizes, group: int) -> tuple[float, int]:
    """The mean of an element minus its stored zero, and the number of elements in the sample."""
    words, zeros = (module.array(end).view(np.uint32) for end in (".qweight", ".qzeros"))
    count = min(len(words), max(1, _SAMPLE // found.features))
    rows = np.linspace(0, len(words) - 1, count).astype(np.int64)
    each = np.arange(0, 32, found.bits, dtype=np.uint32)
    mask = np.uint32(2**found.bits - 1)
    elements = (words[rows][:, None] >> each[:, None]) & mask  # [rows, elements of a word, features]
    members = rows[:, None] * len(each) + np.arange(len(each))
    groups = module.array(".g_idx")[members] if module.has(".g_idx") else members // group
    stored = ((zeros[:, :, None] >> each) & mask).reshape(found.groups, found.features)
    return float(elements.mean() - stored[groups].mean()), elements.size
