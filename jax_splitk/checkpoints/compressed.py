"""What compressed-tensors' description of a checkpoint says."""

from typing import Any

from jax_splitk.checkpoints.weight import Module

METHODS = ("compressed-tensors",)


def _schemes(module: Module) -> list[dict[str, Any]]:
    """The description's groups. Which modules a group has depends on the model's classes, which the checkpoint does not
    hold."""
    groups = module.about.fields.get("config_groups")
    found = groups.values() if isinstance(groups, dict) else []
    return [group for group in found if isinstance(group, dict)]


def _weights(module: Module) -> list[dict[str, Any]]:
    """The fields `weights` of the description's groups."""
    return [scheme["weights"] for scheme in _schemes(module) if isinstance(scheme.get("weights"), dict)]


def says(module: Module, field: str) -> set[Any]:
    """The values that the groups' `weights` give a field. Lists and other values that are no string, number or None are
    left out."""
    values = [weights.get(field) for weights in _weights(module)]
    return {value for value in values if isinstance(value, str | int | None)}


def check_format(module: Module, *formats: str) -> None:
    """Raises CheckpointError if the description has another format for all modules."""
    said = module.about.fields.get("format")
    own = any(scheme.get("format") in formats for scheme in _schemes(module))
    if module.about.method in METHODS and said not in (None, "mixed-precision", *formats) and not own:
        raise module.contradicts(f"is stored as {' or '.join(formats)}", "format")


def group_size(module: Module, k: int, groups: int, bits: int | None = None) -> int:
    """How many k share a scale. Raises CheckpointError if that, or the bits, is nothing that the description says."""
    module_bits = says(module, "num_bits")
    if bits is not None and module_bits and bits not in module_bits:
        raise module.contradicts(f"has {bits} bits", "config_groups")
    if groups == 1:
        return k
    said = {size for size in says(module, "group_size") if isinstance(size, int) and size > 0}
    fitting = [size for size in said if -(-k // size) == groups]
    if said and not fitting:
        raise module.contradicts(f"has {groups} groups of k = {k}", "config_groups")
    if not fitting and k % groups:
        raise module.contradicts(f"has {groups} groups, which do not divide k = {k}", "config_groups")
    return min(fitting) if fitting else k // groups


def block(module: Module) -> Any:
    """The `block_structure` of weights with a scale for each block, [rows, columns]; None if the groups have none."""
    found = next((weights["block_structure"] for weights in _weights(module) if weights.get("block_structure")), None)
    # Older versions write "128x128".
    return [int(n) if n.isdecimal() else n for n in found.split("x")] if isinstance(found, str) else found
