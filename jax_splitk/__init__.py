"""Split-k convolution weight gradients and mixed-precision GEMMs for JAX on NVIDIA Hopper."""

from jax_splitk import registration as registration
from jax_splitk.conv import conv_general_dilated as conv_general_dilated
from jax_splitk.conv import conv_wgrad as conv_wgrad
from jax_splitk.explain import explain as explain

registration.register()
