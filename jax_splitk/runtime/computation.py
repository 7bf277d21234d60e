"""Functions that JAX runs as one computation, also outside of jit."""

import functools
from collections.abc import Callable
from typing import TypeVar

import jax

_Function = TypeVar("_Function", bound=Callable[..., object])


def one_computation(*static: int) -> Callable[[_Function], _Function]:
    """`jax.jit` with these arguments static, also under `jax.disable_jit`.

    So JAX's debugging flags see only operands and results, as for any operation of lax. They do not see constants
    inside the function, such as an infinity or a NaN.
    """

    def decorated(function: _Function) -> _Function:
        jitted = jax.jit(function, static_argnums=static)

        @functools.wraps(function)
        def call(*arguments: object) -> object:
            with jax.disable_jit(False):
                return jitted(*arguments)

        return call  # pyright: ignore[reportReturnType]

    return decorated
