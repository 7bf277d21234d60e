"""Automatic partitioning: how `jit` over sharded arrays divides our operations among devices.

XLA's partitioner cannot look into a custom call and would gather its operands. So each operation has a `Rule`: which of
its dimensions may be divided. By it Shardy (or GSPMD) carries shardings through the operation, and each device computes
the same operation on its own part, the local problem, which is what is tuned, looked up and lowered. Where a reduction
is divided, the parts' results are summed over the devices, in the result's dtype.

On a mesh of explicit axes the shardings are known when the operation is lowered, and it becomes a `shard_map`. On
automatic axes it becomes a `custom_partitioning`, and the local problem is lowered while XLA compiles.
"""

import dataclasses
import functools
import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.interpreters import mlir
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_splitk.runtime import _compat
from jax_splitk.runtime.plan import TARGETS
from jax_splitk.tuning import once
from jax_splitk.tuning.options import Options

_logger = logging.getLogger("jax_splitk")

# The mesh axes over which a dimension is divided, the major one first; of an array, for each dimension.
Axes = tuple[str, ...]
Spec = tuple[Axes, ...]


@dataclasses.dataclass(frozen=True)
class Place:
    """A device's place in a division.

    Attributes:
      parts: by name, into how many parts a dimension is divided.
      axes: by name, the mesh axes that divide it.
      sizes: of the mesh's axes.
    """

    parts: Mapping[str, int]
    axes: Mapping[str, Axes]
    sizes: Mapping[str, int]

    def index(self, name: str) -> Any:
        """The device's place among the parts of a dimension."""
        axes = self.axes[name]
        return functools.reduce(lambda major, axis: major * self.sizes[axis] + lax.axis_index(axis), axes, 0)

    def whole(self, name: str, x: jax.Array) -> jax.Array:
        """The parts of all devices of an array whose first dimension has this name."""
        axes = self.axes.get(name, ())
        return lax.all_gather(x, axes, tiled=True) if axes else x


@dataclasses.dataclass(frozen=True)
class Rule:
    """Which dimensions of an operation may be divided.

    Attributes:
      operands: a name for each dimension of each operand. Dimensions of one name are divided alike, whatever their
        sizes.
      result: a name for each dimension of the result. Names that have a unit but are not in the result are summed over.
      units: by name, into how many parts of equal size a dimension can be cut; names that are not here stay whole.
      divided: takes the number of parts by name, and returns the call of one part (`call.Call`).
      finish: takes the sum over the devices, the operands of one device and its place, and returns the result; None if
        the sum is the result.
      localized: takes the operands of one device and its place, and returns the operands of the call of one part. None
        if they are the same.
    """

    operands: tuple[tuple[str, ...], ...]
    result: tuple[str, ...]
    units: Mapping[str, int]
    divided: Callable[[Mapping[str, int]], Any]
    finish: Callable[[jax.Array, Sequence[jax.Array], Place], jax.Array] | None = None
    localized: Callable[[Sequence[jax.Array], Place], Sequence[Any]] | None = None

    @property
    def reductions(self) -> tuple[str, ...]:
        """Names over which the result is a sum."""
        return tuple(name for name in self.units if name not in self.result)


@dataclasses.dataclass(frozen=True)
class Division:
    """How one operation is divided: by name, the mesh axes. `gathered`: names whose dimensions were divided and are now
    whole."""

    axes: Mapping[str, Axes]
    gathered: tuple[str, ...]

    def spec(self, dims: Sequence[str]) -> PartitionSpec:
        """The sharding of an array whose dimensions have these names."""
        axes = [self.axes.get(name, ()) for name in dims]
        return PartitionSpec(*(those[0] if len(those) == 1 else those or None for those in axes))

    def parts(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """By name, the number of parts on a mesh of such axes."""
        return {name: math.prod(sizes[axis] for axis in axes) for name, axes in self.axes.items()}


def division(rule: Rule, sizes: Mapping[str, int], operands: Sequence[Spec], result: Spec | None) -> Division:
    """The division that the shardings of an operation's arrays ask for; each mesh axis divides one name.

    Args:
      sizes: of the mesh's axes.
      operands: their shardings.
      result: its sharding, None if it is open.
    """
    axes: dict[str, Axes] = {}
    for name, wanted in _wishes(rule, operands, result):
        had = axes.get(name, ())
        others = {axis for other, those in axes.items() if other != name for axis in those}
        free = tuple(axis for axis in wanted if axis not in others)
        while rule.units[name] % math.prod(sizes[axis] for axis in free):
            free = free[:-1]
        if len(free) > len(had) and free[: len(had)] == had:
            axes[name] = free
    given = {
        name: None
        for dims, spec in zip(rule.operands, operands, strict=True)
        for name, those in zip(dims, spec, strict=True)
        if not set(those) <= set(axes.get(name, ()))
    }
    return Division(axes, tuple(given))


def _wishes(rule: Rule, operands: Sequence[Spec], result: Spec | None) -> Iterator[tuple[str, Axes]]:
    """Pairs of a dimension's name and mesh axes, the most important first.

    First come reductions that no operand's sharding contradicts, although the result must then be summed over devices.
    Then comes the sharding that the result's user wants, then the rest.
    """
    named = [wish for dims, spec in zip(rule.operands, operands, strict=True) for wish in zip(dims, spec, strict=True)]
    uses = {(axis, name) for name, axes in named for axis in axes}
    shared = {axis for axis, name in uses for other_axis, other in uses if axis == other_axis and name != other}
    yield from (wish for wish in named if wish[0] in rule.reductions and not shared & set(wish[1]))
    of_result = [] if result is None else zip(rule.result, result, strict=True)
    yield from (wish for wish in (*of_result, *named) if wish[0] in rule.units)


def _local(rule: Rule, found: Division, sizes: Mapping[str, int]) -> Callable[..., jax.Array]:
    """The function of each device's operands."""
    place = Place(found.parts(sizes), found.axes, sizes)
    part = rule.divided(place.parts)
    over = tuple(axis for name in rule.reductions for axis in found.axes.get(name, ()))

    def local(*operands: jax.Array) -> jax.Array:
        out = part.bind(*(operands if rule.localized is None else rule.localized(operands, place)))
        if not over:
            return out
        out = lax.psum(out, over)
        return out if rule.finish is None else rule.finish(out, operands, place)

    return local


def _announce_gathered(problem: Any, found: Division) -> None:
    if found.gathered and once.state.is_first("gathered", problem, found.gathered):
        what = f"sharded along {', '.join(found.gathered)}, which is gathered: it cannot be divided so for a kernel"
        _logger.warning("%s: %s (implementation='xla' leaves it to XLA)", problem, what)


def refusal(ctx: Any) -> str | None:
    """Why the operation that is lowered in this context cannot be divided by its rule; None if it can."""
    mesh = _explicit_mesh(ctx.avals_in)
    if mesh is not None:
        several = set(mesh.axis_types) != {AxisType.Explicit}
        return "the mesh's axes are of several types" if several else None
    if _compat.is_export(ctx):
        return "exported code names no devices"
    known = _compat.automatic_mesh(ctx) is not None
    return None if known else "inside a shard_map over some axes of a mesh, or without a mesh"


def mesh_of(ctx: Any) -> Any:
    """The mesh over which the operation that is lowered in this context is divided."""
    return _explicit_mesh(ctx.avals_in) or _compat.automatic_mesh(ctx)


def lower(ctx: Any, rule: Rule, call: Any, problem: Any, operands: Sequence[Any]) -> Any:
    """Lowers an equation, which `refusal` does not refuse, as its parts on the devices."""
    if _explicit_mesh(ctx.avals_in) is None:
        function = over_automatic_axes(rule, call, problem)
        return mlir.lower_fun(function, False)(_compat.with_mesh(ctx, mesh_of(ctx)), *operands)
    function = over_explicit_axes(rule, problem, ctx.avals_in)
    # The rule gives the result's sharding, unless lax, or an argument, does.
    (out,) = ctx.avals_out
    return mlir.lower_fun(lambda *xs: _compat.placed_like(function(*xs), out), False)(ctx, *operands)


# ---- explicit axes -------------------------------------------------------------------------------------------------


def _explicit_mesh(avals: Sequence[Any]) -> Any:
    return next((s.mesh for aval in avals if (s := _compat.explicit_sharding(aval)) is not None), None)


def explicit_division(rule: Rule, avals: Sequence[Any]) -> Division | None:
    """The division by the types of the operands; None if no type is sharded by explicit axes."""
    mesh = _explicit_mesh(avals)
    if mesh is None:
        return None
    return division(rule, dict(mesh.shape), [_axes(aval.sharding.spec, aval.ndim) for aval in avals], None)


def with_explicit_sharding(out: Any, call: Any, avals: Sequence[Any]) -> Any:
    """The type `out` of a call's result with the sharding that explicit axes give it."""
    mesh = _explicit_mesh(avals)
    if mesh is None or not isinstance(rule := call.rule(avals), Rule):
        return out
    found = explicit_division(rule, avals)
    spec = PartitionSpec() if found is None else found.spec(rule.result)
    return out.update(sharding=NamedSharding(mesh, PartitionSpec(*spec, *[None] * (out.ndim - len(spec)))))


def over_explicit_axes(rule: Rule, problem: Any, avals: Sequence[Any]) -> Callable[..., jax.Array]:
    """The equation's function of operands sharded by explicit axes, by their types."""
    mesh, found = _explicit_mesh(avals), explicit_division(rule, avals)
    if found is None:
        raise TypeError(f"operands of types {', '.join(map(str, avals))}; accepted: one on a mesh of explicit axes")
    _announce_gathered(problem, found)
    specs = tuple(found.spec(dims) for dims in rule.operands)
    local = _local(rule, found, dict(mesh.shape))
    each = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=found.spec(rule.result), check_vma=False)

    def divided(*operands: jax.Array) -> jax.Array:
        pairs = zip(operands, specs, strict=True)
        return each(*(jax.sharding.reshard(x, NamedSharding(mesh, spec)) for x, spec in pairs))

    return divided


# ---- automatic axes ------------------------------------------------------------------------------------------------


def over_automatic_axes(rule: Rule, call: Any, problem: Any) -> Callable[..., jax.Array]:
    """The equation's function, divided as XLA's propagation of shardings ends up."""

    def found_for(mesh: Mesh, operands: Sequence[Any], result: Any) -> Division:
        def spec(x: Any) -> Spec:
            return _axes(_compat.spec_of(x.sharding, mesh, len(x.shape)), len(x.shape))

        return division(rule, dict(mesh.shape), list(map(spec, operands)), None if result is None else spec(result))

    def infer(mesh: Mesh, operands: Sequence[Any], result: Any) -> NamedSharding:
        del result
        return NamedSharding(mesh, found_for(mesh, operands, None).spec(rule.result))

    def partition(mesh: Mesh, operands: Sequence[Any], result: Any) -> Any:
        found = found_for(mesh, operands, result)
        _announce_gathered(problem, found)
        place = lambda dims: NamedSharding(mesh, found.spec(dims))  # noqa: E731
        local = _local(rule, found, dict(mesh.shape))
        return mesh, local, place(rule.result), tuple(map(place, rule.operands))

    divided: Any = custom_partitioning(call.bind)
    divided.def_partition(partition, infer, sharding_rule=shardy(rule), decode_shardings=False)
    label = _label(problem, call)

    def labelled(*operands: jax.Array) -> jax.Array:
        with set_xla_metadata(jax_splitk=label):
            return divided(*operands)

    return labelled


def _label(problem: Any, call: Any) -> str:
    """Stands for what the callbacks compute, of which JAX's compilation cache sees only a pointer, or nothing if
    `jax_remove_custom_partitioning_ptr_from_cache_key` is set."""
    options: Options = call.options
    tuning = None if options.tuning is None else options.tuning.digest
    others = {name: value for name, value in vars(call).items() if name != "options"}
    said = (TARGETS, problem, dataclasses.replace(options, tuning=tuning), sorted(others.items()))
    return hashlib.sha256(repr(said).encode()).hexdigest()[:32]


def shardy(rule: Rule) -> SdyShardingRule:
    """The rule in Shardy's terms."""
    names = dict.fromkeys(name for dims in (*rule.operands, rule.result) for name in dims)
    whole = tuple(name for name in names if name not in rule.units)
    summed = tuple(name for name in names if name in rule.reductions)  # Shardy wants them in the order of the arrays
    operands, result = (tuple(ArrayMapping(*dims) for dims in arrays) for arrays in (rule.operands, [rule.result]))
    return SdyShardingRule(operands, result, reduction_factors=summed, need_replication_factors=whole)


def _axes(spec: PartitionSpec, rank: int) -> Spec:
    """A specification with a tuple of axes for every dimension."""
    entries = [*spec, *[None] * (rank - len(spec))]
    return tuple(() if e is None else e if isinstance(e, tuple) else (e,) for e in entries)
