"""Kernel families of the matrix product."""
