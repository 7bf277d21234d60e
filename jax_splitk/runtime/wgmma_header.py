"""CUTLASS's header of WGMMA, cut to the instructions that a source uses. NVRTC spends up to a quarter of a kernel's
compilation on reading all 192.

Sources name instructions by the macros of device/wgmma.cuh.
"""

import functools
import pathlib
import re

from jax_splitk.runtime import toolchain

_NAME = "cute/arch/mma_sm90_gmma.hpp"
_DEFINITION = re.compile(r"^#define WGMMA.*", re.MULTILINE)
_USE = re.compile(r"\bWGMMA\(\s*\w+\s*,\s*(\w+)\s*\)")
_USE_16 = re.compile(r"\bWGMMA_16\(\s*\w+\s*,\s*(\w+)\s*\)")  # the element is a macro's
_INSTRUCTION = re.compile(r"^template <\n(?:[^\n>]*\n)+>\nstruct MMA_64x\d+(\w+)\n.*?^};\n", re.MULTILINE | re.DOTALL)


def needed(text: str) -> dict[str, str]:
    """The text of the header that a source needs, by its name; empty if the source includes it in another way than by
    device/wgmma.cuh, or CUTLASS's header is not as expected. NVRTC then reads the whole header."""
    text = _DEFINITION.sub("", text)
    kinds = {*_USE.findall(text), *(f"x16_F32{e}{e}_{use}" for use in _USE_16.findall(text) for e in ("F16", "BF16"))}
    if f"#include <{_NAME}>" not in text or "MMA_64x" in text:
        return {}
    reduced = _reduced(toolchain.include_folders()[0], frozenset(kinds))
    return {} if reduced is None else {_NAME: reduced}


@functools.lru_cache(maxsize=64)
def _reduced(folder: pathlib.Path, kinds: frozenset[str]) -> str | None:
    """The header with the instructions of these kinds, for any number of columns; None unless it has all of them."""
    try:
        header = (folder / _NAME).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None  # NVRTC says what is wrong
    found = list(_INSTRUCTION.finditer(header))
    kept = [match for match in found if match.group(1) in kinds]
    if not kept or {match.group(1) for match in kept} != kinds:
        return None
    texts = (match.group(0) for match in kept)
    return header[: found[0].start()] + "".join(texts) + header[found[-1].end() :]
