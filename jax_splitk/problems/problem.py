"""What every problem offers, and what problems share."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from jax import numpy as jnp

from jax_splitk.runtime.arguments import quoted, require

_Base = TypeVar("_Base")
MOST = 2**40  # sizes are below it

ArrayTypes = Sequence[tuple[tuple[int, ...], str]]  # (shape, dtype) of each


class Problem(Protocol):
    """What an operation computes: a frozen, hashable dataclass of integers, strings and tuples of them."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def op(self) -> str:
        """The operation's name, a key of `OPERATIONS` and of `kernels.catalogue.FAMILIES`."""
        ...

    @property
    def operand_types(self) -> ArrayTypes:
        """(shape, dtype) of each operand, in the order of the custom call's buffers."""
        ...

    @property
    def out_shape(self) -> tuple[int, ...]: ...

    @property
    def out_dtype(self) -> str: ...

    @property
    def refusal(self) -> str | None:
        """Why no kernel on any platform takes it, None if one may."""
        ...

    @property
    def flops(self) -> int: ...

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes any implementation must move."""
        ...

    @property
    def brief(self) -> str:
        """The operation and its sizes in few words, for tables; `str()` tells any two problems apart."""
        ...

    def validate(self) -> None:
        """Raises ValueError unless the fields have the right types and belong together."""
        ...


LATER = {"later": True}  # metadata of a field that came after others were stored


def stored_fields(problem: Problem) -> dict[str, Any]:
    """The fields by name, as keys, entries and tables have them. A field that came later is left out where it has its
    default, so that what was stored before keeps its key."""
    fields = dataclasses.asdict(problem)
    for field in dataclasses.fields(problem):
        if field.metadata.get("later") and fields[field.name] == field.default:
            del fields[field.name]
    return fields


def nbytes(shape: Sequence[int], dtype: str) -> int:
    """The size of an array in bytes."""
    return math.prod(shape) * jnp.dtype(dtype).itemsize


def as_base(base: type[_Base], value: _Base) -> _Base:
    """The fields of a dataclass that its base `base` has, as one of that."""
    fields: Any = dataclasses.fields(base)  # pyright: ignore[reportArgumentType]
    return base(**{field.name: getattr(value, field.name) for field in fields})


def brief_dtypes(dtype: str, out_dtype: str) -> str:
    """The dtypes of operands and result in few letters: bf16, or bf16->f32."""
    short = [name.replace("bfloat", "bf").replace("float", "f") for name in dict.fromkeys((dtype, out_dtype))]
    return "->".join(short)


def require_fields(problem: Any, least: Mapping[str, int], choices: Mapping[str, Sequence[str]]) -> None:
    """Raises ValueError unless each field in `least` is an integer of at least its value there, and each field in
    `choices` is one of its values there."""
    for name, low in least.items():
        value = getattr(problem, name)
        require(type(value) is int and low <= value < MOST, f"{name}={value!r}", f"an integer of at least {low}")
    for name, accepted in choices.items():
        value = getattr(problem, name)
        require(isinstance(value, str) and value in accepted, f"{name}={value!r}", quoted(accepted))
