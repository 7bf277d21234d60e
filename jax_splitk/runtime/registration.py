"""Runs once, when the package is imported: registers the C++ handlers of jax_splitk._ffi with XLA, and warns of wrong
environment variables."""

import functools
import logging

import jax

from jax_splitk import _ffi
from jax_splitk.runtime import settings, stopwatch, streams
from jax_splitk.runtime.plan import (
    HOST_CONV_TARGET,
    HOST_QUANTIZED_TARGET,
    HOST_RAGGED_TARGET,
    HOST_WGRAD_TARGET,
    LAUNCH_TARGET,
)


@functools.cache
def register() -> None:
    # Register a state's type before the handlers that use it. No GPU is needed.
    jax.ffi.register_ffi_type("jax_splitk_launch_state_v1", _ffi.launch_state_type(), platform="CUDA")
    jax.ffi.register_ffi_target(LAUNCH_TARGET, _ffi.launch_handlers(), platform="CUDA")
    jax.ffi.register_ffi_target(stopwatch.START_TARGET, _ffi.stopwatch_start_handler(), platform="CUDA")
    jax.ffi.register_ffi_target(stopwatch.STOP_TARGET, _ffi.stopwatch_stop_handler(), platform="CUDA")
    jax.ffi.register_ffi_target(HOST_CONV_TARGET, _ffi.host_conv_handler(), platform="cpu")
    jax.ffi.register_ffi_target(HOST_WGRAD_TARGET, _ffi.host_wgrad_handler(), platform="cpu")
    jax.ffi.register_ffi_target(HOST_QUANTIZED_TARGET, _ffi.host_quantized_handler(), platform="cpu")
    jax.ffi.register_ffi_target(HOST_RAGGED_TARGET, _ffi.host_ragged_handler(), platform="cpu")
    logger = logging.getLogger("jax_splitk")
    streams.guard_log(logger)
    for mistake in settings.mistakes():
        logger.warning("%s", mistake)
