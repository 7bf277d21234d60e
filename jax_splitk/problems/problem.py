"""What every problem offers."""

import dataclasses
from typing import Any, ClassVar, Protocol


class Problem(Protocol):
    """What an operation computes: a frozen, hashable dataclass of integers, strings and tuples of them."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def op(self) -> str:
        """The operation's name, a key of `OPERATIONS` and of `kernels.FAMILIES`."""
        ...

    @property
    def out_shape(self) -> tuple[int, ...]: ...

    @property
    def out_dtype(self) -> str: ...

    @property
    def refusal(self) -> str | None:
        """Why no kernel on any platform takes it, None where one may."""
        ...

    @property
    def flops(self) -> int: ...

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes any implementation must move."""
        ...

    def validate(self) -> None:
        """Raises ValueError unless the fields have the right types and belong together."""
        ...
