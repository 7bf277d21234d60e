"""Compiles the device code of the GPU tests on every core, before they run: `python -m tests.compile_ahead [FILE ...]`.

Processes of pytest-xdist compile a module's code once, but each waits for it: a run of many looks as if it hung.
JAX_SPLITK_CACHE_DIR and JAX_SPLITK_TEST_SEED must be those of the tests.
"""

import concurrent.futures
import importlib
import itertools
import multiprocessing
import os
import pathlib
import sys
import time
from collections.abc import Sequence

from jax_splitk.runtime import compiler

TESTS = pathlib.Path(__file__).parent
TOGETHER = 256  # sources whose machine code is written together: a run that is stopped keeps the earlier ones


def main(files: Sequence[str]) -> None:
    for name in ("JAX_SPLITK_CACHE_DIR", "JAX_SPLITK_TEST_SEED"):
        if name not in os.environ:
            raise SystemExit(f"{name} is not set; accepted: that of the tests which follow")
    begun, paths = time.monotonic(), _paths(files)
    # Modules list their code side by side: random problems that share few kernels take half a minute.
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        found = list(dict.fromkeys(itertools.chain.from_iterable(pool.map(_device_code, paths))))
    print(f"{len(found)} sources, listed in {time.monotonic() - begun:.0f} s", flush=True)
    for start in range(0, len(found), TOGETHER):
        compiler.compile_sources(found[start : start + TOGETHER])
        done = min(start + TOGETHER, len(found))
        print(f"{done} compiled in {time.monotonic() - begun:.0f} s", flush=True)


def _paths(files: Sequence[str]) -> list[pathlib.Path]:
    """All modules of GPU tests, or those of these files and folders."""
    within = [pathlib.Path(file).resolve() for file in files] or [TESTS]
    return [path for path in sorted(TESTS.rglob("test_gpu_*.py")) if any(path.is_relative_to(one) for one in within)]


def _device_code(path: pathlib.Path) -> Sequence[compiler.Source]:
    module = importlib.import_module(".".join(path.relative_to(TESTS.parent).with_suffix("").parts))
    return list(module.device_code()) if hasattr(module, "device_code") else []


if __name__ == "__main__":
    main(sys.argv[1:])
