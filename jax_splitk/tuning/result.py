"""Decisions as a value: to keep, combine, send, and put in force for a block of code."""

import dataclasses
import functools
import hashlib
import json
import threading
from collections.abc import Iterator
from typing import Any

from jax_splitk.tuning import entry as entries
from jax_splitk.tuning import options
from jax_splitk.tuning.choice import XLA
from jax_splitk.tuning.entry import Entry, Found
from jax_splitk.tuning.key import Key


@dataclasses.dataclass(frozen=True)
class TuningResult:
    """The decisions that `tune` made: for each problem the fastest kernel, with all that was measured.

    As a context manager it comes before any cache, for operations traced inside the block; jit traces a function again
    where its decisions change. `a | b` has the decisions of both, b's where both have one.

    Examples:
      >>> from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
      >>> problem = QuantizedMatmulProblem(8, 64, 64, "bfloat16", "bfloat16", "int4", 64, "bfloat16")
      >>> tuned = jax_splitk.tune_problems([problem], seconds=0.05)
      >>> jax_splitk.TuningResult.loads(tuned.dumps()) == tuned
      True
    """

    entries: tuple[tuple[Key, Entry], ...] = ()
    # The open `with` blocks of each thread.
    _blocks: threading.local = dataclasses.field(default_factory=threading.local, init=False, repr=False)

    @functools.cached_property
    def digest(self) -> str:
        """Identifies all entries: inside a block jit compares results at each call of a function."""
        found = hashlib.sha256()
        for key, entry in self.entries:
            found.update(f"{key.digest} {entry.dumps()}".encode())
        return found.hexdigest()

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, TuningResult) and self.digest == other.digest)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the text, since a kernel family belongs to one process."""
        return TuningResult.loads, (self.dumps(),)

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[tuple[Key, Entry]]:
        return iter(self.entries)

    def __or__(self, other: "TuningResult") -> "TuningResult":
        return TuningResult(tuple((self._by_key | other._by_key).items()))

    @functools.cached_property
    def _by_key(self) -> dict[Key, Entry]:
        return dict(self.entries)

    def get(self, key: Key) -> Entry | None:
        return self._by_key.get(key)

    def found(self, key: Key) -> Iterator[Found]:
        """The decision for a key, as a source of decisions."""
        if (entry := self.get(key)) is not None:
            yield Found(entry, "the TuningResult in force")

    def __enter__(self) -> "TuningResult":
        context = options.using(self)
        context.__enter__()
        self._blocks.open = [*getattr(self._blocks, "open", ()), context]
        return self

    def __exit__(self, *error: Any) -> None:
        if not getattr(self._blocks, "open", ()):
            raise RuntimeError("the end of a TuningResult's block in a thread that has not entered it")
        self._blocks.open.pop().__exit__(*error)

    def __str__(self) -> str:
        lines = []
        for key, entry in self.entries:
            named = ("chosen", entry.us(entry.choice)), ("XLA", entry.us(XLA)), ("XLA about", entry.estimated_xla_us)
            times = ", ".join(f"{name} {us:.1f} us" for name, us in named if us is not None)
            lines.append(f"{key.problem}: {entry.choice} ({times})")
        return "\n".join(lines)

    def dumps(self) -> str:
        """JSON text."""
        return "[\n" + ",\n".join(entry.dumps().rstrip() for _, entry in self.entries) + "\n]\n"

    @staticmethod
    def loads(text: str | bytes) -> "TuningResult":
        """Inverse of `dumps`.

        Raises:
          ValueError: not the text of a result, or an entry in it that is not valid; says which and why.
        """
        try:
            items = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON: {error}") from None
        if not isinstance(items, list):
            raise ValueError(f"a {type(items).__name__}; accepted: a list of entries")
        found = []
        for i, item in enumerate(items):
            try:
                found.append(entries.whole(item))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"entry {i}: {error}") from None
        return TuningResult(tuple((entry.key, entry) for entry in found))
