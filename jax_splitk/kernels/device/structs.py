"""C structs of 32-bit integers that the host fills and device code reads. They are declared once, as Python dataclasses
or by their values (`Values`).

`declarations` gives the C text, which stands in a device source in place of `#include "structs.cuh"`; `Struct.param`
gives the kernel parameter. A field is an `int` or a `Divisor`. A subclass of a struct is a derived struct in C.
"""

import dataclasses
from collections.abc import Iterator
from typing import Self

from jax_splitk.runtime.plan import Int32Struct

_HEADER = '#include "device/divisor.cuh"'


class Struct:
    """Base of the structs: frozen dataclasses whose names and fields are those of the C struct."""

    def _words(self) -> Iterator[int]:
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType] - subclasses are dataclasses
            value = getattr(self, field.name)
            if isinstance(value, Struct):
                yield from value._words()
            else:
                yield int(value)

    def param(self) -> Int32Struct:
        """The struct by value."""
        return Int32Struct(tuple(self._words()))


@dataclasses.dataclass(frozen=True)
class Divisor(Struct):
    """A divisor for device code: divides any number below 2**31 by multiplication, n * multiplier >> shift. See
    `divisor.cuh`.

    Attributes:
      value: the divisor; 0 is never used to divide.
      multiplier: 2**31 to 2**32 - 1, less 2**32, since the words of a struct are signed.
      shift: shift of the 64-bit product.
    """

    value: int
    multiplier: int
    shift: int

    @classmethod
    def of(cls, value: int) -> Self:
        """2**(shift - 31) is the least power of 2 that is at least the value. The multiplier is 2**shift / value,
        rounded up, so that n * multiplier / 2**shift exceeds n / value by less than 1 / value."""
        by = max(1, value)
        shift = 31 + (by - 1).bit_length()
        multiplier = -(-(1 << shift) // by)
        return cls(value, multiplier - (1 << 32), shift)


Field = int | Divisor | tuple[int, ...] | tuple[Divisor, ...] | list["Values"]


class Values(Struct):
    """A struct given by the values of its fields. A tuple has one value for each of the last of the dimensions d, h and
    w. A list is an array of structs of one name."""

    def __init__(self, name: str, values: dict[str, Field]) -> None:
        self.name, self.values = name, values

    def _words(self) -> Iterator[int]:
        for value in self.values.values():
            for each in value if isinstance(value, tuple | list) else (value,):
                yield from each._words() if isinstance(each, Struct) else (each,)

    def nested(self) -> Iterator["Values"]:
        """One struct of each of its arrays."""
        return (value[0] for value in self.values.values() if isinstance(value, list))

    def declaration(self) -> str:
        members = {}
        for name, value in self.values.items():
            if isinstance(value, list):
                members[f"{name}[{len(value)}]"] = value[0].name
                continue
            first, axes = (value[0], ", ".join("dhw"[-len(value) :])) if isinstance(value, tuple) else (value, "")
            of = type(first).__name__
            members[name] = f"struct {{ {of} {axes}; }}" if axes else of
        return _c_struct(self.name, members)


def declarations(*structs: type[Struct] | Values) -> str:
    """The C declarations of structs, in this order; a struct's bases come before it."""
    found: list[str] = []
    for struct in structs:
        if isinstance(struct, Values):
            found += [each.declaration() for each in (*struct.nested(), struct)]
        else:
            found += map(_declaration, _line(struct))
    return "\n".join((_HEADER, *dict.fromkeys(found), ""))


def constants(name: str, values: dict[str, int]) -> str:
    """The C declaration of a struct of constants, whose names are in capitals."""
    members = ", ".join(f"{field.upper()} = {value}" for field, value in values.items())
    return f"struct {name} {{\n  static constexpr int {members};\n}};\n"


def _line(struct: type[Struct]) -> list[type[Struct]]:
    """The struct and its bases, the first one first."""
    return [base for base in reversed(struct.__mro__) if issubclass(base, Struct) and base is not Struct]


def _declaration(struct: type[Struct]) -> str:
    *bases, _ = _line(struct)
    inherited = {name for base in bases for name in base.__annotations__}
    types = {}
    for field in dataclasses.fields(struct):  # pyright: ignore[reportArgumentType] - subclasses are dataclasses
        if field.type not in (int, Divisor):
            raise TypeError(f"{struct.__qualname__}.{field.name} is of type {field.type!r}; accepted: int, Divisor")
        if field.name not in inherited:
            types[field.name] = field.type.__name__
    return _c_struct(struct.__name__ + (f" : {bases[-1].__name__}" if bases else ""), types)


def _c_struct(name: str, types: dict[str, str]) -> str:
    return "\n".join((f"struct {name} {{", *(f"  {of} {field};" for field, of in types.items()), "};"))
