from jax_splitk.kernels.wgrad.refusals import *  # noqa: F403
