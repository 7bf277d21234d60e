"""Products with a packed weight under the names and arguments of lax.dot_general and jax.numpy.einsum."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import numpy as jnp
from jax.typing import DTypeLike

from jax_splitk.ops.quantized_matmul import quantized_matmul
from jax_splitk.quantized.array import is_weight, unwrapped
from jax_splitk.quantized.matrix import features_of
from jax_splitk.quantized.packed_weight import PackedWeight
from jax_splitk.tuning.options import Implementation

_Axes = Sequence[int]


def quantized_dot_general(
    lhs: Any,
    rhs: Any,
    dimension_numbers: tuple[tuple[_Axes, _Axes], tuple[_Axes, _Axes]],
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    compute_dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
    config: Any = None,
) -> jax.Array:
    """`lax.dot_general` of activations and a packed weight: `quantized_matmul` with axes in any order.

    Args:
      lhs: an array of activations, as `quantized_matmul` takes them, or a PackedWeight of any rank.
      rhs: the other of the two.
      dimension_numbers: as in lax.dot_general. The weight's contracting axes must be those that it was packed for, and
        its batch axes its stack.
      precision: accepted, since layers pass it, and without effect: sums are float32, and no operand is rounded but to
        the compute_dtype.
      preferred_element_type: as in `quantized_matmul`.
      compute_dtype: as in `quantized_matmul`.
      implementation: as in `quantized_matmul`.
      config: as in `quantized_matmul`.

    Returns:
      Batch axes, then lhs's other axes, then rhs's, as lax.dot_general returns them.

    Raises:
      TypeError: neither or both operands are a PackedWeight; else as `quantized_matmul`.
      ValueError: other axes of the weight; else as `quantized_matmul`.

    Examples:
      >>> w = jax_splitk.prepack(jax_splitk.quantize(jnp.ones((64, 4, 32)), "int4", group_size=64, axis=0), axis=0)
      >>> jax_splitk.quantized_dot_general(jnp.ones((2, 8, 64), jnp.bfloat16), w, (((2,), (0,)), ((), ()))).shape
      (2, 8, 4, 32)
    """
    del precision
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    weight_first = is_weight(lhs)
    x, w = (rhs, lhs) if weight_first else (lhs, rhs)
    w, x = _operands(x, w)
    of_lhs, of_rhs = (lhs_contract, lhs_batch), (rhs_contract, rhs_batch)
    (x_contract, x_batch), (w_contract, w_batch) = (of_rhs, of_lhs) if weight_first else (of_lhs, of_rhs)
    given = f"dimension_numbers={dimension_numbers!r}"
    x_names, w_names = ([f"{of}{axis}" for axis in range(array.ndim)] for of, array in (("x", x), ("w", w)))
    free, kept = (
        [names[i] for i in features_of(len(names), [axis % len(names) for axis in axes])]
        for names, axes in ((x_names, (*x_contract, *x_batch)), (w_names, (*w_contract, *w_batch)))
    )
    batch = [w_names[i] for i in w_batch]
    for of_x, of_w in ((x_contract, w_contract), (x_batch, w_batch)):
        for x_axis, w_axis in zip(of_x, of_w, strict=True):
            x_names[x_axis] = w_names[w_axis]
    out = [*batch, *kept, *free] if weight_first else [*batch, *free, *kept]
    dtypes = (preferred_element_type, compute_dtype)
    return _product(x, w, x_names, w_names, out, given, dtypes, implementation, config)


def quantized_einsum(
    subscripts: str,
    *operands: Any,
    preferred_element_type: DTypeLike | None = None,
    compute_dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
    config: Any = None,
) -> jax.Array:
    """`jnp.einsum` of activations and a packed weight: `quantized_matmul` with axes in any order.

    Args:
      subscripts: as in jnp.einsum, of two operands. The letters that only the result lacks are contracted; they must be
        the axes of the weight that it was packed for. Letters that all three have must be its stack. "..." stands for
        leading axes of the activations.
      *operands: activations and a PackedWeight, in either order.
      preferred_element_type: as in `quantized_matmul`.
      compute_dtype: as in `quantized_matmul`.
      implementation: as in `quantized_matmul`.
      config: as in `quantized_matmul`.

    Raises:
      TypeError: not one PackedWeight; else as `quantized_matmul`.
      ValueError: subscripts that do not fit the operands, or another product; else as `quantized_matmul`.

    Examples:
      >>> w = jax_splitk.quantize(jnp.ones((4, 32, 64)), "int4", group_size=32, axis=(0, 1))
      >>> w = jax_splitk.prepack(w, axis=(0, 1))
      >>> jax_splitk.quantized_einsum("bthd,hdk->btk", jnp.ones((2, 8, 4, 32), jnp.bfloat16), w).shape
      (2, 8, 64)
    """
    given = f"subscripts {subscripts!r}"
    inputs, arrow, out = subscripts.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != 2 or len(operands) != 2:
        raise ValueError(f"{given} of {len(operands)} operands; accepted: activations and one packed weight")
    weight_at = 0 if is_weight(operands[0]) else 1
    w, x = _operands(operands[1 - weight_at], operands[weight_at])
    names_of_x, names_of_w = (
        _names(terms[i], x.ndim if i != weight_at else w.ndim, given) for i in (1 - weight_at, weight_at)
    )
    if not arrow:
        counts = {name: inputs.count(name) for name in [*names_of_x, *names_of_w]}
        leading = [name for name in names_of_x if len(name) > 1]
        result = [*leading, *sorted(name for name, count in counts.items() if count == 1 and len(name) == 1)]
    else:
        result = _names(out, len(out.replace("...", "")) + sum(len(name) > 1 for name in names_of_x), given)
    dtypes = (preferred_element_type, compute_dtype)
    return _product(x, w, names_of_x, names_of_w, result, given, dtypes, implementation, config)


def _operands(x: Any, w: Any) -> tuple[PackedWeight, jax.Array]:
    w = unwrapped(w)
    if not isinstance(w, PackedWeight) or is_weight(x):
        kinds = f"operands of types {type(x).__name__} and {type(w).__name__}"
        raise TypeError(f"{kinds}; accepted: an array of activations and a PackedWeight (jax_splitk.prepack makes it)")
    return w, jnp.asarray(x)


def _names(term: str, rank: int, given: str) -> list[str]:
    """A name for each axis: its letter, or "...0", "...1" for those of an ellipsis."""
    before, dots, after = term.partition("...")
    missing = rank - len(before) - len(after)
    names = [*before, *[f"...{i}" for i in range(missing if dots else 0)], *after]
    letters = all(name.isalpha() for name in (*before, *after))
    if len(names) != rank or not letters or len(set(names)) != rank:
        raise ValueError(
            f"{given}: {term!r} of an operand of rank {rank}; accepted: a letter for each axis, no letter twice"
        )
    return names


def _product(
    x: jax.Array,
    w: PackedWeight,
    x_names: Sequence[str],
    w_names: Sequence[str],
    out_names: Sequence[str],
    given: str,
    dtypes: tuple[DTypeLike | None, DTypeLike | None],
    implementation: Implementation | None,
    config: Any,
) -> jax.Array:
    """The product whose axes have these names, of which x and w share those that are contracted and the batch. `dtypes`
    are its preferred_element_type and its compute_dtype."""
    depth, shared = len(w.stack), [name for name in w_names if name in x_names]
    batch = [name for name in shared if name in out_names]
    contracted = [name for name in shared if name not in out_names]
    stack, packed = w_names[:depth], [w_names[depth + i] for i in w.contracted]
    if set(batch) != set(stack) or set(contracted) != set(packed):
        axes = tuple(i + depth for i in w.contracted)
        asked = tuple(i for i, name in enumerate(w_names) if name in contracted)
        batched = tuple(i for i, name in enumerate(w_names) if name in batch)
        raise ValueError(
            f"{given}, which contracts axes {asked} and maps axes {batched} of a PackedWeight of shape {w.shape}; "
            f"accepted: contracted axes {axes}, mapped axes {tuple(range(depth))}, for which it was packed"
        )
    kept = [name for name in w_names[depth:] if name not in packed]
    free = [name for name in x_names if name not in shared]
    made = [*stack, *free, *kept]
    if sorted(made) != sorted(out_names):
        raise ValueError(f"{given}; accepted: a result with all axes that are not contracted, each once")
    order = [x_names.index(name) for name in (*stack, *free, *packed)]
    product = quantized_matmul(
        x.transpose(order),
        w,
        preferred_element_type=dtypes[0],
        compute_dtype=dtypes[1],
        implementation=implementation,
        config=config,
    )
    return product.transpose([made.index(name) for name in out_names])
