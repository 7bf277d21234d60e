"""Every variant of the Hopper family compiles to sm_90a without what would make it slow. Needs no GPU."""

import dataclasses
import itertools
import time
from collections.abc import Iterator

import pytest

from benchmarks import cases
from jax_splitk.kernels.wgrad import im2col
from jax_splitk.kernels.wgrad.im2col import Config
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime import compiler
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import cubin

REGISTERS_PER_SM = 65536
SHARED_PER_SM = 228 * 1024
MAIN_KERNELS = ("wgrad_partial", "wgrad_direct")


def small(name: str, dtype: str = "bfloat16", out_dtype: str = "float32") -> ConvWgradProblem:
    case = next(case for case in cases.SMALL_CASES if case.name == name)
    return dataclasses.replace(case, dtype=dtype).problem(out_dtype)


def volume() -> ConvWgradProblem:
    """Three spatial dimensions, in each of which the window moves."""
    size, kernel, ones = (6, 6, 6), (3, 3, 3), (1, 1, 1)
    return ConvWgradProblem(2, size, size, kernel, 64, 64, ones, ((1, 1),) * 3, ones, ones, 1, "bfloat16", "float32")


def compilations() -> Iterator[tuple[ConvWgradProblem, Config]]:
    for variant in im2col.variants():
        yield small("plain"), variant
        # Other producers: the tiles with the most boxes need the most registers of both shares that a producer can
        # have (of two and three consumers). The tiled one is the same for both orientations.
        if variant.tile_m + variant.tile_n == 384:
            yield volume(), variant
            if not variant.swap:
                yield small("1x1"), variant
    # A wide tile of each width, in both orientations. The result's type is the epilogue's alone; two-byte ones are
    # stored in other instructions.
    widest = {tile_n: max(m for m, n in im2col.TILES if n == tile_n) for _, tile_n in im2col.TILES}
    outputs = itertools.cycle(("float16", "bfloat16", "float32"))
    for tile_n, tile_m in sorted(widest.items()):
        stages = im2col.max_stages(tile_m, tile_n)
        for swap in (False, True):
            yield small("plain", "float16", next(outputs)), Config(tile_m, tile_n, stages, swap, splits=1)


def tails() -> Iterator[tuple[ConvWgradProblem, Config]]:
    """Plans whose last tiles are split, in both orientations."""
    swaps = itertools.cycle((False, True))
    for tile in ((64, 64), (128, 128), (192, 192), (128, 256), (256, 128)):
        config = Config(*tile, im2col.max_stages(*tile), next(swaps), 2, whole_tiles=5)
        yield small("c320k320", out_dtype="bfloat16"), config


def clusters() -> Iterator[tuple[ConvWgradProblem, Config]]:
    """Plans whose splits are a cluster."""
    outputs = itertools.cycle(("bfloat16", "float32"))
    for tile in ((64, 64), (64, 192), (128, 128), (192, 192), (128, 256), (256, 64)):
        for swap in (False, True):
            config = Config(*tile, im2col.max_stages(*tile), swap, 2)
            yield small("plain", out_dtype=next(outputs)), dataclasses.replace(config, reduction="cluster")


COMPILATIONS = list(dict.fromkeys(compilations()))
TAILS = list(tails())
CLUSTERS = list(clusters())
IDS = [
    f"{v.tile_m}x{v.tile_n}_{v.stages}{'_swap' if v.swap else ''}{'_pair' if v.cluster == 2 else ''}"
    f"_{p.dtype}_{p.out_dtype}{'_tiled' if p.taps == 1 else ''}{'_3d' if p.rank == 3 else ''}"
    for p, v in COMPILATIONS
]


@pytest.fixture(scope="module")
def machine_code() -> dict[compiler.Source, compiler.Compiled]:
    """All of them, compiled in parallel."""
    assert compiler.unavailable() is None, compiler.unavailable()
    sources = list(dict.fromkeys(im2col.source(p, variant) for p, variant in (*COMPILATIONS, *TAILS, *CLUSTERS)))
    start = time.perf_counter()
    compiled = compiler.compile_sources(sources)
    print(f"\n{len(sources)} compilations in {time.perf_counter() - start:.1f} s")
    return dict(zip(sources, compiled, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("problem", "variant"), COMPILATIONS, ids=IDS)
def test_variant_is_good_machine_code(
    problem: ConvWgradProblem, variant: Config, machine_code: dict[compiler.Source, compiler.Compiled]
) -> None:
    source = im2col.source(problem, variant)
    compiled = machine_code[source]
    assert not cubin.warnings(compiled.log, source.file)
    assert not compiled.serialized_wgmma, compiled.log
    assert compiled.spill_bytes == 0, compiled.log

    found, reports = cubin.kernels(compiled.image), cubin.reports(compiled.log)
    blocks = im2col.k_tiles(problem)
    for splits in (1, blocks):
        config = dataclasses.replace(variant, splits=im2col.whole_splits(problem, splits))
        plan = im2col.make_plan(problem, config)
        assert plan.source == source, "the code must not depend on the splits"
        for launch in plan.launches:
            kernel, report = found[launch.kernel], reports[launch.kernel]
            assert (report.stack_bytes, report.spill_bytes) == (0, 0), launch.kernel
            threads, is_main = launch.block[0], launch.kernel in MAIN_KERNELS
            together = config.ctas_per_sm if is_main else 1
            # Registers are allocated by the eight.
            registers = -(-report.registers // 8) * 8
            assert registers * threads * together <= REGISTERS_PER_SM, launch.kernel
            assert (launch.shared_bytes + kernel.shared_bytes) * together <= SHARED_PER_SM, launch.kernel
            products = kernel.opcodes[cubin.HGMMA]
            if not is_main:
                assert products == 0
                continue
            # Each is 16 pixels deep; the loop over a stage is unrolled, and so are a warpgroup's 64-row blocks.
            depth, rows = im2col.BLOCK_K // 16, config.tile_m // 64 // config.consumers
            assert products >= depth * rows
            assert products % (depth * rows) == 0
            # What the roles take of the register file may not exceed what the block was given: it would wait for ever.
            # A single consumer leaves the shares equal.
            roles = sorted(set(kernel.immediates(cubin.USETMAXREG))) or [registers] * 2
            assert len(roles) == 2, roles
            assert (roles[0] == roles[1]) == (config.consumers == 1)
            assert 128 * (roles[0] + config.consumers * roles[1]) <= registers * threads
            assert threads == 128 * (1 + config.consumers)
            accumulators = config.tile_n // 2 * rows
            assert roles[1] > accumulators
    assert set(found) == {*MAIN_KERNELS, "reduce_splits"}


@pytest.mark.slow
@pytest.mark.parametrize(("problem", "config"), [*TAILS, *CLUSTERS], ids=str)
def test_other_splits_are_good_machine_code(
    problem: ConvWgradProblem, config: Config, machine_code: dict[compiler.Source, compiler.Compiled]
) -> None:
    plan = im2col.make_plan(problem, config)
    compiled = machine_code[plan.source]
    assert not cubin.warnings(compiled.log, plan.source.file)
    assert not compiled.serialized_wgmma
    assert compiled.spill_bytes == 0
    found, reports = cubin.kernels(compiled.image), cubin.reports(compiled.log)
    main, *reductions = plan.launches
    assert len(reductions) == 1 - config.in_cluster
    assert {launch.kernel for launch in plan.launches} <= set(found)
    assert reports[main.kernel].registers * main.block[0] * config.ctas_per_sm <= REGISTERS_PER_SM
    assert (main.shared_bytes + found[main.kernel].shared_bytes) * config.ctas_per_sm <= SHARED_PER_SM
    assert all(found[reduction.kernel].opcodes[cubin.HGMMA] == 0 for reduction in reductions)


def test_every_config_that_can_be_chosen_is_compiled() -> None:
    compiled = {im2col.source(p, variant) for p, variant in COMPILATIONS}
    for case in (*cases.WGRAD_CASES, *cases.SMALL_CASES):
        problem = dataclasses.replace(case, dtype="bfloat16").problem("float32")
        if im2col.supports(problem) is None:
            for config in im2col.candidates(problem, DEFAULT_CUDA):
                plain = dataclasses.replace(config, splits=1, reduction="workspace", whole_tiles=0)
                assert im2col.source(small("plain"), plain) in compiled, (case.name, config)


def test_choice_of_compilations_covers_dtypes_widths_and_orientations() -> None:
    seen = {(p.dtype, variant.tile_n, variant.swap) for p, variant in COMPILATIONS}
    widths = {tile_n for _, tile_n in im2col.TILES}
    assert seen == set(itertools.product(("bfloat16", "float16"), widths, (False, True)))
    every = set(itertools.product((1, 2), (2, 3)))
    assert {(variant.cluster, variant.consumers) for p, variant in COMPILATIONS if p.rank == 3} == every
    assert {(variant.cluster, variant.consumers) for p, variant in COMPILATIONS if p.taps == 1} == every
    assert {(p.out_dtype, variant.swap) for p, variant in COMPILATIONS} == set(
        itertools.product(("float32", "bfloat16", "float16"), (False, True))
    )
    assert {config.swap for _, config in TAILS} == {False, True}
    assert {variant.cluster for _, variant in COMPILATIONS} == {1, 2}
    tiles = {(variant.tile_m, variant.tile_n) for _, variant in COMPILATIONS}
    assert tiles == set(im2col.TILES)
    assert {(128, 256), (256, 128), (128, 128), (192, 128)} <= tiles


def compile_text(text: str, monkeypatch: pytest.MonkeyPatch) -> compiler.Compiled:
    monkeypatch.setattr(compiler.Source, "text", lambda self: text)
    return compiler.compile_source(compiler.Source("probe.cu", ()))


def test_a_warning_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compile_text('extern "C" __global__ void probe(int* x) { int unused; *x = 1; }', monkeypatch)
    assert cubin.warnings(compiled.log, "probe.cu")


def test_a_spill_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
    extern "C" __global__ void __launch_bounds__(1024) probe(float* x) {
      float v[200];
      #pragma unroll
      for (int i = 0; i < 200; ++i) v[i] = x[i * 1024 + threadIdx.x];
      __syncthreads();
      #pragma unroll
      for (int i = 0; i < 200; ++i) x[(199 - i) * 1024 + threadIdx.x] = v[i] * v[(i + 77) % 200];
    }"""
    compiled = compile_text(text, monkeypatch)
    assert compiled.spill_bytes > 0
    assert cubin.reports(compiled.log)["probe"].spill_bytes == compiled.spill_bytes
    assert cubin.kernels(compiled.image)["probe"].opcodes[cubin.HGMMA] == 0


def test_serialised_wgmma_would_be_seen() -> None:
    line = (
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
        "insufficient register resources for the wgmma pipeline in function 'wgrad_direct'"
    )
    assert compiler.Compiled(b"", line).serialized_wgmma
    assert cubin.warnings(line, "wgrad/im2col.cu") == [line]
    assert not compiler.Compiled(b"", "ptxas info    : Used 168 registers").serialized_wgmma


def test_only_cubins_are_read_as_cubins() -> None:
    with pytest.raises(ValueError, match="not a little-endian ELF64 file"):
        cubin.kernels(b"\x7fELF\x01\x01" + bytes(100))
