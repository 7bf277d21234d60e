"""What automatic partitioning will make of a function, found without compiling: each device's problems.

The function is lowered with a marker in the place of each of our operations, and Shardy propagates the shardings of its
arguments and constraints, as it will when XLA compiles. Each operation's rule is then applied to the shardings at its
marker.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy
from jax.interpreters import mlir

from jax_splitk.ops import lowering, partitioning, routing
from jax_splitk.ops.call import Call
from jax_splitk.ops.partitioning import Division, Rule, Spec
from jax_splitk.ops.primitives import PRIMITIVES
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime import _compat
from jax_splitk.tuning import watch
from jax_splitk.tuning.options import Options

_INDEX = "jax_splitk.index"


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of a function as a device computes it.

    Attributes:
      problem: a device's.
      note: for the reader: the operation of which it is a part, or the part that XLA computes; empty for a whole
        operation.
      undivided: why XLA partitions it; None if it does not.
    """

    problem: Problem
    options: Options
    note: str = ""
    undivided: str | None = None


@dataclasses.dataclass(frozen=True)
class _Marked:
    """An equation as it was lowered; if it is divided, its rule, the mesh's axes, and its division, if the types tell
    it."""

    call: Call
    shapes: tuple[Any, ...]
    undivided: str | None = None
    rule: Rule | None = None
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    division: Division | None = None


def operations(fn: Callable[..., Any], args: Any, kwargs: Any, platform: str, *, every: bool) -> list[Operation]:
    """The operations of `jit(fn)(*args, **kwargs)`, which is a program for several devices, as they are lowered;
    `every`: implied passes for which no kernel is chosen as the others, divided."""
    marked: list[_Marked] = []
    rules = tuple((primitive, _marking(platform, marked, every)) for primitive in PRIMITIVES)
    parameters: Any = mlir.LoweringParameters(override_lowering_rules=rules)  # pyright: ignore[reportArgumentType]
    with watch.state.tracing_only():
        traced = jax.jit(functools.partial(fn)).trace(*args, **kwargs)
        module: Any = traced.lower(_private_parameters=parameters).compiler_ir("stablehlo")
    with module.context:
        passmanager.PassManager.parse("builtin.module(sdy-propagation-pipeline)").run(module.operation)
        functions = {
            ir.StringAttr(f.attributes["sym_name"]).value: f for f in module.body if "sym_name" in f.attributes
        }
        return [_operation(op, marked) for op in _markers(functions["main"].operation, functions)]


# ---- lowering to markers -------------------------------------------------------------------------------------------


def _marking(platform: str, marked: list[_Marked], every: bool) -> Callable[..., Any]:
    """The lowering rule that leaves markers."""

    def lowered(ctx: Any, *operands: Any, call: Call) -> Any:
        problem = routing.routed(call, ctx.avals_in, platform)
        if problem is None:
            return lowering.as_lax_does(ctx, operands, call)
        shapes = tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in ctx.avals_in)
        equation, rule = _Marked(call, shapes), None
        if _compat.is_automatically_partitioned(ctx):
            laxs = None if every else lowering.stays_laxs(ctx, problem, call.options, platform, final=False)
            found = laxs or lowering.division_rule(ctx, call, platform)
            if isinstance(found, Rule):
                explicit, sizes = partitioning.explicit_division(found, ctx.avals_in), partitioning.mesh_of(ctx).shape
                equation = dataclasses.replace(equation, rule=found, sizes=dict(sizes), division=explicit)
            else:
                equation = dataclasses.replace(equation, undivided=found)
            # Also what XLA computes carries shardings on.
            rule = call.rule(ctx.avals_in)
        marked.append(equation)
        if isinstance(rule, Rule):
            operands = tuple(_passing(ctx, aval, x) for aval, x in zip(ctx.avals_in, operands, strict=True))
        out = _call("jax_splitk_marker", ctx, operands)
        out.attributes[_INDEX] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), len(marked) - 1)
        if isinstance(rule, Rule):
            out.attributes["sdy.sharding_rule"] = _compat.sharding_rule(partitioning.shardy(rule), out)
        return out.results

    return lowered


def _passing(ctx: Any, aval: Any, operand: Any) -> Any:
    """An operand by way of an operation that shows its sharding."""
    dims = tuple(f"d{d}" for d in range(aval.ndim))
    same = Rule((dims,), dims, dict(zip(dims, aval.shape, strict=True)), lambda _: None)
    op = _call("jax_splitk_operand", ctx.replace(avals_in=[aval], avals_out=[aval]), [operand])
    op.attributes["sdy.sharding_rule"] = _compat.sharding_rule(partitioning.shardy(same), op)
    return op.results[0]


def _call(target: str, ctx: Any, operands: Sequence[Any]) -> Any:
    """A custom call whose results have the context's types."""
    (result,) = jax.ffi.ffi_lowering(target)(ctx, *operands)
    return result.owner  # pyright: ignore[reportAttributeAccessIssue]


# ---- what propagation left -----------------------------------------------------------------------------------------


def _markers(op: Any, functions: dict[str, Any]) -> Iterator[Any]:
    """The markers in the order in which they run, those of a called function at each of its calls."""
    for region in op.regions:
        for block in region:
            for inner in block:
                if _INDEX in inner.operation.attributes:
                    yield inner.operation
                elif "callee" in inner.operation.attributes:
                    callee = ir.FlatSymbolRefAttr(inner.operation.attributes["callee"]).value
                    yield from _markers(functions[callee].operation, functions)
                else:
                    yield from _markers(inner.operation, functions)


def _operation(op: Any, marked: list[_Marked]) -> Operation:
    equation = marked[ir.IntegerAttr(op.attributes[_INDEX]).value]
    options = equation.call.options
    whole = equation.call.problem(equation.shapes)
    rule = equation.rule
    if rule is None:
        return Operation(whole, options, undivided=equation.undivided)
    if not getattr(jax.config, "jax_use_shardy_partitioner", True):
        return Operation(whole, options, "not yet divided, as GSPMD does it when it compiles")
    specs = [_spec(value) for value in op.operands]
    found = equation.division or partitioning.division(rule, equation.sizes, specs, _spec(op.results[0]))
    parts = found.parts(equation.sizes)
    shapes = [
        jax.ShapeDtypeStruct([n // parts.get(name, 1) for n, name in zip(x.shape, dims, strict=True)], x.dtype)
        for x, dims in zip(equation.shapes, rule.operands, strict=True)
    ]
    part = rule.divided(parts).problem(shapes)
    return Operation(part, options, "" if part == whole else f"a device's part of {whole}")


def _spec(value: Any) -> Spec:
    """The mesh axes of a result's dimensions; none if they are not whole axes."""
    attributes, rank = value.owner.attributes, ir.RankedTensorType(value.type).rank
    if "sdy.sharding" not in attributes:
        return ((),) * rank
    (sharding,) = sdy.TensorShardingPerValueAttr(attributes["sdy.sharding"]).shardings
    dims = [sdy.DimensionShardingAttr(dim) for dim in sdy.TensorShardingAttr(sharding).dimension_shardings]
    axes = [[sdy.AxisRefAttr(axis) for axis in dim.axes] for dim in dims]
    if any(axis.sub_axis_info is not None for those in axes for axis in those):
        return ((),) * rank
    return tuple(tuple(axis.name for axis in those) for those in axes)
