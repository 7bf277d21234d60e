"""What tuning says of depthwise weight gradients on the CUDA cores, on a GPU."""

import pytest

import jax_splitk
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from tests.kernels.wgrad.test_gpu_families import DEPTHWISE_ANY

pytestmark = pytest.mark.gpu

COPY_BYTES_PER_SECOND = 3.8e12  # of an H200


@pytest.mark.parametrize("p", DEPTHWISE_ANY, ids=str)
def test_a_measurement_chooses_between_it_and_xla(p: ConvWgradProblem) -> None:
    tuned = jax_splitk.tune_problems([p], seconds=8, again=True)
    ((_, entry),) = tuned.entries
    us = entry.us(entry.choice)
    assert us is not None
    print(entry.choice, us, f"{p.bytes_moved / COPY_BYTES_PER_SECOND / us * 1e6:.0%} of the copy rate", p)
    assert not [m for m in entry.measurements if m.error], "candidates that failed"
