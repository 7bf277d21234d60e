"""The `conv_fprop_epilogue` primitive: a convolution, and activation(sum + bias) + residual, or activation(sum + bias +
residual).

Operands are lhs and rhs, then the bias, [output features], and the residual, of the result's shape, as far as there are
any. Where a kernel computes the convolution and not its epilogue, XLA computes that from the convolution, which is
rounded to the result's dtype.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
from jax import lax
from jax import numpy as jnp
from jax.interpreters import batching

from jax_splitk.ops import epilogue_call
from jax_splitk.ops.call import Primitive
from jax_splitk.ops.conv_calls import ConvFprop, orders_of
from jax_splitk.ops.epilogue_arguments import floating_operand, known_activation
from jax_splitk.ops.epilogue_call import WithEpilogue
from jax_splitk.ops.folding import fold_into, mapped_size, one_by_one, unfold_from
from jax_splitk.ops.partitioning import Place, Rule
from jax_splitk.ops.tangents import bilinear_terms
from jax_splitk.problems.conv_epilogue import ConvEpilogueProblem, decisive, with_epilogue
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.problems.dot_reference import finished
from jax_splitk.problems.epilogue import named
from jax_splitk.problems.problem import as_base
from jax_splitk.runtime import _compat, execute
from jax_splitk.runtime.arguments import require, wider
from jax_splitk.runtime.plan import CustomCall

conv_epilogue_p = Primitive("conv_fprop_epilogue")

_FUSED_BY_XLA = ("none", "relu")  # with a bias, in XLA's own convolution


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ConvEpilogue(WithEpilogue, ConvFprop):
    """A convolution and its epilogue.

    Attributes:
      residual: whether it is an operand.
      activation_last: whether the residual is added before the activation.
    """

    residual: bool = False
    activation_last: bool = False

    primitive = conv_epilogue_p
    problem_type: ClassVar[type[Any]] = ConvEpilogueProblem

    @property
    def after_count(self) -> int:
        return self.bias + self.residual

    @property
    def product(self) -> ConvFprop:
        return as_base(ConvFprop, self)

    @property
    def differentiated(self) -> Self:
        return dataclasses.replace(self, options=dataclasses.replace(self.options, forward_only=False))

    def problem(self, avals: Sequence[Any]) -> ConvProblem:
        operands = named(self.rest(avals), self.bias, self.residual)
        bias_dtype, residual_dtype = ("none" if x is None else jnp.dtype(x.dtype).name for x in operands)
        return with_epilogue(
            super().problem(self.own(avals)),
            bias_dtype=bias_dtype,
            activation=self.activation,
            residual_dtype=residual_dtype,
            activation_last=self.activation_last,
        )

    def type_of(self, *avals: Any) -> Any:
        return self.product.type_of(*self.own(avals))

    def after(self, sums: jax.Array, *rest: jax.Array) -> jax.Array:
        return self._after(sums.astype(wider(sums.dtype, jnp.float32)), rest)

    def _after(self, sums: jax.Array, rest: Sequence[jax.Array]) -> jax.Array:
        """The result, by operations in the dtype of the sums."""
        bias, residual = named(rest, self.bias, self.residual)
        if bias is not None:
            features = self.convolution.dimension_numbers.out_spec[1]
            bias = bias.reshape([bias.size if i == features else 1 for i in range(sums.ndim)])
        return finished(sums, bias, self.activation, residual, self.activation_last).astype(self.out_dtype)

    def tangent_terms(self, primals: Sequence[Any], tangents: Sequence[Any]) -> list[jax.Array]:
        # What a transpose keeps of an operand is its conversion, which may be smaller.
        converted = [x.astype(self.compute_dtype) for x in primals]
        return bilinear_terms(converted, tangents, self.product)

    def rule(self, avals: Sequence[Any]) -> Rule | str:
        """If the input channels are divided, the convolutions are summed over the devices, in the result's dtype, and
        XLA computes the epilogue from the sum."""
        rule = self.product.rule(self.own(avals))
        if isinstance(rule, str):
            return rule
        features = rule.result[self.convolution.dimension_numbers.out_spec[1]]
        more = named(((features,), rule.result)[not self.bias :], self.bias, self.residual)

        def is_summed(parts: Mapping[str, int]) -> bool:
            return any(name in parts for name in rule.reductions)

        def divided(parts: Mapping[str, int]) -> Any:
            return (self.product if is_summed(parts) else self)._divided(rule.result, parts)

        def localized(operands: Sequence[jax.Array], place: Place) -> Sequence[jax.Array]:
            return self.own(operands) if is_summed(place.parts) else operands

        def finish(sums: jax.Array, operands: Sequence[jax.Array], place: Place) -> jax.Array:
            del place
            return self.after(sums, *self.rest(operands))

        operands = (*rule.operands, *(dims for dims in more if dims is not None))
        return Rule(operands, rule.result, rule.units, divided, finish, localized)

    def in_lax(self, problem: ConvProblem | None, out: Any) -> Callable[..., jax.Array]:
        """What XLA can fuse into its convolution stays in the result's dtype, as XLA's fusion needs it."""
        convolved = self.product.in_lax(None if problem is None else decisive(problem), out)

        def convolution_and_epilogue(*operands: jax.Array) -> jax.Array:
            sums, rest = convolved(*self.own(operands)), self.rest(operands)
            return self._after(sums, rest) if self.activation in _FUSED_BY_XLA else self.after(sums, *rest)

        return convolution_and_epilogue

    def with_kernel(self, problem: ConvProblem, out: Any, custom_call: CustomCall) -> Callable[..., jax.Array] | None:
        if not isinstance(problem, ConvEpilogueProblem):
            return super().with_kernel(problem, out, custom_call)

        def function(*operands: jax.Array) -> jax.Array:
            bias, residual = named(self.rest(operands), self.bias, self.residual)
            if residual is not None:
                residual = residual.transpose(orders_of(self.convolution.dimension_numbers)["g"])
                residual = residual.reshape(problem.out_shape)
            rest = [x for x in (bias, residual) if x is not None]
            run = lambda *own: execute.call(custom_call, problem, *own, *rest)  # noqa: E731
            return self.between_layouts(problem, out, run)(*self.own(operands))

        return function


def bind(
    call: ConvFprop,
    lhs: jax.Array,
    rhs: jax.Array,
    bias: Any,
    activation: Any,
    residual: Any,
    activation_last: bool,
) -> jax.Array:
    """The result of a call, and what becomes of it; ValueError or TypeError for arguments that do not fit it."""
    if bias is None and activation is None and residual is None:
        return call.bind(lhs, rhs)
    out, operands = call.type_of(jax.typeof(lhs), jax.typeof(rhs)), []
    if bias is not None:
        operands.append(floating_operand("bias", bias))
        features = (out.shape[call.convolution.dimension_numbers.out_spec[1]],)
        require(operands[-1].shape == features, f"bias of shape {operands[-1].shape}", str(features))
    if residual is not None:
        operands.append(floating_operand("residual", residual))
        require(operands[-1].shape == out.shape, f"residual of shape {operands[-1].shape}", str(out.shape))
    fields = {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
    epilogue = ConvEpilogue(
        **fields,
        bias=bias is not None,
        activation=known_activation(activation),
        residual=residual is not None,
        activation_last=bool(activation_last) and activation is not None and residual is not None,
    )
    return epilogue.bind(lhs, rhs, *operands)


def _batch(
    axis: Any, operands: Sequence[jax.Array], dims: Sequence[int | None], *, call: ConvEpilogue
) -> tuple[jax.Array, int | None]:
    """A batch of inputs, and of residuals with them, widens the batch. With a batch of weights or biases, XLA computes
    the epilogue."""
    if all(dim is None for dim in dims):
        return call.bind(*operands), None
    if call.options.config is not None:
        return one_by_one(operands, dims, call), 0
    size = mapped_size(operands, dims)
    if dims[0] is None or dims[1] is not None or (call.bias and dims[2] is not None) or size == 0:
        return jax.vmap(call.composed, tuple(dims))(*operands), 0
    specs = call.convolution.dimension_numbers
    lhs = fold_into(operands[0], dims[0], specs.lhs_spec[0], call.convolution.batch_group_count)
    rest = list(operands[1:])
    place = specs.out_spec[0]
    if call.residual:
        rest[-1] = fold_into(batching.bdim_at_front(rest[-1], dims[-1], size), 0, place)
    sharding = _compat.mapped_sharding(call.out_sharding, axis, place)
    out = dataclasses.replace(call, out_sharding=sharding).bind(lhs, *rest)
    return unfold_from(out, place, size), place


batching.fancy_primitive_batchers[conv_epilogue_p] = _batch
epilogue_call.define(conv_epilogue_p, lax.conv_general_dilated_p)
