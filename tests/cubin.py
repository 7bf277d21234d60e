"""Reads cubins without a disassembler: kernels, instructions, and ptxas's report. A cubin is an ELF64 file. Only these
NVIDIA sections are used: `.text.<kernel>` holds 16-byte instructions whose low twelve bits are the opcode and whose
second word is the immediate, and `.nv.shared.<kernel>` is as large as the kernel's static shared memory with the KiB
that Hopper reserves in each thread block. A load may name a scoreboard, for which later instructions wait
(`_SCOREBOARD`, `_WAITS`).
"""

import collections
import dataclasses
import re
import struct

HGMMA = 0x9F0  # a warpgroup's matrix product
HGMMA_REGISTERS = 0xDF0  # the same with A in registers
QGMMA, QGMMA_REGISTERS = 0x9F3, 0xDF3  # both of e4m3
HMMA = 0x23C  # a warp's matrix product
PRODUCTS = {HGMMA, HGMMA_REGISTERS, QGMMA, QGMMA_REGISTERS, HMMA}
LDMATRIX, STMATRIX = 0x83B, 0x844
ARRIVE = 0x9A7  # at a barrier in shared memory
MEMBAR = 0x992
GENERIC_LOAD, GENERIC_STORE = 0x980, 0x985
GLOBAL_STORE = 0x986
UBLKCP = 0x3BA  # a bulk copy into shared memory
USETMAXREG = 0x9C8  # a warpgroup takes or gives registers; the immediate is how many a thread has from then on
_SHT_NOBITS = 8
_SCOREBOARD, _WAITS = 46, 52  # bits of the second half: the number of one, 7 for none, and a bit for each of six
_WIDTHS = (1, 1, 2, 2, 4, 8, 16)  # of an access to memory, by its three bits


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One `__global__` function as compiled."""

    shared_bytes: int
    instructions: tuple[bytes, ...]

    @property
    def opcodes(self) -> collections.Counter[int]:
        return collections.Counter(int.from_bytes(i[:2], "little") & 0xFFF for i in self.instructions)

    def widths(self, opcode: int) -> collections.Counter[int]:
        """Bytes of a lane that each access to memory with that opcode has."""
        words = [struct.unpack_from("<QQ", i) for i in self.instructions]
        return collections.Counter(_WIDTHS[high >> 9 & 7] for low, high in words if low & 0xFFF == opcode)

    def immediates(self, opcode: int) -> list[int]:
        """The immediate of each instruction with that opcode, in order."""
        words = [struct.unpack_from("<HHI", i) for i in self.instructions]
        return [immediate for low, _, immediate in words if low & 0xFFF == opcode]

    def loads_at_arrivals(self) -> list[int]:
        """For each arrival at a barrier, how many ldmatrix before it may still be under way, because no instruction has
        waited for them."""
        found, under_way, without = [], [0] * 6, 0
        for low, high in (struct.unpack_from("<QQ", i) for i in self.instructions):
            opcode, board = low & 0xFFF, high >> _SCOREBOARD & 7
            under_way = [0 if high >> (_WAITS + i) & 1 else count for i, count in enumerate(under_way)]
            if opcode == MEMBAR:
                under_way, without = [0] * 6, 0
            elif opcode == ARRIVE:
                found.append(sum(under_way) + without)
            elif opcode == LDMATRIX:
                without += 1
                if board < 6:
                    under_way[board] += without
                    without = 0
        return found


@dataclasses.dataclass(frozen=True)
class Report:
    """What ptxas said of one kernel."""

    registers: int
    stack_bytes: int
    spill_bytes: int


def _sections(image: bytes) -> dict[str, bytes]:
    if image[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"not a little-endian ELF64 file: {image[:16]!r}")
    (table,) = struct.unpack_from("<Q", image, 0x28)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", image, table + i * entry_bytes) for i in range(count)]
    names_at = headers[names_index][4]
    found = {}
    for name_at, kind, _, _, offset, size in headers:
        start = names_at + name_at
        name = image[start : image.index(b"\0", start)].decode()
        found[name] = bytes(size) if kind == _SHT_NOBITS else image[offset : offset + size]
    return found


def kernels(image: bytes) -> dict[str, Kernel]:
    """Every kernel of a cubin by name."""
    sections = _sections(image)
    found = {}
    for section, code in sections.items():
        if section.startswith(".text."):
            name = section.removeprefix(".text.")
            instructions = tuple(code[i : i + 16] for i in range(0, len(code), 16))
            found[name] = Kernel(len(sections.get(f".nv.shared.{name}", b"")), instructions)
    return found


def reports(log: str) -> dict[str, Report]:
    """ptxas's report (`--ptxas-options=-v`) on every kernel."""
    found = {}
    for part in log.split("Compiling entry function '")[1:]:
        registers = re.search(r"Used (\d+) registers", part)
        stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        if registers is None or stack is None:
            raise ValueError(f"ptxas's report is not understood: {part}")
        sizes = [int(n) for n in stack.groups()]
        found[part[: part.index("'")]] = Report(int(registers[1]), sizes[0], sizes[1] + sizes[2])
    return found


def warnings(log: str, file: str) -> list[str]:
    """The log's lines that warn of `file`'s code: the front end's, which name it, and ptxas's, which name no file."""
    front_end = re.compile(rf"{re.escape(file)}\(\d+\): (warning|error)")
    ptxas = re.compile(r"ptxas\s*(warning|fatal|error)|Potential Performance Loss", re.IGNORECASE)
    return [line for line in log.splitlines() if front_end.search(line) or ptxas.search(line)]
