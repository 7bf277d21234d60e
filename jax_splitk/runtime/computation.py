"""Functions that are one computation wherever they are called."""

import functools
from collections.abc import Callable
from typing import TypeVar

import jax

_Function = TypeVar("_Function", bound=Callable[..., object])


def one_computation(*static: int) -> Callable[[_Function], _Function]:
    """`jax.jit` with these arguments static, also under `jax.disable_jit`.

    JAX's debugging flags then see operands and results, as of any operation of lax, and none of the constants inside:
    a NaN that marks what is not finite, an infinity, a table.
    """

    def decorated(function: _Function) -> _Function:
        jitted = jax.jit(function, static_argnums=static)

        @functools.wraps(function)
        def call(*arguments: object) -> object:
            with jax.disable_jit(False):
                return jitted(*arguments)

        return call  # pyright: ignore[reportReturnType]

    return decorated
