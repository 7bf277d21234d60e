from jax_splitk.kernels.wgrad.refusals import *
