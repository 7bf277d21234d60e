"""Structs that host and device share, and the device code's division by multiplication."""

import dataclasses
import math

import numpy as np

from jax_splitk.kernels.device.structs import Divisor, Struct, declarations
from tests.problems import seeded


def test_divisors_divide_all_that_they_may_meet() -> None:
    """The quotient is n * multiplier >> shift in unsigned 64 bits, for n of 31 bits."""
    most = 2**31 - 1
    with seeded(7) as rng:
        drawn = [int(v) for v in np.exp(rng.uniform(0, math.log(most), 2000))]
        for value in (*range(1, 300), *(2**bits + more for bits in range(2, 31) for more in (-1, 0, 1)), *drawn, most):
            d = Divisor.of(value)
            word, multiplier, shift = d.value, d.multiplier, d.shift
            assert (word, -(2**31) <= multiplier < 0) == (value, True)
            edges = [k * value + more for k in (1, 2, most // value // 2, most // value) for more in (-1, 0, 1)]
            for n in (0, 1, most, *edges, *(int(v) for v in rng.integers(0, most, 8))):
                if 0 <= n <= most:
                    product = n * (multiplier % 2**32)
                    assert product < 2**64
                    assert product >> shift == n // value, (n, value)


def test_zero_divides_nothing_but_is_kept() -> None:
    assert Divisor.of(0) == dataclasses.replace(Divisor.of(1), value=0)


def test_declarations_have_the_fields_in_the_order_of_their_words() -> None:
    by = [(d.value, d.multiplier, d.shift) for d in map(Divisor.of, (3, 5, 7))]
    of = Struct("Of", {"size": 7, "by": Divisor.of(3), "pad": (-1, 2), "out": (Divisor.of(5), Divisor.of(7))})
    assert declarations(of).splitlines() == [
        '#include "device/divisor.cuh"',
        *(
            "struct Of {",
            "  int size;",
            "  Divisor by;",
            "  struct { int h, w; } pad;",
            "  struct { Divisor h, w; } out;",
        ),
        "};",
    ]
    assert of.values == (7, *by[0], -1, 2, *by[1], *by[2])


def test_arrays_of_structs_follow_their_declaration() -> None:
    points = [Struct("Point", {"x": x, "by": Divisor.of(x)}) for x in (3, 5)]
    line = Struct("Line", {"length": 2, "points": points})
    assert declarations(line, line).splitlines() == [
        '#include "device/divisor.cuh"',
        *("struct Point {", "  int x;", "  Divisor by;", "};"),
        *("struct Line {", "  int length;", "  Point points[2];", "};"),
    ]
    by = [(d.value, d.multiplier, d.shift) for d in map(Divisor.of, (3, 5))]
    assert line.values == (2, 3, *by[0], 5, *by[1])


def test_sources_without_structs_include_nothing() -> None:
    assert declarations() == ""
