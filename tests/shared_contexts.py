"""MLIR contexts that serve several modules, as in jax 0.11. jax 0.10 makes one for each module that it lowers, which
took a fifth of the tests' time. It has no option to share them, so this file looks behind its public API."""

import threading

import jax

_MODULES = 100  # of a context, which keeps every constant of its modules


def install() -> None:
    if jax.__version_info__ >= (0, 11):
        return
    from jax._src.interpreters import mlir  # noqa: PLC0415

    make = mlir.make_ir_context
    shared, modules = make(), 0

    def context() -> mlir.ir.Context:
        nonlocal shared, modules
        if threading.current_thread() is not threading.main_thread():
            return make()
        modules += 1
        if modules % _MODULES == 0:
            shared = make()
        return shared

    mlir.make_ir_context = context
