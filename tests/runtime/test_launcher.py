"""Calls that the launcher refuses before it runs anything, with a driver that only answers questions about kernels."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

import pytest

from jax_splitk import _ffi
from jax_splitk.runtime.joined_plan import JoinedPlan
from jax_splitk.runtime.plan import Buffer, DevicePlan, Int32Struct, Launch, MapParam, Pointer, TiledMap
from jax_splitk.runtime.source import Source

# `FAKE_SIZES` are the bytes of each parameter of every kernel. Without it the driver cannot tell. `FAKE_GPU` is the
# result of the driver's initialization.
DRIVER = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define UNUSED(name) int name(void) { return 999; }
UNUSED(cuGetErrorString) UNUSED(cuCtxGetDevice) UNUSED(cuLibraryUnload) UNUSED(cuKernelSetAttribute)
UNUSED(cuLaunchKernelEx) UNUSED(cuStreamIsCapturing) UNUSED(cuTensorMapEncodeTiled) UNUSED(cuTensorMapEncodeIm2col)
UNUSED(cuStreamWaitValue32_v2) UNUSED(cuEventCreate) UNUSED(cuEventRecord) UNUSED(cuEventElapsedTime)
UNUSED(cuMemHostAlloc)

int cuInit(unsigned flags) { return atoi(getenv("FAKE_GPU")); }

int cuLibraryLoadData(void **library, const void *code) { *library = (void *)code; return 0; }

int cuLibraryGetKernel(void **kernel, void *library, const char *name) {
  *kernel = library;
  return strcmp(name, "present") == 0 ? 0 : 500;
}

#ifndef BEFORE_12_4
int cuKernelGetParamInfo(void *kernel, size_t index, size_t *offset, size_t *size) {
  const char *sizes = getenv("FAKE_SIZES");
  for (; sizes != NULL && *sizes != 0 && index > 0; --index) {
    sizes = strchr(sizes, ',');
    if (sizes != NULL) ++sizes;
  }
  if (sizes == NULL || *sizes == 0) return 1;
  *offset = 0;
  *size = atoi(sizes);
  return 0;
}
#endif
"""

# The extension module alone: jax would take a second to import.
CALLS = """
import importlib.util, json, os, sys
spec = importlib.util.spec_from_file_location("_ffi", sys.argv[1])
ffi = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ffi)
for sizes, words, code, kernels in json.load(sys.stdin):
    os.environ["FAKE_SIZES"] = sizes
    codes = code if isinstance(code, list) else [code]
    print(ffi.launch_refusal(words, "".join(codes).encode(), [len(each) for each in codes[1:] and codes], kernels))
print(ffi.driver_error())
"""

PLAN = DevicePlan(
    Source("", ()),
    (Buffer(64, 16), Buffer(0, 16)),
    (TiledMap(0, "float32", (16,), (), box=(16,)),),
    (Launch("present", (1, 1, 1), (32, 1, 1), (Pointer(0), MapParam(0), Int32Struct((1, 2, 3)))),),
    label="",
)
ELF = "\177ELF and so on"


def refusals(
    folder: pathlib.Path,
    calls: Sequence[tuple[str, list[int], str | list[str], str]],
    *flags: str,
    initialized: int = 0,
) -> list[str]:
    library = folder / "libcuda.so.1"
    command = ["g++", "-x", "c", "-shared", "-fPIC", *flags, "-o", str(library), "-"]
    subprocess.run(command, input=DRIVER, text=True, check=True)
    command = [sys.executable, "-c", CALLS, str(_ffi.__file__)]
    given = {
        "input": json.dumps(calls),
        "env": {**os.environ, "LD_LIBRARY_PATH": str(folder), "FAKE_GPU": str(initialized)},
    }
    ran = subprocess.run(command, **given, text=True, check=True, stdout=subprocess.PIPE)
    return ran.stdout.split("\n")[:-1]


@pytest.mark.parametrize("old", [False, True])
def test_parameters_must_be_the_kernels(tmp_path: pathlib.Path, old: bool) -> None:
    """A struct's size is in whole words. If a driver does not know the parameters, the call is not refused."""
    wrong = {
        "8,128,12": "",
        "8,128,16": "",
        "": "",
        "8,128": "takes 2 parameters; the plan gives 3",
        "8,128,12,4": "takes 4 parameters; the plan gives 3",
        "8,128,8": "takes 8 bytes as parameter 2; the plan gives 16",
        "8,128,20": "takes 20 bytes as parameter 2; the plan gives 16",
        "4,128,12": "takes 4 bytes as parameter 0; the plan gives 8",
        "8,64,12": "takes 64 bytes as parameter 1; the plan gives 128",
    }
    found = refusals(
        tmp_path, [(sizes, PLAN.words(), ELF, "present") for sizes in wrong], *["-DBEFORE_12_4"][: int(old)]
    )
    said = "jax_splitk_launch: kernel 'present' "
    assert found == [*("" if old or not why else said + why for why in wrong.values()), ""]


def test_other_refusals(tmp_path: pathlib.Path) -> None:
    words, renamed = PLAN.words(), dataclasses.replace(PLAN.launches[0], kernel="absent")
    calls = [
        ("8,128,12", [*words, 0], ELF, "present"),
        ("8,128,12", words, "text", "present"),
        ("8,128,12", dataclasses.replace(PLAN, launches=(renamed,)).words(), ELF, "absent"),
    ]
    assert refusals(tmp_path, calls) == [
        f"jax_splitk_launch: plan has {len(words) + 1} words; {len(words)} were expected",
        "jax_splitk_launch: the code attribute (4 bytes) is not an ELF file",
        "jax_splitk_launch: kernel 'absent' not found: unknown error (CUresult 500)",
        "",
    ]


def test_each_kernel_is_looked_for_in_its_own_machine_code(tmp_path: pathlib.Path) -> None:
    words = JoinedPlan((PLAN, PLAN), ((0,), (1,))).words()
    text = "jax_splitk_launch: the code attribute ({} bytes) is not an ELF file"
    calls = {
        ((ELF, ELF), "present;present"): "",
        ((ELF, ELF), "present,present"): "",  # both in the first one
        ((ELF, "text"), "present;present"): text.format(4),
        ((ELF, ELF), "present;absent"): "jax_splitk_launch: kernel 'absent' not found: unknown error (CUresult 500)",
        ((ELF,), "present;present"): "jax_splitk_launch: kernel 'present' is in machine code 2; there are 1",
    }
    given = [("8,128,12", words, list(codes), names) for codes, names in calls]
    assert refusals(tmp_path, given) == [*calls.values(), ""]


def test_a_machine_without_a_gpu_compiles_for_another(tmp_path: pathlib.Path) -> None:
    """There the launcher reads the plan, and leaves the code to the machine that runs it."""
    words = PLAN.words()
    calls = [("", words, "text", "absent"), ("", [*words, 0], ELF, "present")]
    refused = f"jax_splitk_launch: plan has {len(words) + 1} words; {len(words)} were expected"
    no_device = "the CUDA driver cannot use a GPU: unknown error (CUresult 100)"
    assert refusals(tmp_path, calls, initialized=100) == ["", refused, no_device]
