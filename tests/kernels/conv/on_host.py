"""Runs a CUDA kernel whose threads share nothing on the host: its source, compiled by g++ as C++."""

import ctypes
import hashlib
import pathlib
import re
import subprocess
import tempfile

import numpy as np

from jax_splitk.runtime.plan import DevicePlan, Int32Struct

_BEFORE = """
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#define __device__
#define __global__
#define __launch_bounds__(...)
using std::min;
struct float2 { float x, y; };
struct __nv_bfloat16 { uint16_t bits; };
using __half = _Float16;
struct __half2 { _Float16 x, y; };
static float2 __half22float2(__half2 v) { return {float(v.x), float(v.y)}; }
static __half __float2half_rn(float x) { return __half(x); }
static __nv_bfloat16 __float2bfloat16_rn(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
static struct { int x; } blockIdx, threadIdx;
// Each load is inside of the array that it is of.
static struct Array { const char* data; size_t bytes; } arrays[2];
static int outside = 0;
static unsigned __ldg(const unsigned* p) {
  for (const Array& a : arrays)
    if ((const char*)p >= a.data && (const char*)(p + 1) <= a.data + a.bytes) return *p;
  ++outside;
  return 0;
}
static float __uint_as_float(unsigned x) { float y; std::memcpy(&y, &x, 4); return y; }
"""
_AFTER = """
extern "C" int run(const void* x, size_t x_bytes, const void* w, size_t w_bytes, const int* args, void* out) {
  arrays[0] = {(const char*)x, x_bytes}, arrays[1] = {(const char*)w, w_bytes};
  Args given;
  std::memcpy(&given, args, sizeof(given));
  for (int i = 0; i < given.items; ++i) {
    blockIdx.x = i / THREADS, threadIdx.x = i % THREADS;
    depthwise((const unsigned*)x, (const unsigned*)w, given, (Output*)out);
  }
  return outside;
}
"""


def run(plan: DevicePlan, x: np.ndarray, w: np.ndarray, out: np.ndarray) -> int:
    """Writes `out`; how many loads were outside of x and w."""
    text = _BEFORE + re.sub(r"#include <cuda_.*", "", plan.source.text()) + _AFTER
    folder = pathlib.Path(tempfile.gettempdir()) / "jax_splitk_on_host"
    folder.mkdir(exist_ok=True)
    macros = [f"-D{name}={value}" for name, value in plan.source.defines]
    name = hashlib.sha256("\n".join((text, *macros)).encode()).hexdigest()[:24]
    source, library = folder / f"{name}.cc", folder / f"{name}.so"
    source.write_text(text)
    command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", *macros, str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    (launch,) = plan.launches
    (args,) = (param.values for param in launch.params if isinstance(param, Int32Struct))
    words = (ctypes.c_int * len(args))(*args)
    address = lambda array: ctypes.c_void_p(array.ctypes.data)  # noqa: E731
    sizes = [ctypes.c_size_t(array.nbytes) for array in (x, w)]
    return ctypes.CDLL(str(library)).run(address(x), sizes[0], address(w), sizes[1], words, address(out))
