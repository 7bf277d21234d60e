"""The register file, shared out by role: a warpgroup of producers, which compute addresses or convert what they load,
and consumer warpgroups.

The instruction for it (setmaxnreg) wants multiples of 8. Device code has a thread's as PRODUCER_REGS and CONSUMER_REGS.
"""

# By (thread blocks on an SM, consumer warpgroups): a producer thread's and a consumer thread's.
_SHARES = {
    (1, 1): (104, 240),
    (1, 2): (88, 208),
    (1, 3): (56, 152),
    (1, 4): (64, 104),
    (2, 1): (72, 184),
    (2, 2): (64, 88),
    (2, 3): (40, 72),
}


def consumer_registers(blocks_per_sm: int, consumers: int) -> int:
    """Of a thread; 0 where there are no such shares."""
    return _SHARES.get((blocks_per_sm, consumers), (0, 0))[1]


def share_macros(blocks_per_sm: int, consumers: int) -> dict[str, int]:
    producer, consumer = _SHARES[blocks_per_sm, consumers]
    return {"PRODUCER_REGS": producer, "CONSUMER_REGS": consumer}
