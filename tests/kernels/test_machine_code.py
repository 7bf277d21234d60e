"""Machine code of every CUDA family, compiled for sm_90a: no spills, no warnings, the expected products, no more
registers and shared memory than a multiprocessor has, and no loop that reads a register before it has a value. Needs no
GPU.

`make test` compiles one source of each file. `make test-all` compiles enough sources for every value of every macro
that specialises the code (`CODE`), and `DRAWN` others of each file, which each run draws anew. Families of one file
share its samples.
"""

import collections
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmarks import cases
from jax_splitk import kernels
from jax_splitk.kernels import catalogue
from jax_splitk.kernels.base.adapted import Adapted
from jax_splitk.kernels.contraction import im2col as conv_im2col
from jax_splitk.kernels.contraction import products as tma
from jax_splitk.kernels.device.wgmma_tile import BARRIER_BYTES
from jax_splitk.kernels.gather import fprop as conv_gather
from jax_splitk.kernels.grouped import passes as grouped
from jax_splitk.kernels.quantized import fp8, stream, tiled, tiles, transposed
from jax_splitk.problems.dot_general import DotProblem
from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.problems.problem import Problem
from jax_splitk.problems.quantized_epilogue import QuantizedEpilogueProblem
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.problems.quantized_transposed import QuantizedTransposedProblem
from jax_splitk.problems.ragged_dot import RHS_ORDERS, RaggedDotProblem
from jax_splitk.quantized.formats import FORMATS
from jax_splitk.runtime import compiler, toolchain
from jax_splitk.runtime.source import source_files
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import cubin, every_kernel, experts, formats, products, ptx, random_problems
from tests.every_kernel import Run
from tests.exhaustive import thinned
from tests.kernels.dot.test_dot_tma import random_problem as random_dot
from tests.problems import conv, seeded

REGISTERS = 65536 // 4  # registers of each of a multiprocessor's four parts, which share the warps
SHARED_BYTES = 228 * 1024
MOST_SOURCES = 190  # for every value
DRAWN = 2
MOST_PROBLEMS = 24  # of a family, beside those of tests/every_kernel.py
EVERY = [family for op in catalogue.FAMILIES for family in kernels.families(op, "cuda")]
FAMILIES = [family for family in EVERY if not isinstance(family, Adapted)]  # others have no code of their own
HELPER = re.compile(r"_(reduce|prepare|factors|transpose)(?![a-z])")  # in the names of kernels that multiply nothing


@dataclasses.dataclass(frozen=True)
class Code:
    """The sources to compile from a device source file, and checks of its main kernels.

    Attributes:
      check: asserts properties of this file's kernels.
      macros: names of macros for which every value is compiled.
    """

    check: Callable[["Main"], None]
    macros: str


@dataclasses.dataclass(frozen=True)
class Main:
    """A kernel that multiplies: its source's macros, the threads of its launch, and the registers of a consumer's
    thread (from `setmaxnreg` if roles share registers, as `shared_out` says)."""

    macros: dict[str, Any]
    kernel: cubin.Kernel
    threads: int
    registers: int
    shared_out: bool

    def __getitem__(self, macro: str) -> Any:
        return self.macros[macro]

    def count(self, opcode: int) -> int:
        return self.kernel.opcodes[opcode]

    def multiple(self, opcode: int, of: int) -> None:
        """Asserts that the opcode occurs `of` times, or a multiple of it."""
        count = self.count(opcode)
        assert count > 0
        assert count % of == 0, (count, of)


# ---- what each file's code must be ---------------------------------------------------------------------------------


def _wgmma_tile(m: Main) -> None:
    consumers = m.threads // 128 - 1
    blocks = m["TILE_M"] // 64 // (consumers // m.macros.get("TEAMS", 1))
    # A stage is four products, or fewer if it is a tap's last. Other stages then have code of their own. The loop over
    # a stage's products is unrolled, and so are a warpgroup's blocks.
    products = m.macros.get("LAST_STEPS", 4) + 4 * m.macros.get("MIXED", 0)
    m.multiple(cubin.QGMMA if m["ELEMENT"] == 3 else cubin.HGMMA, products * blocks)
    assert m.shared_out == (consumers > 1)
    assert m.registers > m["TILE_N"] // 2 * blocks


def _few_rows(m: Main) -> None:
    _wgmma_tile(m)
    # With the system's KiB. Configs may fill shared memory.
    assert m.kernel.shared_bytes <= BARRIER_BYTES + 1024


def _halo(m: Main) -> None:
    rows = 1 if m["TILE_Q"] % 16 == 0 else 2
    m.multiple(cubin.HGMMA, m["BATCH_ROWS"] // rows * (m["TILE_Q"] * rows // 16))
    assert m.shared_out
    assert m.registers > 32 * m["TAPS_W"]


def _tf32(m: Main) -> None:
    steps = m["TILE_IMAGES"] * m["TILE_Q"] // 8
    # Every step of a line multiplies once for each filter row that reads it; lines differ in these rows.
    m.multiple(cubin.HGMMA_REGISTERS, steps)
    assert m.count(cubin.HGMMA_REGISTERS) >= m["TAPS_H"] * steps
    assert m.shared_out


def _gather(m: Main) -> None:
    steps = m["TILE_IMAGES"] * m["TILE_P"] * m["TILE_Q"] // 16
    assert m.count(cubin.HGMMA_REGISTERS) >= steps * m["BLOCKS"] * {1: 1, 2: 3, 3: 6}[m["PARTS"]]
    assert m.shared_out


def _grouped(m: Main) -> None:
    assert m.count(cubin.HMMA) > 0
    assert not m.shared_out
    _releases_what_was_read(m)


def _releases_what_was_read(m: Main) -> None:
    """TMA may overwrite a stage after its release."""
    arrivals = m.kernel.loads_at_arrivals()
    assert len(arrivals) >= 2, "a producer's and a consumer's"
    assert not any(arrivals), arrivals


def _grouped_pass(m: Main) -> None:
    def meets(axis: str) -> bool:
        """Whether some tap reads the input, not only padding."""
        size, out, taps, down, up, step, pad = (
            m[f"{name}_{axis}"] for name in ("INPUT", "OUTPUT", "KERNEL", "DOWN", "UP", "DILATION", "PAD")
        )
        places = (divmod(o * down - pad + t * step, up) for o in range(out) for t in range(taps))
        return any(rest == 0 and 0 <= i < size for i, rest in places)

    assert not m.shared_out
    if all(map(meets, "DHW")):
        assert m.count(cubin.HMMA) > 0
        _releases_what_was_read(m)
    else:  # the results are zeros, and the consumer reads no stage that it could release
        assert m.count(cubin.HMMA) == 0
        assert not any(m.kernel.loads_at_arrivals())


def _depthwise(m: Main) -> None:
    passes = m["CHANNELS"] // m["WARPS"]
    assert m.count(cubin.HMMA) == m["SIZE_W"] * m["SEGMENT"] // 4 * passes
    assert m.count(cubin.STMATRIX) > 0
    assert m.count(cubin.GENERIC_LOAD) == m.count(cubin.GENERIC_STORE) == 0, "shared memory is addressed as such"
    assert m.shared_out or passes == 1


def _depthwise_pass(m: Main) -> None:
    assert not m.kernel.opcodes.keys() & cubin.PRODUCTS
    assert m.kernel.shared_bytes <= 1024, "the sums and taps are in registers"
    assert m.registers >= m["COLUMNS"] + m["KERNEL_D"] * m["KERNEL_H"] * m["KERNEL_W"]


def _depthwise_blocked(m: Main) -> None:
    assert not m.kernel.opcodes.keys() & cubin.PRODUCTS
    assert m.kernel.shared_bytes <= 1024, "the sums are in registers"
    assert m.registers >= m["COLUMNS"] * m["CHANNELS"]


def _toeplitz(m: Main) -> None:
    rows = m["STEP"] if m["SLIDES"] else m["EACH"] * m["PLANES"] * m["KERNEL_D"] * m["KERNEL_H"]
    assert m.count(cubin.HMMA) == m["STEP"] * rows * ((m["K_CHUNKS"] + 1) // 2)
    assert m.count(cubin.STMATRIX) > 0
    # The compiler may make one access four, which touch their lines as often; `repair` stores single values.
    stores = m.kernel.widths(cubin.GLOBAL_STORE)
    assert stores.total() == stores[16] + 1
    assert not m.shared_out


def _gather_pass(m: Main) -> None:
    eights = m["SEGMENTS"] * -(-(m["PARITY"] + m["SEGMENT"]) // 8)
    assert m.count(cubin.HGMMA_REGISTERS) == (eights if m["ELEMENT"] == 0 else -(-eights // 2))
    assert (m.count(cubin.STMATRIX) > 0) == (m["OUT"] > 0)
    assert m.shared_out


def _depthwise_any(m: Main) -> None:
    assert not m.kernel.opcodes.keys() & cubin.PRODUCTS
    assert m.count(cubin.GENERIC_LOAD) == m.count(cubin.GENERIC_STORE) == 0
    assert m.registers >= m["CHANNELS"] * (m["COLUMNS"] + m["KERNEL_D"] * m["KERNEL_H"] * m["KERNEL_W"])


def _stream(m: Main) -> None:
    # For each tile four products of 16 k, with zero points four more that sum x; or two products of 32 k in e4m3.
    used, other, each = cubin.HGMMA_REGISTERS, cubin.QGMMA_REGISTERS, 4 if m["ZERO_TYPE"] < 0 else 8
    if m["E4M3_PRODUCTS"]:
        used, other, each = other, used, 2
    m.multiple(used, each * m["TILES"])
    assert m.count(other) == 0
    # The way to the first copy is short: instructions come from the L2 when they first run.
    opcodes = [int.from_bytes(i[:2], "little") & 0xFFF for i in m.kernel.instructions]
    assert opcodes.index(cubin.UBLKCP) < 200


def _fp8(m: Main) -> None:
    # A product for each 32 k of a stage's 128 and chunk, once for the whole loop.
    assert m.count(cubin.QGMMA_REGISTERS) == 4 * m["TILE_N"] // m["CHUNK"]
    assert m.shared_out


def _tiled(m: Main) -> None:
    # Two tiles of 64 k, each of four products.
    assert m.count(cubin.HGMMA_REGISTERS) == 8
    assert m.shared_out
    assert m.registers > m["TILE_N"] // 2 * (2 if tiled.SCALINGS[m["SCALING"]] == "sum" else 1) + 32
    # Code that runs once counts for the sizes of a cluster.
    assert m["SPLITS"] == 1 or len(m.kernel.instructions) <= (2700 if m["EXPERTS"] else 1800)


CODE = {
    "contraction/wgrad.cu": Code(_wgmma_tile, "ELEMENT OUT TILE_M TILE_N SWAP X_TILED CTAS_PER_SM RANK3 TAIL DISCARD"),
    "contraction/halo.cu": Code(_halo, "ELEMENT OUT TAPS_H TAPS_W BATCH_ROWS TILE_Q"),
    "tf32/wgrad.cu": Code(_tf32, "OUT TAPS_H TAPS_W STRIDE_W RAGGED BLOCKS TILE_N TILE_IMAGES"),
    "gather/wgrad.cu": Code(
        _gather, "ELEMENT PARTS CHAIN OUT CTAS_PER_SM DY_TMA RAGGED DENSE RUNS PAIRED CONSUMERS BLOCKS LHS_W"
    ),
    "grouped/wgrad.cu": Code(
        _grouped,
        "ELEMENT OUT RAGGED WARP_IN WARP_OUT CTAS_PER_SM GROUP_IN GROUP_OUT IN_BLOCK OUT_BLOCK SLICES PADDED "
        "COLUMN_PARTS",
    ),
    "depthwise/wgrad.cu": Code(_depthwise, "ELEMENT OUT CHANNELS SEGMENTS CHAIN SEGMENT SIZE_W SHIFT_W MULTIPLIER"),
    "depthwise/wgrad_any.cu": Code(
        _depthwise_any, "ELEMENT OUT CHANNELS ALONG_W WARPS CTAS_PER_SM COLUMNS STRIDE_H STRIDE_W KERNEL_D KERNEL_H"
    ),
    "depthwise/passes.cu": Code(_depthwise_pass, "ELEMENT OUT CHANNELS MIRRORED DOWN_W DOWN_H UP_W UP_H KERNEL_W"),
    "depthwise/blocked.cu": Code(_depthwise_blocked, "ELEMENT OUT CHANNELS MIRRORED DOWN_W UP_W STEP SUMMED"),
    "depthwise/toeplitz.cu": Code(
        _toeplitz, "ELEMENT OUT MIRRORED CHANNELS EACH STEP DOWN_W KERNEL_W KERNEL_H PLANES SLIDES"
    ),
    "grouped/passes.cu": Code(
        _grouped_pass, "ELEMENT OUT MIRRORED RESIDENT STRIPS UNITS DOWN_W UP_W BIAS RESIDUAL_TYPE ACTIVATION_LAST"
    ),
    "gather/fprop.cu": Code(
        _gather_pass,
        "ELEMENT CTAS_PER_SM CONSUMERS PAIRED GROUPED OUT PARITY TILE_N BLOCKS GROUP RUNS DENSE GRANULE BIAS "
        "RESIDUAL_TYPE ACTIVATION_LAST",
    ),
    "contraction/im2col.cu": Code(
        _wgmma_tile,
        "REDUCTION PHASED PERSISTENT STATIONARY B_MN TRANSPOSED ODD AXES ELEMENT OUT TILE_M TILE_N SPLITS EMPTY "
        "B_WHOLE CTAS_PER_SM ROW_BYTES GROUPED TAPS ROW_PARTS SWAP TEAMS LAST_STEPS MIXED WEIGHT_ROW RESULT_BOX "
        "THREAD_STORES OWN_STORES BIAS RESIDUAL_TYPE ACTIVATION_LAST",
    ),
    "contraction/products.cu": Code(
        _wgmma_tile, "ELEMENT OUT REDUCTION A_MN B_MN A_WHOLE B_WHOLE PATCH TILE_M TILE_N SPLITS CTAS_PER_SM"
    ),
    "contraction/few_rows.cu": Code(_few_rows, "ELEMENT OUT W_MN W_WHOLE TILE_N TILE_M SPLITS CTAS_PER_SM EPILOGUE"),
    "quantized/stream.cu": Code(
        _stream,
        "FORMAT E4M3_PRODUCTS X_TMA WHOLE FOURS OUT TILE_N TILES WARPGROUPS CLUSTER GROUP SCALE_TYPE ZERO_TYPE "
        "ACTIVATION RESIDUAL_TYPE NORM",
    ),
    "quantized/fp8.cu": Code(
        _fp8,
        "FORMAT SCALE_TYPE GROUP CHUNK ROUNDED OUT TILE_N M_WARPGROUPS K_WARPGROUPS MULTICAST SPLITS ACTIVATION "
        "ZERO_TYPE PREPARED X_HALF",
    ),
    "quantized/tiled.cu": Code(
        _tiled,
        "FORMAT OUT SCALING EXPERTS M_WARPGROUPS K_WARPGROUPS PREPARED TILE_N ZERO_TYPE GROUP X_E4M3 SPLITS "
        "SCALE_TYPE TRANSPOSED CUT HAS_OFFSET ACTIVATION RESIDUAL_TYPE",
    ),
    "ragged/ragged_m.cu": Code(_wgmma_tile, "OUT TILE_M TILE_N SWAP B_MN ELEMENT B_WHOLE HAS_OFFSET PARTS GROUPS"),
    "ragged/ragged_k.cu": Code(_wgmma_tile, "OUT TILE_M TILE_N ELEMENT HAS_OFFSET PARTS GROUPS"),
}


# ---- what is compiled ----------------------------------------------------------------------------------------------


def gradients() -> list[Problem]:
    dtypes = itertools.cycle(itertools.product(("bfloat16", "float16", "float32"), ("float32", "float16", "bfloat16")))
    suite: list[Problem] = [
        dataclasses.replace(case, dtype=dtype).problem(out_dtype)
        for case, (dtype, out_dtype) in zip(cases.WGRAD_CASES * 3, dtypes, strict=False)
    ]
    return suite + random_problems.problems(np.random.default_rng(1), mixtures=4)


def passes() -> list[Problem]:
    """Forward passes and input gradients of the convolutions of `gradients`."""
    return [OPERATIONS[op].problem(**vars(p)) for op in ("conv_fprop", "conv_dgrad") for p in gradients()]


def first_layers() -> list[Problem]:
    """First layers of networks, and the layers between their stages, in all passes."""
    shapes = (
        ((224, 224), (16, 16), (3, 768), 16),
        ((56, 56), (2, 2), (96, 192), 2),
        ((8, 32, 32), (2, 4, 4), (4, 72), (2, 4, 4)),
        ((224, 224), (4, 4), (3, 96), 4),
        ((64, 64), (3, 3), (4, 320), 1),
        ((65, 64), (3, 3), (1, 192), 1),
    )
    dtypes = itertools.cycle(
        (("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16"), ("float32", "float32"))
    )
    return [
        OPERATIONS[op].problem(
            **vars(conv(size, kernel, channels, batch=64, stride=stride, dtype=dtype, out_dtype=out))
        )
        for op in ("conv_fprop", "conv_dgrad", "conv_wgrad")
        for (size, kernel, channels, stride), (dtype, out) in zip(shapes, dtypes, strict=False)
    ]


def matrix_products() -> list[Problem]:
    """Products of every major and dtype, with long and short reductions."""
    rng = np.random.default_rng(1)
    few = ((1, 4096, 14336), (16, 14336, 4096), (64, 4096, 1024), (33, 1000, 5128), (8, 136, 520))
    types = itertools.product(("bfloat16", "float16"), ("bfloat16", "float32", "float16"), ("bkn", "bnk"))
    rows = [
        DotProblem(1, m, n, k, "bmk", order, dtype, out)
        for (dtype, out, order), (m, n, k) in zip(types, itertools.cycle(few), strict=False)
    ]
    return [*rows, *(random_dot(rng) for _ in range(80))]


def quantized_products() -> list[Problem]:
    """Products of every format and dtype, in large and small sizes."""
    sizes = itertools.cycle(((64, 8192, 3584), (8, 1024, 1024), (256, 8192, 8192), (17, 1088, 333), (4096, 1024, 640)))
    groups = itertools.cycle((64, 32, 128, 0, 64, 16))
    e4m3 = ({"x_dtype": "float8_e4m3fn"}, {"x_dtype": "float8_e4m3fn", "out_dtype": "float16"})
    rounded = [{**types, "compute_dtype": "float8_e4m3fn"} for types in (*e4m3, {}, products.HALF)]
    of_bytes = (
        {"scale_dtype": formats.E8M0},
        {"scale_dtype": "float8_e4m3fn", "channel_dtype": "float32"},
        {"scale_dtype": formats.E8M0, "channel_dtype": "float32", "x_dtype": "float8_e4m3fn"},
    )
    kinds = itertools.product(
        formats.BITS, ("none", "bfloat16", "float32"), (*products.TYPES, *e4m3, *of_bytes, *rounded)
    )
    found: list[Problem] = []
    for (qtype, zero, types), size, group in zip(kinds, sizes, groups, strict=False):
        if zero == "none" or qtype in formats.INTEGERS:
            kind = {"qtype": qtype, "zero_dtype": zero, "group_size": group, **types}
            found += products.problems([size], [kind])
    return [*found, *(QuantizedTransposedProblem(**vars(p)) for p in found)]


def normalized_products() -> list[Problem]:
    """Products whose kernels normalize x, of every format."""
    plain = [p for p in quantized_products() if type(p) is QuantizedMatmulProblem]
    norms = [{"norm_epsilon": "1e-05", "norm_scale_dtype": dtype} for dtype in ("none", "bfloat16")]
    found = [QuantizedEpilogueProblem(**vars(p), **norm) for p in plain for norm in norms]
    return [p for p in found if stream.FAMILY.problem_refusal(p) is None]


def grouped_products() -> list[Problem]:
    """Grouped products of every pass and dtype, with many rows in a group and with few."""
    sizes = ((32768, 2880, 2048, 32), (64, 4096, 1408, 8), (300, 136, 328, 70))
    types = list(itertools.product(("bfloat16", "float16"), ("bfloat16", "float16", "float32")))
    modes = [("forward", order) for order in RHS_ORDERS] + [("rhs_gradient", "gkn")]
    return [
        RaggedDotProblem(mode, groups, m, k, n, dtype, out, rhs_order=order, total_groups=2 * groups * (m == 300))
        for (mode, order), (dtype, out), (m, k, n, groups) in itertools.product(modes, types, sizes)
    ]


def expert_products() -> list[Problem]:
    """Grouped products with packed weights of every format and dtype, with many rows in a group and with few."""
    sizes = itertools.cycle(((128, 8, 0), (4096, 8, 16), (300, 70, 0), (4, 32, 0)))
    return [
        experts.problem(groups, dataclasses.replace(experts.case_of(p), rows=m), total)
        for p, (m, groups, total) in zip(quantized_products(), sizes, strict=False)
    ]


@functools.cache
def pools() -> dict[str, dict[compiler.Source, Run]]:
    """For each file, the sources that the tuner may choose for problems of all types, large and small, with one sample
    each."""
    every = (*gradients(), *passes(), *first_layers(), *matrix_products(), *quantized_products(), *grouped_products())
    every += (*expert_products(), *normalized_products())
    samples = [run for run in every_kernel.RUNS if run.family in FAMILIES]
    for family in FAMILIES:
        served = [p for p in every if family in catalogue.FAMILIES[p.op] and family.refusal(p) is None]
        for p in served[:: -(-len(served) // MOST_PROBLEMS)]:
            first, *others = family.candidates(p, DEFAULT_CUDA)
            near = [c for c in family.neighbours(p, first, DEFAULT_CUDA) if family.refusal(p, c) is None]
            samples += [Run(family, p, config) for config in (first, *others, *near)]
    found: dict[str, dict[compiler.Source, Run]] = {}
    for sample in samples:
        source = sample.plan.source
        found.setdefault(source.file, {})[source] = sample
    return found


@functools.cache
def samples(file: str) -> list[Run]:
    """A few samples of the pool that have all values. Each next sample has one that the fewest samples have, and adds
    the most; samples that add nothing are dropped."""
    traits = {}
    for source, sample in pools()[file].items():
        macros = dict(source.defines)
        values = ((name, macros.get(name)) for name in CODE[file].macros.split())
        traits[sample] = {("family", sample.family.name), *values}
    count = collections.Counter(trait for found in traits.values() for trait in found)
    left, chosen = set(count), list[Run]()
    while left:
        rarest = min(count[trait] for trait in left)
        needed = {trait for trait in left if count[trait] == rarest}
        rare = [sample for sample in traits if traits[sample] & needed]
        chosen.append(max(rare, key=lambda sample: len(traits[sample] & left)))
        left -= traits[chosen[-1]]
    for sample in reversed(chosen):
        others = [traits[other] for other in chosen if other is not sample]
        if traits[sample] <= set().union(*others):
            chosen.remove(sample)
    return chosen


def is_helper(kernel: str) -> bool:
    return HELPER.search(kernel) is not None


def check(sample: Run) -> None:
    made = sample.plan
    compiled, ptx_text = ptx.compile_source(made.source)
    log = compiled.log
    assert ptx.carried_without_value(ptx_text) == {}
    assert not cubin.warnings(log, made.source.file), log
    found, reports, macros = cubin.kernels(compiled.image), cubin.reports(log), dict(made.source.defines)
    assert {launch.kernel for launch in made.launches} <= set(found)
    main = next(launch for launch in made.launches if not is_helper(launch.kernel))
    for name, kernel in found.items():
        report = reports[name]
        assert (report.stack_bytes, report.spill_bytes) == (0, 0), log
        if is_helper(name):
            assert not kernel.opcodes.keys() & cubin.PRODUCTS
            continue
        # Registers are allocated by the eight, warps to four parts in turns.
        threads, together = main.block[0], macros.get("CTAS_PER_SM", 1)
        registers = -(-report.registers // 8) * 8
        assert registers * 32 * -(-threads * together // 128) <= REGISTERS, name
        assert (main.shared_bytes + kernel.shared_bytes) * together <= SHARED_BYTES, name
        # The roles' registers must not exceed those of the block: it would wait forever.
        shares = sorted(set(kernel.immediates(cubin.USETMAXREG)))
        assert len(shares) in (0, 2), shares
        if shares:
            producers = 32 * macros.get("PRODUCERS", 4)
            assert shares[0] * producers + shares[1] * (threads - producers) <= registers * threads, name
        consumer = shares[1] if shares else registers
        CODE[made.source.file].check(Main(macros, kernel, threads, consumer, bool(shares)))


def check_all(wanted: list[Run]) -> None:
    """Reports all errors together."""
    assert toolchain.unavailable() is None, toolchain.unavailable()
    errors = []
    for sample in wanted:
        try:
            check(sample)
        except AssertionError as error:
            error.add_note(f"{sample.problem}\n{sample.config}")
            errors.append(error)
    if errors:
        raise ExceptionGroup(f"{len(errors)} of {len(wanted)} sources", errors)


FIRST = {run.plan.source.file: run for run in reversed(every_kernel.RUNS)}


@pytest.mark.parametrize("file", CODE)
def test_machine_code(file: str) -> None:
    """The first run of tests/every_kernel.py for each file."""
    check_all([FIRST[file]])


@pytest.mark.exhaustive
@pytest.mark.parametrize("file", CODE)
def test_machine_code_of_every_value(file: str) -> None:
    others = [sample for sample in pools()[file].values() if sample not in samples(file)]
    with seeded(75) as rng:
        drawn = [others[i] for i in rng.permutation(len(others))[:DRAWN]]
        check_all([*samples(file), *drawn])


def test_no_product_of_a_short_range_is_missing() -> None:
    """With several chunks and ranges of one k block, ptxas may merge products that it takes for equal."""
    problem = products.Case(96, 192, 72, group_size=32, x_dtype="float8_e4m3fn").problem
    config = tiles.split_tiles(problem, fp8.Config(128, 96, 7, 0), 2)
    assert fp8.FAMILY.refusal(problem, config) is None
    check_all([Run(fp8.FAMILY, problem, config)])


def test_epilogues_do_not_spill() -> None:
    """Compiles the code with the fewest registers: the reduction, and two thread blocks on a multiprocessor."""
    after = {"bias": "n", "bias_dtype": "float32", "residual_dtype": "bfloat16"}
    small = DotProblem(1, 264, 328, 4096, "bkm", "bkn", "bfloat16", "bfloat16", **after)
    configs = {"gelu": tma.Config(64, 64, 6, 11, "workspace"), "gelu_exact": tma.Config(64, 192, 3, 8, "cluster")}
    check_all([Run(tma.FAMILY, dataclasses.replace(small, activation=a), config) for a, config in configs.items()])


GATHERED = [run for run in every_kernel.conv_epilogue_runs() if run.family in (conv_gather.FPROP, grouped.FPROP)]


@pytest.mark.parametrize("run", thinned(GATHERED, 4))
def test_epilogues_of_convolutions_do_not_spill(run: Run) -> None:
    check_all([run])


def test_two_blocks_of_two_consumers_do_not_spill() -> None:
    """They have 80 registers a thread. Input gradients with strides in 3D compute the most."""
    run = next(run for run in every_kernel.RUNS if run.family is conv_im2col.DGRAD and run.problem.rank == 3)
    check_all([dataclasses.replace(run, config=conv_im2col.Config(128, 64, 4, 4, "workspace"))])


def test_sums_of_e4m3_do_not_spill() -> None:
    """Compiles three consumers, which have the fewest registers for sums that are held twice."""
    problem = DotProblem(1, 264, 328, 4096, "bmk", "bnk", "float8_e4m3fn", "bfloat16")
    check_all([Run(tma.FAMILY, problem, tma.Config(192, 128, 5))])


def test_transposed_weights_do_not_spill() -> None:
    """Compiles tiles with the most sums, and with the fewest registers. Scales multiply pairs of 16 bits, or floats."""
    plain = {"qtype": "int4"}, {"qtype": "nf4", "group_size": 32, "scale_dtype": "float32"}
    for kind, (tile_m, tile_n) in itertools.product(plain, ((128, 256), (256, 64))):
        problem = QuantizedTransposedProblem(**vars(products.valid_problem(tile_n, 4096, 4096, **kind)))
        config = transposed.FAMILY.deepest(problem, transposed.Config(tile_m, tile_n, 0, 0))
        check_all([Run(transposed.FAMILY, problem, tiles.whole_tiles(problem, config))])


def test_epilogues_of_quantized_products_do_not_spill() -> None:
    """Compiles tiles with the most sums, and the few rows with the fewest registers."""
    after = {"bias": "float32", "activation": "geglu", "residual": "float32"}
    wide, few = products.Case(256, 4096, 4096, **after), products.Case(16, 4096, 4096, **after)
    config = tiled.FAMILY.deepest(wide.problem, tiled.Config(128, 256, 0, 0))
    check_all(
        [
            Run(tiled.FAMILY, wide.problem, tiles.whole_tiles(wide.problem, config)),
            Run(stream.FAMILY, few.problem, stream.Config(16, 4, 2, 3, 2, 64)),
        ]
    )


@pytest.mark.exhaustive
def test_sums_with_zero_points_do_not_spill() -> None:
    """These combinations once spilled: many rows, int8 in groups, float32 results and zero points."""
    problem = QuantizedMatmulProblem(65536, 1984, 8, "float16", "float32", "int8", 64, "bfloat16", zero_dtype="float32")
    candidates = tiled.FAMILY.candidates(problem, DEFAULT_CUDA)
    runs = {(run := Run(tiled.FAMILY, problem, config)).plan.source: run for config in candidates}
    check_all(list(runs.values()))


@pytest.mark.exhaustive
def test_few_rows_with_zero_points_do_not_spill() -> None:
    """The widest x in float16, with two scales of a tile, once spilled."""
    runs = []
    for scale, channel in (("bfloat16", "none"), ("float8_e4m3fn", "float32")):
        types = ("float8_e4m3fn", "bfloat16", "uint4", 32, scale)
        problem = QuantizedMatmulProblem(64, 8192, 3584, *types, zero_dtype="bfloat16", channel_dtype=channel)
        found = stream.FAMILY.candidates(problem, DEFAULT_CUDA)
        runs += [Run(stream.FAMILY, problem, config) for config in found]
    check_all(list({run.plan.source: run for run in runs}.values()))


@pytest.mark.exhaustive
def test_the_sources_are_few_and_of_every_type() -> None:
    chosen = {file: samples(file) for file in CODE}
    print({file: len(found) for file, found in chosen.items()})
    assert CODE.keys() == pools().keys() == set(source_files())
    assert 90 <= sum(map(len, chosen.values())) <= MOST_SOURCES
    assert {family.name for family in FAMILIES} == {sample.family.name for found in chosen.values() for sample in found}

    def values(file: str, field: str) -> set[str]:
        problems = [sample.problem for sample in chosen[file]]
        return {str(getattr(getattr(problem, "product", problem), field)) for problem in problems}

    for file in CODE:
        outs = {"bfloat16", "float16"} | ({"float32"} if file != "quantized/fp8.cu" else set())
        assert values(file, "out_dtype") == outs, file
    for file in ("quantized/stream.cu", "quantized/tiled.cu"):
        assert values(file, "qtype") == set(FORMATS)
        assert values(file, "x_dtype") == {"bfloat16", "float16", "float8_e4m3fn"}
        assert values(file, "scale_dtype") == set(formats.SCALE_DTYPES)
        assert values(file, "channel_dtype") == {"none", "float32"}
        assert values(file, "zero_dtype") >= {"none", "bfloat16", "float32"}


# ---- that it would be seen -----------------------------------------------------------------------------------------


def compile_text(text: str, monkeypatch: pytest.MonkeyPatch) -> compiler.Compiled:
    monkeypatch.setattr(compiler.Source, "text", lambda self, **_: text)
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
    assert cubin.reports(compiled.log)["probe"].spill_bytes > 0
    assert cubin.kernels(compiled.image)["probe"].opcodes[cubin.HGMMA] == 0


def test_serialised_wgmma_would_be_seen() -> None:
    line = (
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
        "insufficient register resources for the wgmma pipeline in function 'wgrad_direct'"
    )
    assert cubin.warnings(f"ptxas info    : Used 168 registers\n{line}", "contraction/wgrad.cu") == [line]


def test_only_cubins_are_read_as_cubins() -> None:
    with pytest.raises(ValueError, match="not a little-endian ELF64 file"):
        cubin.kernels(b"\x7fELF\x01\x01" + bytes(100))
