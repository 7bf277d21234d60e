"""Device source: a file of `jax_splitk/kernels`, with the headers it includes and what specialises it."""

import dataclasses
import functools
import importlib.resources
import os
import pathlib
import re

ARCH = "sm_90a"
_INCLUDE = re.compile(r'^#include "([\w/]+\.cuh)"$', re.MULTILINE)
_STRUCTS = "structs.cuh"


@dataclasses.dataclass(frozen=True)
class Source:
    """A device source file and what specialises it.

    Attributes:
      file: a file of `jax_splitk/kernels`, relative to it, as are the headers that it includes; or an absolute path,
        whose headers are looked for beside the file first.
      defines: macros.
      structs: the text that stands for `#include "structs.cuh"`; see `kernels/device/structs.py`.
    """

    file: str
    defines: tuple[tuple[str, str | int], ...]
    structs: str = ""

    def text(self) -> str:
        """The file, with the headers that it includes in their places."""
        return _source_text(self.file, self.structs)

    def options(self) -> tuple[str, ...]:
        """NVRTC's options, without the paths."""
        return (
            f"--gpu-architecture={ARCH}",
            "--std=c++17",
            "-default-device",
            "--ptxas-options=-v",
            "-DNDEBUG",
            *(f"-D{name}={value}" for name, value in self.defines),
        )


def source_files() -> list[str]:
    """The device source files, as `Source.file` names them."""
    folder = pathlib.Path(str(importlib.resources.files("jax_splitk.kernels")))
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.cu"))


@functools.cache
def _file_text(file: str) -> str:
    return importlib.resources.files("jax_splitk.kernels").joinpath(file).read_text(encoding="utf-8")


@functools.lru_cache(maxsize=256)
def _source_text(file: str, structs: str) -> str:
    """The file with what it includes in its place, each header once."""
    included = {file}

    def included_text(include: re.Match[str]) -> str:
        if include[1] in included:
            return ""
        included.add(include[1])
        beside = os.path.join(os.path.dirname(file), include[1])
        header = beside if os.path.isabs(file) and os.path.isfile(beside) else include[1]
        text = structs if header == _STRUCTS else _file_text(header)
        return _INCLUDE.sub(included_text, text)

    return _INCLUDE.sub(included_text, _file_text(file))
