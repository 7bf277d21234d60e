"""Runs a plan of CUDA kernels on the CPU: g++ compiles its device source with stand-ins for Hopper's features.
Emulated, as PTX's documentation describes them: thread blocks and clusters, functions of warps and blocks, mbarriers,
TMA (tiled, im2col, multicast, bulk), mma and WGMMA. Not emulated: timing, memory ordering and proxy fences, the
precision of tensor cores (sums are fp32), registers, asynchronous reads of registers.

The headers here take the place of `kernels/device/ptx.cuh`, of `async.cuh` and of all headers that a source includes by
<...>; every other file of the package is compiled unchanged. The headers declare functions, and the `.cc` files define
them. These become a library that all kernels of a run share, so that g++ compiles only a kernel's own code each time.
When a kernel runs, a seed determines the order of threads and copies, and which warp is late. A source is built once in
a run for each set of macros.
"""

import ctypes
import dataclasses
import fcntl
import functools
import hashlib
import os
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Sequence

import numpy as np
from jax import numpy as jnp

from jax_splitk.runtime import source as device_source
from jax_splitk.runtime.plan import DevicePlan, Im2colMap, Int32Struct, MapParam, Pointer, TiledMap

_FOLDER = pathlib.Path(__file__).parent
_HEADERS = ("counters.h", "threads.h", "cuda.h", "memory.h", "cute.h", "ptx.h", "async.h", "launch.h")
_RUNTIME = ("state.h", "counters.cc", "threads.cc", "memory.cc", "cute.cc", "launch.cc")
# Each library keeps its own variables, even if another library has variables of the same name.
_OPTIONS = ("-std=c++20", "-w", "-Wno-psabi", "-fPIC", "-pthread", "-fno-gnu-unique")
# The shared code runs often and is built once; a kernel's own is built for each set of macros, which takes longer than
# its runs. The process has the libraries of C++, so that none is linked.
_SHARED_CODE = (*_OPTIONS, "-O3", "-shared", "-x", "c++")
_KERNELS = (*_OPTIONS, "-O0")
_LINKED = ("-shared", "-nodefaultlibs")
# The folder that all processes of a run share (tests/conftest.py); not that of a test with a cache of its own.
_SHARED = os.environ.get("JAX_SPLITK_CACHE_DIR")
_GUARD = 4096  # bytes around a buffer, which nobody may write
_DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];")


@dataclasses.dataclass(frozen=True)
class Access:
    """The accesses of warps at one place of the source.

    Attributes:
      function, statement: the place.
      kind: shared or global memory, and the instruction.
      bytes: bytes of a lane.
      requests: number of warps' instructions.
      paid, ideal: wavefronts of shared memory, or lines of 128 bytes of global memory; without conflicts and gaps.
    """

    function: str
    statement: str
    kind: str
    bytes: int
    requests: int
    paid: int
    ideal: int


class EmulationError(AssertionError):
    """A kernel made an error that would crash a GPU, or waits forever."""


def run(
    plan: DevicePlan,
    inputs: Sequence[np.ndarray],
    outputs: Sequence[np.ndarray],
    seed: int = 0,
    accesses: list[Access] | None = None,
) -> None:
    """Runs all launches of a plan, one after the other, between XLA's operations around them.

    Args:
      plan: the plan.
      inputs: its operands, with the sizes in bytes of its buffers.
      outputs: its results without the workspace. They are overwritten; results and workspace start as NaN.
      seed: determines the order of threads and copies, and the late warp of each block.
      accesses: gets the costs of the kernels' memory accesses; makes the run slower.

    Raises:
      EmulationError: an endless wait, a wrong arrival or access, a write outside of an output, an `__ldg` outside of
        the buffers.
    """
    if (around := plan.around) is not None:
        shape, dtype = around.returned
        result = np.empty(shape, jnp.dtype(dtype))
        changed = [np.asarray(operand) for operand in around.before([jnp.asarray(array) for array in inputs])]
        run(dataclasses.replace(plan, around=None), changed, [result], seed, accesses)
        outputs[0][...] = np.asarray(around.after(jnp.asarray(result)))
        return
    runtime, library = _compiled(plan)
    arrays = [*inputs, *outputs]
    assert len(arrays) + 1 == len(plan.buffers)
    assert all(array.flags.c_contiguous for array in outputs)
    sizes = [array.nbytes for array in arrays]
    assert sizes == [buffer.bytes for buffer in plan.buffers[:-1]], (sizes, plan.buffers)
    sizes.append(plan.workspace_bytes)
    memory = [np.full(size + 2 * _GUARD + 1024, 0xFF, np.uint8) for size in sizes]
    starts = [-array.ctypes.data % 1024 + _GUARD for array in memory]
    for array, start, value in zip(memory, starts, inputs, strict=False):
        array[start : start + value.nbytes] = np.ascontiguousarray(value).view(np.uint8).reshape(-1)
    addresses = [array.ctypes.data + start for array, start in zip(memory, starts, strict=True)]
    bounds = [bound for at, size in zip(addresses, sizes, strict=True) for bound in (at, at + size)]
    runtime.begin((ctypes.c_uint64 * len(bounds))(*bounds), len(sizes), accesses is not None)
    words = [np.array(each.words(), np.int64) for each in plan.maps]
    for number, launch in enumerate(plan.launches):
        params = [_bytes(param, addresses, plan.maps, words) for param in launch.params]
        dims = (ctypes.c_uint * 9)(*launch.grid, *launch.block, *launch.cluster)
        values = [np.frombuffer(param, np.uint8).copy() for param in params]
        pointers = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
        counts = (ctypes.c_int * len(values))(*map(len, params))
        kernel = plan.kernels().index(launch.kernel)
        library.emulate.restype = ctypes.c_char_p
        error = library.emulate(kernel, dims, pointers, counts, len(values), ctypes.c_uint(seed + 1000 * number))
        if error:
            raise EmulationError(f"{plan.label}: {launch.kernel}: {error.decode()}")
    if accesses is not None:
        accesses += _counted(plan, runtime)
    for index, (array, start, size) in enumerate(zip(memory, starts, sizes, strict=True)):
        before, after = array[:start], array[start + size :]
        if not (before.min(initial=255) == 255 == after.min(initial=255)):
            raise EmulationError(f"{plan.label}: a write outside of buffer {index}")
    for index, value in enumerate(outputs, len(inputs)):
        start = starts[index]
        value.reshape(-1).view(np.uint8)[:] = memory[index][start : start + value.nbytes]


def _counted(plan: DevicePlan, runtime: ctypes.CDLL) -> list[Access]:
    runtime.counted_accesses.restype = ctypes.c_char_p
    lines, found = _text(plan).splitlines(), []
    for row in runtime.counted_accesses().decode().splitlines():
        function, line, kind, *numbers = row.split("\t")
        found.append(Access(function, lines[int(line) - 1].strip(), kind, *map(int, numbers)))
    return found


def _bytes(
    param: Pointer | MapParam | Int32Struct,
    addresses: Sequence[int],
    maps: Sequence[TiledMap | Im2colMap],
    words: Sequence[np.ndarray],
) -> bytes:
    if isinstance(param, Pointer):
        return np.array([addresses[param.buffer] + param.offset], np.uint64).tobytes()
    if isinstance(param, MapParam):
        opaque = np.zeros(16, np.uint64)
        opaque[:2] = words[param.index].ctypes.data, addresses[maps[param.index].buffer]
        return opaque.tobytes()
    return np.array(param.values, np.int64).astype(np.int32).tobytes()


def _text(plan: DevicePlan) -> str:
    """The device source as C++, without its headers, and a table of the kernels."""
    text = plan.source.text()
    for header in ("ptx", "async"):
        own = device_source._file_text(f"device/{header}.cuh")
        text = text.replace(re.sub(r'^#include ".*"$', "", own, flags=re.MULTILINE), "")
    text = re.sub(r"^#include <.*>$", "", text, flags=re.MULTILINE)
    text = re.sub(r"__shared__ (alignas\(\d+\)) ", r"\1 __shared__ ", text)
    text = re.sub(r"^  (constexpr uint16_t \w+\[16\] =)", r"  static \1", text, flags=re.MULTILINE)
    text = _DYNAMIC.sub(r"\1* const \2 = reinterpret_cast<\1*>(emulator::dynamic);", text)
    cases = "\n".join(
        f"    case {i}: return emulator::launch(::{name}, sizes, values, bytes, count, seed);"
        for i, name in enumerate(plan.kernels())
    )
    table = f"""
extern "C" const char* emulate(int kernel, const unsigned* sizes, void* const* values, const int* bytes, int count,
                               unsigned seed) {{
  switch (kernel) {{
{cases}
  }}
  return "no such kernel";
}}
"""
    return f"{text}\n{table}"


@functools.cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="jax_splitk-emulator-")


def _built(name: str, suffix: str, text: str, options: Sequence[str]) -> pathlib.Path:
    """The file that g++ makes of a text, kept by its content. If several processes want it, one makes it."""
    folder = pathlib.Path(_SHARED if _SHARED is not None else _own_folder().name, "emulator")
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256("\n".join((text, *options)).encode()).hexdigest()[:24]
    source = folder / f"{name}-{digest}.h"
    built = source.with_suffix(suffix)
    if built.exists():
        return built
    with source.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not built.exists():
            file.truncate(0)
            file.write(text)
            file.flush()
            made = source.with_suffix(".made")
            command = ["g++", *options, str(source), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise EmulationError(f"{name} with {' '.join(options)}:\n{done.stderr[:4000]}")
            made.replace(built)
    return built


@functools.cache
def _runtime() -> tuple[pathlib.Path, pathlib.Path]:
    """The stand-ins' header, and the library of the code that all kernels share."""
    stand_ins, code = ("\n".join((_FOLDER / name).read_text() for name in names) for names in (_HEADERS, _RUNTIME))
    header = _built("stand_ins", ".h.gch", stand_ins, [*_KERNELS, "-x", "c++-header"]).with_suffix("")
    return header, _built("runtime", ".so", f"{stand_ins}\n{code}", _SHARED_CODE)


def _compiled(plan: DevicePlan) -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """The runtime, whose functions the kernels call, and the plan's kernels."""
    header, runtime = _runtime()
    macros = (f"-D{name}={value}" for name, value in plan.source.defines)
    options = [*macros, *_KERNELS, *_LINKED, "-include", str(header), "-x", "c++"]
    kernels = _built(pathlib.Path(plan.source.file).stem, ".so", _text(plan), options)
    return ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL), ctypes.CDLL(str(kernels))
