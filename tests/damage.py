"""Files damaged at random: bytes, and values of the JSON they hold."""

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.tuning_cache import HUGE

ODD_VALUES: list[Any] = [None, True, False, 0, 1, -1, 2, 3, 64, 128, 129, 1.5, 1.0, -0.0, 2**31, 2**63, 2**64, 10**30]
ODD_VALUES += [
    "",
    "x",
    "xla",
    "wgrad_host",
    "wgrad_im2col",
    "quantized_host",
    "quantized_tiled",
    "quantized_matmul",
    "int4",
]
ODD_VALUES += ["\ud800", [], {}, [[]], [1, 2], {"family": "xla"}]
ODD_VALUES += [float("nan"), float("inf"), float("-inf"), 1e308, 5e-324, {"family": "wgrad_host", "config": {}}]
ODD_TEXTS = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", HUGE, "9" * 5000, "1" + "0" * 300, '"\\ud800"', "\0"]


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, index) of a JSON value."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for index, value in items:
        yield data, index
        yield from places(value)


def mutate_json(rng: np.random.Generator, text: str, other: str) -> str:
    data = json.loads(text)
    for _ in range(int(rng.integers(1, 4))):
        found = list(places(data))
        if not found:
            break
        # Half of the changes go to the choice, the part that decides.
        if rng.random() < 0.5 and isinstance(data, dict) and isinstance(data.get("choice"), dict):
            found = list(places(data["choice"])) or found
        container, index = found[rng.integers(len(found))]
        kind = rng.integers(8)
        if kind == 0 and isinstance(container, dict):
            del container[index]
        elif kind == 1 and isinstance(container, dict):
            container[str(rng.integers(100))] = container[index]
        elif kind == 2:
            container[index] = [container[index]]
        elif kind == 3:
            source, at = found[rng.integers(len(found))]
            container[index] = copy.deepcopy(source.get(at) if isinstance(source, dict) else source[at])
        elif kind == 4 and isinstance(container[index], int):
            container[index] = container[index] + int(rng.integers(-3, 4)) * int(rng.choice([1, 8, 64]))
        elif kind == 5:
            theirs = json.loads(other)
            name = str(rng.choice(list(theirs)))
            if isinstance(data, dict):
                data[name] = theirs[name]
        else:
            container[index] = copy.deepcopy(ODD_VALUES[rng.integers(len(ODD_VALUES))])
    return json.dumps(data)


def mutate_text(rng: np.random.Generator, text: str) -> bytes:
    kind = rng.integers(7)
    data = bytearray(text.encode())
    at = int(rng.integers(len(data)))
    if kind == 0:
        for _ in range(int(rng.integers(1, 6))):
            data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        del data[at:]
    elif kind == 2:
        del data[at : at + int(rng.integers(1, 40))]
    elif kind == 3:
        data[at:at] = rng.bytes(int(rng.integers(1, 20)))
    elif kind == 4:
        numbers = list(re.finditer(r"(?<=[ \[])-?\d[\d.e+-]*", text))
        spot = numbers[rng.integers(len(numbers))]
        odd = ODD_TEXTS[rng.integers(len(ODD_TEXTS))]
        return (text[: spot.start()] + odd + text[spot.end() :]).encode()
    elif kind == 5:
        depth = int(rng.choice([3, 50, 500, 900, 990, 2000, 50_000]))
        spot = list(re.finditer(r'(?<=": )', text))[rng.integers(text.count('": '))]
        return (text[: spot.start()] + nested(depth, "1") + "," * int(rng.integers(2)) + text[spot.end() :]).encode()
    else:
        words = [b"\xff\xfe", b"\xef\xbb\xbf", b"\x00", b"\xc3\x28", text.encode(), text.encode("utf-16")]
        data[0:0] = words[rng.integers(len(words))]
    return bytes(data)


def nested(depth: int, inner: str = "") -> str:
    return "[" * depth + inner + "]" * depth
