"""Policies of `jax.checkpoint` on the operations of this package.

A policy looks at lax's primitives: `dots_saveable`, for one, saves the results of `dot_general` and
`conv_general_dilated`. For an operation of ours it is asked about lax's operation, and its answer holds for ours.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval as pe

from jax_splitk.ops.call import call_of
from jax_splitk.runtime import _compat


def define(primitive: core.Primitive, lax_primitive: core.Primitive) -> None:
    """Gives a primitive the rule by which a policy treats its equations as those of `lax_primitive`."""

    def rule(policy: Callable[..., Any], unknown: Sequence[bool], known: Sequence[bool], eqn: Any) -> Any:
        if any(unknown):
            return None, eqn, [True], [True], _missing(eqn, known)
        avals, params = call_of(eqn).as_lax([x.aval for x in eqn.invars])
        answer = policy(lax_primitive, *avals, **params)
        if (spaces := _compat.offload_spaces(answer)) is not None:
            return _offloaded(eqn, *spaces)
        if _compat.is_saveable(answer):
            return eqn, None, [False], [False], []
        return eqn, eqn, [False], [True], _missing(eqn, known)

    pe.partial_eval_jaxpr_custom_rules[primitive] = rule


def _missing(eqn: Any, known: Sequence[bool]) -> list[Any]:
    """The operands that the backward pass must be given."""
    return [x for x, held in zip(eqn.invars, known, strict=True) if not held and isinstance(x, core.Var)]


def _offloaded(eqn: Any, source: Any, target: Any) -> Any:
    """The result is moved to the memory `target` after the forward pass, and back to `source` in the backward pass.

    The rule may return one equation for each pass, so operation and move are one jitted function.
    """
    run = functools.partial(eqn.primitive.bind, **eqn.params)

    def forward(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = run(*operands)
        return out, jax.device_put(out, target)

    (out,) = eqn.outvars
    (moving,) = jax.make_jaxpr(jax.jit(forward))(*(x.aval for x in eqn.invars)).eqns
    (returning,) = jax.make_jaxpr(lambda x: jax.device_put(x, source))(out.aval).eqns
    kept = moving.outvars[1]
    moving = moving.replace(invars=eqn.invars, outvars=[out, kept])
    return moving, returning.replace(invars=[kept], outvars=[out]), [False], [True], [kept]
