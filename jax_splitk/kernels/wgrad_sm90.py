"""Kernel family: 2D convolution weight gradients on Hopper by TMA im2col and WGMMA (device code: wgrad_sm90.cu).

The output [taps * C, K] is cut into tiles and the reduction over N*P*Q pixels into splits; a thread block computes one
tile of one split. With more than one split the fp32 partial sums go to the workspace and a second kernel, launched with
programmatic dependent launch, adds them in a fixed order: the result is deterministic, bit for bit.

The method is implicit-GEMM weight gradient with parallel split-k, as in CUTLASS 2.x for SM80 ("Implicit GEMM
Convolution" in CUTLASS's documentation), rebuilt on the Hopper atoms of CuTe.
"""

import dataclasses
import math
from collections.abc import Iterator

from jax import numpy as jnp

from jax_splitk import compiler, plan
from jax_splitk.kernels import split_k
from jax_splitk.problem import ConvWgradProblem
from jax_splitk.target import Target

name = "wgrad_sm90"
implementation = "cutlass"
platform = "cuda"
ABI = 1

BLOCK_K = 64
SLOT = 64  # channels of a TMA box
BOX_BYTES = BLOCK_K * SLOT * 2
SHARED_BYTES = 227 * 1024
RESERVED_BYTES = 2 * 1024  # alignment of the ring and barriers
MAX_STAGES = 8
# WGMMA truncates its fp32 sums, an error that grows with the number of additions in a row: 2.8e-5 relative over 380
# blocks of pixels (measured). A float32 result, which keeps it, is summed in splits of at most this many blocks; in a
# 16-bit result rounding hides it.
MAX_FLOAT32_CHAIN = 256
INT32_MAX = 2**31 - 1

# (tile_m, tile_n): rows of one or more 64-row blocks per consumer warpgroup, columns of one WGMMA.
TILES = (
    (64, 64),
    (64, 128),
    (64, 192),
    (64, 256),
    (128, 64),
    (128, 128),
    (128, 192),
    (128, 256),
    (192, 64),
    (192, 128),
    (192, 192),
    (256, 64),
    (256, 128),
)

_DTYPES = ("bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Config:
    """How a weight gradient is computed.

    Attributes:
      tile_m, tile_n: output tile of a thread block (elements); see `TILES`.
      stages: depth of the shared-memory ring, in blocks of 64 pixels.
      swap: False puts (filter tap, input channel) on the tile's M side and output channels on N; True the reverse.
      splits: parts into which the reduction over N*P*Q is cut; none may be empty.
    """

    tile_m: int
    tile_n: int
    stages: int
    swap: bool
    splits: int

    @property
    def stage_bytes(self) -> int:
        return (self.tile_m + self.tile_n) // SLOT * BOX_BYTES

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes + RESERVED_BYTES

    @property
    def consumers(self) -> int:
        """Consumer warpgroups (CONSUMERS in the device code)."""
        return 2 if self.tile_m == 256 and self.tile_n <= 128 else self.tile_m // 64

    @property
    def ctas_per_sm(self) -> int:
        """2 where shared memory and, at 128 registers a thread, the accumulators allow it."""
        return 2 if self.consumers == 1 and self.tile_n <= 192 and 2 * self.shared_bytes <= SHARED_BYTES else 1


def max_stages(tile_m: int, tile_n: int, ctas_per_sm: int = 1) -> int:
    """The deepest ring that fits in shared memory."""
    stage_bytes = (tile_m + tile_n) // SLOT * BOX_BYTES
    return min(MAX_STAGES, (SHARED_BYTES // ctas_per_sm - RESERVED_BYTES) // stage_bytes)


def k_tiles(problem: ConvWgradProblem) -> int:
    """Blocks of pixels in the reduction."""
    return -(-problem.reduction_size // BLOCK_K)


def whole_splits(problem: ConvWgradProblem, splits: int) -> int:
    """The nearest split count not above `splits` (and at least 1) that leaves no split empty."""
    return split_k.whole_splits(k_tiles(problem), splits)


def least_splits(problem: ConvWgradProblem) -> int:
    """Fewest splits for the accuracy that is promised (explicit configs may have fewer)."""
    if problem.out_dtype != "float32":
        return 1
    blocks, least = k_tiles(problem), -(-k_tiles(problem) // MAX_FLOAT32_CHAIN)
    while least < blocks and -(-blocks // whole_splits(problem, least)) > MAX_FLOAT32_CHAIN:
        least += 1  # rounding to whole splits may have gone below
    return least


def tile_counts(problem: ConvWgradProblem, config: Config) -> tuple[int, int]:
    """(tiles along M, tiles along N)."""
    slots = problem.taps * -(-problem.in_channels // SLOT)
    m, n = slots * SLOT, problem.out_channels
    if config.swap:
        m, n = n, m
    return -(-m // config.tile_m), -(-n // config.tile_n)


def output_size(problem: ConvWgradProblem) -> int:
    return math.prod(problem.out_shape)


def workspace_bytes(problem: ConvWgradProblem, config: Config) -> int:
    """fp32 partial sums, one set for each split; none when there is a single split."""
    return split_k.workspace_bytes(problem, config.splits)


def supports(problem: ConvWgradProblem, config: Config | None = None, target: Target | None = None) -> str | None:
    """None when the family (with that config, on that target) can compute the problem, else the reason."""
    reason = _target_limit(target) or _problem_limit(problem) or _tma_limit(problem)
    if reason is None and config is not None:
        reason = _config_limit(problem, config)
    return reason


def preferred(problem: ConvWgradProblem, target: Target) -> str | None:
    """Always chosen where it is legal: no shape is known to lose to XLA by more than tuning recovers."""
    del problem, target
    return None


def _target_limit(target: Target | None) -> str | None:
    if target is None or target.is_hopper:
        return None
    return f"needs a GPU of compute capability 9.0 (Hopper), not {target.device_kind} ({target.compute_capability})"


def _problem_limit(p: ConvWgradProblem) -> str | None:
    if p.rank != 2:
        return f"{p.rank} spatial dimensions; accepted: 2"
    if p.dtype not in _DTYPES:
        return f"dtype {p.dtype}; accepted: {', '.join(_DTYPES)}"
    if p.out_dtype not in split_k.OUT_CODES:
        return f"preferred_element_type {p.out_dtype}; accepted: {', '.join(split_k.OUT_CODES)}"
    if p.feature_group_count != 1 or p.batch_group_count != 1:
        groups = f"feature_group_count {p.feature_group_count}, batch_group_count {p.batch_group_count}"
        return f"{groups}; accepted: 1"
    if p.in_channels % 8 or p.out_channels % 8:
        return f"{p.in_channels} input and {p.out_channels} output channels; accepted: multiples of 8"
    if any(d != 1 for d in p.lhs_dilation):
        return f"lhs_dilation {p.lhs_dilation}; accepted: 1"
    if 0 in p.input_spatial:
        return f"input of {p.input_spatial} pixels; accepted: at least 1 in each dimension"
    if not 0 < p.reduction_size <= INT32_MAX - BLOCK_K:
        return f"{p.reduction_size} output pixels; accepted: 1 to {INT32_MAX - BLOCK_K}"
    if not 0 < output_size(p) <= INT32_MAX:
        return f"{output_size(p)} weights; accepted: 1 to {INT32_MAX}"
    return None


def _tma_limit(p: ConvWgradProblem) -> str | None:
    """Limits of TMA's im2col mode (CUDA driver API, cuTensorMapEncodeIm2col)."""
    if is_matrix_product(p):
        return None
    for axis in range(2):
        where = f"in spatial dimension {axis}"
        stride, (low, high) = p.window_strides[axis], p.padding[axis]
        reach = (p.kernel_spatial[axis] - 1) * p.rhs_dilation[axis]
        if stride > 8:
            return f"window stride {stride} {where}; accepted: at most 8"
        if not -128 <= -low <= 127:
            return f"padding {low} {where}; accepted: -127 to 128"
        if not -128 <= high - reach <= 127:
            return f"padding {high} less the dilated window's reach {reach} {where}; accepted: -128 to 127"
        if reach > 255:
            return f"dilated window's reach {reach} {where}; accepted: at most 255"
    return None


def _config_limit(problem: ConvWgradProblem, config: Config) -> str | None:
    if (config.tile_m, config.tile_n) not in TILES:
        return f"tile {config.tile_m}x{config.tile_n}; accepted: {', '.join(f'{m}x{n}' for m, n in TILES)}"
    most = max_stages(config.tile_m, config.tile_n)
    if not 2 <= config.stages <= most:
        return f"stages {config.stages}; accepted with this tile: 2 to {most}"
    if not isinstance(config.swap, bool):
        return f"swap {config.swap!r}; accepted: True or False"
    blocks = k_tiles(problem)
    if not 1 <= config.splits <= min(blocks, 65535):
        return f"splits {config.splits}; accepted for {blocks} blocks of pixels: 1 to {min(blocks, 65535)}"
    if whole_splits(problem, config.splits) != config.splits:
        nearest = whole_splits(problem, config.splits)
        return f"splits {config.splits} leaves some of {blocks} blocks of pixels' splits empty; use {nearest}"
    return None


def is_matrix_product(p: ConvWgradProblem) -> bool:
    """A 1x1 filter with unit strides and no padding: X is a plain matrix, and im2col's limits do not apply."""
    return p.taps == 1 and set(p.window_strides) == {1} and set(p.padding) == {(0, 0)}


def variants() -> Iterator[tuple[int, int, int, bool]]:
    """Every (tile_m, tile_n, stages, swap) that `candidates` may use: what has to compile."""
    for tile_m, tile_n in TILES:
        depths = {max_stages(tile_m, tile_n)}
        if tile_m == 64 and tile_n <= 192:
            depths.add(max_stages(tile_m, tile_n, ctas_per_sm=2))
        for stages in sorted(depths):
            if stages >= 2:
                yield from ((tile_m, tile_n, stages, swap) for swap in (False, True))


def candidates(problem: ConvWgradProblem, target: Target) -> list[Config]:
    """Configs worth considering: every variant with the split counts that fill 1 to 8 whole waves of the machine."""
    found = {}
    least = least_splits(problem)
    for variant in variants():
        single = Config(*variant, splits=1)
        tiles = math.prod(tile_counts(problem, single))
        slots = target.cores * single.ctas_per_sm
        wanted = [least, *(slots * waves // tiles for waves in range(1, 9))]
        for splits in sorted({whole_splits(problem, s) for s in wanted if s >= least}):
            config = dataclasses.replace(single, splits=splits)
            if _config_limit(problem, config) is None:
                found[config] = None
    return list(found)


def neighbours(problem: ConvWgradProblem, config: Config, target: Target) -> list[Config]:
    """The other orientation, one stage less, and split counts nearby, in between waves, doubled and halved."""
    tiles = math.prod(tile_counts(problem, config))
    wave = target.cores * config.ctas_per_sm / tiles
    blocks = -(-k_tiles(problem) // config.splits)
    wanted = {config.splits // 2, config.splits * 2, round(config.splits + wave / 2), round(config.splits - wave / 2)}
    # One block of pixels more or less in each split.
    wanted |= {-(-k_tiles(problem) // blocks_each) for blocks_each in (blocks - 1, blocks + 1) if blocks_each}
    splits = {whole_splits(problem, s) for s in wanted if s >= least_splits(problem)}
    found = [dataclasses.replace(config, splits=s) for s in sorted(splits - {config.splits})]
    found.append(dataclasses.replace(config, swap=not config.swap))
    found += [dataclasses.replace(config, stages=config.stages - 1)] * (config.stages > 2)
    return found


# Fitted to 2,500 timings of 21 suite shapes on one H200; over these the config that the model puts first is on average
# 4% slower than the fastest (worst 24%).
_MMA_FLOPS_PER_SM = 790e12 / 132  # bf16 matrix product on random data
_ONE_WARPGROUP = 0.85  # of that rate, where a single consumer warpgroup issues
_L2_BYTES_PER_SM = 111e9
_SHADOW = 0.11  # part of the shorter of arithmetic and loads that is not hidden by the longer
_SWAP_GAIN = 0.05
_HBM_BYTES = 4.0e12
_PARTIAL_BYTES = 4.8e12  # partial sums stay in L2 for the most part
_WAVE_SECONDS = 2.1e-6  # filling the ring and the epilogue
_LAUNCH_SECONDS = 4.5e-6
_REDUCE_SECONDS = 0.7e-6


def estimate(problem: ConvWgradProblem, config: Config, target: Target) -> float:
    """Predicted seconds: the busiest SM's blocks at the slower of tensor-core and L2 rate, plus the reduction.

    The padding of tiles beyond the problem counts as work; device memory bounds the whole from below.
    """
    blocks = math.prod(tile_counts(problem, config)) * config.splits
    mma = 2 * config.tile_m * config.tile_n * BLOCK_K / _MMA_FLOPS_PER_SM
    if config.consumers == 1:
        mma /= _ONE_WARPGROUP
    load = config.stage_bytes / _L2_BYTES_PER_SM
    step = max(mma, load) + _SHADOW * min(mma, load)
    # Thread blocks that share an SM share its rates, but hide each other's ramp.
    steps = -(-blocks // target.cores) * -(-k_tiles(problem) // config.splits)
    waves = -(-blocks // (target.cores * config.ctas_per_sm))
    seconds = steps * step * (1 - _SWAP_GAIN * config.swap) + waves * _WAVE_SECONDS
    seconds = max(seconds, problem.bytes_moved / _HBM_BYTES) + _LAUNCH_SECONDS
    if config.splits > 1:
        seconds += _REDUCE_SECONDS + 2 * workspace_bytes(problem, config) / _PARTIAL_BYTES
    return seconds


def source(problem: ConvWgradProblem, config: Config) -> compiler.Source:
    """The device code's specialisation: it depends on dtypes and tile, not on shapes or splits."""
    return compiler.Source(
        "wgrad_sm90.cu",
        (
            ("ELEMENT_BF16", int(problem.dtype == "bfloat16")),
            ("OUT", split_k.OUT_CODES[problem.out_dtype]),
            ("TILE_M", config.tile_m),
            ("TILE_N", config.tile_n),
            ("STAGES", config.stages),
            ("SWAP", int(config.swap)),
            ("X_TILED", int(is_matrix_product(problem))),
            ("CTAS_PER_SM", config.ctas_per_sm),
        ),
    )


def _args(p: ConvWgradProblem, config: Config) -> plan.Int32Struct:
    """`struct Args` of the device code, in its order."""
    out_h, out_w = p.output_spatial
    blocks = k_tiles(p)
    step_n, rest = divmod(BLOCK_K, out_h * out_w)
    step_p, step_q = divmod(rest, out_w)
    (pad_h, _), (pad_w, _) = p.padding
    values = (
        *(p.in_channels, p.out_channels, p.taps, p.kernel_spatial[1]),
        *(out_h, out_w, *p.window_strides, pad_h, pad_w, *p.rhs_dilation),
        tile_counts(p, config)[1],
        *(blocks, -(-blocks // config.splits)),
        *(step_n, step_p, step_q),
    )
    return plan.Int32Struct(values)


def _x_map(p: ConvWgradProblem) -> plan.TiledMap | plan.Im2colMap:
    if is_matrix_product(p):
        return _matrix_map(0, p.dtype, p.in_channels, p.reduction_size)
    height, width = p.input_spatial
    dims = (p.in_channels, width, height, p.batch)
    inner_first = (1, 0)
    low, high, reach = (
        [p.padding[axis][0] for axis in inner_first],
        [p.padding[axis][1] for axis in inner_first],
        [(p.kernel_spatial[axis] - 1) * p.rhs_dilation[axis] for axis in inner_first],
    )
    return plan.Im2colMap(
        buffer=0,
        dtype=p.dtype,
        dims=dims,
        strides=plan.tensor_map_strides(dims, 2),
        element_strides=(1, p.window_strides[1], p.window_strides[0], 1),
        lower=tuple(-pad for pad in low),
        upper=tuple(pad - r for pad, r in zip(high, reach, strict=True)),
        channels=SLOT,
        pixels=BLOCK_K,
    )


def _matrix_map(buffer: int, dtype: str, channels: int, pixels: int) -> plan.TiledMap:
    dims = (channels, pixels)
    return plan.TiledMap(buffer, dtype, dims, plan.tensor_map_strides(dims, 2), box=(SLOT, BLOCK_K))


def make_plan(problem: ConvWgradProblem, config: Config) -> plan.DevicePlan:
    """Exact launches. Buffers: lhs, g, dW, workspace."""
    item = jnp.dtype(problem.dtype).itemsize
    out_bytes = output_size(problem) * jnp.dtype(problem.out_dtype).itemsize
    buffers = (
        plan.Buffer(math.prod(problem.lhs_shape) * item, 16),
        plan.Buffer(math.prod(problem.g_shape) * item, 16),
        plan.Buffer(out_bytes, 16),
        plan.Buffer(workspace_bytes(problem, config), 16),
    )
    maps = (_x_map(problem), _matrix_map(1, problem.dtype, problem.out_channels, problem.reduction_size))
    tiles = math.prod(tile_counts(problem, config))
    split = config.splits > 1
    main = plan.Launch(
        kernel="wgrad_partial" if split else "wgrad_direct",
        grid=(tiles, config.splits, 1),
        block=(128 * (config.consumers + 1), 1, 1),
        params=(plan.MapParam(0), plan.MapParam(1), _args(problem, config), plan.Pointer(3 if split else 2)),
        shared_bytes=config.shared_bytes,
    )
    launches = (main, split_k.reduce_launch(problem, config.splits)) if split else (main,)
    return plan.DevicePlan(source(problem, config), buffers, maps, launches, label=f"{name} {config}")
