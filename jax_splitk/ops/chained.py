"""`chained`: products with quantized weights in one custom call, whose kernels overlap; the primitive of a chain."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
from jax.experimental import jet
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from jax_splitk.ops.call import call_of
from jax_splitk.ops.chains import PRODUCTS, Chain, evaluated
from jax_splitk.ops.lowering import chosen
from jax_splitk.ops.routing import has_elements, routed, served
from jax_splitk.runtime import _compat, execute
from jax_splitk.runtime.compiler import CompilationError
from jax_splitk.runtime.joined_plan import JoinedPlan
from jax_splitk.runtime.nvrtc import NvrtcError
from jax_splitk.runtime.plan import DevicePlan
from jax_splitk.runtime.toolchain import CompilerUnavailable
from jax_splitk.tuning.choice import Choice
from jax_splitk.tuning.options import Options
from jax_splitk.tuning.select import announce, can_be_chained

_P = ParamSpec("_P")
_R = TypeVar("_R")

MOST_ROWS = 64  # of activations: products of more are not bound by the weight's bytes

# Its parameter is a function that consists of products, and of views of their results.
chain_p = core.Primitive("jax_splitk_chain")
chain_p.multiple_results = True


def chained(function: Callable[_P, _R], /) -> Callable[_P, _R]:
    """Puts products with quantized weights that follow each other into one custom call.

    The bytes of its weight determine the time of a product of a few rows. Between two such products the memory is idle
    for some microseconds: one kernel ends, and the next begins. In one custom call the next kernel begins earlier, and
    loads its weight until its activations are there (programmatic dependent launch). The products of a decoder between
    two attentions are such a chain:

        @jax_splitk.chained
        def block(attention, x, weights, next_qkv):
            x = jax_splitk.quantized_matmul(attention, weights["o"], residual=x)
            y = jax_splitk.quantized_matmul(x, weights["gate_up"], norm_epsilon=1e-5, activation="swiglu")
            x = jax_splitk.quantized_matmul(y, weights["down"], residual=x)
            return x, jax_splitk.quantized_matmul(x, next_qkv, norm_epsilon=1e-5)

    The same kernels give the same bits as without `chained`. Calls of `quantized_matmul`, and what becomes one of them
    (the layers of this package, `quantized_einsum`), are chained if they have at most 64 rows and their kernel is of
    the family `quantized_stream`. Where another family's kernel is at most 1.5 us faster, `quantized_stream` serves in
    a chain. The activations and the residual of a product may be results of the chain, reshaped or not. Other
    operations on results of the chain run after it, or end it if the next product needs them. Products inside of loops,
    conditionals and functions of `jax.checkpoint` are not chained, unless `chained` is applied inside.

    Derivatives, `vmap` of the chained function, and programs that XLA divides among devices compute each product by
    itself. The mapped function can be chained instead (`chained(jax.vmap(f))`), and a function inside of `shard_map`.

    Args:
      function: a function of arrays, and of pytrees of arrays.

    Returns:
      A function of the same arguments and results.

    Examples:
      >>> w = jax_splitk.prepack(jax_splitk.quantize(jnp.ones((128, 128)), "int4", group_size=64))
      >>> def two(x):
      ...     return jax_splitk.quantized_matmul(jax_splitk.quantized_matmul(x, w), w)
      >>> x = jnp.ones((1, 128), jnp.bfloat16)
      >>> bool(jnp.all(jax_splitk.chained(two)(x) == two(x)))
      True
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args, **kwargs)
        results = evaluated(closed, jax.tree.leaves((args, kwargs)), _has_few_rows, _bound)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call


def _has_few_rows(eqn: core.JaxprEqn) -> bool:
    out: Any = eqn.outvars[0].aval
    return out.ndim == 2 and has_elements([out]) and out.shape[0] <= MOST_ROWS


def _bound(chain: Chain, operands: Sequence[Any]) -> list[jax.Array]:
    """The results of a chain's products, as one equation."""
    jaxpr = jax.make_jaxpr(lambda *operands: chain.computed(operands, chained=True))(*operands)
    return chain_p.bind(*operands, jaxpr=jaxpr)


# ---- rules -----------------------------------------------------------------------------------------------------------


def _each(*operands: Any, jaxpr: core.ClosedJaxpr) -> list[jax.Array]:
    """The results of products that are computed one by one."""
    return evaluated(jaxpr, operands, lambda eqn: False, Chain.computed)


def _of_some(jaxpr: core.ClosedJaxpr, operands: Sequence[Any], places: Sequence[int]) -> Callable[..., Any]:
    """The function of the operands at some places. The others are constants."""

    def function(*given: Any) -> list[jax.Array]:
        return _each(*{**dict(enumerate(operands)), **dict(zip(places, given, strict=True))}.values(), jaxpr=jaxpr)

    return function


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: core.ClosedJaxpr) -> tuple[Any, Any]:
    moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    return jax.jvp(_of_some(jaxpr, primals, moving), [primals[i] for i in moving], [tangents[i] for i in moving])


def _batch(operands: Sequence[Any], dims: Sequence[int | None], *, jaxpr: core.ClosedJaxpr) -> tuple[Any, Any]:
    out = jax.vmap(functools.partial(_each, jaxpr=jaxpr), tuple(dims))(*operands)
    return out, [0] * len(out)


def _transpose(cts: Sequence[Any], *operands: Any, jaxpr: core.ClosedJaxpr) -> list[Any]:
    """The rule of a chain that is linear in the operands that are not known."""
    unknown = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]
    types = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in (operands[i] for i in unknown)]
    given = [ad.instantiate_zeros(ct) for ct in cts]
    transposed = jax.linear_transpose(_of_some(jaxpr, operands, unknown), *types)
    found = dict(zip(unknown, transposed(given), strict=True))
    return [found.get(i) for i in range(len(operands))]


def _jet(primals: Sequence[Any], series: Sequence[Any], *, jaxpr: core.ClosedJaxpr) -> Any:
    return jet.jet(functools.partial(_each, jaxpr=jaxpr), tuple(primals), tuple(series), factorial_scaled=False)


@functools.lru_cache(maxsize=64)
def _jitted(jaxpr: core.ClosedJaxpr) -> Callable[..., Any]:
    return jax.jit(functools.partial(chain_p.bind, jaxpr=jaxpr))


def _outside_jit(*operands: Any, jaxpr: core.ClosedJaxpr) -> Any:
    with jax.disable_jit(False):  # else jit would call this again, for ever
        return _jitted(jaxpr)(*operands)


chain_p.def_impl(_outside_jit)
chain_p.def_abstract_eval(lambda *avals, jaxpr: jaxpr.out_avals)
ad.primitive_jvps[chain_p] = _jvp
ad.primitive_transposes[chain_p] = _transpose
batching.primitive_batchers[chain_p] = _batch
jet.jet_rules[chain_p] = _jet


# ---- lowering --------------------------------------------------------------------------------------------------------


def _lowered_for_cuda(ctx: Any, *operands: Any, jaxpr: core.ClosedJaxpr) -> Any:
    if _compat.is_automatically_partitioned(ctx):
        return _lowered(ctx, *operands, jaxpr=jaxpr)
    kernels = {eqn.outvars[0]: _kernel(ctx, eqn) for eqn in jaxpr.jaxpr.eqns}

    def kernel(eqn: core.JaxprEqn) -> Any:
        return kernels[eqn.outvars[0]]

    def joined(chain: Chain, operands: Sequence[Any]) -> Sequence[jax.Array]:
        eqns = [node.eqn for node in chain.products]
        plan = joined_plan(chain, [kernel(eqn)[0] for eqn in eqns])
        try:
            custom_call = plan.custom_call()
        except (CompilationError, CompilerUnavailable, NvrtcError):  # each product warns if its own code fails, too
            return chain.computed(operands)
        for eqn in eqns:
            announce(*kernel(eqn)[1:])
        results = [eqn.outvars[0].aval for eqn in eqns]
        return execute.call_joined(custom_call, results, *operands, replaced=chain.replaced())

    def function(*operands: Any) -> Any:
        return evaluated(jaxpr, operands, lambda eqn: kernel(eqn) is not None, joined)

    return mlir.lower_fun(function, True)(ctx, *operands)


def _kernel(ctx: Any, eqn: core.JaxprEqn) -> tuple[DevicePlan, Choice, Options] | None:
    """The plan of a product that may be chained, with its choice; None for another one."""
    if eqn.primitive not in PRODUCTS:
        return None
    call = call_of(eqn)
    problem = routed(call, [x.aval for x in eqn.invars], "cuda")
    if problem is None or served(problem, "cuda")[0] != problem:
        return None
    choice, _ = chosen(ctx, problem, "cuda", call.options)
    if choice.problem != problem or choice.family is None or not can_be_chained(choice.family):
        return None
    plan = choice.candidate.plan(problem)
    return (plan, choice, call.options) if isinstance(plan, DevicePlan) else None


def joined_plan(chain: Chain, plans: Sequence[DevicePlan]) -> JoinedPlan:
    """The plan of a chain, from those of its products."""
    operands, producers = {x: i for i, x in enumerate(chain.operands)}, chain.producers()
    first = len(operands)  # result
    places = [
        (*(first + producers[x] if x in producers else operands[x] for x in node.operands), first + i)
        for i, node in enumerate(chain.products)
    ]
    return JoinedPlan(tuple(plans), tuple(places))


def _lowered(ctx: Any, *operands: Any, jaxpr: core.ClosedJaxpr) -> Any:
    return mlir.lower_fun(functools.partial(_each, jaxpr=jaxpr), True)(ctx, *operands)


mlir.register_lowering(chain_p, _lowered)
mlir.register_lowering(chain_p, _lowered_for_cuda, platform="cuda")
