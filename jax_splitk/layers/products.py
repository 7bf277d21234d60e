"""The products of layers, with packed, quantized and plain weights, and what their axes say about packing."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax import numpy as jnp

from jax_splitk.ops.quantized_einsum import quantized_dot_general, quantized_einsum
from jax_splitk.quantized.array import dequantize, is_weight, unwrapped
from jax_splitk.quantized.packed_weight import PackedWeight
from jax_splitk.quantized.params import QuantizationRule
from jax_splitk.quantized.permuted import PermutedWeight


def dot_general(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """`lax.dot_general` whose rhs may be a quantized weight, also one that is not packed: XLA dequantizes that one."""
    rhs = unwrapped(rhs)
    if isinstance(rhs, PackedWeight):
        if out_sharding is not None:
            raise ValueError(f"out_sharding={out_sharding!r} of a product with a PackedWeight; accepted: None")
        return quantized_dot_general(lhs, rhs, dimension_numbers, precision, preferred_element_type)
    if isinstance(rhs, PermutedWeight):
        accepted = (((lhs.ndim - 1,), (0,)), ((), ()))
        if dimension_numbers != accepted:
            raise ValueError(f"dimension_numbers={dimension_numbers} with a PermutedWeight; accepted: {accepted}")
        y = lhs @ rhs
        return y if preferred_element_type is None else y.astype(preferred_element_type)
    rhs = dequantize(rhs, lhs.dtype) if is_weight(rhs) else rhs
    return jax.lax.dot_general(
        lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding=out_sharding
    )


def einsum(
    subscripts: str,
    *operands: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """`jnp.einsum` of two operands, the second of which may be a quantized weight, as in `dot_general`."""
    lhs, rhs = operands[0], unwrapped(operands[1])
    if isinstance(rhs, PackedWeight):
        if out_sharding is not None:
            raise ValueError(f"out_sharding={out_sharding!r} of a product with a PackedWeight; accepted: None")
        return quantized_einsum(subscripts, lhs, rhs, preferred_element_type=preferred_element_type)
    rhs = dequantize(rhs, lhs.dtype) if is_weight(rhs) else rhs
    return jnp.einsum(
        subscripts,
        lhs,
        rhs,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )


def stand_in(kernel: Any) -> jax.Array:
    """A number that stands for a quantized kernel where a layer promotes dtypes. It has the dtype of the scales."""
    return jnp.zeros((), unwrapped(kernel).dtype)


@dataclasses.dataclass(frozen=True)
class Axes:
    """How a layer uses its kernel.

    Attributes:
      contracted: the axes that the layer's product contracts.
      batch: how many leading axes count weights.
      rank: the kernel's rank in the layer. A parameter with more axes is a stack of layers.
    """

    contracted: tuple[int, ...]
    batch: int
    rank: int

    def completed(self, rule: QuantizationRule, path: str, rank: int) -> QuantizationRule:
        """The rule with the axes of a parameter of this rank, as far as the rule leaves them open."""
        layers = rank - self.rank
        if rule.dtype is None or rule.axis is not None:
            return rule
        if layers < 0:
            raise ValueError(f"{path} of rank {rank}, whose layer takes rank {self.rank}; accepted: at least that rank")
        axis = tuple(layers + i for i in self.contracted)
        return dataclasses.replace(rule, axis=axis, stack=layers + self.batch if rule.stack is None else rule.stack)


def axes_of_general(contracted: int, features: int, batch: int = 0) -> Axes:
    """The axes of a kernel of batch axes, contracted axes and features, in this order."""
    return Axes(tuple(range(batch, batch + contracted)), batch, batch + contracted + features)


def axes_of_einsum(subscripts: str, path: str) -> Axes:
    """The axes of an einsum's second operand."""
    inputs, arrow, out = subscripts.replace(" ", "").partition("->")
    terms = inputs.split(",")
    given = f"subscripts {subscripts!r} of {path}"
    if not arrow or len(terms) != 2 or "." in terms[1]:
        raise ValueError(f"{given}; accepted: 'x,kernel->result', no ellipsis in the kernel, or an axis in its rule")
    x, kernel = terms
    shared = [letter in x for letter in kernel]
    batch = [i for i, letter in enumerate(kernel) if shared[i] and letter in out]
    if batch != list(range(len(batch))):
        raise ValueError(f"{given}; accepted: axes that both operands and the result have first in the kernel")
    contracted = tuple(i for i, letter in enumerate(kernel) if shared[i] and letter not in out)
    return Axes(contracted, len(batch), len(kernel))


def bias_shape(subscripts: str, kernel_shape: Sequence[int], rank: int) -> tuple[int, ...]:
    """The shape in which an einsum's bias broadcasts to the result of this rank: sizes of the kernel's axes, else 1."""
    inputs, _, out = subscripts.replace(" ", "").partition("->")
    sizes = dict(zip(inputs.split(",")[1], kernel_shape, strict=True))
    before, dots, after = out.partition("...")
    ones = (1,) * (rank - len(before) - len(after)) if dots else ()
    return (*(sizes.get(c, 1) for c in before), *ones, *(sizes.get(c, 1) for c in after))
