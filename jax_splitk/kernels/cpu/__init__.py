"""Kernel families for the CPU."""
