"""What callers may ask of the selection, in a call or for a block of code."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax.typing import DTypeLike

from jax_splitk import kernels
from jax_splitk.problems.quantized_matmul import COMPUTE_DTYPES
from jax_splitk.runtime.arguments import RefusedType, RefusedValue, dtype_of

Implementation = Literal["cutlass", "host", "xla"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)
DEFAULT_WORKSPACE_LIMIT = 256 * 2**20


@dataclasses.dataclass(frozen=True)
class Options:
    """What the caller asked for; `jax_splitk.conv_wgrad` documents the fields. None stands for the value of the
    enclosing blocks, then for the default.

    Attributes:
      tuning: the `TuningResult` that was in force when the operation was traced.
      implied: whether the caller named another operation, which this pass belongs to. It is lax's, and is not
        mentioned, unless a kernel competes.
      forward_only: whether it is an implied forward pass without a gradient (the model is initialised or evaluated).
        Existing decisions hold for it, but a miss is not measured.
      copied_operand: whether it is a product in a loop, for which XLA would copy a slice of a stack. A kernel computes
        it if a family for few rows serves it, since kernels read the slice in place; else lax's product stays.
      chained: whether it is a product of a chain (`jax_splitk.chained`). A kernel that can be chained is preferred.
      compute_dtype: the name of the dtype to which kernels may round x and a quantized weight.
    """

    config: Any = None
    implementation: Implementation | None = None
    workspace_limit_bytes: int | None = None
    tuning: Any = None
    implied: bool = False
    forward_only: bool = False
    copied_operand: bool = False
    chained: bool = False
    compute_dtype: str | None = None

    @property
    def explicit(self) -> bool:
        """Whether only what was asked for may serve."""
        return self.implementation is not None or self.config is not None

    def without_config(self) -> "Options":
        """The options for another problem, for which the config was not made."""
        return dataclasses.replace(self, config=None)

    def without_rounding(self) -> "Options":
        """The options for a product that is not rounded."""
        return dataclasses.replace(self, compute_dtype=None)

    def of_another_pass(self, *, implied: bool = True, forward_only: bool = False) -> "Options":
        """The options for another pass of the convolution, which the implementation may not be able to serve."""
        implementation = "xla" if self.implementation == "xla" else None
        return dataclasses.replace(
            self, config=None, implementation=implementation, implied=implied, forward_only=forward_only
        )

    @property
    def workspace_limit(self) -> int:
        limit = self.workspace_limit_bytes
        return DEFAULT_WORKSPACE_LIMIT if limit is None else int(limit)


def settled(op: str, call: Options) -> Options:
    """The options of a call, completed from the enclosing blocks and checked by `check_options`."""
    options = _merged(call)
    check_options(op, options)
    return options


def check_options(op: str, options: Options) -> None:
    """Raises ValueError or TypeError for options that are wrong for every problem of the operation."""
    if options.implementation not in (None, *IMPLEMENTATIONS):
        accepted = ", ".join(map(repr, IMPLEMENTATIONS))
        raise RefusedValue(f"implementation={options.implementation!r}; accepted: None, {accepted}")
    limit = options.workspace_limit_bytes
    if limit is not None and (not isinstance(limit, int | np.integer) or isinstance(limit, bool) or limit < 0):
        raise RefusedValue(f"workspace_limit_bytes={limit!r}; accepted: None or an integer of at least 0")
    config = options.config
    if config is None:
        return
    known = [family for family in kernels.families(op) if isinstance(config, family.Config)]
    if not known:
        some = kernels.families(op)[-1].Config
        raise RefusedType(
            f"config={config!r} of type {_name(type(config))}; accepted: None (leave it out: the fastest is chosen), "
            f"or the Config of a family that computes {op}, e.g. {some.__module__}.{some.__name__}; jax_splitk.explain "
            "shows that of each operation"
        )
    if (wrong := wrong_field(config)) is not None:
        raise RefusedType(f"config={config!r} has {wrong}")
    belongs = known[0].implementation
    if options.implementation not in (None, belongs):
        raise RefusedValue(f"config={config!r} belongs to implementation={belongs!r}, not {options.implementation!r}")


def wrong_field(config: Any) -> str | None:
    """The first field of a config that does not have exactly its type, in words; None if all have. Families rely on
    exact types: bool is a subclass of int, and 2.0 equals 2."""
    for field in dataclasses.fields(config):
        value, accepted = getattr(config, field.name), field.type
        if type(value) is not accepted:
            return f"{field.name}={value!r} of type {_name(type(value))}; accepted: {_name(accepted)}"
    return None


def _name(kind: Any) -> str:
    """A type's name, with its module unless that is Python's own: NumPy, too, has types called bool and str."""
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


# Part of jit's cache key: under other options a function is traced again. None stands for the default options.
_context = jax.make_user_context(None)


@contextlib.contextmanager
def options(
    *,
    implementation: Implementation | None = None,
    workspace_limit_bytes: int | None = None,
    quantized_compute_dtype: DTypeLike | None = None,
) -> Iterator[None]:
    """Defaults for every jax_splitk operation traced inside the `with` block; a call's own arguments come first.

    Args:
      implementation: as in `jax_splitk.conv_wgrad`; None leaves the outer block's.
      workspace_limit_bytes: as in `jax_splitk.conv_wgrad`; None leaves the outer block's.
      quantized_compute_dtype: the compute_dtype of `jax_splitk.quantized_matmul`, also for `x @ w` and for layers whose
        weights are packed; None leaves the outer block's.

    Raises:
      TypeError: another quantized_compute_dtype.
      ValueError: a value outside its range.

    Examples:
      >>> x = jnp.ones((2, 8, 4))
      >>> with jax_splitk.options(implementation="xla"):
      ...     dw = jax_splitk.conv_wgrad(x, x, (3, 4, 4), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
      >>> dw.shape
      (3, 4, 4)
    """
    dtype = rounding_dtype("quantized_compute_dtype", quantized_compute_dtype)
    inner = _merged(Options(None, implementation, workspace_limit_bytes, compute_dtype=dtype))
    check_options("", inner)
    with _context(inner):
        yield


def rounding_dtype(name: str, value: DTypeLike | None) -> str | None:
    """The name of the dtype to which products with quantized weights may round; None for None. Raises TypeError for
    another one, which the caller gave as the argument `name`."""
    return None if value is None else dtype_of(name, value, COMPUTE_DTYPES).name


def using(tuning: Any) -> contextlib.AbstractContextManager[Any]:
    """A block in which a `TuningResult` decides first (see its `__enter__`)."""
    return _context(dataclasses.replace(current(), tuning=tuning))


def current() -> Options:
    """The options of the enclosing blocks."""
    return _context.value or Options()


def _merged(call: Options) -> Options:
    """The options of a call, completed from the enclosing blocks."""
    outer = current()
    implementation = outer.implementation if call.implementation is None else call.implementation
    limit = outer.workspace_limit_bytes if call.workspace_limit_bytes is None else call.workspace_limit_bytes
    dtype = outer.compute_dtype if call.compute_dtype is None else call.compute_dtype
    return Options(call.config, implementation, limit, outer.tuning, compute_dtype=dtype)
