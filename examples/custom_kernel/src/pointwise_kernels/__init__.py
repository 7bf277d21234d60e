"""Two families for the weight gradients of 1x1 convolutions. Importing this package registers them."""

from jax_splitk.kernel_api import register

from . import cuda, host

register("conv_wgrad", cuda.FAMILY)
register("conv_wgrad", host.FAMILY)
