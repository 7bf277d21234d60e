"""Rounding of float32 to tf32."""

import numpy as np


def nearest(x: np.ndarray) -> np.ndarray:
    """Finite values, rounded to 10 bits after the leading one, ties to even; float64."""
    bits = x.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1))) & np.uint32(0xFFFFE000)
    return rounded.view(np.float32).astype(np.float64)
