"""A new family takes a class, a device source and a line in the registry: all else sees it."""

import dataclasses
import pathlib

import jax
import pytest

import jax_splitk
from benchmarks.cases import Case
from jax_splitk import kernels
from jax_splitk.kernels.device.structs import Struct
from jax_splitk.kernels.family import field_refusal
from jax_splitk.kernels.wgrad.family import WgradFamily
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime import compiler
from jax_splitk.runtime.plan import Launch, Pointer
from jax_splitk.runtime.target import DEFAULT_CUDA, Target
from jax_splitk.tuning import entry, search, select
from jax_splitk.tuning.choice import Candidate
from jax_splitk.tuning.key import key_for
from jax_splitk.tuning.options import Options, check_options
from tests import cubin
from tests.tuning_cache import isolate

# The device source.
SOURCE = """
#include "structs.cuh"

extern "C" __global__ void wgrad_toy(const float* lhs, const float* g, Args args, float* out) {
  const int i = blockIdx.x * THREADS + threadIdx.x;
  float sum = 0;
  for (int pixel = 0; pixel < args.pixels; ++pixel) {
    sum += lhs[pixel * args.channels + i / args.out_channels] * g[pixel * args.out_channels + i % args.out_channels];
  }
  if (i < args.channels * args.out_channels) out[i] = sum;
}
"""


# The Python file.
@dataclasses.dataclass(frozen=True)
class Config:
    threads: int


@dataclasses.dataclass(frozen=True)
class Args(Struct):
    pixels: int
    channels: int
    out_channels: int


class Toy(WgradFamily[Config]):
    name = "wgrad_toy"
    ABI = 7
    structs = (Args,)

    def problem_refusal(self, problem: ConvWgradProblem) -> str | None:
        return None if problem.taps == 1 else f"{problem.taps} taps; accepted: 1"

    def config_refusal(self, problem: ConvWgradProblem, config: Config) -> str | None:
        return field_refusal(config, threads=range(32, 1025))

    def candidates(self, problem: ConvWgradProblem, target: Target) -> list[Config]:
        return [Config(64), Config(128)]

    def neighbours(self, problem: ConvWgradProblem, config: Config, target: Target) -> list[Config]:
        return [Config(config.threads * 2)]

    def estimate(self, problem: ConvWgradProblem, config: Config, target: Target) -> float:
        return 1e-9 / config.threads

    def workspace_bytes(self, problem: ConvWgradProblem, config: Config) -> int:
        return 8 * config.threads

    def macros(self, problem: ConvWgradProblem, config: Config) -> dict[str, int]:
        return {"THREADS": config.threads}

    def launches(self, problem: ConvWgradProblem, config: Config) -> tuple[Launch, ...]:
        args = Args(problem.reduction_size, problem.in_channels, problem.out_channels).param()
        grid = (-(-problem.in_channels * problem.out_channels // config.threads), 1, 1)
        return (Launch("wgrad_toy", grid, (config.threads, 1, 1), (Pointer(0), Pointer(1), args, Pointer(2))),)


FAMILY = Toy(Config)
PROBLEM = Case("toy", 2, 9, 8, 6, 10, (1, 1), dtype="float32").problem()


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    isolate(monkeypatch, tmp_path)
    (tmp_path / "toy.cu").write_text(SOURCE)
    monkeypatch.setattr(Toy, "file", str(tmp_path / "toy.cu"), raising=False)
    # The line in the registry.
    monkeypatch.setitem(kernels.FAMILIES, "conv_wgrad", (FAMILY, *kernels.FAMILIES["conv_wgrad"]))


def test_selection_search_and_cache_see_it() -> None:
    choice = select.select(PROBLEM, DEFAULT_CUDA, Options())
    assert (choice.implementation, choice.family, choice.config) == ("cutlass", FAMILY, Config(128))
    assert select.select(PROBLEM, DEFAULT_CUDA, Options(workspace_limit_bytes=1023)).config == Config(64)
    three = dataclasses.replace(PROBLEM, kernel_spatial=(3, 3))
    assert FAMILY.refusal(three, None, DEFAULT_CUDA) == "9 taps; accepted: 1"
    assert select.select(three, DEFAULT_CUDA, Options()).family is not FAMILY
    key = key_for(PROBLEM, DEFAULT_CUDA)
    assert "wgrad_toy:7" in key.environment.abi
    assert search.ranked(key)[:2] == [Candidate(FAMILY, Config(128)), Candidate(FAMILY, Config(64))]
    stored = entry.Entry.of(key, Candidate(FAMILY, Config(64)))
    assert entry.loads(stored.dumps(), key) == stored
    check_options("conv_wgrad", Options(Config(96)))
    assert select.select(PROBLEM, DEFAULT_CUDA, Options(Config(96))).config == Config(96)
    with pytest.raises(ValueError, match="threads 16; accepted: 32 to 1024"):
        select.select(PROBLEM, DEFAULT_CUDA, Options(Config(16)))


def test_explain_shows_it() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax_splitk.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers).sum()

    shapes = jax.ShapeDtypeStruct((1, 1, 6, 10), "float32"), jax.ShapeDtypeStruct((2, 9, 8, 6), "float32")
    (decision,) = jax_splitk.explain(jax.grad(loss), *shapes, platform="cuda").decisions
    assert (decision.family, decision.config) == ("wgrad_toy", Config(128))


def test_its_code_compiles() -> None:
    plan = FAMILY.plan(PROBLEM, Config(128))
    assert [buffer.bytes for buffer in plan.buffers] == [3456, 5760, 240, 1024]
    compiled = compiler.compile_source(plan.source)
    assert list(cubin.kernels(compiled.image)) == ["wgrad_toy"]
    assert plan.custom_call().attributes["kernels"] == "wgrad_toy"
