"""What NVIDIA's driver reports about itself and the machine's GPUs through NVML, its library. Does not start CUDA."""

import ctypes
import dataclasses


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU of the machine, also one that `CUDA_VISIBLE_DEVICES` hides; memory in bytes."""

    name: str
    memory_bytes: int
    free_bytes: int


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def driver() -> tuple[str | None, list[Gpu]]:
    """(the driver's version, the GPUs); None and an empty list if there is no driver, or it does not answer."""
    try:
        library = _library()
        if library.nvmlInit_v2() != 0:
            return None, []
    except (OSError, AttributeError):
        return None, []
    try:
        return _read(library)
    finally:
        library.nvmlShutdown()


def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libnvidia-ml.so.1")


def _read(library: ctypes.CDLL) -> tuple[str | None, list[Gpu]]:
    text, count = ctypes.create_string_buffer(96), ctypes.c_uint()
    known = library.nvmlSystemGetDriverVersion(text, len(text)) == 0
    version = text.value.decode(errors="replace") if known else None
    gpus = []
    if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return version, []
    for index in range(count.value):
        handle, memory = ctypes.c_void_p(), _Memory()
        calls = (
            library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)),
            library.nvmlDeviceGetName(handle, text, len(text)),
            library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)),
        )
        if not any(calls):
            gpus.append(Gpu(text.value.decode(errors="replace"), memory.total, memory.free))
    return version, gpus
