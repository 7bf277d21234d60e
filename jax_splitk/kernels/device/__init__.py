"""What kernels of several operations share: device headers and the host's side of them."""
