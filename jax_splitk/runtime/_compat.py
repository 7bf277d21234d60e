"""Differences between jax's releases. Only this module may look behind jax's public API."""

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.experimental.custom_partitioning import SdyShardingRule
from jax.extend import core
from jax.extend.mlir.dialects import sdy
from jax.interpreters import mlir


def aval_vma(aval: Any) -> frozenset[str]:
    """Mesh axes over which a value of this type varies inside shard_map (empty elsewhere)."""
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(manual, "varying", ()))


def like(aval: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """A type with this shape and dtype that varies over the same mesh axes as `aval` and has no sharding of its own."""
    sharding = aval.sharding
    if not sharding.mesh.empty:
        spec = jax.sharding.PartitionSpec(*[None] * len(shape))
        sharding = jax.sharding.NamedSharding(sharding.mesh, spec)
        return aval.update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False, sharding=sharding)
    return aval.update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False)


def explicit_sharding(aval: Any) -> jax.sharding.NamedSharding | None:
    """A type's sharding if the mesh has explicit axes, else None."""
    mesh = aval.sharding.mesh
    explicit = not mesh.empty and jax.sharding.AxisType.Explicit in mesh.axis_types
    return aval.sharding if explicit else None


def over_auto_axes(function: Callable[..., jax.Array], sharding: Any) -> Callable[..., jax.Array]:
    """The function of plain lax operations, whose shardings are XLA's to find; `sharding` is the result's, by explicit
    axes, or None if there are none."""
    if sharding is None:
        return function
    return jax.sharding.auto_axes(function, out_sharding=sharding)  # pyright: ignore[reportReturnType]


def mapped_sharding(sharding: Any, axis: Any, dim: int) -> Any:
    """The sharding of a result with a mapped axis in dimension `dim`, from the sharding of the result without that
    axis; None stays None.

    `axis` is the description of the axis that JAX passes to a batching rule: it may be sharded over explicit mesh axes.
    """
    names = getattr(axis, "explicit_mesh_axis", None)
    if sharding is None or not names:
        return sharding
    spec = sharding.spec
    if spec[dim] is not None:
        raise NotImplementedError(
            f"out_sharding={sharding} under vmap over {names!r}; accepted: None in dimension {dim}"
        )
    return sharding.update(spec=jax.sharding.PartitionSpec(*spec[:dim], names, *spec[dim + 1 :]))


def placed_like(x: jax.Array, aval: Any) -> jax.Array:
    """`x`, resharded to the sharding of the type if the mesh has explicit axes."""
    wanted, found = explicit_sharding(aval), explicit_sharding(jax.typeof(x))
    return x if wanted is None or wanted == found else jax.sharding.reshard(x, wanted)


def matmul_operators() -> list[tuple[type, str]]:
    """The class and the attribute that hold the function behind `x @ w` of a traced x, in a list of one; an empty list
    in a release of JAX that keeps the function elsewhere."""
    at = type(jax.typeof(0)), "_matmul"
    return [at] if isinstance(vars(at[0]).get(at[1]), staticmethod) else []


def is_saveable(answer: Any) -> bool:
    """The answer of a `jax.checkpoint` policy: a bool or one of JAX's own types."""
    return answer is True or type(answer).__name__ == "SaveableType"


def offload_spaces(answer: Any) -> tuple[Any, Any] | None:
    """The result's memory space and the one to offload it to, if a `jax.checkpoint` policy offloads; else None.

    The policy's answer has JAX's private type `Offloadable`, with the names of memory kinds.
    """
    if not hasattr(answer, "dst"):
        return None
    spaces = {"device": jax.memory.Space.Device}
    return tuple(spaces.get(kind, jax.memory.Space.Host) for kind in (answer.src, answer.dst))


def vary_like(x: jax.Array, *others: Any) -> jax.Array:
    """Marks `x` as varying over every mesh axis that `others` vary over, so that AD sums its cotangent over them."""
    wanted, varying = (frozenset().union(*(aval_vma(jax.typeof(y)) for y in of)) for of in (others, (x,)))
    missing = tuple(sorted(wanted - varying))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def vary_alike(operands: Any) -> Any:
    """The pytree with each of its arrays varying over every mesh axis that any of them varies over."""
    every = jax.tree.leaves(operands)
    if not any([aval_vma(jax.typeof(x)) for x in every]):
        return operands
    return jax.tree.map(lambda x: vary_like(x, *every), operands)


def is_automatically_partitioned(ctx: Any) -> bool:
    """Whether XLA's partitioner will see the code lowered in this context on more than one device.

    The lowering context is public as a type only; its `axis_context` tells jit over several devices
    (ShardingContext) from code inside a fully manual shard_map (SPMDAxisContext).
    """
    axis_context = getattr(ctx.module_context, "axis_context", None)
    mesh = getattr(axis_context, "mesh", None)
    manual = mesh is not None and frozenset(mesh.axis_names) == frozenset(getattr(axis_context, "manual_axes", ()))
    return device_count(ctx) > 1 and not manual


def device_count(ctx: Any) -> int:
    """How many devices run the program that is being lowered."""
    axis_context = getattr(ctx.module_context, "axis_context", None)
    devices = getattr(axis_context, "num_devices", None)
    return devices if devices is not None else getattr(getattr(axis_context, "mesh", None), "size", 1)


def is_inside_shard_map() -> bool:
    """Whether the current trace is inside a shard_map that is manual over at least one mesh axis."""
    return jax.sharding.AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types


def automatic_mesh(ctx: Any) -> Any:
    """The abstract mesh over whose axes the code lowered in this context is partitioned.

    None if the program names no mesh, and inside a shard_map over only some axes of a mesh, which custom partitioning
    does not support.
    """
    devices = getattr(getattr(ctx.module_context, "axis_context", None), "num_devices", 0)
    meshes = [aval.sharding.mesh for aval in ctx.avals_in] + [jax.sharding.get_abstract_mesh()]
    known = next((mesh for mesh in meshes if not mesh.empty), None) or _mesh_of_module(ctx)
    return known if known is not None and known.size == devices else None


def _mesh_of_module(ctx: Any) -> Any:
    """The first mesh in the module lowered so far. The mesh of jit's `in_shardings` is in no operand's type."""
    for sharding in _shardings(ctx.module_context.module.operation):
        axes = [sdy.MeshAxisAttr(axis) for axis in sdy.MeshAttr(sdy.TensorShardingAttr(sharding).mesh_or_ref).axes]
        return jax.sharding.AbstractMesh(tuple(axis.size for axis in axes), tuple(axis.name for axis in axes))
    return None


def _shardings(operation: Any) -> Iterator[Any]:
    """The sharding attributes of a function's arguments and of constraints inside an operation."""
    attributes = operation.attributes
    for of_argument in attributes["arg_attrs"] if "arg_attrs" in attributes else ():  # noqa: SIM401 (it has no get)
        if "sdy.sharding" in of_argument:
            yield of_argument["sdy.sharding"]
    if operation.name == "sdy.sharding_constraint":
        yield attributes["sharding"]
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield from _shardings(inner.operation)


def with_mesh(ctx: Any, mesh: Any) -> Any:
    """A context in which `custom_partitioning` can be lowered. It asks for devices only to count them, and a program
    may be lowered for more devices than this machine has."""
    devices = tuple(itertools.islice(itertools.cycle(jax.devices()), mesh.size))
    axis_context = ctx.module_context.axis_context
    axis_context = dataclasses.replace(axis_context, device_assignment=devices, abstract_mesh=mesh)
    return ctx.replace(module_context=ctx.module_context.replace(axis_context=axis_context))


def sharding_rule(rule: SdyShardingRule, op: Any) -> Any:
    """The rule as an attribute of an operation of StableHLO, as `custom_partitioning` makes it."""
    from jax._src.custom_partitioning_sharding_rule import sdy_sharding_rule_to_mlir  # noqa: PLC0415

    return sdy_sharding_rule_to_mlir(rule, [x.type for x in op.operands], [x.type for x in op.results])


def spec_of(sharding: Any, mesh: jax.sharding.Mesh, rank: int) -> jax.sharding.PartitionSpec:
    """A sharding of XLA's partitioner in terms of the mesh's axes; replicated if it divides an axis, or if GSPMD gave
    the array none."""
    if sharding is None:
        return jax.sharding.PartitionSpec()
    from jax._src.sharding_impls import parse_flatten_op_sharding  # noqa: PLC0415

    try:
        (spec,) = parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(rank), mesh)
    except (ValueError, NotImplementedError, AssertionError, StopIteration):
        return jax.sharding.PartitionSpec()
    return spec


def named(ctx: Any, name: str) -> Any:
    """The lowering context of operations inside the one that is being lowered; `name` becomes a part of their names."""
    return ctx.replace(name_stack=ctx.name_stack.extend(name))


def location(ctx: Any, name: str) -> Any:
    """A context in which MLIR operations are called `name`: HLO's `op_name` ends in it, after the scopes that JAX puts
    there."""
    return mlir.ir.Location.name(str(ctx.name_stack.extend(name)))


def is_known(*sizes: Any) -> bool:
    """Whether no size is a symbolic dimension of jax.export."""
    return all(isinstance(size, int | np.integer) for size in sizes)


def static_or_symbolic(size: Any) -> Any:
    """The size as a plain int; a symbolic dimension unchanged."""
    return int(size) if isinstance(size, int | np.integer) else size


def is_export(ctx: Any) -> bool:
    """Whether code is lowered to be exported: it may run on other devices than this process's."""
    parameters = getattr(ctx.module_context, "lowering_parameters", None)
    return bool(getattr(parameters, "for_export", False)) or len(ctx.module_context.platforms) > 1


@contextlib.contextmanager
def watching_programs(tell: Callable[[core.Jaxpr], None]) -> Iterator[None]:
    """Calls `tell` with each program that JAX lowers while the block runs, inside or outside of jit, before it is
    lowered. JAX has no public hook for this.
    """
    from jax._src.interpreters import mlir  # noqa: PLC0415

    lower = mlir.lower_jaxpr_to_module

    def telling(name: str, jaxpr: core.ClosedJaxpr, *args: Any, **kwargs: Any) -> Any:
        tell(jaxpr.jaxpr)
        return lower(name, jaxpr, *args, **kwargs)

    mlir.lower_jaxpr_to_module = telling
    try:
        yield
    finally:
        mlir.lower_jaxpr_to_module = lower


def backends_are_started() -> bool:
    """Whether JAX's backends have started. Asking for the devices would start them, which takes memory and must not
    happen before `jax.distributed.initialize`."""
    from jax._src import xla_bridge  # noqa: PLC0415

    return bool(xla_bridge.backends_are_initialized())


def distributed() -> tuple[Any, int, int]:
    """(client of the job's key-value store or None, this process's index, number of processes).

    jax.distributed has no public access to its client, which offers wait_at_barrier, key_value_set and
    blocking_key_value_get; nor can processes be counted publicly without starting a backend.
    """
    from jax._src import distributed as jax_distributed  # noqa: PLC0415

    state = jax_distributed.global_state
    return state.client, state.process_id or 0, state.num_processes or 1


def lowered_function() -> core.Jaxpr | None:
    """The function that JAX lowers in this thread, a whole program; None if it lowers none, or a part of an operation
    for XLA's partitioner.

    A lowering rule sees one equation of it. It is a variable of one of the rule's callers, the same object for all
    equations.
    """
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "lower_jaxpr_to_module":
        frame = frame.f_back
    is_part = frame is None or (frame.f_back is not None and frame.f_back.f_code.co_name == "build_mlir_module_helper")
    found = None if frame is None or is_part else frame.f_locals.get("jaxpr")
    return found.jaxpr if isinstance(found, core.ClosedJaxpr) else found if isinstance(found, core.Jaxpr) else None
