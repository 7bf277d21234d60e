"""Structs that plans hand to kernels, read back by the names that the device code has for their fields."""

import re

from jax_splitk.runtime.plan import DevicePlan, Int32Struct


def fields(text: str, struct: str) -> dict[str, int]:
    """Of a C struct and its base: each with how many words it takes, in order. A number for each of some spatial
    dimensions is a field for each of these."""
    found = re.search(rf"struct {struct}\b(?: : (\w+))? \{{(.*?)\n\}};", text, re.DOTALL)
    assert found is not None, struct
    members = re.findall(r"^ +(\w+) ([\w, ]+);", re.sub(r"//.*", "", found[2]), re.MULTILINE)
    own = {}
    for of, names in members:
        for name in names.split(", "):
            axes = [f"{name}_{axis}" for axis in fields(text, of)] if of in ("Dims2", "Dims3") else [name]
            own |= dict.fromkeys(axes, 3 if of == "Divisor" else 1)
    return {**(fields(text, found[1]) if found[1] else {}), **own}


def arguments(plan: object, struct: str = "Args", launch: int = 0) -> dict[str, int]:
    """A launch's argument of that type; of a divisor what it divides by."""
    assert isinstance(plan, DevicePlan)
    sizes = fields(plan.source.text(), struct)
    structs = [param.values for param in plan.launches[launch].params if isinstance(param, Int32Struct)]
    (words,) = (list(values) for values in structs if len(values) == sum(sizes.values()))
    found = {}
    for name, size in sizes.items():
        found[name], words = words[0], words[size:]
    return found
