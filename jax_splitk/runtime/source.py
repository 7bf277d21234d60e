"""Device source: a file of `jax_splitk/kernels`, with its headers, macros and structs."""

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
    """A device source file with the macros and structs that specialise it.

    Attributes:
      file: a file of `jax_splitk/kernels`, relative to that folder, or an absolute path. Included headers are searched
        beside an absolute file first, then in `jax_splitk/kernels`.
      defines: macros.
      structs: the text that stands for `#include "structs.cuh"`; see `kernels/device/structs.py`.
    """

    file: str
    defines: tuple[tuple[str, str | int], ...]
    structs: str = ""

    def text(self, *, with_lines: bool = False) -> str:
        """The file, with the headers that it includes in their places.

        Args:
          with_lines: whether `#line` directives say where each part comes from, for a compiler's messages. They contain
            paths, and do not change the code. A compilation is identified by the text without these directives.
        """
        return _source_text(self.file, self.structs, with_lines)

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
def _source_text(file: str, structs: str, with_lines: bool = False) -> str:
    """The file with the text of its headers in place of the includes, each header once."""
    included = {file}

    def whole(name: str, text: str) -> str:
        """The text of a file, or of the structs, with its includes."""
        found = _INCLUDE.sub(lambda include: included_text(name, include), text)
        return f"{_line(1, name)}{found}" if with_lines else found

    def included_text(including: str, include: re.Match[str]) -> str:
        header, found = include[1], ""
        if header not in included:
            included.add(header)
            beside = os.path.join(os.path.dirname(file), header)
            header = beside if os.path.isabs(file) and os.path.isfile(beside) else header
            found = whole(header, structs if header == _STRUCTS else _file_text(header))
        # The lines after the include continue the file's own numbers. The include's end of line is still to come.
        number = include.string.count("\n", 0, include.start()) + 2
        return f"{found}\n{_line(number, including).rstrip()}" if with_lines else found

    return whole(file, _file_text(file))


def _line(number: int, name: str) -> str:
    """The directive that gives the next line its number and file."""
    quoted = name.replace("\\", "\\\\").replace('"', '\\"')
    return f'#line {number} "{quoted}"\n'
