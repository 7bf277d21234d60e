"""Two families for the weight gradients of 1x1 convolutions. Importing this package registers them."""

from jax_splitk import kernels

from . import cuda, host

kernels.register("conv_wgrad", cuda.FAMILY)
kernels.register("conv_wgrad", host.FAMILY)
