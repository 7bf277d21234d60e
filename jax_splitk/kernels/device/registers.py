"""Divides the register file among roles: a warpgroup of producers, which compute addresses or convert loaded data, and
consumer warpgroups.

The instruction setmaxnreg needs multiples of 8. PRODUCER_REGS and CONSUMER_REGS in device code are the registers of a
thread.
"""

# For (thread blocks on an SM, consumer warpgroups): registers of a producer's and of a consumer's thread.
_SHARES = {
    (1, 1): (104, 240),
    (1, 2): (88, 208),
    (1, 3): (56, 152),
    (1, 4): (64, 104),
    (2, 1): (72, 184),
    (2, 2): (64, 88),
    (2, 3): (40, 72),
}


# Registers that a WGMMA needs beside its sums. ptxas compiles it for the registers that a thread has at launch.
_WGMMA_REGISTERS = 32


def wgmma_fits(columns: int, blocks_per_sm: int, consumers: int) -> bool:
    """Whether a WGMMA of so many columns compiles, where a thread block has a warpgroup of producers beside the
    consumers."""
    at_launch = 65536 // (blocks_per_sm * 128 * (consumers + 1)) // 8 * 8
    return columns // 2 + _WGMMA_REGISTERS <= at_launch


def consumer_registers(blocks_per_sm: int, consumers: int) -> int:
    """Registers of a consumer's thread; 0 if there is no entry."""
    return _SHARES.get((blocks_per_sm, consumers), (0, 0))[1]


def share_macros(blocks_per_sm: int, consumers: int) -> dict[str, int]:
    producer, consumer = _SHARES[blocks_per_sm, consumers]
    return {"PRODUCER_REGS": producer, "CONSUMER_REGS": consumer}
