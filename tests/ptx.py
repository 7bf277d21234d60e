"""Compiles a kernel, and reads its PTX, of which ptxas makes the machine code: finds registers that a loop reads before
they have a value. ptxas may share such a register with another variable, which gives wrong results that neither the
emulator nor the PTX shows."""

import ctypes
import re
from collections.abc import Iterator

from jax_splitk.runtime import compiler, toolchain
from jax_splitk.runtime.compiler import Compiled
from jax_splitk.runtime.nvrtc import Nvrtc
from jax_splitk.runtime.source import Source

_REGISTER = re.compile(r"%[a-z]+\d+")
_KERNEL = re.compile(r"\.entry (\w+)\(.*?\n\{(.*?)\n\}", re.DOTALL)
_STATEMENT = re.compile(r";|(?<=:)\s*\n")
_LABEL = re.compile(r"(\$?\w+):$")
_GUARD = re.compile(r"@!?(%p\d+)\s+(.*)", re.DOTALL)
_ENDS = ("bra", "ret", "exit", "trap")
# Instructions whose first operand is also read, or is not a register.
_WRITE_NOTHING = (
    *("st.", "red.", "bar", "fence", "membar", "prefetch", "cp.", "mbarrier.init", "mbarrier.inval", "griddepcontrol"),
    *("wgmma.fence", "wgmma.commit", "wgmma.wait", "setmaxnreg", "discard", "stmatrix", "mbarrier.expect", "call"),
)


class _KeepsPtx(Nvrtc):
    ptx = ""

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        if what == "CUBIN":
            self.ptx = super()._read(program, "PTX").rstrip(b"\0").decode()
        return super()._read(program, what)


def compile_source(source: Source) -> tuple[Compiled, str]:
    """The machine code and the PTX of the source, from one compilation in this process."""
    nvrtc = _KeepsPtx(toolchain.find_nvrtc().library)
    image, log = nvrtc.compile(*compiler.program(source))
    assert image is not None, log
    return Compiled(image, log), nvrtc.ptx


class _Block:
    """Statements that run one after the other, and their successors."""

    def __init__(self) -> None:
        self.statements: list[str] = []
        self.leads_to: list[int] = []
        self.reads: set[str] = set()  # before the block writes them
        self.writes: set[str] = set()


def carried_without_value(text: str) -> dict[str, set[str]]:
    """For each kernel, the registers that a loop reads on its first turn and writes later, and that nothing writes
    before the loop."""
    found = {}
    for kernel, body in _KERNEL.findall(text):
        blocks = _blocks(body)
        reached = [_reached(blocks, i) for i in range(len(blocks))]
        for register in sorted(_live(blocks)):
            writers = {j for j, block in enumerate(blocks) if register in block.writes}
            for i in (i for i, block in enumerate(blocks) if register in block.reads):
                before = {j for j in writers if i in reached[j]}
                if before and before <= reached[i]:  # all of them in loops with it
                    found.setdefault(kernel, set()).add(register)
    return found


def _blocks(body: str) -> list[_Block]:
    blocks, labels = [_Block()], {}
    for statement in _statements(body):
        if (label := _LABEL.match(statement)) is not None:
            blocks += [_Block()] if blocks[-1].statements else []
            labels[label[1]] = len(blocks) - 1
            continue
        blocks[-1].statements.append(statement)
        if _GUARD.sub(r"\2", statement).startswith(_ENDS):
            blocks.append(_Block())
    for i, block in enumerate(blocks):
        goes_on = i + 1 < len(blocks)
        for statement in block.statements:
            guard = _GUARD.match(statement)
            plain = statement if guard is None else guard[2]
            _note(block, plain, set() if guard is None else {guard[1]})
            if plain.startswith(_ENDS):
                goes_on = goes_on and guard is not None
                block.leads_to += [labels[name] for name in re.findall(r"\$\w+", plain) if name in labels]
        block.leads_to += [i + 1] if goes_on else []
    return blocks


def _statements(body: str) -> Iterator[str]:
    for statement in _STATEMENT.split(re.sub(r"//[^\n]*", "", body)):
        plain = re.sub(r"^[{}\s]+", "", statement).strip()
        if plain and not re.match(r"\.(reg|shared|local|loc|align|pragma)\b", plain):
            yield plain


def _note(block: _Block, statement: str, reads: set[str]) -> None:
    """Records the registers that a statement reads, besides its guard, and writes. Sums of wgmma count as written only:
    the first product of a sum does not read them."""
    operation, operands = (*statement.split(maxsplit=1), "")[:2]
    if operation.startswith((*_WRITE_NOTHING, *_ENDS)) or operands.startswith("["):
        first, rest = "", operands
    elif operands.startswith("{"):
        first, _, rest = operands.partition("}")
    else:
        first, _, rest = operands.partition(",")
    block.reads |= (reads | set(_REGISTER.findall(rest))) - block.writes
    block.writes |= set(_REGISTER.findall(first))


def _reached(blocks: list[_Block], start: int) -> set[int]:
    """Blocks that may run after a block; the block itself if it is in a loop."""
    found: set[int] = set()
    left = [*blocks[start].leads_to]
    while left:
        if (i := left.pop()) not in found:
            found.add(i)
            left += blocks[i].leads_to
    return found


def _live(blocks: list[_Block]) -> set[str]:
    """Registers that some path from the kernel's start reads before it writes them."""
    live: list[set[str]] = [set() for _ in blocks]
    changed = True
    while changed:
        changed = False
        for i in reversed(range(len(blocks))):
            after = set[str]().union(*(live[j] for j in blocks[i].leads_to))
            before = blocks[i].reads | (after - blocks[i].writes)
            changed, live[i] = changed or before != live[i], before
    return live[0]
