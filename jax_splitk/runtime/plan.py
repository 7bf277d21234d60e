"""Exact, plain-data descriptions of what a custom call does: the last step before lowering.

A `DevicePlan` is a list of kernel launches. Its buffers are the custom call's operands, then its results, the last of
which is the workspace. It travels to the launcher (ffi/plan.cc) as a list of int64 words:

    plan     = MAGIC VERSION #buffers #maps #launches buffer* map* launch*
    buffer   = bytes alignment
    map      = kind buffer dtype rank dims[rank] strides[rank-1] element_strides[rank]
               (kind 0, tiled: box[rank] | kind 1, im2col: lower[rank-2] upper[rank-2] channels pixels)
               swizzle l2_promotion
    launch   = kernel grid[3] block[3] cluster[3] shared_bytes programmatic #params param*
    param    = 0 buffer offset | 1 map | 2 #words word*

Enumerations are CUDA's (cuda.h: CUtensorMapDataType and so on).
"""

import dataclasses
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_splitk.runtime import compiler
from jax_splitk.runtime.around import Around
from jax_splitk.runtime.source import Source

# Names of the custom calls; a name ends in the version of its attributes.
LAUNCH_TARGET = "jax_splitk_launch_v2"
HOST_CONV_TARGET = "jax_splitk_host_conv_v2"
HOST_WGRAD_TARGET = "jax_splitk_host_conv_wgrad_v3"
HOST_QUANTIZED_TARGET = "jax_splitk_host_quantized_v5"
HOST_RAGGED_TARGET = "jax_splitk_host_ragged_dot_v1"
TARGETS = (LAUNCH_TARGET, HOST_CONV_TARGET, HOST_WGRAD_TARGET, HOST_QUANTIZED_TARGET, HOST_RAGGED_TARGET)
PLAN_MAGIC = 0x4B50534A
PLAN_VERSION = 2

TF32 = "tfloat32"  # float32, which a load rounds to tf32, to nearest
TENSOR_MAP_DTYPES = {"float8_e4m3fn": 0, "float16": 6, "float32": 7, "bfloat16": 9, TF32: 11}  # 0: bytes
SWIZZLE_128B = 3
L2_PROMOTION_128B = 2  # with 256 bytes families of im2col take 1.01 to 1.10 times as long (H200)


@dataclasses.dataclass(frozen=True)
class CustomCall:
    """An FFI custom call: its versioned target, attributes (plain data) and workspace size in bytes.

    It is also the plan of a host family: a C++ handler that runs on XLA's own threads has nothing to compile.

    Attributes:
      around: XLA's operations on the operands and on the result; None for none.
      name: what HLO and profiles call it.
    """

    target: str
    attributes: Mapping[str, Any]
    workspace_bytes: int
    around: Around | None = None
    name: str = "custom_call"

    def custom_call(self) -> "CustomCall":
        return self


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An operand or result as the launcher checks it: its exact size and its address's alignment, in bytes."""

    bytes: int
    alignment: int


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A TMA descriptor. Sizes, innermost dimension first, and byte strides of all dimensions but the innermost."""

    buffer: int
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]

    def _words(self, kind: int, element_strides: Sequence[int], *window: int) -> list[int]:
        head = (kind, self.buffer, TENSOR_MAP_DTYPES[self.dtype], len(self.dims))
        return [*head, *self.dims, *self.strides, *element_strides, *window, L2_PROMOTION_128B]


@dataclasses.dataclass(frozen=True)
class TiledMap(TensorMap):
    """A TMA descriptor for dense boxes (cuTensorMapEncodeTiled)."""

    box: tuple[int, ...]
    swizzle: int = SWIZZLE_128B

    def words(self) -> list[int]:
        return self._words(0, [1] * len(self.dims), *self.box, self.swizzle)


@dataclasses.dataclass(frozen=True)
class Im2colMap(TensorMap):
    """A TMA descriptor for the windows of a convolution (cuTensorMapEncodeIm2col).

    `dims` is (channels, ..., width, height, batch) from the innermost on; `lower` and `upper` are the corners of the
    bounding box of window origins relative to the image, innermost spatial dimension first.
    """

    element_strides: tuple[int, ...]
    lower: tuple[int, ...]
    upper: tuple[int, ...]
    channels: int
    pixels: int
    swizzle: int = SWIZZLE_128B

    def words(self) -> list[int]:
        window = (*self.lower, *self.upper, self.channels, self.pixels, self.swizzle)
        return self._words(1, self.element_strides, *window)


@dataclasses.dataclass(frozen=True)
class Pointer:
    """A kernel parameter: the address of a buffer."""

    buffer: int
    offset: int = 0

    def words(self) -> list[int]:
        return [0, self.buffer, self.offset]


@dataclasses.dataclass(frozen=True)
class MapParam:
    """A kernel parameter: a tensor map, by value (`__grid_constant__`)."""

    index: int

    def words(self) -> list[int]:
        return [1, self.index]


@dataclasses.dataclass(frozen=True)
class Int32Struct:
    """A kernel parameter: a C struct of 32-bit integers, by value."""

    values: tuple[int, ...]

    def words(self) -> list[int]:
        packed = struct.pack(f"<{len(self.values)}i", *self.values)
        packed += bytes(-len(packed) % 8)
        return [2, len(packed) // 8, *struct.unpack(f"<{len(packed) // 8}q", packed)]


Param = Pointer | MapParam | Int32Struct


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel launch. `programmatic`: the launch may start before the plan's previous launch has ended (programmatic
    dependent launch; the kernel itself waits for its input)."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    params: tuple[Param, ...]
    shared_bytes: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    programmatic: bool = False


@dataclasses.dataclass(frozen=True)
class DevicePlan:
    """Launches of kernels from one NVRTC-compiled source. The last buffer is the workspace. `around`: XLA's operations
    on the operands and on the result."""

    source: Source
    buffers: tuple[Buffer, ...]
    maps: tuple[TiledMap | Im2colMap, ...]
    launches: tuple[Launch, ...]
    label: str
    around: Around | None = None

    @property
    def workspace_bytes(self) -> int:
        return self.buffers[-1].bytes

    def kernels(self) -> list[str]:
        return list(dict.fromkeys(launch.kernel for launch in self.launches))

    def words(self) -> list[int]:
        kernels = self.kernels()
        return encoded(self.buffers, self.maps, [(kernels.index(launch.kernel), launch) for launch in self.launches])

    def custom_call(self) -> CustomCall:
        """Compiles the source (or finds it in the cubin cache) and packs everything into attributes.

        The machine code is an array of bytes: MLIR and XLA write arrays in hexadecimal, and read them, faster than
        strings, and the launcher uses the bytes directly.
        """
        compiled = compiler.compile_source(self.source)
        attributes = {
            "plan": np.array(self.words(), dtype=np.int64),
            "code": np.frombuffer(compiled.image, dtype=np.uint8),
            "kernels": ",".join(self.kernels()),
            "config": self.label,
        }
        return CustomCall(LAUNCH_TARGET, attributes, self.workspace_bytes, self.around)


def encoded(
    buffers: Sequence[Buffer], maps: Sequence[TiledMap | Im2colMap], launches: Sequence[tuple[int, Launch]]
) -> list[int]:
    """The encoding described at the top of this file. Each launch comes with its kernel's number."""
    out = [PLAN_MAGIC, PLAN_VERSION, len(buffers), len(maps), len(launches)]
    for buffer in buffers:
        out += [buffer.bytes, buffer.alignment]
    for tensor_map in maps:
        out += tensor_map.words()
    for kernel, launch in launches:
        out += [kernel, *launch.grid, *launch.block, *launch.cluster]
        out += [launch.shared_bytes, int(launch.programmatic), len(launch.params)]
        for param in launch.params:
            out += param.words()
    return out


def tensor_map_strides(dims: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Byte strides of a packed array whose dimensions are given innermost first, without the innermost."""
    strides, stride = [], itemsize
    for dim in dims[:-1]:
        stride *= dim
        strides.append(stride)
    return tuple(strides)
