"""What a family's device code must hold to, run by the emulator."""

from typing import Any

import numpy as np
from jax import numpy as jnp

from jax_splitk.kernels.family import CudaFamily
from jax_splitk.problems.conv_wgrad import ConvProblem
from tests import emulator, float64


def check(family: CudaFamily[Any, Any], p: ConvProblem, config: Any, seed: int = 0) -> None:
    """Exact on integers, whose sums every dtype holds, whatever the order of threads and copies."""
    assert family.refusal(p, config) is None, f"{family.refusal(p, config)}: {p} {config}"
    rng = np.random.default_rng(seed)
    x, y = (rng.integers(-2, 3, shape) for shape in p.operand_shapes)
    expected = float64.ON_HOST[p.op](p, x.astype(float), y.astype(float)).astype(np.float32)
    out = np.empty(p.out_shape, jnp.dtype(p.out_dtype))
    emulator.run(family.plan(p, config), [array.astype(jnp.dtype(p.dtype)) for array in (x, y)], [out], seed)
    np.testing.assert_array_equal(out, expected.astype(out.dtype), err_msg=f"{p} {config}")
