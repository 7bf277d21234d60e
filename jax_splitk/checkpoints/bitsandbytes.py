"""bitsandbytes' nf4 (Dettmers et al., QLoRA, arXiv:2305.14314).

`weight` holds the bytes of [n, k] in row-major order, two elements a byte, the first in the high half. `weight.absmax`
has a float32 scale for each 64 (`blocksize`) elements of that order. With double quantization it has bytes instead,
which stand for `nested_quant_map[byte] * nested_absmax[block of 256] + nested_offset`. What is no tensor is JSON in the
bytes of `weight.quant_state.bitsandbytes__nf4`.
"""

import functools
import json
import math
from typing import Any

import numpy as np

from jax_splitk.checkpoints.elements import HIGH_FIRST, quantized, unpacked
from jax_splitk.checkpoints.weight import Module, Parts, Stored
from jax_splitk.quantized.array import QuantizedArray
from jax_splitk.quantized.formats import NF4
from jax_splitk.runtime.safetensors_file import CheckpointError

KEYS = (".weight", ".SCB")
METHODS = ("bitsandbytes",)
_STATE = ".weight.quant_state.bitsandbytes__"
_NESTED = (".weight.nested_absmax", ".weight.nested_quant_map")
_ENDS = (".weight", ".weight.absmax", ".weight.quant_map", *_NESTED, _STATE + "nf4")


def find(module: Module) -> Stored | None:
    """The weight of a module; None if bitsandbytes did not store it."""
    if module.has(_STATE + "fp4"):
        raise CheckpointError(f"{module.stem!r} in bitsandbytes' fp4; accepted: nf4")
    if module.has(".SCB") or module.has(".weight.SCB"):
        raise CheckpointError(f"{module.stem!r} in bitsandbytes' 8 bits (LLM.int8); accepted: nf4")
    if not module.has(_STATE + "nf4"):
        return None
    module.is_said("nf4: quant_state.bitsandbytes__nf4", *METHODS)
    said = module.about.fields.get("bnb_4bit_quant_type", "nf4")
    if said != "nf4":
        raise module.contradicts("is stored as nf4", "bnb_4bit_quant_type")
    module.require(*_ENDS[:3])
    state = _state(module)
    features, k = state["shape"]
    parts = functools.partial(_parts, module, state)
    return module.stored("nf4", (k, features), _ENDS, parts)


def _state(module: Module) -> dict[str, Any]:
    try:
        state = json.loads(module.array(_STATE + "nf4").tobytes())
        (features, k), block = state["shape"], state["blocksize"]
        nested = module.has(*_NESTED)
        if nested:
            state["nested_blocksize"] = int(state["nested_blocksize"])
            state["nested_offset"] = float(state["nested_offset"])
        counts = [features, k, block, state["nested_blocksize"] if nested else 1]
        valid = state["quant_type"] == "nf4" and all(type(n) is int and n > 0 for n in counts)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{module.stem + _STATE}nf4 is no state of an nf4 matrix ({error!r})") from None
    module.check(
        valid, *_ENDS, because=f"the quant_state {state}; accepted: quant_type nf4, a shape (n, k), blocksizes"
    )
    return state


def _parts(module: Module, state: dict[str, Any]) -> Parts:
    (features, k), block = state["shape"], state["blocksize"]
    table, absmax = module.array(".weight.quant_map"), module.array(".weight.absmax")
    same = np.array_equal(table.ravel(), NF4)
    module.check(same, *_ENDS, because=f"quant_map {table.ravel()[:16]}; accepted: the values of nf4, {NF4}")
    # `weight` may be a tensor of any dtype (bnb_4bit_quant_storage).
    words = module.array(".weight").ravel().view(np.uint8)
    blocks = -(-features * k // block)
    sizes = words.size == -(-features * k // 2) and absmax.size == blocks
    module.check(sizes, *_ENDS, because=f"shape {[features, k]} and blocksize {block} need {blocks} absmax")
    scale = _scales(module, state, absmax.ravel())
    # A run of elements along k that lie in one block has one scale.
    run = math.gcd(k, block)
    if run < block:
        scale = scale[np.arange(0, features * k, run) // block]
    return Parts(_build, (words, scale.reshape(features, k // run)), (run,))


def _scales(module: Module, state: dict[str, Any], absmax: np.ndarray) -> np.ndarray:
    """Float32 scales. NumPy rounds the product and then the sum, as bitsandbytes; XLA might fuse them."""
    if not module.has(*_NESTED):
        module.check(absmax.dtype == np.float32, *_ENDS, because="accepted: absmax of float32, or nested_absmax")
        return absmax
    scales, table = module.array(_NESTED[0]).ravel(), module.array(_NESTED[1]).ravel()
    size = state["nested_blocksize"]
    fits = absmax.dtype == np.uint8 and table.size == 256 and scales.size == -(-absmax.size // size)
    module.check(fits, *_ENDS, because=f"accepted: absmax of uint8, a map of 256, a nested_absmax for each {size}")
    products = table[absmax] * np.repeat(scales, size)[: absmax.size]
    return products + np.float32(state["nested_offset"])


def _build(words: Any, scale: Any, group: int) -> QuantizedArray:
    features, groups = scale.shape
    codes = unpacked(words, 4, HIGH_FIRST)[: features * groups * group].reshape(features, groups * group)
    return quantized("nf4", codes.T, scale.T, None, (group, 1))
