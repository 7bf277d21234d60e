"""Shared by kernels of several operations: device headers, and their host side."""
