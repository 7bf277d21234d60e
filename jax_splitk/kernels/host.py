"""What both host families count with."""

from jax_splitk.runtime.target import Target, target_for


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def threads(target: Target | None) -> int:
    """Hardware threads of the target, of this machine without one."""
    return (target or target_for("cpu")).cores
