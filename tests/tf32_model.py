"""wgrad_tf32's device code in NumPy: where it puts bytes and which of them meet, by the same formulas, without timing.

What the hardware does is written from its documentation: TMA's boxes and 128-byte swizzle, WGMMA's A fragment, the
layout of B without swizzle, and the accumulator. Numbers are float64, so small integers must come out exactly.
"""

import math

import numpy as np

from jax_splitk.kernels.wgrad import tf32
from jax_splitk.kernels.wgrad.tf32 import Config
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime.plan import TiledMap
from tests.structs import arguments

LANES = np.arange(32)
WORD = 4


def tma_box(array: np.ndarray, tensor_map: TiledMap, coordinates: tuple[int, ...]) -> np.ndarray:
    """The box at `coordinates` (innermost first) as words of shared memory, with zeros outside; not yet swizzled."""
    index = np.zeros(tensor_map.box[::-1], np.int64)
    inside = np.ones(index.shape, bool)
    strides = (WORD, *tensor_map.strides)
    for axis, (start, box, dim, stride) in enumerate(
        zip(coordinates, tensor_map.box, tensor_map.dims, strides, strict=True)
    ):
        shape = [1] * len(tensor_map.box)
        shape[len(tensor_map.box) - 1 - axis] = box
        at = (start + np.arange(box)).reshape(shape)
        inside &= (at >= 0) & (at < dim)
        index = index + at * (stride // WORD)
    return np.where(inside, array.reshape(-1)[np.where(inside, index, 0)], 0.0).reshape(-1)


def swizzled(byte: np.ndarray) -> np.ndarray:
    return byte ^ (byte >> 7 & 7) << 4


def put(memory: np.ndarray, at: int, words: np.ndarray) -> None:
    """What TMA writes from byte `at` on."""
    memory[swizzled(at + np.arange(len(words)) * WORD) // WORD] = words


class Block:
    """A thread block: shared memory as far as rings hold anything, and its constants."""

    def __init__(self, problem: ConvWgradProblem, config: Config):
        plan = tf32.FAMILY.plan(problem, config)
        self.x_map, self.dy_map = (m for m in plan.maps if isinstance(m, TiledMap))
        self.g = arguments(plan)
        self.config, self.view = config, tf32.view(problem)
        v, c = self.view, config
        self.steps = c.pixels // 8
        self.mixed = c.tile_q % 4 != 0
        self.pitch_bytes = -(-tf32.columns(v, c) // 8) * 8 * 128
        self.image_bytes = 2 * c.blocks * self.pitch_bytes
        self.x_bytes = c.images * self.image_bytes
        self.dy_bytes = c.pixels * c.tile_n * 4
        self.chunk_bytes = c.tile_n * 16
        self.dy_stages = tf32.dy_stages(v, c)
        self.reach = (c.taps_h - 1) * v.dilation[0]
        self.x = np.full(c.stages * self.x_bytes // WORD, np.nan)
        self.dy = np.full(self.dy_stages * self.dy_bytes // WORD, np.nan)

    def spaced(self, step: int) -> bool:
        fits = step * 8 % self.config.tile_q + 8 <= self.config.tile_q
        return self.view.stride[1] % 2 == 1 and (self.mixed or fits)

    def load_line(self, x: np.ndarray, stage: int, c0: int, w: int, h: int, n: int) -> None:
        to = stage * self.x_bytes
        for image in range(self.config.images):
            for box in range(2 * self.config.blocks):
                put(self.x, to, tma_box(x, self.x_map, (c0 + box * 32, w, h, n + image)))
                to += self.pitch_bytes

    def load_row(self, dy: np.ndarray, stage: int, k0: int, q0: int, p: int, n: int) -> None:
        """A row by TMA, then transposed."""
        c, boxes = self.config, self.config.tile_n // 32
        raw = np.full(self.dy_bytes // WORD, np.nan)
        for box in range(boxes):
            put(raw, box * c.pixels * 128, tma_box(dy, self.dy_map, (k0 + box * 32, q0, p, n)))
        for i in range(self.steps * 2 * boxes):
            chunk, box = i // boxes, i % boxes
            step, half = chunk // 2, chunk % 2
            first, apart = (step * 8 + half, 2) if self.spaced(step) else (chunk * 4, 1)
            for a in range(8):
                block = np.empty((4, 4))
                for j in range(4):
                    at = first + j * apart
                    word = (box * c.pixels * 128 + at * 128 + (a ^ at % 8) * 16) // WORD
                    block[j] = raw[word : word + 4]
                to = stage * self.dy_bytes + chunk * self.chunk_bytes + (box * 8 + a) * 16
                for channel in range(4):
                    word = (to + channel * (self.chunk_bytes // 4)) // WORD
                    self.dy[word : word + 4] = block[:, channel]

    def operand(self, stage: int, step: int) -> np.ndarray:
        """B of a step, [8, TILE_N], as WGMMA finds it without swizzle: 8 rows of 16 bytes make 128."""
        n, k = np.arange(self.config.tile_n), np.arange(8)[:, None]
        start = stage * self.dy_bytes + step * 2 * self.chunk_bytes
        return self.dy[(start + k // 4 * self.chunk_bytes + n // 8 * 128 + n % 8 * 16 + k % 4 * WORD) // WORD]

    def fragment(self, stage: int, warpgroup: int, step: int, inside: int) -> np.ndarray:
        """A of a step, [64, 8], from what the warps' lanes gather, with few bank conflicts or none."""
        c, v = self.config, self.view
        s, block = warpgroup % c.taps_w, warpgroup // c.taps_w
        a = np.full((64, 8), np.nan)
        group, t = LANES // 4, LANES % 4
        for warp in range(4):
            for half in range(2):
                order = half if self.spaced(step) else 2
                pixel = 2 * t + order if order < 2 else t
                first = 8 * step + (0 if self.spaced(step) else 4 * half)
                column, chunk = first % c.tile_q, warp % 2 * 4 + group // 2
                if self.mixed:
                    following = column + pixel >= c.tile_q
                    q = column + pixel - following * c.tile_q
                    assert (q < c.tile_q).all()
                    at = q * v.stride[1] + s * v.dilation[1]
                    offset = (first // c.tile_q + following) * self.image_bytes
                else:
                    q = column + pixel
                    parity = column * v.stride[1] % 8 // 4
                    at = pixel * v.stride[1] + s * v.dilation[1] + 4 * parity
                    offset = first // c.tile_q * self.image_bytes + (column * v.stride[1] - 4 * parity) * 128
                place = (block * 2 + warp // 2) * self.pitch_bytes + at * 128 + (chunk ^ at % 8) * 16 + group % 2 * 8
                word = (stage * self.x_bytes + place + offset) // WORD
                if v.stride[1] % 4 and (order < 2 or v.stride[1] % 2 == 0):
                    for lanes in (word[:16], word[16:]):
                        assert np.bincount(lanes % 32).max() <= 1 + self.mixed
                counts = q < inside
                # Registers 0 and 1 are rows l/4 and l/4 + 8 at column l%4; 2 and 3 are four columns on.
                a[warp * 16 + group, 4 * half + t] = np.where(counts, self.x[word], 0)
                a[warp * 16 + group + 8, 4 * half + t] = np.where(counts, self.x[word + 1], 0)
        return a


def sums(problem: ConvWgradProblem, config: Config, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """[splits, *out_shape]: what each split writes; NaN where nothing is written."""
    block = Block(problem, config)
    out = np.full((config.splits, math.prod(problem.out_shape)), np.nan)
    tiles = tf32.FAMILY.thread_blocks(problem, config)
    for split in range(config.splits):
        for tile in range(tiles):
            _tile(block, tile, split, x, dy, out[split])
    return out.reshape(config.splits, *problem.out_shape)


def _tile(block: Block, tile: int, split: int, x: np.ndarray, dy: np.ndarray, out: np.ndarray) -> None:
    g, c, v = block.g, block.config, block.view
    rest, k = divmod(tile, g["k_blocks"])
    group, slot = divmod(rest, g["slots"])
    k0, c0 = k * c.tile_n, slot * 64 * c.blocks
    r0, s0 = group // g["groups_w"] * c.taps_h, group % g["groups_w"] * c.taps_w
    acc = np.zeros((c.consumers, c.taps_h, 64, c.tile_n))
    rows_before, turn = 0, 0
    begin = split * g["units_per_split"]
    for index in range(begin, min(begin + g["units_per_split"], g["units"])):
        rest, strip_q = divmod(index, g["tiles_q"])
        images, strip_p = divmod(rest, g["tiles_p"])
        n, p0, q0 = images * c.images, strip_p * c.tile_p, strip_q * c.tile_q
        rows = min(c.tile_p, g["out_h"] - p0)
        h, w = (first * stride - pad + tap * d for first, stride, pad, tap, d in zip(
            (p0, q0), v.stride, (g["pad_h"], g["pad_w"]), (r0, s0), v.dilation, strict=True
        ))  # fmt: skip
        live: set[int] = set()  # rows of dY that may not be overwritten
        for line in range((rows - 1) * v.stride[0] + block.reach + 1):
            block.load_line(x, turn % c.stages, c0, w, h + line, n)
            if line % v.stride[0] == 0 and line // v.stride[0] < rows:
                p = line // v.stride[0]
                live.add(p)
                assert len(live) <= block.dy_stages
                block.load_row(dy, (rows_before + p) % block.dy_stages, k0, q0, p0 + p, n)
            met = {r: (line - r * v.dilation[0]) // v.stride[0] for r in range(c.taps_h)
                   if line >= r * v.dilation[0] and (line - r * v.dilation[0]) % v.stride[0] == 0
                   and (line - r * v.dilation[0]) // v.stride[0] < rows}  # fmt: skip
            assert set(met.values()) <= live
            for warpgroup in range(c.consumers):
                for step in range(block.steps if met else 0):
                    a = block.fragment(turn % c.stages, warpgroup, step, g["out_w"] - q0)
                    for r, p in met.items():
                        acc[warpgroup, r] += a @ block.operand((rows_before + p) % block.dy_stages, step)
            if c.taps_h - 1 in met:
                live.remove((line - block.reach) // v.stride[0])
            turn += 1
        assert not live
        rows_before += rows
    _store(block, acc, (k0, c0, r0, s0), out)


def _store(block: Block, acc: np.ndarray, at: tuple[int, int, int, int], out: np.ndarray) -> None:
    g, c, (k0, c0, r0, s0) = block.g, block.config, at
    boxes = c.tile_n // 32
    for warpgroup in range(c.consumers):
        s = s0 + warpgroup % c.taps_w
        for tap, warp, lane, half in np.ndindex(c.taps_h, 4, 32, 2):
            channel = c0 + warpgroup // c.taps_w * 64 + warp * 16 + lane // 4 * 2 + half
            if s >= g["filter_w"] or r0 + tap >= g["filter_h"] or channel >= g["channels"]:
                continue
            to = (((r0 + tap) * g["filter_w"] + s) * g["channels"] + channel) * g["out_channels"]
            for box, e in np.ndindex(boxes, 2):
                k = k0 + 4 * (8 * box + 2 * (lane % 4) + e)
                if k >= g["out_channels"]:
                    continue
                for i in range(4):
                    j = i * boxes + box  # a thread's accumulators 4*j.. belong to columns 8*j..
                    value = acc[warpgroup, tap, warp * 16 + lane // 4 + 8 * half, 8 * j + 2 * (lane % 4) + e]
                    assert np.isnan(out[to + k + i])
                    out[to + k + i] = value
