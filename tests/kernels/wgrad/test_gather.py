"""The gathering family: its index arithmetic step by step, and the accuracy of its sums. Needs no GPU."""

import itertools
from typing import Any

import numpy as np
import pytest

from jax_splitk.kernels.wgrad import gather
from jax_splitk.kernels.wgrad.gather import CHAINS, FAMILY, Config
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import float64, random_problems
from tests.problems import conv, seeded
from tests.structs import arguments


def test_precision_decides_the_parts() -> None:
    parts = lambda **fields: gather.volume(conv((12, 12), (3, 3), (3, 64), padding=1, **fields)).parts  # noqa: E731
    assert parts(dtype="bfloat16", precision="highest") == 1
    assert parts(dtype="float32") == parts(dtype="float32", precision="high") == 2
    assert parts(dtype="float32", precision="highest") == parts(dtype="float32", precision="default,highest") == 3


# ---- index arithmetic: the device code's, step by step -------------------------------------------------------------


class Device:
    """wgrad/gather.cu's way from a plan and arrays to the result, with unwritten shared memory full of NaN."""

    def __init__(self, p: ConvWgradProblem, config: Config) -> None:
        plan = FAMILY.plan(p, config)
        self.p, self.config = p, config
        self.m = {name: int(value) for name, value in plan.source.defines}
        self.g = arguments(plan)
        self.grid = plan.launches[0].grid
        m = self.m
        self.items = m["GRANULE"] // gather.volume(p).item
        self.segment = m["KERNEL_W"] * m["SLICE"] if m["RUNS"] else m["SLICE"]
        self.segments = m["KERNEL_D"] * m["KERNEL_H"] * (1 if m["RUNS"] else m["KERNEL_W"])
        self.parity = m["LEAD"] % 2 if m["PAIRED"] else 0
        self.run = (self.parity + self.segment + 1) // 2 * 2 if m["PAIRED"] else self.segment
        self.pixels = m["TILE_IMAGES"] * m["TILE_P"] * m["TILE_Q"]
        self.image = m["KERNEL_D"] * m["ROWS"] * m["ROW_PITCH"]

    def pixel_offset(self, k: int) -> int:
        m = self.m
        rest, q = divmod(k, m["TILE_Q"])
        n, p = divmod(rest, m["TILE_P"])
        return q * m["PIXEL_COL"] + p * m["PIXEL_ROW"] + n * self.image

    def row_offset(self, rows: np.ndarray) -> np.ndarray:
        m = self.m
        segment = np.minimum(rows // self.run, self.segments - 1)
        s, tr = (0, segment) if m["RUNS"] else (segment % m["KERNEL_W"], segment // m["KERNEL_W"])
        place = tr // m["KERNEL_H"] * m["ROWS"] * m["ROW_PITCH"] + tr % m["KERNEL_H"] * m["TAP_ROW"] + s * m["TAP_COL"]
        return place + m["LEAD"] + rows % self.run - self.parity

    def load_x(self, x: np.ndarray, tile: tuple[int, int, int, int], c0: int) -> np.ndarray:
        m, g = self.m, self.g
        image, plane, row0, column0 = tile
        per_line = m["SLICE"] // self.items
        if m["DENSE"]:
            per_line = -(-(m["LEAD"] + m["COLUMNS"] * m["PITCH"]) // self.items)
        lines = m["TILE_IMAGES"] * m["KERNEL_D"] * m["ROWS"] * (1 if m["DENSE"] else m["COLUMNS"])
        i = np.arange(lines * per_line)
        line, first = i // per_line, i % per_line * self.items
        column = 0
        if not m["DENSE"]:
            line, column = line // m["COLUMNS"], line % m["COLUMNS"]
        to = line * m["ROW_PITCH"] + column * m["PITCH"] + first
        n = image + line // (m["ROWS"] * m["KERNEL_D"])

        def undilated(position: Any, size: int, dilation: int) -> Any:
            legal = (position >= 0) & (position % dilation == 0) & (position // dilation < size)
            return np.where(legal, position // dilation, -1)

        depth = line // m["ROWS"] % m["KERNEL_D"]
        d = undilated(plane * g["stride_d"] - g["pad_d"] + depth * m["GRID_D"], g["in_d"], m["LHS_D"])
        h = undilated(row0 * g["stride_h"] - g["pad_h"] + line % m["ROWS"] * m["GRID_H"], g["in_h"], m["LHS_H"])
        inside = (n < g["batch"]) & (d >= 0) & (h >= 0)
        start = column0 * g["stride_w"] - g["pad_w"]
        if m["DENSE"]:
            w, element = 0, start * m["PITCH"] - m["LEAD"] + first
            inside &= (element >= 0) & (element < g["in_w"] * m["PITCH"])
        else:
            w, element = undilated(start + column * m["GRID_W"], g["in_w"], m["LHS_W"]), c0 + first
            inside &= (w >= 0) & (element < g["channels"])
        at = np.where(inside, (((n * g["in_d"] + d) * g["in_h"] + h) * g["in_w"] + w) * g["channels"] + element, 0)
        assert not (at % self.items).any(), "a copy's source is not aligned"
        assert not (to % self.items).any(), "a copy's destination is not aligned"
        stage = np.full(m["TILE_IMAGES"] * self.image, np.nan)
        for j in range(self.items):
            stage[to + j] = np.where(inside, x.reshape(-1)[at + j], 0)
        return stage

    def fragments(self, stage: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """A's operand: a thread's place, then steps to its pixels that are the same for all threads."""
        k = np.arange(self.pixels)
        eights = np.array([self.pixel_offset(int(v)) for v in k // 8 * 8])
        lanes = np.array([self.pixel_offset(int(v)) for v in k % 8 // 2 * 2])
        at = self.row_offset(rows)[:, None] + eights + lanes + k % 2 * self.pixel_offset(1)
        if self.m["PAIRED"]:
            assert not (at[0::2] % 2).any(), "a pair of rows is not aligned"
            assert (at[1::2] == at[0::2] + 1).all(), "two rows are not neighbours"
        return stage[at]

    def run_block(self, x: np.ndarray, dy: np.ndarray, out: np.ndarray, block: tuple[int, int]) -> None:
        m, g, config = self.m, self.g, self.config
        slice_, mn = divmod(block[0], g["m_tiles"] * g["n_tiles"])
        m_tile, n_tile = divmod(mn, g["n_tiles"])
        k0, c0 = n_tile * config.tile_n, slice_ * m["SLICE"]
        rows = m_tile * config.tile_m + np.arange(config.tile_m)
        k = np.arange(self.pixels)
        sums = np.zeros((config.tile_m, config.tile_n))
        first = block[1] * g["k_tiles_per_split"]
        for kt in range(first, min(first + g["k_tiles_per_split"], g["k_tiles"])):
            rest, q = divmod(kt, g["tiles_w"])
            plane, p = divmod(rest, g["tiles_h"])
            images, depth = divmod(plane, g["out_d"])
            tile = (images * m["TILE_IMAGES"], depth, p * m["TILE_P"], q * m["TILE_Q"])
            a = self.fragments(self.load_x(x, tile, c0), rows)
            n = tile[0] + k // (m["TILE_P"] * m["TILE_Q"])
            p, q = tile[2] + k // m["TILE_Q"] % m["TILE_P"], tile[3] + k % m["TILE_Q"]
            inside = (n < g["batch"]) & (p < g["out_h"]) & (q < g["out_w"])
            assert m["RAGGED"] or inside.all()
            columns = min(config.tile_n, g["out_channels"] - k0)
            b = np.zeros((self.pixels, config.tile_n))
            gradient = dy.reshape(*(g[name] for name in ("batch", "out_d", "out_h", "out_w", "out_channels")))
            b[inside, :columns] = gradient[n[inside], depth, p[inside], q[inside], k0 : k0 + columns]
            sums += np.where(inside, a, 0) @ b
        position = rows % self.run - self.parity
        c = c0 + position
        stored = (rows // self.run < self.segments) & (position >= 0) & (position < self.segment)
        stored &= bool(m["RUNS"]) | (c < g["channels"])
        to = rows // self.run * (self.segment if m["RUNS"] else g["channels"]) + c
        columns = min(config.tile_n, g["out_channels"] - k0)
        target = out[block[1]].reshape(-1, g["out_channels"])
        assert np.isnan(target[to[stored], k0 : k0 + columns]).all(), "stored twice"
        target[to[stored], k0 : k0 + columns] = sums[stored, :columns]

    def __call__(self, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
        out = np.full((self.grid[1], *self.p.out_shape), np.nan)
        for block in itertools.product(range(self.grid[0]), range(self.grid[1])):
            self.run_block(x, dy, out, block)
        return out.sum(0)


def test_index_arithmetic_of_random_problems() -> None:
    with seeded(31) as rng:
        drawn = random_problems.draws(rng, "any_channels", "float32")
        for p in itertools.islice((p for p in drawn if p.flops < 1e7), 25):
            x, dy = (rng.integers(-2, 3, shape).astype(float) for shape in (p.lhs_shape, p.g_shape))
            configs = FAMILY.candidates(p, DEFAULT_CUDA)
            for i in rng.choice(len(configs), min(2, len(configs)), replace=False):
                np.testing.assert_array_equal(
                    Device(p, configs[i])(x, dy), float64.conv_wgrad_on_host(p, x, dy), err_msg=f"{p} {configs[i]}"
                )


@pytest.mark.parametrize("pad", [2, 3])
def test_index_arithmetic_of_the_stem(pad: int) -> None:
    """Rows of the 7x7x3 window are runs of 21 elements, which begin at even or odd places."""
    p = conv((32, 32), (7, 7), (3, 64), batch=1, stride=2, padding=((pad, 3), (pad, 3)))
    with seeded(32) as rng:
        x, dy = (rng.integers(-2, 3, shape).astype(float) for shape in (p.lhs_shape, p.g_shape))
        for config in FAMILY.candidates(p, DEFAULT_CUDA)[::6]:
            layout = gather.layout(gather.volume(p), config)
            assert (layout.dense, layout.runs, layout.paired, layout.granule) == (True, True, True, 16)
            np.testing.assert_array_equal(Device(p, config)(x, dy), float64.conv_wgrad_on_host(p, x, dy))


def test_splitting_into_parts_is_what_the_device_code_assumes() -> None:
    """Three truncated bf16 parts hold a float exactly (from 1e-33 on); two hold 16 bits of it."""
    truncated = lambda x: (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)  # noqa: E731
    with seeded(33) as rng:
        x = (rng.standard_normal(10_000) * 10.0 ** rng.uniform(-25, 30, 10_000)).astype(np.float32)
        high = truncated(x)
        middle = truncated(x - high)
        low = truncated(x - high - middle)
        np.testing.assert_array_equal(high.astype(np.float64) + middle + low, x)
        assert (abs(x - high - middle) <= abs(x) * 2.0**-15).all()


# ---- how exactly the tensor cores add ------------------------------------------------------------------------------

SMALL = ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1))  # products of parts (of X, of dY), in the device code's order


def bf16_parts(x: np.ndarray) -> list[np.ndarray]:
    """Three that hold float32 numbers exactly, as float64."""
    parts = []
    for _ in range(3):
        part = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        parts.append(part.astype(np.float64))
        x = x - part
    return parts


def truncated_sum(sums: np.ndarray, products: np.ndarray) -> np.ndarray:
    """A WGMMA's: it cuts off what lies below 26 bits of the largest of them all, and the result to 24.

    Errors measured on an H200 follow from it: see `test_chains_keep_float32s_accuracy`.
    """
    terms = np.concatenate([sums[None], products])
    unit = np.ldexp(1.0, np.frexp(np.abs(terms).max(0))[1] - 26)
    total = np.trunc(terms / unit).sum(0) * unit
    unit = np.ldexp(1.0, np.frexp(total)[1] - 24)
    return np.trunc(total / unit) * unit


def chain_error(order: list[tuple[int, int, int]], splits: int, chains: int) -> float:
    """Relative error of inner products in `splits` parts of so many chains, whose products are `order`: (step of 16
    pixels, part of X, part of dY)."""
    width, steps = 128, 1 + max(step for step, _, _ in order)
    with seeded(35) as rng:
        x, dy = (rng.standard_normal((splits, chains, steps, 16, width)).astype(np.float32) for _ in range(2))
    exact = (x.astype(np.float64) * dy).sum((0, 1, 2, 3))
    x_parts, dy_parts = bf16_parts(x), bf16_parts(dy)
    total = np.zeros(width, np.float32)
    for split in range(splits):
        rounded = np.zeros(width, np.float32)
        for chain in range(chains):
            sums = np.zeros(width)
            for step, i, j in order:
                sums = truncated_sum(sums, x_parts[i][split, chain, step] * dy_parts[j][split, chain, step])
            rounded += sums.astype(np.float32)
        total += rounded
    return float(np.linalg.norm(total - exact) / np.linalg.norm(exact))


def order_of(steps: int) -> list[tuple[int, int, int]]:
    """The device code's, of a chain."""
    return [(step, *parts) for step in range(steps) for parts in SMALL] + [(step, 0, 0) for step in range(steps)]


@pytest.mark.parametrize("steps", CHAINS)
def test_chains_keep_float32s_accuracy(steps: int) -> None:
    """Of 25088 pixels in 44 splits, on which XLA's float32 has an error of 2.3e-7 on an H200. hh first, and the others
    onto its large sums, in chains of two steps, gave 5.70e-7 there."""
    before = [(step, *parts) for step in range(2) for parts in ((0, 0), *reversed(SMALL))]
    assert 5e-7 < chain_error(before, 44, 18) < 6.5e-7
    assert chain_error(order_of(steps), 44, 36 // steps) < 2.5e-7


# Warpgroups of several blocks, whose chains end one after the other, by (blocks, steps of a chain).
CHAINED = conv((33, 31), (3, 3), (64, 72), padding=1, dtype="float32", precision="highest")
BLOCKS = {
    (2, 4): Config(2, 2, 32, 1, 8, 8, 16, 2, 3),
    (3, 4): Config(2, 3, 32, 1, 8, 8, 16, 2, 2),
    (2, 2): Config(2, 2, 64, 1, 4, 8, 16, 2, 5),
    (4, 2): Config(1, 4, 16, 1, 8, 8, 16, 2, 1),
}


def test_chains_of_several_blocks() -> None:
    v = gather.volume(CHAINED)
    for (blocks, steps), config in BLOCKS.items():
        assert FAMILY.refusal(CHAINED, config) is None
        assert (config.blocks, gather.chain(v, config)) == (blocks, steps)
    stem = conv((224, 224), (7, 7), (3, 64), batch=256, stride=2, padding=3)
    assert gather.chain(gather.volume(stem), BLOCKS[2, 4]) == 1


def test_sums_of_the_longest_split_keep_float32s_accuracy() -> None:
    assert chain_error(order_of(CHAINS[0]), 1, gather.MAX_ROUNDED_CHAIN) < 4e-7
