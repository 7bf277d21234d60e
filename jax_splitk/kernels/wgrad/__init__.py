"""Kernel families of the convolution weight gradient."""
