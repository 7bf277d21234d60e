"""C structs of 32-bit integers that the host fills and device code reads. The host states only their values; the
declarations follow from these.

A `Struct` is a launch's parameter, by value. Its family declares it in the C text that stands in a device source in
place of `#include "structs.cuh"`.
"""

import dataclasses
from collections.abc import Iterator
from typing import Self

from jax_splitk.runtime.plan import Int32Struct

_HEADER = '#include "device/divisor.cuh"'


@dataclasses.dataclass(frozen=True)
class Divisor:
    """A divisor for device code: divides any number below 2**31 by multiplication, n * multiplier >> shift. See
    `divisor.cuh`.

    Attributes:
      value: the divisor; by 0 nothing is divided.
      multiplier: 2**31 to 2**32 - 1, less 2**32, since the words of a struct are signed.
      shift: of the product of 64 bits.
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


Field = int | Divisor | tuple[int, ...] | tuple[Divisor, ...] | list["Struct"]


class Struct(Int32Struct):
    """A struct by its name and the values of its fields.

    A field is a number or a `Divisor`. A tuple has one of them for each of the last of the dimensions d, h and w; a
    list is an array of structs of one name.
    """

    def __init__(self, name: str, fields: dict[str, Field]) -> None:
        super().__init__(tuple(_words(*fields.values())))
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "fields", fields)

    name: str
    fields: dict[str, Field]

    def declaration(self) -> str:
        members = {}
        for name, value in self.fields.items():
            if isinstance(value, list):
                members[f"{name}[{len(value)}]"] = value[0].name
                continue
            first, axes = (value[0], ", ".join("dhw"[-len(value) :])) if isinstance(value, tuple) else (value, "")
            of = type(first).__name__
            members[name] = f"struct {{ {of} {axes}; }}" if axes else of
        return "\n".join((f"struct {self.name} {{", *(f"  {of} {name};" for name, of in members.items()), "};"))


def _words(*fields: Field | Struct) -> Iterator[int]:
    for field in fields:
        if isinstance(field, tuple | list):
            yield from _words(*field)
        elif isinstance(field, Int32Struct):
            yield from field.values
        elif isinstance(field, Divisor):
            yield from (field.value, field.multiplier, field.shift)
        else:
            yield int(field)


def declarations(*structs: Struct) -> str:
    """The C declarations of structs, in this order; those of an array come before the struct that has it."""
    found = [each.declaration() for struct in structs for each in (*_nested(struct), struct)]
    return "\n".join((_HEADER, *dict.fromkeys(found), "")) if found else ""


def _nested(struct: Struct) -> Iterator[Struct]:
    return (value[0] for value in struct.fields.values() if isinstance(value, list))


def constants(name: str, values: dict[str, int]) -> str:
    """The C declaration of a struct of constants, in capitals."""
    members = ", ".join(f"{field.upper()} = {value}" for field, value in values.items())
    return f"struct {name} {{\n  static constexpr int {members};\n}};\n"
