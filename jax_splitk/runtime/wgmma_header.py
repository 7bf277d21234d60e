"""CUTLASS's headers of WGMMA, cut to the instructions that a source uses. NVRTC spends up to a quarter of a kernel's
compilation on reading all 192 of the first. The second has other numbers of columns.

Sources name instructions by the macros of device/wgmma.cuh.
"""

import functools
import pathlib
import re

from jax_splitk.runtime import toolchain

_NAMES = "cute/arch/mma_sm90_gmma.hpp", "cute/arch/mma_sm90_gmma_ext.hpp"
_DEFINITION = re.compile(r"^#define WGMMA.*", re.MULTILINE)
_USE = re.compile(r"\bWGMMA\(\s*\w+\s*,\s*(\w+)\s*\)")
_USE_16 = re.compile(r"\bWGMMA_16\(\s*\w+\s*,\s*(\w+)\s*\)")  # the element is a macro's
_INSTRUCTION = re.compile(r"^template <\n(?:[^\n>]*\n)+>\nstruct MMA_64x\d+(\w+)\n.*?^};\n", re.MULTILINE | re.DOTALL)


def needed(text: str) -> dict[str, str]:
    """The texts of the headers that a source needs, by their names; empty if the source includes them in another way
    than by device/wgmma.cuh, or CUTLASS's headers are not as expected. NVRTC then reads whole headers."""
    text = _DEFINITION.sub("", text)
    kinds = {*_USE.findall(text), *(f"x16_F32{e}{e}_{use}" for use in _USE_16.findall(text) for e in ("F16", "BF16"))}
    names = [name for name in _NAMES if f"#include <{name}>" in text]
    if not names or "MMA_64x" in text:
        return {}
    reduced = {name: _reduced(toolchain.include_folders()[0] / name, frozenset(kinds)) for name in names}
    return {name: header for name, header in reduced.items() if header is not None}


@functools.lru_cache(maxsize=64)
def _reduced(path: pathlib.Path, kinds: frozenset[str]) -> str | None:
    """The header with the instructions of these kinds, for any number of columns; None unless it has all of them."""
    try:
        header = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None  # NVRTC says what is wrong
    found = list(_INSTRUCTION.finditer(header))
    kept = [match for match in found if match.group(1) in kinds]
    if not kept or {match.group(1) for match in kept} != kinds:
        return None
    texts = (match.group(0) for match in kept)
    return header[: found[0].start()] + "".join(texts) + header[found[-1].end() :]
