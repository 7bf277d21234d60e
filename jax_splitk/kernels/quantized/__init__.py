"""Kernel families of the product with a quantized weight."""
