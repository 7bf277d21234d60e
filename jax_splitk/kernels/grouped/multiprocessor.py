"""How thread blocks of the grouped kernels, with one producer warp each, share a multiprocessor."""

SHARED_BYTES = 227 * 1024 - 512  # of a thread block, without barriers and a row of zeros
ALIGNMENT_BYTES = 1024  # of the pipeline
REGISTERS = 16384  # of a quarter of an SM, which has every fourth warp
_SM_SHARED_BYTES = 228 * 1024
_RESERVED_BYTES = 1024 + 512  # of an SM for each thread block, by Hopper and for barriers and a row of zeros


def above(value: int, multiple: int) -> int:
    """The smallest multiple that is not below the value."""
    return -(-value // multiple) * multiple


def fits_registers(consumers: int, registers: int, together: int) -> bool:
    """Whether `together` thread blocks have the registers for `consumers` warps each, with so many a thread."""
    return -(-together * (consumers + 1) // 4) * 32 * registers <= REGISTERS


def registers_refusal(consumers: int, registers: int) -> str | None:
    """Why one thread block does not have the registers for its warps."""
    if fits_registers(consumers, registers, 1):
        return None
    most = REGISTERS // 32 // registers * 4 - 1
    return f"{consumers} warps of {registers} registers a thread; accepted: at most {most} warps"


def blocks_per_sm(shared_bytes: int, consumers: int, registers: int) -> int:
    """Thread blocks of an SM by shared memory and registers; 0 if none fits."""
    by_memory = min(4, _SM_SHARED_BYTES // (shared_bytes + _RESERVED_BYTES))
    return max((n for n in range(1, by_memory + 1) if fits_registers(consumers, registers, n)), default=0)


def pipeline_bytes(together: int) -> int:
    """Most bytes of the pipeline of a thread block that shares an SM with others."""
    return _SM_SHARED_BYTES // together - _RESERVED_BYTES - ALIGNMENT_BYTES
