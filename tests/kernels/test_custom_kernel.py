"""examples/custom_kernel: families from another package, one with a device source and one with a C++ handler.
`.ci/package` installs this package; here only its handler is compiled."""

import dataclasses
import functools
import importlib
import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import types
from collections.abc import Iterator
from typing import Any

import jax
import jaxlib
import numpy as np
import pytest
from jax import numpy as jnp

import jax_splitk
from benchmarks.cases import Case
from jax_splitk import kernel_api, kernels
from jax_splitk.kernels import catalogue
from jax_splitk.runtime import compiler
from jax_splitk.runtime.target import DEFAULT_CUDA
from jax_splitk.tuning import entry, search, select
from jax_splitk.tuning.choice import Candidate
from jax_splitk.tuning.key import key_for
from jax_splitk.tuning.options import Options, check_options
from tests import cubin
from tests.kernels import emulated
from tests.tuning_cache import isolate

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "custom_kernel"
CPU = pytest.mark.skipif(jax.default_backend() != "cpu", reason="runs the host family")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The imported package, with its handler if pybind11 is there to bind it."""
    folder = tmp_path_factory.mktemp("custom") / "pointwise_kernels"
    shutil.copytree(EXAMPLE / "src" / "pointwise_kernels", folder)
    if importlib.util.find_spec("pybind11") is None:
        pytest.skip("pybind11 is not installed")
    import pybind11  # noqa: PLC0415

    xla = pathlib.Path(jaxlib.__file__).parent / "include"
    includes = [f"-I{path}" for path in (pybind11.get_include(), sysconfig.get_path("include"), xla)]
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    command = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", "-w", *includes]
    subprocess.run([*command, EXAMPLE / "handler.cc", "-o", folder / f"_handler{suffix}"], check=True)
    before = dict(catalogue.FAMILIES)
    sys.path.insert(0, str(folder.parent))
    yield importlib.import_module("pointwise_kernels")
    sys.path.remove(str(folder.parent))
    catalogue.FAMILIES.update(before)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the device source alone, which needs no handler, with its family registered."""
    alone = types.ModuleType("pointwise_alone")
    alone.__path__ = [str(EXAMPLE / "src" / "pointwise_kernels")]
    monkeypatch.setitem(sys.modules, "pointwise_alone", alone)
    module = importlib.import_module("pointwise_alone.cuda")
    ours = tuple(family for family in catalogue.FAMILIES["conv_wgrad"] if family.name.startswith("wgrad"))
    monkeypatch.setitem(catalogue.FAMILIES, "conv_wgrad", ours)  # without `package`'s
    kernels.register("conv_wgrad", module.FAMILY)
    return module


def wgrad(x: jax.Array, g: jax.Array, **arguments: Any) -> jax.Array:
    shape = (1, 1, x.shape[-1], g.shape[-1])
    return jax_splitk.conv_wgrad(x, g, shape, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"), **arguments)


def operands(channels: int, out_channels: int) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """x, g and their weight gradient, of small integers."""
    rng = np.random.default_rng(0)
    x, g = (rng.integers(-3, 4, (3, 5, 7, size)).astype(np.float32) for size in (channels, out_channels))
    return jnp.asarray(x), jnp.asarray(g), np.einsum("nhwc,nhwk->ck", x, g)[None, None]


@CPU
def test_the_handler_computes_and_is_measured(
    package: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    isolate(monkeypatch, tmp_path)
    x, g, expected = operands(13, 24)
    run = jax.jit(functools.partial(wgrad, config=package.host.Config(block=5)))
    np.testing.assert_array_equal(run(x, g), expected)
    assert set(re.findall(r"custom_call @(\w+)", run.lower(x, g).as_text())) == {package.host.TARGET}
    (decision,) = jax_splitk.explain(run, x, g).decisions
    assert (decision.implementation, decision.family) == ("host", "pointwise_host")
    ((key, entry),) = jax_splitk.tune(wgrad, x, g, seconds=5)
    measured = {m.candidate.family for m in entry.measurements if m.us is not None}
    assert package.host.FAMILY in measured
    assert "pointwise_host:1" in key.environment.abi
    assert jax_splitk.TuningResult.loads(jax_splitk.TuningResult(((key, entry),)).dumps()).get(key) == entry


@CPU
def test_what_a_family_refuses_goes_to_others(package: Any) -> None:
    x, g, _ = operands(13, 24)
    refusal = package.host.FAMILY.refusal
    problem = jax_splitk.explain(wgrad, x, g).decisions[0].problem
    assert refusal(problem) is None
    assert refusal(dataclasses.replace(problem, dtype="bfloat16")) == "dtype bfloat16; accepted: float32"
    with pytest.raises(ValueError, match="block 0; accepted: 1 to 4096"):
        wgrad(x, g, config=package.host.Config(0))
    strided = jax_splitk.explain(lambda: jax_splitk.conv_wgrad(x, x[:, :3, :4], (1, 1, 13, 13), (2, 2), "VALID",
                                 dimension_numbers=("NHWC", "HWIO", "NHWC"))).decisions[0]  # fmt: skip
    assert strided.family == "wgrad_host"


def test_the_device_source_compiles(cuda: Any) -> None:
    x, g, _ = operands(13, 24)
    run = functools.partial(wgrad, config=cuda.Config(32))
    (decision,) = jax_splitk.explain(run, x, g, platform="cuda").decisions
    assert (decision.implementation, decision.family) == ("cutlass", "pointwise_cuda")
    assert cuda.FAMILY.refusal(decision.problem, None, DEFAULT_CUDA) is None
    plan = cuda.FAMILY.plan(decision.problem, cuda.Config(32))
    assert [launch.grid for launch in plan.launches] == [(1, 2, 1)]
    assert list(cubin.kernels(compiler.compile_source(plan.source).image)) == ["pointwise"]


def test_a_family_takes_a_module_a_device_source_and_a_line(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """Selection, search, keys, entries and explicit configs accept it."""
    isolate(monkeypatch, tmp_path)
    family, config = cuda.FAMILY, cuda.Config
    problem = Case("1x1", 2, 9, 8, 6, 10, (1, 1), dtype="float32").problem()
    others = tuple(other for other in catalogue.FAMILIES["conv_wgrad"] if other is not family)
    monkeypatch.setitem(catalogue.FAMILIES, "conv_wgrad", (family, *others))
    choice = select.select(problem, DEFAULT_CUDA, Options())
    assert (choice.implementation, choice.family, choice.config) == ("cutlass", family, config(64))
    three = dataclasses.replace(problem, kernel_spatial=(3, 3))
    assert family.refusal(three, None, DEFAULT_CUDA) == "kernel_spatial (3, 3); accepted: {1}"
    assert select.select(three, DEFAULT_CUDA, Options()).family is not family
    key = key_for(problem, DEFAULT_CUDA)
    assert "pointwise_cuda:1" in key.environment.abi
    own = [candidate for candidate in search.ranked(key) if candidate.family is family]
    assert own[:3] == [Candidate(family, config(rows)) for rows in (64, 32, 16)]
    stored = entry.Entry.of(key, Candidate(family, config(16)))
    assert entry.loads(stored.dumps(), key) == stored
    check_options("conv_wgrad", Options(config(32)))
    assert select.select(problem, DEFAULT_CUDA, Options(config(32))).config == config(32)
    with pytest.raises(ValueError, match="rows 8; accepted: 16, 32, 64"):
        select.select(problem, DEFAULT_CUDA, Options(config(8)))
    assert [buffer.bytes for buffer in family.plan(problem, config(64)).buffers] == [3456, 5760, 240, 0]


SIZES = pytest.mark.parametrize(("channels", "out_channels"), [(13, 24), (64, 16), (1, 33)])


@pytest.mark.parametrize("rows", [16, 64])
@SIZES
def test_the_device_source_computes_in_the_emulator(rows: int, channels: int, out_channels: int, cuda: Any) -> None:
    problem = Case("1x1", 2, 9, 8, channels, out_channels, (1, 1), dtype="float32").problem()
    emulated.check(cuda.FAMILY, problem, cuda.Config(rows))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [16, 32, 64])
@SIZES
def test_the_device_source_computes(rows: int, channels: int, out_channels: int, cuda: Any) -> None:
    x, g, expected = operands(channels, out_channels)
    np.testing.assert_array_equal(jax.jit(functools.partial(wgrad, config=cuda.Config(rows)))(x, g), expected)


def test_headers_beside_the_source_come_first(cuda: Any, tmp_path: pathlib.Path) -> None:
    (tmp_path / "mine.cuh").write_text("constexpr int MINE = 3;\n")
    (tmp_path / "own.cu").write_text('#include "mine.cuh"\n#include "device/ptx.cuh"\n')
    source = cuda.FAMILY.source(jax_splitk.explain(wgrad, *operands(2, 2)[:2]).decisions[0].problem, cuda.Config(16))
    text = dataclasses.replace(source, file=str(tmp_path / "own.cu")).text()
    assert "MINE = 3" in text
    assert "#pragma once" in text or "__device__" in text


def test_a_compilers_errors_name_the_files_and_their_lines(cuda: Any, tmp_path: pathlib.Path) -> None:
    """This holds even if the package's structs and headers precede and interrupt them in the text."""
    (tmp_path / "mine.cuh").write_text('#include "device/ptx.cuh"\n\nconstexpr int MINE = in_mine;\n')
    lines = (
        '#include "structs.cuh"',
        '#include "mine.cuh"',
        "",
        "__global__ void own(int* x) {",
        "  *x = in_own;",
        "}",
    )
    (tmp_path / "own.cu").write_text("\n".join((*lines, '#include "mine.cuh"', "int last = at_the_end;")))
    source = cuda.FAMILY.source(jax_splitk.explain(wgrad, *operands(2, 2)[:2]).decisions[0].problem, cuda.Config(16))
    source = dataclasses.replace(source, file=str(tmp_path / "own.cu"))
    with pytest.raises(compiler.CompilationError) as raised:
        compiler.compile_source(source)
    found = re.findall(r'^(\S+)\((\d+)\): error: identifier "(\w+)"', str(raised.value), re.MULTILINE)
    own, mine = str(tmp_path / "own.cu"), str(tmp_path / "mine.cuh")
    assert found == [(mine, "3", "in_mine"), (own, "5", "in_own"), (own, "8", "at_the_end")]
    # The identity of a compilation has no paths.
    (tmp_path / "moved").mkdir()
    for name in ("own.cu", "mine.cuh"):
        shutil.copy(tmp_path / name, tmp_path / "moved")
    moved = dataclasses.replace(source, file=str(tmp_path / "moved" / "own.cu"))
    assert compiler.source_key(moved) == compiler.source_key(source)


def test_a_kernel_imports_what_is_public_only() -> None:
    """The example package and the page import public names only, and the reference has all of these."""
    page = (EXAMPLE.parents[1] / "docs" / "own-kernel.md").read_text()
    texts = [*re.findall(r"```python\n(.*?)```", page, re.DOTALL)]
    texts += [path.read_text() for path in EXAMPLE.glob("src/pointwise_kernels/*.py")]
    imported = {module for text in texts for module in re.findall(r"(?:from|import) (jax_splitk[\w.]*)", text)}
    assert imported == {"jax_splitk", "jax_splitk.kernel_api"}
    reference = (EXAMPLE.parents[1] / "docs" / "reference" / "api.md").read_text()
    assert {f"::: jax_splitk.kernel_api.{name}" for name in kernel_api.__all__} <= set(reference.splitlines())


def test_wrong_families_are_refused(cuda: Any) -> None:
    class Other(type(cuda.FAMILY)):
        name = "other"

    @dataclasses.dataclass
    class Changing:
        rows: int

    for op, family, error, message in (
        (
            "gemm",
            cuda.FAMILY,
            ValueError,
            "op='gemm'; accepted: 'conv_fprop', 'conv_dgrad', 'conv_wgrad', 'dot_general', 'quantized_matmul'",
        ),
        ("conv_wgrad", Other, TypeError, "of type ABCMeta; accepted: an instance of a Family"),
        ("conv_wgrad", cuda.FAMILY, ValueError, "pointwise_cuda has one of these"),
        ("quantized_matmul", Other(cuda.Config), ValueError, "pointwise_cuda has one of these"),
        ("conv_wgrad", Other(Changing), TypeError, "accepted: a frozen dataclass"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            kernels.register(op, family)
