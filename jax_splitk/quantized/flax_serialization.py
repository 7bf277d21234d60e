"""Quantized weights in flax.serialization: to_bytes, from_bytes, to_state_dict, from_state_dict."""

from typing import Any

from jax_splitk.quantized.array import QuantizedArray
from jax_splitk.quantized.joined import JoinedWeight
from jax_splitk.quantized.packed_weight import PackedWeight
from jax_splitk.quantized.permuted import PermutedWeight
from jax_splitk.quantized.state import from_state, to_state


def register_flax_serialization() -> None:
    """Makes flax.serialization store quantized weights as `to_state` does, and restore them as `from_state` does.

    Call it once, before `flax.serialization.to_bytes` and the like; importing jax_splitk does not import Flax. To
    restore into a weight of another type, group size, shape or layout version then raises ValueError.

    Raises ImportError if Flax is not installed.

    Examples:
      >>> from flax import serialization
      >>> jax_splitk.register_flax_serialization()
      >>> w = jax_splitk.prepack(jax_splitk.quantize(jnp.ones((128, 256)), "int4", group_size=64))
      >>> serialization.from_bytes(w, serialization.to_bytes(w)).qtype
      'int4'
    """
    from flax import serialization  # noqa: PLC0415 - an optional dependency

    def restored(target: Any, state: Any) -> Any:
        return from_state(state, target)

    for cls in (PackedWeight, QuantizedArray, PermutedWeight, JoinedWeight):
        serialization.register_serialization_state(cls, to_state, restored, override=True)
