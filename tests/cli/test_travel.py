"""Moving decisions and kernels to other machines: `cache export`, `merge` and `verify`."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.cases import Case
from jax_splitk.cli import kernels
from jax_splitk.kernels.quantized import tiled
from jax_splitk.problems.problem import Problem
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.runtime import compiler, disk, toolchain
from jax_splitk.runtime.plan import DevicePlan
from jax_splitk.runtime.source import Source
from jax_splitk.runtime.target import DEFAULT_CUDA
from jax_splitk.tuning import buckets, search, store
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.entry import Entry, Measurement
from jax_splitk.tuning.key import key_for
from tests.command_line import refused, run, text
from tests.tuning_cache import finish, put, start

pytestmark = [
    pytest.mark.usefixtures("cache"),
    pytest.mark.skipif(toolchain.unavailable() is not None, reason="compiles"),
]

WGRAD = Case("small", 2, 9, 11, 72, 40, (1, 1), dtype="bfloat16").problem()
PRODUCT = QuantizedMatmulProblem(32, 256, 128, "bfloat16", "bfloat16", "int4", 64, "bfloat16")
FAKE = compiler.Compiled(b"machine code", "log")


def decided(problem: Problem, measured: int = 1) -> Entry:
    """An H200's entry: the model's first candidate, faster than some others and XLA."""
    key = key_for(problem, DEFAULT_CUDA)
    ranking = search.ranked(key)
    times = [Measurement(candidate, 5.0 + i) for i, candidate in enumerate(ranking[:measured])]
    return Entry.of(key, ranking[0], [*times, Measurement(XLA, 50.0)], metadata={"driver": "1"})


def source_of(problem: Problem, candidate: Candidate | None = None) -> Source:
    plan = (candidate or decided(problem).choice).plan(problem)
    assert isinstance(plan, DevicePlan)
    return plan.source


def device_code() -> Iterator[Source]:
    yield from map(source_of, (WGRAD, PRODUCT))


def code(folder: pathlib.Path) -> set[str]:
    """The source keys of a folder's kernels, all of which are whole."""
    return {kernel.source_key if kernel else str(path) for path, kernel in compiler.cached(folder)}


LOWER = """
import functools, json, logging, os, sys
import jax, jax.numpy as jnp
import jax_splitk
from jax_splitk.runtime import compiler, nvrtc, toolchain

def forbidden(*arguments):
    raise AssertionError("nothing is compiled")

nvrtc.Nvrtc.compile = compiler.compile_in_worker = forbidden
toolchain._nvidia_folders = lambda: []  # as where no wheel of NVIDIA is installed
assert "nvidia-cuda-nvrtc 13, " in toolchain.unavailable()
logging.basicConfig(level=logging.INFO)

def lowered(function, *arguments):
    try:
        text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
        return "kernel" if "jax_splitk_launch" in text else "xla"
    except jax_splitk.FrozenCacheMiss as error:
        return str(error)

def wgrad(x, g):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax_splitk.conv_wgrad(x, g, (1, 1, 72, 40), (1, 1), "VALID", dimension_numbers=numbers)

def product(rows):
    weight = jax_splitk.prepack(jax_splitk.quantize(jnp.ones((256, 128), jnp.bfloat16), "int4", group_size=64))
    return lowered(lambda x, w: jax_splitk.quantized_matmul(x, w), jnp.ones((rows, 256), jnp.bfloat16), weight)

operands = jnp.ones((2, 9, 11, 72), jnp.bfloat16), jnp.ones((2, 9, 11, 40), jnp.bfloat16)
found = []
for os.environ["JAX_SPLITK_CACHE_MODE"] in sys.argv[1:]:
    found.append([lowered(functools.partial(wgrad), *operands), product(32), product(31), product(100)])
print(json.dumps(found))
"""


def test_a_machine_without_a_compiler_runs_what_was_exported(
    cache: pathlib.Path, tmp_path: pathlib.Path, capsys: Any
) -> None:
    """The kernels are those of an H200's decisions, compiled by another version of NVRTC."""
    for entry in (decided(WGRAD), decided(PRODUCT)):
        put(cache, entry.key, entry.dumps())
    bundle = tmp_path / "bundle"
    found = run(capsys, "cache", "export", bundle)
    assert (found["added"], found["kernels"], found["compiled"], found["unusable"]) == (2, 0, 2, [])
    assert code(bundle) == {compiler.source_key(source_of(problem)) for problem in (WGRAD, PRODUCT)}
    assert run(capsys, "cache", "export", bundle)["compiled"] == 0

    def machine(*modes: str) -> tuple[list[list[str]], str]:
        variables = {"CACHE_DIR": str(tmp_path / "empty"), "CACHE_PATH": str(bundle)}
        return finish(start(LOWER, *modes, **variables))[0]

    ((*lowered, other),), said = machine("frozen")
    assert lowered == ["kernel"] * 3, said
    assert "no entry, and JAX_SPLITK_CACHE_MODE=frozen" in other
    assert "of a cache is used, which NVRTC" in said
    assert "decision of 32 rows" in said
    (path,) = bundle.glob(f"cubin/{compiler.source_key(source_of(WGRAD))}-*")
    path.unlink()
    ((missing, *_), read), _ = machine("frozen", "read")
    assert "no cache has the kernel of wgrad_" in missing
    assert "nvidia-cuda-nvrtc 13, nvidia-cuda-cccl, nvidia-cuda-runtime are not installed" in missing
    assert read == ["xla", "kernel", "kernel", "xla"]


# ---- merge and export ------------------------------------------------------------------------------------------------


def test_kernels_that_lost_stay_behind(cache: pathlib.Path, tmp_path: pathlib.Path, capsys: Any) -> None:
    entry = decided(PRODUCT, measured=12)
    put(cache, entry.key, entry.dumps())
    sources = {source_of(PRODUCT, m.candidate): m.candidate for m in entry.measurements if m.candidate != XLA}
    assert len(sources) > 3
    # Also the kernels that were lowered by a shipped table's or the cost model's choice.
    for source in [*sources, source_of(WGRAD)]:
        assert compiler.store(cache, source, FAKE)
    wanted = {compiler.source_key(source) for source in (source_of(PRODUCT), source_of(WGRAD))}
    assert "kernels 2, compiled 0" in text(capsys, "cache", "merge", cache, tmp_path / "b")
    assert code(tmp_path / "b") == wanted
    assert run(capsys, "cache", "merge", cache, tmp_path / "b")["kernels"] == 0
    assert run(capsys, "cache", "merge", cache, tmp_path / "decisions.json")["kernels"] == 0
    assert run(capsys, "cache", "export", tmp_path / "c")["kernels"] == 2
    assert code(tmp_path / "c") == wanted


def test_a_decision_for_some_rows_has_the_kernels_of_fewer(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above 64 rows the number of tiles is a macro, so the decision for 96 rows needs kernels for 4 tiles and for 3."""
    monkeypatch.setattr(compiler, "compile_sources", lambda sources: [FAKE for _ in sources])
    key = key_for(dataclasses.replace(PRODUCT, rows=320, k=4096, features=8192), DEFAULT_CUDA)
    choice = Candidate(tiled.FAMILY, tiled.Config(128, 96, 6, 132, 1))
    kernels.carry([], tmp_path, [Entry.of(key, choice)], complete=True)
    tiles = [dict(kernel.source.defines)["N_TILES"] for _, kernel in compiler.cached(tmp_path) if kernel]
    assert sorted(tiles) == ["3", "4"]
    for rows in range(257, 321):
        fewer = dataclasses.replace(key.problem, rows=rows)
        if buckets.choice_for(key_for(fewer, DEFAULT_CUDA), Entry.of(key, choice), 2**28) is not None:
            assert compiler.source_key(source_of(fewer, choice)) in code(tmp_path)


@pytest.mark.parametrize("where", ["source", "file"])
def test_code_that_is_not_trusted_does_not_travel(
    where: str, cache: pathlib.Path, tmp_path: pathlib.Path, capsys: Any
) -> None:
    entry = decided(PRODUCT)
    put(cache, entry.key, entry.dumps())
    assert compiler.store(cache, source_of(PRODUCT), FAKE)
    ((path, _),) = compiler.cached(cache)
    (cache if where == "source" else path).chmod(0o777)
    found = run(capsys, "cache", "merge", cache, tmp_path / "b", code=1)
    assert (found["added"], found["kernels"], len(found["unusable"])) == (1, 0, 1)
    assert "may" in found["unusable"][0]["reason"] or "trusted" in found["unusable"][0]["reason"]
    assert code(tmp_path / "b") == set()


def test_without_a_compiler_export_says_what_is_missing(
    cache: pathlib.Path, tmp_path: pathlib.Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = decided(PRODUCT)
    put(cache, entry.key, entry.dumps())
    monkeypatch.setattr(toolchain, "unavailable", lambda: "reason of the test")
    found = run(capsys, "cache", "export", tmp_path / "b", code=1)
    assert found["unusable"][0]["reason"] == "1 kernels are missing and not compiled: reason of the test"
    assert "there is no compiler: reason of the test" in refused(capsys, "cache", "verify")
    for wrong in (cache, tmp_path / "b.json"):
        assert "accepted: a folder that is none of the caches" in refused(capsys, "cache", "export", wrong)


# ---- verify ----------------------------------------------------------------------------------------------------------


def test_verify_finds_what_the_compiler_did_not_make(
    cache: pathlib.Path, tmp_path: pathlib.Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Source, "text", lambda source, **_: 'extern "C" __global__ void tiny(int* x) { *x = VALUE; }')
    monkeypatch.setattr(kernels, "source_files", lambda: ["tiny.cu"])
    sources = [Source("tiny.cu", (("VALUE", value),)) for value in range(6)]
    good = compiler.compile_source(sources[0])
    assert text(capsys, "cache", "verify").endswith("1 of 1 kernels are what the compiler makes of their sources\n")
    expected = {}

    def put_kernel(reason: str, key: str, source: Source, compiled: compiler.Compiled, version: str = "") -> None:
        path = cache / compiler._file(key)
        assert disk.write(path, compiler._pack(key, version or toolchain.identity(), source, compiled))
        expected[str(path)] = reason

    forged = dataclasses.replace(good, image=good.image[:-8] + b"\1" * 8)
    put_kernel("it is not what the compiler makes", compiler.content_key(sources[1]), sources[1], forged)
    # Another's code under its name, with a header that is right, or tells the truth.
    put_kernel("it is not what the compiler makes", compiler.content_key(sources[2]), sources[2], good)
    put_kernel("does not match its name", compiler.content_key(sources[3]), sources[0], good)
    put_kernel("NVRTC 1.0 compiled it", f"{compiler.source_key(sources[4])}-0", sources[4], good, "NVRTC 1.0")
    broken = Source("tiny.cu", (("VALUE", "nonsense"),))
    put_kernel("does not compile", compiler.content_key(broken), broken, good)
    odd = Source("tiny.cu", (("VALUE", "\ud800"),))
    put_kernel("does not compile", compiler.content_key(odd), odd, good)
    outside = Source("/etc/passwd", ())
    put_kernel("is not the package's", compiler.content_key(outside), outside, good)
    (cache / "cubin" / f"{'0' * 64}.cubin").write_bytes(b"")
    expected[str(cache / "cubin" / f"{'0' * 64}.cubin")] = "another version's"
    found = run(capsys, "cache", "verify", cache, code=1)
    assert (found["kernels"], found["verified"]) == (len(expected) + 1, 1)
    reasons = {item["path"]: item["reason"] for item in found["wrong"]}
    assert reasons.keys() == expected.keys()
    for path, reason in expected.items():
        assert reason in reasons[path]
    assert "accepted: a cache folder" in refused(capsys, "cache", "verify", tmp_path / "nowhere")
    cache.chmod(0o777)
    assert "anybody may write to it" in json.dumps(run(capsys, "cache", "verify", code=1)["refused"])


def test_exported_entries_are_those_of_the_cache(cache: pathlib.Path, tmp_path: pathlib.Path, capsys: Any) -> None:
    """The export has entries of every machine. Evidence such as the driver is not a part of their keys."""
    entry = decided(PRODUCT)
    other = dataclasses.replace(entry, evidence={**entry.evidence, "metadata": {"driver": "2"}})
    put(cache, entry.key, entry.dumps())
    assert compiler.store(cache, source_of(PRODUCT), FAKE)
    run(capsys, "cache", "export", tmp_path / "b")
    assert store.read(tmp_path / "b" / entry.key.file, entry.key) == entry
    assert other.key == entry.key
