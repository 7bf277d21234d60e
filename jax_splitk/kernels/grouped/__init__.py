"""Kernel families of convolutions with few channels per group."""
