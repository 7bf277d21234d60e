"""Constants of the cost models: data, `cost_models/DEVICE.json`, which `python -m benchmarks.cost_model.fit` makes.

    {"families": {NAME: {"uncertainty": {CLASS: ...}, "constants": {FIELD: ...}}},
     "xla": {OPERATION: {"weights": {FEATURE: ...},
                         "classes": {CLASS: {"uncertainty": ..., "ranges": {SIZE: [low, high]}}}}}}

An uncertainty is how far the logarithm of an estimate usually lies from that of the time (its standard deviation).
Classes are those of `xla.features`.
"""

import dataclasses
import functools
import json
import math
import pathlib
import re
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from jax_splitk.runtime.target import Target

FOLDER = pathlib.Path(__file__).resolve().parent / "cost_models"
# Whose constants are taken on devices that have none of their own.
_DEFAULTS = {"cuda": "NVIDIA H200", "cpu": "cpu"}
# Rates of device memory against those of the device whose constants are taken, by the data sheets (an H200: 4.8 TB/s).
# Copies ran at 3.0 TB/s on an H100, at 4.3 on an H200.
_MEMORY_SHARES = {
    "NVIDIA H100 80GB HBM3": 3.35 / 4.8,
    "NVIDIA H100 NVL": 3.94 / 4.8,
    "NVIDIA H100 PCIe": 2.04 / 4.8,
    "NVIDIA H800": 3.35 / 4.8,
}
MEMORY_RATE = "hbm_bytes_per_second"  # a constant of every family that has one
# Of estimates that nothing is known about.
UNKNOWN = 0.3

_T = TypeVar("_T")


def path_for(device_kind: str) -> pathlib.Path:
    """A device's file: nvidia_h200.json."""
    return FOLDER / (re.sub(r"[^a-z0-9]+", "_", device_kind.lower()) + ".json")


@functools.cache
def path_of(platform: str, device_kind: str) -> pathlib.Path:
    """The file that a device takes its constants from: its own or, where it has none, its platform's usual device's."""
    path = path_for(device_kind)
    return path if path.is_file() else path_for(_DEFAULTS.get(platform, _DEFAULTS["cuda"]))


@functools.cache
def memory_share(platform: str, device_kind: str) -> float | None:
    """The rate of its memory against that of the device whose constants it takes; None where nothing is known, as of a
    device that has a file of its own."""
    own = path_of(platform, device_kind) == path_for(device_kind)
    return None if own else _MEMORY_SHARES.get(device_kind)


@functools.cache
def model_of(platform: str, device_kind: str) -> Mapping[str, Any]:
    """The data of the file that a device takes its constants from.

    Raises:
      ValueError: the package's file is damaged.
    """
    path = path_of(platform, device_kind)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data["families"], dict) or not isinstance(data["xla"], dict):
            raise TypeError("families and xla are objects")
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}); install jax_splitk again") from None
    return data


@functools.cache
def constants(record: type[_T], family: str, platform: str, device_kind: str) -> _T:
    """A family's constants on a device. Raises ValueError for a damaged file of the package."""
    found = model_of(platform, device_kind)["families"].get(family)
    try:
        return on_device(record_of(record, found["constants"]), platform, device_kind)
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"constants of {family} for {device_kind} in {FOLDER}: {error}; install jax_splitk again"
        ) from None


def on_device(costs: _T, platform: str, device_kind: str) -> _T:
    """Constants of the device whose file it is, as those of one that takes them from there."""
    share, rate = memory_share(platform, device_kind), getattr(costs, MEMORY_RATE, None)
    if share is None or rate is None:
        return costs
    rate = {key: each * share for key, each in rate.items()} if isinstance(rate, dict) else rate * share
    return dataclasses.replace(costs, **{MEMORY_RATE: rate})  # pyright: ignore[reportArgumentType]


def record_of(record: type[_T], values: Mapping[str, Any]) -> _T:
    """A record of constants from plain data; raises ValueError for other fields than it has, and for what is no such
    number."""
    fields = {field.name: field.type for field in dataclasses.fields(record)}  # pyright: ignore[reportArgumentType]
    if set(values) != set(fields):
        raise ValueError(f"fields {', '.join(sorted(set(values) ^ set(fields)))} are missing or unknown")
    return record(**{name: _value(name, values[name], kind) for name, kind in fields.items()})


def _value(name: str, value: Any, kind: Any) -> Any:
    """A number, or a table of them whose keys are integers or names."""
    if typing.get_origin(kind) is dict:
        of_key, of_value = typing.get_args(kind)
        return {of_key(key): _value(f"{name}[{key}]", each, of_value) for key, each in value.items()}
    valid = type(value) is int if kind is int else type(value) in (int, float)
    if not valid or not (0 <= value < math.inf and (value or kind is int)):
        raise ValueError(f"{name}={value!r}; accepted: numbers above 0, or integers of at least 0 for a count")
    return kind(value)


def uncertainty(family: str, name: str, target: Target) -> float:
    """Of a family's estimates of a class of problems on a device: `UNKNOWN` where none was measured, and infinite of a
    family without data, as those from outside of the package, whose estimates may say no more than an order."""
    found = model_of(target.platform, target.device_kind)["families"].get(family)
    return math.inf if found is None else float(found["uncertainty"].get(name, UNKNOWN))
