"""NVRTC by ctypes. Standard library only: this file also runs as a script, a worker that compiles one program.

NVRTC compiles in one thread of a process at a time (measured with 13.0 and 13.5: two threads take as long as one after
the other), so compiling many kernels at once takes as many processes (`worker.py`). The worker writes `ANSWER` to its
standard output, reads one pickled request from its standard input and writes one pickled `(image or None, log)`.
"""

import ctypes
import os
import pathlib
import pickle
import signal
import sys
from collections.abc import Iterable, Mapping

ANSWER = b"jax_splitk compiler\n"
_PR_SET_PDEATHSIG = 1  # option of Linux's prctl: the signal that a process gets when its parent ends


class NvrtcError(RuntimeError):
    """NVRTC itself failed (not: the program does not compile)."""


class Nvrtc:
    """The NVRTC library of the `nvidia-cuda-nvrtc` wheel."""

    def __init__(self, library: pathlib.Path):
        # The builtins library is looked up by name at the first compilation; loading it first makes it findable.
        for builtins in sorted(library.parent.glob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        self.library = library
        self._lib = ctypes.CDLL(str(library))
        self._lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
        self.version = (major.value, minor.value)

    def _check(self, result: int, what: str) -> None:
        if result != 0:
            raise NvrtcError(f"{what} failed: {self._lib.nvrtcGetErrorString(result).decode()}")

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), what)
        data = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._lib, f"nvrtcGet{what}")(program, data), what)
        return data.raw

    def compile(
        self, text: str, name: str, options: Iterable[str], headers: Mapping[str, str] | None = None
    ) -> tuple[bytes | None, str]:
        """(machine code or None, log). `headers`: texts by the names that `#include` gives, in place of files."""
        program, headers = ctypes.c_void_p(), headers or {}
        texts, names = _strings(headers.values()), _strings(headers)
        created = self._lib.nvrtcCreateProgram(
            ctypes.byref(program), text.encode(), name.encode(), len(headers), texts, names
        )
        self._check(created, "nvrtcCreateProgram")
        try:
            encoded = _strings(options)
            result = self._lib.nvrtcCompileProgram(program, len(encoded), encoded)
            log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if result != 0:
                return None, log or self._lib.nvrtcGetErrorString(result).decode()
            return self._read(program, "CUBIN"), log
        finally:
            self._lib.nvrtcDestroyProgram(ctypes.byref(program))


def _strings(texts: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def _main() -> None:
    sys.stdout.buffer.write(ANSWER)
    sys.stdout.buffer.flush()
    parent, library, *request = pickle.loads(sys.stdin.buffer.read())
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before
            return
    result = Nvrtc(pathlib.Path(library)).compile(*request)
    sys.stdout.buffer.write(pickle.dumps(result))


if __name__ == "__main__":
    _main()
