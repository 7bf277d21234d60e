"""Greedy decoding by a quantized decoder with an MLP and a mixture of experts: 200 tokens are the same with the
epilogues in the products as with separate operations."""

import jax
import numpy as np
import pytest

from tests import decoder
from tests.decoder import Sizes

STEPS = 200
SMALL = Sizes(width=288, hidden=96, heads=2, head=32, experts=4, vocabulary=16, steps=STEPS)
# Layers of the width of gpt-oss-20b's, with few experts: the weights before quantization take 33 MB for each of an
# expert's three matrices, and tests share a GPU's memory.
LARGE = Sizes(width=2880, hidden=2880, heads=16, head=64, experts=8, vocabulary=256, steps=STEPS)
MARGIN = 0.5  # of the next token's logit over all others; the head is trained for 1
DIFFERENCE = 0.05  # the most by which logits differ: separate operations round to bfloat16 more often


def check(sizes: Sizes, implementation: str) -> None:
    assert decoder.implementations(sizes) == {implementation}
    found = decoder.greedy(sizes)
    text, wanted = found["text"]
    for name in ("fused", "apart"):
        tokens, logits = found[name]
        np.testing.assert_array_equal(tokens, text, err_msg=name)
        others = np.where(wanted == 1, -np.inf, logits).max(1)
        assert (logits[np.arange(len(text)), text] - others).min() > MARGIN
    difference = np.abs(found["fused"][1] - found["apart"][1]).max()
    assert 0 < difference < DIFFERENCE


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="these are the CPU's paths")
def test_200_tokens() -> None:
    check(SMALL, "host")


@pytest.mark.gpu
def test_200_tokens_by_kernels() -> None:
    check(LARGE, "cutlass")
