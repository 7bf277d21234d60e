"""Kernel families of the forward pass of a convolution and of the gradient of its input."""
