"""Several plans as one custom call, each of whose kernels starts before the one before it has ended.

A kernel of a custom call of its own starts when all thread blocks of the kernel before it have ended. In one custom
call it may start earlier (programmatic dependent launch): it loads what does not depend on the kernels before it, and
waits for their results on the device. Its source does so where the macro CHAINED is 1.
"""

import dataclasses
import functools

import numpy as np

from jax_splitk.runtime import compiler
from jax_splitk.runtime.plan import (
    LAUNCH_TARGET,
    Buffer,
    CustomCall,
    DevicePlan,
    Launch,
    MapParam,
    Param,
    Pointer,
    encoded,
)
from jax_splitk.runtime.source import Source

MOST_BUFFERS = 64  # of a plan, for the launcher


@dataclasses.dataclass(frozen=True)
class JoinedPlan:
    """Plans without a workspace, in the order of their launches.

    Attributes:
      parts: the plans.
      places: for each plan, where its operands and its result are among the buffers of the custom call. These are the
        operands, the results of all plans in their order, and a workspace of no bytes.
    """

    parts: tuple[DevicePlan, ...]
    places: tuple[tuple[int, ...], ...]

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        found = {}
        for part, places in zip(self.parts, self.places, strict=True):
            found |= dict(zip(places, part.buffers[:-1], strict=True))
        return *(found[place] for place in range(len(found))), Buffer(0, 16)

    def words(self) -> list[int]:
        maps, launches, kernels = [], [], 0
        for part, places in zip(self.parts, self.places, strict=True):
            names = part.kernels()
            for launch in part.launches:
                placed = _placed(launch, places, len(maps), programmatic=bool(launches))
                launches.append((kernels + names.index(launch.kernel), placed))
            maps += [dataclasses.replace(each, buffer=places[each.buffer]) for each in part.maps]
            kernels += len(names)
        return encoded(self.buffers, maps, launches)

    def sources(self) -> list[Source]:
        return [chained(part.source) for part in self.parts]

    def custom_call(self) -> CustomCall:
        """Compiles the sources (or finds them in the cache), as `DevicePlan.custom_call`. The machine codes are one
        array, with the number of bytes of each."""
        return _custom_call(self)


def chained(source: Source) -> Source:
    """The source of a kernel that may start before those before it have ended."""
    return dataclasses.replace(source, defines=(*source.defines, ("CHAINED", 1)))


@functools.lru_cache(maxsize=256)  # the layers of a model differ in their operands alone
def _custom_call(plan: JoinedPlan) -> CustomCall:
    images = [compiled.image for compiled in compiler.compile_sources(plan.sources())]
    images = [image + bytes(-len(image) % 64) for image in images]  # so that each begins aligned, as ELF files do
    attributes = {
        "plan": np.array(plan.words(), dtype=np.int64),
        "code": np.frombuffer(b"".join(images), dtype=np.uint8),
        "code_bytes": np.array([len(image) for image in images], dtype=np.int64),
        "kernels": ";".join(",".join(part.kernels()) for part in plan.parts),
        "config": "; ".join(part.label for part in plan.parts),
    }
    return CustomCall(LAUNCH_TARGET, attributes, 0, name="chained_products")


def _placed(launch: Launch, places: tuple[int, ...], first_map: int, *, programmatic: bool) -> Launch:
    """The launch with the numbers that buffers and tensor maps have in the whole plan."""

    def placed(param: Param) -> Param:
        if isinstance(param, Pointer):
            return dataclasses.replace(param, buffer=places[param.buffer])
        return MapParam(param.index + first_map) if isinstance(param, MapParam) else param

    return dataclasses.replace(launch, params=tuple(map(placed, launch.params)), programmatic=programmatic)
