"""A lowering with a stored choice reads one file, and neither measures nor compiles."""

import functools
import pathlib
import sys
import types
from typing import Any
from unittest import mock

import jax
import pytest
from jax import numpy as jnp

import jax_splitk
from benchmarks import cases
from jax_splitk.ops import trace
from jax_splitk.runtime import compiler, disk, nvrtc, toolchain
from jax_splitk.runtime.plan import LAUNCH_TARGET, DevicePlan
from jax_splitk.runtime.source import Source
from jax_splitk.runtime.target import DEFAULT_CUDA
from jax_splitk.tuning import search, select, store, table, tuner
from jax_splitk.tuning.entry import Entry, Measurement
from jax_splitk.tuning.key import key_for
from jax_splitk.tuning.options import Options
from tests.tuning_cache import CASE, CPU

pytestmark = [
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="lowers for the H200 of the shipped table"),
    pytest.mark.skipif(toolchain.unavailable() is not None, reason="needs NVRTC and CUTLASS's headers"),
]

CONVOLUTIONS = [case for case in cases.WGRAD_CASES if case.kernel == (3, 3) and case.batch == 8][:2]


def wgrad(case: cases.Case) -> Any:
    """A traced function that jit has not seen before."""
    shapes = [jax.ShapeDtypeStruct(shape, case.dtype) for shape in (case.lhs_shape, case.g_shape)]
    run = lambda x, g: jax_splitk.conv_wgrad(x, g, case.rhs_shape, **case.lax_arguments())  # noqa: E731
    return jax.jit(run).trace(*shapes)


def product(rows: int) -> Any:
    dense = jax.ShapeDtypeStruct((8192, 3584), jnp.bfloat16)
    weight = jax.eval_shape(lambda w: jax_splitk.prepack(jax_splitk.quantize(w, "int4", group_size=64)), dense)
    run = functools.partial(jax_splitk.quantized_matmul)
    return jax.jit(run).trace(jax.ShapeDtypeStruct((rows, 8192), jnp.bfloat16), weight)


def traced() -> list[Any]:
    return [*map(wgrad, CONVOLUTIONS), product(1), product(64)]


def device_code() -> list[Source]:
    sources = []
    for each in traced():
        ((_, problem),) = trace.ours(each.jaxpr.jaxpr, "cuda")
        choice = select.select(problem, DEFAULT_CUDA, Options())
        assert choice.why.startswith("shipped table: "), choice
        plan = choice.candidate.plan(choice.problem)
        assert isinstance(plan, DevicePlan)
        sources.append(plan.source)
    return sources


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[pathlib.Path]:
    """The files that are read. Nothing may be measured or compiled, and no evidence read."""
    forbidden = mock.Mock(side_effect=AssertionError("measured, compiled or evidence read"))
    for where, name in ((tuner, "tune"), (nvrtc.Nvrtc, "compile"), (compiler, "compile_in_worker")):
        monkeypatch.setattr(where, name, forbidden)
    monkeypatch.setattr(Entry, "read_evidence", forbidden)
    monkeypatch.setattr(compiler, "_memory", {})  # the machine code comes from disk, as in a new process
    files: list[pathlib.Path] = []
    real = disk.read
    monkeypatch.setattr(disk, "read", lambda path, **kw: files.append(pathlib.Path(path)) or real(path, **kw))
    return files


def test_a_hit_in_the_shipped_table_reads_the_table_once_and_the_machine_code(read: list[pathlib.Path]) -> None:
    for each in traced():
        assert LAUNCH_TARGET in each.lower(lowering_platforms=("cuda",)).as_text()
    tables = [path for path in read if table.FOLDER in path.parents]
    assert tables == [table.path_for(op, "NVIDIA H200") for op in ("conv_wgrad", "quantized_matmul")]
    cubins = [path for path in read if path.suffix == ".cubin"]
    looked_for = [path for path in read if path.suffix == ".json" and path not in tables]
    # A user's entry would come first. Compiling ahead looks for it once more.
    assert (len(cubins), len(set(looked_for))) == (4, 4)
    assert len(read) == 6 + len(looked_for) <= 14


def test_a_hit_in_the_cache_reads_its_file_alone(
    cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "on_miss")
    key = key_for(CASE.problem(), CPU)
    ranking = search.ranked(key)
    assert store.save(Entry.of(key, ranking[-1], [Measurement(c, 40.0) for c in ranking], ranking[0]))
    read = request.getfixturevalue("read")
    assert select.select(key.problem, CPU, Options(), measure=True).candidate == ranking[-1]
    assert read == [cache / key.file]


def test_a_hit_passes_few_functions() -> None:
    """Anyone who wants to know how a decision is found must read these functions. What a process works out once for a
    problem, such as its key, has been worked out."""
    problem = CONVOLUTIONS[0].problem()
    select.select(problem, DEFAULT_CUDA, Options())  # reads the table
    folder = str(pathlib.Path(select.__file__).parent)
    passed: list[tuple[str, str]] = []

    def count(frame: types.FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            passed.append((frame.f_code.co_filename, frame.f_code.co_qualname))

    sys.setprofile(count)
    try:
        choice = select.select(problem, DEFAULT_CUDA, Options(), measure=True)
    finally:
        sys.setprofile(None)
    assert choice.because == "shipped table"
    functions = {(file, name) for file, name in passed if not name.endswith(("comp>", "genexpr>", "<lambda>"))}
    assert len(functions) <= 40, sorted(functions)
    assert len(passed) <= 100
