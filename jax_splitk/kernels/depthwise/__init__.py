"""Kernel families of depthwise convolutions."""
