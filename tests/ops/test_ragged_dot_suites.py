"""Cases that other projects test of `lax.ragged_dot` (jax's RaggedTest, tokamax's RaggedDotTestBase), over ours.

`tests/other_suites.py` runs these projects' own tests.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

import jax_splitk
from tests.problems import generator, on_device, ones

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="these are the CPU's paths")

Numbers = lax.RaggedDotDimensionNumbers
_PLAIN = (((1,), (1,)), ((), ()))
# Shapes of lhs, rhs and group_sizes, and dimension numbers, which do not belong together.
_WRONG = [
    ((11, 5), (3, 5, 7), (3,), Numbers(_PLAIN, [0, 1], [0])),
    ((11, 5), (3, 5, 7), (3,), Numbers(_PLAIN, [2], [0])),
    ((11, 5), (3, 5, 7), (2, 3), Numbers(_PLAIN, [0], [0])),
    ((19, 17, 11, 5), (3, 19, 5, 7), (19, 11, 3), Numbers((((3,), (2,)), ((0,), (1,))), [2], [0])),
    ((19, 11, 17, 5), (19, 17, 5, 7), (19, 11, 3), Numbers((((2, 3), (1, 2)), ((0,), (0,))), [3], [])),
    ((17, 19, 11, 5), (17, 19, 5, 7), (19, 3), Numbers((((3,), (2,)), ((0, 1), (0, 1))), [1], [])),
    ((19, 11, 5), (19, 5, 7), (19, 3), Numbers((((2,), (1,)), ((0,), (0,))), [1], [0])),
    ((11, 3), (3, 3, 7), (3,), Numbers(_PLAIN, [0], [1])),
    ((11, 5), (3, 5, 7), (2,), Numbers(_PLAIN, [0], [0])),
    ((2, 11, 5), (3, 2, 5, 7), (3,), Numbers((((2,), (2,)), ((0,), (1,))), [0], [0])),
    ((11, 5), (3, 5, 7), (3,), Numbers(_PLAIN, [1], [0])),
    ((11, 5), (5, 7), (3,), Numbers((((1,), (0,)), ((), ())), [0], [])),
]


@pytest.mark.parametrize("i", range(len(_WRONG)))
@pytest.mark.parametrize("offset", [False, True])
def test_dimensions_are_refused_in_laxs_words(i: int, offset: bool) -> None:
    lhs, rhs, sizes = ones(_WRONG[i][0]), ones(_WRONG[i][1]), ones(_WRONG[i][2], jnp.int32)
    with pytest.raises(TypeError) as theirs:
        lax.ragged_dot_general(lhs, rhs, sizes, _WRONG[i][3])
    with pytest.raises(TypeError) as ours:
        more: dict[str, Any] = {"group_offset": jnp.array([0])} if offset else {}
        jax_splitk.ragged_dot_general(lhs, rhs, sizes, _WRONG[i][3], **more)
    assert offset or str(ours.value) == str(theirs.value)


def _dense(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    ends, row = jnp.cumsum(sizes), jnp.arange(x.shape[0])[:, None]
    member = ((row >= ends - sizes) & (row < ends)).astype(x.dtype)
    return jnp.einsum("mg,mk,gkn->mn", member, x, w)


def _operands(seed: int, m: int, k: int, n: int, groups: int, dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array]:
    rng = generator(seed)
    x, w = (on_device(rng.integers(-2, 3, shape), dtype) for shape in ((m, k), (groups, k, n)))
    return x, w


def test_every_pattern_of_empty_groups() -> None:
    x, w = _operands(480, 64, 8, 4, 8)
    sizes = on_device(generator(481).integers(0, 8, 8), jnp.int32)
    patterns = jnp.unpackbits(jnp.arange(256, dtype=jnp.uint8)[:, None], axis=1) * sizes
    ours, theirs = (jax.jit(jax.vmap(f, (None, None, 0)))(x, w, patterns) for f in (jax_splitk.ragged_dot, _dense))
    np.testing.assert_array_equal(ours, theirs)


def test_small_and_odd_shapes() -> None:
    shapes = [(64, 4, 3, 1), (64, 9, 8, 2), (5, 4, 3, 1), (5, 4, 3, 2), (9, 4, 3, 1), (10, 9, 8, 2), (16, 4, 3, 2)]
    rng, cases = generator(482), []
    for (m, k, n, groups), dtype in itertools.product(shapes, ("bfloat16", "float32")):
        cuts = np.sort(rng.choice(m, groups - 1))
        cases.append((*_operands(483, m, k, n, groups, dtype), jnp.asarray(np.diff([0, *cuts, m]), jnp.int32)))

    def results(function: Callable[..., jax.Array]) -> list[jax.Array]:
        return [function(*case) for case in cases]

    ours, theirs = (jax.jit(lambda f=f: results(f))() for f in (jax_splitk.ragged_dot, _dense))
    for case, one, other in zip(cases, ours, theirs, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other, err_msg=str(case[0].shape))


@pytest.mark.parametrize("activation", [jax.nn.relu, jnp.tanh], ids=["relu", "tanh"])
def test_gradients_behind_an_activation(activation: Any) -> None:
    x, w = _operands(484, 128, 16, 32, 8)
    sizes = jnp.full(8, 16, jnp.uint32)  # as tokamax has them

    def results(function: Callable[..., jax.Array]) -> Any:
        out, back = jax.vjp(lambda x, w: activation(function(x, w, sizes)), x / 16, w)
        return out, back(jax.nn.standardize(out))

    ours, theirs = (jax.jit(lambda f=f: results(f))() for f in (jax_splitk.ragged_dot, _dense))
    for one, other in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_an_algorithm_as_precision_is_laxs() -> None:
    x, w = _operands(485, 12, 4, 6, 3, jnp.bfloat16)
    given = {"precision": lax.DotAlgorithmPreset.BF16_BF16_F32, "preferred_element_type": jnp.float32}
    sizes = jnp.array([4, 0, 8])
    np.testing.assert_array_equal(jax_splitk.ragged_dot(x, w, sizes, **given), lax.ragged_dot(x, w, sizes, **given))
