"""Structs that plans hand to kernels, read back by the names that the device code has for their fields."""

import re

from jax_splitk.runtime.plan import DevicePlan, Int32Struct


def fields(text: str, struct: str) -> dict[str, int]:
    """The fields of a C struct and its base, in order, each with its number of words. For a nested struct `h` there is
    a field `name_h` for each of its members."""
    found = re.search(rf"struct {struct}\b(?: : (\w+))? \{{(.*?)\n\}};", text, re.DOTALL)
    assert found is not None, struct
    body = re.sub(r"//.*", "", found[2])
    for of, axes, name in re.findall(r"struct \{ (\w+) ([\w, ]+); \} (\w+);", body):
        apart = f"{of} {', '.join(f'{name}_{axis}' for axis in axes.split(', '))};"
        body = body.replace(f"struct {{ {of} {axes}; }} {name};", apart)
    members = re.findall(r"^ +(\w+) ([\w, ]+);", body, re.MULTILINE)
    own = {name: 3 if of == "Divisor" else 1 for of, names in members for name in names.split(", ")}
    return {**(fields(text, found[1]) if found[1] else {}), **own}


def arguments(plan: object, struct: str = "Args", launch: int = 0) -> dict[str, int]:
    """A launch's argument of that struct type; for a divisor, the number that it divides by."""
    assert isinstance(plan, DevicePlan)
    sizes = fields(plan.source.text(), struct)
    structs = [param.values for param in plan.launches[launch].params if isinstance(param, Int32Struct)]
    (words,) = (list(values) for values in structs if len(values) == sum(sizes.values()))
    found = {}
    for name, size in sizes.items():
        found[name], words = words[0], words[size:]
    return found
