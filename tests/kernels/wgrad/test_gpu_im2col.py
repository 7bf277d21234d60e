"""The Hopper weight gradient on a GPU: exactness, accuracy, determinism, replay, concurrency, errors."""

import dataclasses
import threading
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

import jax_splitk
from benchmarks import cases
from jax_splitk import _ffi
from jax_splitk.kernels.device import split_k
from jax_splitk.kernels.wgrad import im2col
from jax_splitk.problems.conv_wgrad import ConvWgradProblem, conv_output_spatial
from jax_splitk.runtime.target import target_for
from tests import float64, gpu_wgrad, poison
from tests.gpu_wgrad import error, integers, normals, xla

pytestmark = pytest.mark.gpu

LEGAL = [case for case in cases.WGRAD_CASES if im2col.FAMILY.refusal(case.problem()) is None]
OUT_DTYPES = ("bfloat16", "float32")
ODD_TILES = (((128, 128), False), ((64, 192), True), ((192, 64), False))
ODD_CHANNELS = next(case for case in cases.SMALL_CASES if case.name == "c136k200")
SIXTEEN_BITS = [
    dataclasses.replace(ODD_CHANNELS, in_channels=c, out_channels=k, dtype="float16").problem()
    for c, k in ((24, 136), (136, 200), (72, 8))
]


def device_code():
    image, matrix = LEGAL[2], LEGAL[0]
    half = dataclasses.replace(image, dtype="float16").problem()
    sources = {im2col.FAMILY.source(image.problem("float32"), variant) for variant in im2col.variants()}
    for variant in im2col.variants():
        sources |= {im2col.FAMILY.source(p, config) for p in SIXTEEN_BITS for config in whole_and_split(p, variant)}
    sources |= {im2col.FAMILY.source(p, config) for p in SPATIAL for config in SPATIAL_CONFIGS}
    sources |= {im2col.FAMILY.source(p, config) for p in TURNS for config in turns(p)}
    sources |= {im2col.FAMILY.source(case.problem(out), chosen(case, out)) for case in LEGAL for out in OUT_DTYPES}
    for tile, swap in ODD_TILES:
        config = im2col.Config(*tile, im2col.max_stages(*tile), swap, 1)
        sources |= {im2col.FAMILY.source(p, config) for p in (half, image.problem(), matrix.problem())}
    return sources


def spatial(
    batch: int,
    size: tuple[int, ...],
    kernel: tuple[int, ...],
    channels: tuple[int, int],
    *,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    out_dtype: str = "float32",
) -> ConvWgradProblem:
    """A problem of any rank; numbers stand for the same in each dimension."""
    rank = len(size)
    stride, dilation = ((v,) * rank if isinstance(v, int) else v for v in (stride, dilation))
    padding = ((padding, padding),) * rank if isinstance(padding, int) else padding
    ones = (1,) * rank
    out = conv_output_spatial(size, kernel, stride, padding, ones, dilation)
    return ConvWgradProblem(
        batch, size, out, kernel, *channels, stride, padding, ones, dilation, groups, "bfloat16", out_dtype
    )


SPATIAL = (
    spatial(3, (100,), (3,), (72, 136), padding=1),
    spatial(5, (201,), (7,), (64, 64), stride=2, padding=((5, 1),), dilation=3),
    spatial(2, (7, 8, 9), (3, 3, 3), (72, 136), padding=1),
    spatial(
        3, (11, 6, 10), (2, 3, 1), (24, 200), stride=(2, 1, 3), padding=((1, 0), (2, 1), (0, 4)), dilation=(3, 2, 1)
    ),
    spatial(
        1, (40, 3, 5), (5, 1, 2), (64, 8), stride=(1, 2, 1), padding=((16, 16), (0, 0), (-1, 1)), dilation=(7, 1, 1)
    ),
    spatial(2, (6, 9, 8), (1, 3, 3), (64, 64), padding=((0, 0), (1, 1), (1, 1))),
    spatial(2, (9, 6, 8), (3, 1, 1), (136, 64), padding=((2, 0), (0, 0), (0, 0))),
    spatial(2, (5, 6, 7), (1, 1, 1), (72, 200)),
    spatial(3, (12, 9), (1, 5), (72, 64), padding=((0, 0), (2, 2))),
    spatial(2, (9, 11), (3, 3), (128, 384), padding=1, groups=2),
    spatial(2, (9, 11), (1, 1), (192, 192), groups=3),
    spatial(2, (4, 9, 5), (3, 2, 3), (256, 128), padding=1, groups=2),
)
SPATIAL_CONFIGS = (
    im2col.Config(64, 64, 8, False, 1),
    im2col.Config(128, 128, 5, True, 3),
    im2col.Config(192, 64, 5, False, 5),
    im2col.Config(64, 256, 5, False, 2),
    im2col.Config(256, 128, 4, True, 1),
)

# Matrix products, whose splits take turns: the last block is of 11, 9, 62 and 2 pixels, and splits differ by a block.
TURNS = (
    spatial(1, (5003,), (1,), (64, 200)),
    spatial(3, (17, 19), (1, 1), (136, 72), out_dtype="bfloat16"),
    spatial(2, (33, 31), (1, 1), (192, 192), groups=3),
    spatial(1, (2, 5, 13), (1, 1, 1), (24, 8), out_dtype="float16"),
)
TURNS_CONFIGS = (
    im2col.Config(64, 64, 8, True, 27),
    im2col.Config(64, 64, 8, False, 3),
    im2col.Config(64, 64, 6, False, 4),
    im2col.Config(128, 64, 8, False, 8),
    im2col.Config(256, 64, 5, True, 5),
    im2col.Config(64, 256, 5, False, 2),
)


def turns(problem):
    configs = [with_splits(problem, given, given.splits) for given in TURNS_CONFIGS]
    return [config for config in configs if im2col.FAMILY.refusal(problem, config) is None]


def ours(case, out_dtype=None, **options):
    return jax.jit(
        lambda lhs, g: jax_splitk.conv_wgrad(
            lhs, g, case.rhs_shape, **case.lax_arguments(), preferred_element_type=out_dtype, **options
        )
    )


def through_lax(case):
    def wgrad(lhs, g):
        forward = lambda rhs: lax.conv_general_dilated(lhs, rhs, **case.lax_arguments())  # noqa: E731
        return jax.linear_transpose(forward, jax.ShapeDtypeStruct(case.rhs_shape, lhs.dtype))(g)[0]

    return jax.jit(wgrad)


def chosen(case, out_dtype=None):
    """The family's best by its model."""
    problem, target = case.problem(out_dtype), target_for("cuda")
    return min(im2col.FAMILY.candidates(problem, target), key=lambda c: im2col.FAMILY.estimate(problem, c, target))


@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
@pytest.mark.parametrize("case", LEGAL, ids=lambda case: case.name)
def test_suite_is_exact_on_integers(case, out_dtype):
    gpu_wgrad.check_exact(im2col.FAMILY, case.problem(out_dtype), [chosen(case, out_dtype)])


@pytest.mark.parametrize("case", LEGAL, ids=lambda case: case.name)
def test_suite_is_as_accurate_as_xla(case):
    lhs, g = normals(case)
    problem = case.problem()
    exact = float64.conv_wgrad(problem, lhs, g)
    mine = error(ours(case, config=chosen(case))(lhs, g), exact)
    theirs = error(through_lax(case)(lhs, g), exact)
    assert mine <= 2 * theirs, (mine, theirs)
    # With nothing rounded at the end what is left is the tensor cores' fp32 accumulation, XLA's as ours.
    unrounded = case.problem("float32")
    mine = error(ours(case, "float32", config=chosen(case, "float32"))(lhs, g), exact)
    theirs = error(xla(unrounded)(lhs, g), exact)
    assert mine <= 2 * theirs, (mine, theirs)


def with_splits(problem, variant, splits):
    return dataclasses.replace(variant, splits=split_k.whole_splits(im2col.k_tiles(problem), splits))


def whole_and_split(problem, variant):
    """A single split, two of them, and a whole tile before tiles that are split."""
    split = with_splits(problem, variant, 2)
    found = (variant, split, dataclasses.replace(split, whole_tiles=1))
    return [config for config in found if im2col.FAMILY.refusal(problem, config) is None]


@pytest.mark.parametrize("variant", list(im2col.variants()), ids=str)
@pytest.mark.parametrize("splits", [1, 3, 16])
def test_every_variant_is_exact(variant, splits):
    long = next(c for c in LEGAL if c.batch == 8 and c.in_channels == 64 and c.kernel == (3, 3))
    for shape in (ODD_CHANNELS, next(c for c in cases.SMALL_CASES if c.in_channels == 72), long):
        problem = shape.problem("float32")
        gpu_wgrad.check_exact(im2col.FAMILY, problem, [with_splits(problem, variant, splits)], seed=splits)


@pytest.mark.parametrize("variant", list(im2col.variants()), ids=str)
def test_every_variant_is_exact_in_16_bits(variant):
    """Such results leave the registers by a way of their own."""
    configs = {problem: whole_and_split(problem, variant) for problem in SIXTEEN_BITS}
    assert any(configs.values())
    for problem, legal in configs.items():
        gpu_wgrad.check_exact(im2col.FAMILY, problem, legal)


@pytest.mark.parametrize("problem", SPATIAL, ids=str)
def test_ranks_and_groups_are_exact(problem):
    configs = [with_splits(problem, given, given.splits) for given in SPATIAL_CONFIGS]
    legal = [config for config in configs if im2col.FAMILY.refusal(problem, config) is None]
    assert len(legal) >= 3
    gpu_wgrad.check_exact(im2col.FAMILY, problem, legal)


@pytest.mark.parametrize("problem", TURNS, ids=str)
def test_splits_that_take_turns_are_exact(problem):
    configs = turns(problem)
    assert len(configs) >= 4
    assert all(im2col.takes_turns(problem, config) for config in configs)
    gpu_wgrad.check_exact(im2col.FAMILY, problem, configs)


@pytest.mark.parametrize("config", turns(TURNS[0]), ids=str)
def test_splits_that_take_turns_give_the_same_bits_and_keep_nan_in_its_channels(config):
    problem = TURNS[0]
    gpu_wgrad.check_repeats(gpu_wgrad.ours(im2col.FAMILY, problem, config), *normals(problem, seed=3))
    lhs, g = integers(problem)
    expected = float64.conv_wgrad(problem, lhs, g).astype(np.float32)
    lhs, g = lhs.at[0, 5002, 7].set(jnp.nan), g.at[0, 64, 197].set(jnp.inf)
    out = poison.run(im2col.FAMILY.plan(problem, config), problem, lhs, g)
    bad = np.zeros(out.shape, bool)
    bad[..., 7, :] = bad[..., 197] = True
    assert not np.isfinite(out[bad]).any()
    np.testing.assert_array_equal(out[~bad], expected[~bad])


@pytest.mark.parametrize("config", SPATIAL_CONFIGS, ids=str)
def test_nan_and_infinity_stay_with_their_channels(config):
    problem = ODD_CHANNELS.problem("float32")
    config = with_splits(problem, config, config.splits)
    assert im2col.FAMILY.refusal(problem, config) is None
    lhs, g = integers(ODD_CHANNELS)
    expected = float64.conv_wgrad(problem, lhs, g).astype(np.float32)
    out = poison.run(
        im2col.FAMILY.plan(problem, config), problem, lhs.at[:, 3, 4, 130].set(jnp.nan), g.at[..., 197].set(jnp.inf)
    )
    bad = np.isnan(out) | np.isinf(out)
    assert bad[..., 130, :].any()
    assert bad[..., 197].all()
    bad_only = np.zeros_like(bad)
    bad_only[..., 130, :] = bad_only[..., 197] = True
    np.testing.assert_array_equal(out[~bad_only], expected[~bad_only])


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("tile", [(64, 64), (64, 192), (128, 128), (192, 192), (128, 256), (256, 128)], ids=str)
def test_split_tail_is_exact(tile, swap):
    case = dataclasses.replace(next(c for c in cases.SMALL_CASES if c.name == "c320k320"), batch=6)
    for out_dtype, whole, wanted in (("float32", 1, 2), ("bfloat16", 7, 3)):
        problem = case.problem(out_dtype)
        splits = split_k.whole_splits(im2col.k_tiles(problem), wanted)
        config = im2col.Config(*tile, im2col.max_stages(*tile), swap, splits, whole_tiles=whole)
        gpu_wgrad.check_exact(im2col.FAMILY, problem, [config], seed=whole)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", cases.SMALL_CASES, ids=lambda case: case.name)
def test_odd_shapes_are_exact(case, dtype):
    case = dataclasses.replace(case, dtype=dtype)
    for seed, ((tile, swap), splits) in enumerate(zip(ODD_TILES, (1, 100, 5), strict=True)):
        problem = case.problem(dtype if seed else "float32")
        stages = im2col.max_stages(*tile)
        config = im2col.Config(*tile, stages, swap, split_k.whole_splits(im2col.k_tiles(problem), splits))
        gpu_wgrad.check_exact(im2col.FAMILY, problem, [config], seed=seed)


@pytest.mark.parametrize("case", LEGAL[2:16:3], ids=lambda case: case.name)
def test_bitwise_the_same_over_100_runs(case):
    gpu_wgrad.check_repeats(ours(case, "float32", config=chosen(case, "float32")), *normals(case, seed=1))


@pytest.mark.parametrize("config", SPATIAL_CONFIGS[2:], ids=str)
def test_gives_bitwise_the_same(config):
    problem = ODD_CHANNELS.problem("float32")
    config = with_splits(problem, config, config.splits)
    gpu_wgrad.check_repeats(gpu_wgrad.ours(im2col.FAMILY, problem, config), *normals(ODD_CHANNELS, seed=2))


@pytest.mark.parametrize(
    "config",
    [
        im2col.Config(128, 64, 8, True, 7),
        im2col.Config(128, 128, 7, False, 1),
    ],
    ids=str,
)
def test_replayed_in_a_command_buffer_with_moving_buffers(config):
    """Six calls in one jitted function are recorded by XLA and stay right when every address changes."""
    case = next(c for c in LEGAL if c.batch == 8 and c.in_channels == 128)

    @jax.jit
    def six(lhs, g):
        out = 0
        for i in range(6):
            out = out + jax_splitk.conv_wgrad(
                lhs * (i + 1), g, case.rhs_shape, **case.lax_arguments(), preferred_element_type="float32",
                config=config,
            )  # fmt: skip
        return out

    before = _ffi.launch_counts()
    kept = []
    for i in range(30):
        kept.append(jnp.zeros((i % 7 + 1, 1 << 18)) + i)  # moves the allocator
        if i % 5 == 0:
            kept = kept[-2:]
        lhs, g = integers(case, seed=i, limit=1)
        expected = 21 * float64.conv_wgrad(case.problem(), lhs, g)
        np.testing.assert_array_equal(np.asarray(six(lhs, g)), expected.astype(np.float32))
    after = _ffi.launch_counts()
    print({key: after[key] - before[key] for key in after})
    assert after["captured"] > before["captured"], (before, after)
    # XLA shares the six workspaces where it can, and reports them.
    temp = six.lower(lhs, g).compile().memory_analysis().temp_size_in_bytes
    assert temp >= im2col.FAMILY.workspace_bytes(case.problem("float32"), config)


def test_two_executables_at_once():
    pair = [LEGAL[7], next(c for c in LEGAL if c.batch == 8)]
    inputs = [integers(case, seed=5) for case in pair]
    runs = [ours(case, "float32", config=chosen(case, "float32")) for case in pair]
    expected = [
        float64.conv_wgrad(case.problem(), *xs).astype(np.float32) for case, xs in zip(pair, inputs, strict=True)
    ]
    wrong = []

    def worker(i):
        for _ in range(40):
            if not np.array_equal(np.asarray(runs[i](*inputs[i])), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=worker, args=(i,)) for i in (0, 1, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_workspace_is_visible():
    case = next(c for c in LEGAL if c.batch == 8 and c.in_channels == 64 and c.kernel == (3, 3))
    lhs, g = normals(case)
    problem = case.problem()
    config = im2col.Config(64, 192, 4, True, split_k.whole_splits(im2col.k_tiles(problem), 40))
    compiled = ours(case, config=config).lower(lhs, g).compile()
    assert compiled.memory_analysis().temp_size_in_bytes >= im2col.FAMILY.workspace_bytes(problem, config)


def test_errors_are_python_errors():
    case = LEGAL[2]
    lhs, g = normals(case)
    bad = im2col.Config(128, 999, 4, False, 1)
    with pytest.raises(ValueError, match=r"tile 128x999; accepted: 64x64"):
        ours(case, config=bad)(lhs, g)
    with pytest.raises(ValueError, match=r"workspace_limit_bytes=-1"):
        ours(case, workspace_limit_bytes=-1)(lhs, g)
    config = im2col.Config(64, 192, 4, True, 44)
    with pytest.raises(ValueError, match=r"needs \d+ bytes of workspace .*workspace_limit_bytes=1000"):
        ours(case, config=config, workspace_limit_bytes=1000)(lhs, g)
    with pytest.raises(NotImplementedError, match=r"wgrad_im2col: dtype float32; accepted: bfloat16, float16"):
        ours(case, config=config)(lhs.astype(jnp.float32), g.astype(jnp.float32))


def test_a_plan_for_other_buffers_is_refused():
    case = next(c for c in LEGAL if c.batch == 8)
    problem = case.problem()
    call = im2col.FAMILY.plan(problem, chosen(case)).custom_call()
    lhs, g = normals(case)
    out = jax.ShapeDtypeStruct(problem.out_shape, jnp.bfloat16)
    short = jax.ShapeDtypeStruct((call.workspace_bytes + 512,), np.uint8)
    run = jax.jit(lambda *xs: jax.ffi.ffi_call(call.target, (out, short))(*xs, **call.attributes)[0])
    with pytest.raises(Exception, match=r"INVALID_ARGUMENT.*buffer 3 has \d+ bytes; the plan expects \d+"):
        jax.block_until_ready(run(lhs, g))
