"""Division in device code by a number that the host knows. The host's side of `device/divisor.cuh`."""


def divisor(value: int) -> tuple[int, int, int]:
    """`struct Divisor`: the value, and (multiplier, shift) that divide any number below 2**31. By 0 nothing is divided.

    2**(shift - 31) is the least power of 2 that is at least the value. The multiplier is 2**shift / value, rounded up,
    so that n * multiplier / 2**shift exceeds n / value by less than 1 / value.
    """
    by = max(1, value)
    shift = 31 + (by - 1).bit_length()
    multiplier = -(-(1 << shift) // by)  # 2**31 to 2**32 - 1: the struct's words are signed
    return value, multiplier - (1 << 32), shift
