"""A cost model's constants as vectors, and as the files that ship with the package."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

DIGITS = 5  # of a fitted constant


def fitted(costs: Any) -> dict[str, float]:
    """A record's constants that are fitted, by name; a table's by name and key. Integers count, and stay."""
    found: dict[str, float] = {}
    for name, value in vars(costs).items():
        entries = {f"{name} {key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
        found |= {entry: each for entry, each in entries.items() if isinstance(each, float)}
    return found


def replaced(costs: Any, values: Mapping[str, float]) -> Any:
    """The record with these constants, named as in `fitted`."""
    changes: dict[str, Any] = {}
    for name, value in vars(costs).items():
        if isinstance(value, dict):
            changes[name] = {key: values.get(f"{name} {key}", each) for key, each in value.items()}
        else:
            changes[name] = values.get(name, value)
    return dataclasses.replace(costs, **changes)


def scaled(costs: Any, names: list[str], logarithms: np.ndarray) -> Any:
    """The record with each of these constants times the exponential of its number."""
    old = fitted(costs)
    return replaced(costs, {name: old[name] * math.exp(x) for name, x in zip(names, logarithms, strict=True)})


def rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def text_of(model: Mapping[str, Any]) -> str:
    """The file of a device: a line for each family, class and list of weights."""

    def block(items: Mapping[str, Any], indent: str) -> str:
        lines = ",\n".join(f"{indent} {json.dumps(name)}: {value}" for name, value in items.items())
        return f"{{\n{lines}\n{indent}}}" if items else "{}"

    families = {name: json.dumps(value) for name, value in model["families"].items()}
    operations = {}
    for op, of_op in model["xla"].items():
        classes = {name: json.dumps(value) for name, value in sorted(of_op["classes"].items())}
        inner = {"weights": json.dumps(of_op["weights"]), "classes": block(classes, "   ")}
        operations[op] = block(inner, "  ")
    return block({"families": block(families, " "), "xla": block(operations, " ")}, "") + "\n"


def write(path: pathlib.Path, model: Mapping[str, Any]) -> None:
    path.write_text(text_of(model))
