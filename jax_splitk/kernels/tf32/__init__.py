"""Kernel families of float32 on the tf32 tensor cores."""
