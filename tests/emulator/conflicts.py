"""The costs of memory accesses in the runs of tests/every_kernel.py: `python -m tests.emulator.conflicts [WORD ...]`.

Prints, for every family whose name has one of the words, the places where its kernels lose the most to bank conflicts
(wavefronts of shared memory) and gaps (lines of global memory), over all its runs.
"""

import argparse
import collections
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from tests import emulator, every_kernel
from tests.emulator import Access

_MOST = 12  # places of a family


def measured(run: every_kernel.Run) -> list[Access]:
    operands, exact = run.operands()
    accesses: list[Access] = []
    emulator.run(run.plan, operands, [np.empty(exact.shape, exact.dtype)], accesses=accesses)
    return accesses


def summed(accesses: Iterable[Access]) -> list[Access]:
    """One access for each place and kind, those that lose the most first."""
    sums: dict[tuple[str, str, str, int], list[int]] = collections.defaultdict(lambda: [0, 0, 0])
    for a in accesses:
        numbers = sums[a.function, a.statement, a.kind, a.bytes]
        numbers[:] = [sum(pair) for pair in zip(numbers, (a.requests, a.paid, a.ideal), strict=True)]
    found = [Access(*place, *numbers) for place, numbers in sums.items()]
    return sorted(found, key=lambda a: (a.ideal - a.paid, a.function, a.statement, a.kind))


def _rows(accesses: Sequence[Access]) -> Iterator[str]:
    for a in accesses:
        what = f"{a.kind} of {a.bytes} bytes"
        yield f"{what:<32}{a.requests:>9}{a.paid:>10}{a.paid / max(a.ideal, 1):>7.2f}  {a.function}: {a.statement[:70]}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", default=[""], help="of the families' names; all, without one")
    words = parser.parse_args(arguments).words
    runs = [run for run in every_kernel.RUNS if any(word in run.family.name for word in words)]
    for family in dict.fromkeys(run.family.name for run in runs):
        accesses = summed(a for run in runs if run.family.name == family for a in measured(run))
        print(f"\n{family}\n{'access of a lane':<32}{'requests':>9}{'paid':>10}{'/ideal':>7}  place")
        for row in _rows(accesses[:_MOST]):
            print(row)


if __name__ == "__main__":
    main()
