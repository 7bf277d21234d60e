"""Kernel families of dense convolutions, all three passes, and of matrix products: TMA and WGMMA."""
