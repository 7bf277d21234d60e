"""The NVRTC compiler's cache, its errors and its workers, on kernels small enough to compile in a moment."""

import concurrent.futures
import json
import logging
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
import types
from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax import numpy as jnp

import jax_splitk
from jax_splitk.runtime import compiler, disk, pool, toolchain
from jax_splitk.runtime.compiler import CompilationError
from jax_splitk.runtime.nvrtc import Nvrtc, NvrtcError
from jax_splitk.runtime.source import Source
from jax_splitk.runtime.toolchain import CompilerUnavailable
from jax_splitk.runtime.worker import compile_in_worker
from tests import cubin
from tests.runtime.test_plan import small_hopper_plan
from tests.tuning_cache import start

TINY = """
extern "C" __global__ void tiny(int* x) {
#ifdef BROKEN
  x = does_not_exist;
#endif
  *x = VALUE;
}
"""


class Machine:
    """A compiler with an empty memory, its own cache folder and a count of the compilations."""

    def __init__(self, cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
        self.cache, self.compiled = cache, []
        self._monkeypatch = monkeypatch
        monkeypatch.setenv("JAX_SPLITK_CACHE_DIR", str(cache))
        self.source_text(TINY)
        self.forget()
        compile_text = Nvrtc.compile

        def counted(nvrtc: Nvrtc, text: str, name: str, options: list[str], *more: Any) -> tuple[bytes | None, str]:
            self.compiled.append(options)
            return compile_text(nvrtc, text, name, options, *more)

        monkeypatch.setattr(Nvrtc, "compile", counted)

    def source_text(self, text: str) -> None:
        self._monkeypatch.setattr(Source, "text", lambda source, **_: text)

    def forget(self) -> None:
        """Resets the memory, as in a new process."""
        self._monkeypatch.setattr(compiler, "_memory", {})
        self._monkeypatch.setattr(compiler, "_in_flight", {})
        self._monkeypatch.setattr(compiler, "pool", pool.Pool())

    def file(self) -> pathlib.Path:
        (path,) = self.cache.glob("cubin/*")
        return path


@pytest.fixture
def machine(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path / "cache", monkeypatch)


def tiny(value: int = 1, *more: tuple[str, int]) -> Source:
    return Source("tiny.cu", (("VALUE", value), *more))


def test_second_compilation_comes_from_memory_then_from_disk(machine: Machine) -> None:
    first = compiler.compile_source(tiny())
    assert compiler.compile_source(tiny()) is first
    machine.forget()
    again = compiler.compile_source(tiny())
    assert again == first
    assert again is not first
    assert len(machine.compiled) == 1


def test_a_fresh_process_reads_the_disk_and_never_calls_nvrtc(tmp_path: pathlib.Path) -> None:
    script = """
import json, sys
from jax_splitk.runtime import compiler, nvrtc, toolchain
calls = []
compile_text = nvrtc.Nvrtc.compile
def counted(self, *arguments):
    calls.append(1)
    return compile_text(self, *arguments)
nvrtc.Nvrtc.compile = counted
compiler.Source.text = lambda self, **_: sys.argv[1]
compiled = compiler.compile_source(compiler.Source("tiny.cu", (("VALUE", 3),)))
print(json.dumps([len(calls), compiled.image.hex()]))
"""
    environment = {**os.environ, "JAX_SPLITK_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    results = []
    for _ in range(2):
        command = [sys.executable, "-c", script, TINY]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        results.append(json.loads(done.stdout))
    assert [calls for calls, _ in results] == [1, 0]
    assert results[0][1] == results[1][1]


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]


@pytest.mark.parametrize("damage", [
    truncated,
    flipped,
    lambda data: data + b"x",
    lambda data: b"",
    lambda data: data[:10],
    lambda data: data.replace(compiler._FILE_MAGIC, b"jax_splitk cubin 0\n", 1),
    lambda data: b"\x7fELF another program's file",
], ids=["truncated", "bit_flip", "longer", "empty", "only_magic", "other_version", "foreign"])  # fmt: skip
def test_damaged_file_is_compiled_again_and_repaired(
    damage: Callable[[bytes], bytes], machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    first = compiler.compile_source(tiny())
    path = machine.file()
    good = path.read_bytes()
    path.write_bytes(damage(good))
    machine.forget()
    with caplog.at_level(logging.WARNING, "jax_splitk"):
        assert compiler.compile_source(tiny()).image == first.image
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert len(machine.compiled) == 2
    # The whole file may differ, because ptxas's log contains times.
    machine.forget()
    caplog.clear()
    assert compiler.compile_source(tiny()).image == first.image
    assert (len(machine.compiled), caplog.records) == (2, [])


def test_a_cache_that_cannot_be_written_is_no_error(
    machine: Machine, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "a_file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("JAX_SPLITK_CACHE_DIR", str(blocked / "cache"))
    with caplog.at_level(logging.WARNING, "jax_splitk"):
        compiled = compiler.compile_source(tiny())
    assert "tiny" in cubin.kernels(compiled.image)
    (record,) = caplog.records
    assert "cannot write" in record.getMessage()
    assert compiler.compile_source(tiny()) is compiled


def test_a_failed_write_leaves_nothing_behind(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(source: str, target: pathlib.Path) -> None:
        raise OSError("no space left on device")

    path = tmp_path / "folder" / "file"
    assert disk.write(path, b"old")
    monkeypatch.setattr(os, "replace", full_disk)
    assert not disk.write(path, b"new")
    assert [p.name for p in path.parent.iterdir()] == ["file"]
    assert path.read_bytes() == b"old"


def test_key_holds_no_paths(machine: Machine, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = compiler.content_key(tiny())
    monkeypatch.setenv("JAX_SPLITK_CACHE_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(toolchain, "include_folders", lambda: (tmp_path / "moved",))
    monkeypatch.chdir(tmp_path)
    assert compiler.content_key(tiny()) == key
    assert not [option for option in tiny().options() if "/" in option]


def test_key_differs_with_text_macros_and_versions(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [compiler.content_key(tiny()), compiler.content_key(tiny(2)), compiler.content_key(tiny(1, ("MORE", 1)))]
    machine.source_text(TINY + "// another comment\n")
    keys.append(compiler.content_key(tiny()))
    machine.source_text(TINY)
    with monkeypatch.context() as patch:
        patch.setattr(toolchain.find_nvrtc(), "version", (99, 9))
        keys.append(compiler.content_key(tiny()))
    for package in toolchain.package_versions():
        with monkeypatch.context() as patch:
            versions = {**toolchain.package_versions(), package: "99.9"}
            patch.setattr(toolchain, "package_versions", lambda versions=versions: versions)
            keys.append(compiler.content_key(tiny()))
    assert len(set(keys)) == len(keys) == 9
    assert compiler.content_key(tiny()) == keys[0]


def test_compilation_error_shows_macros_and_log(machine: Machine) -> None:
    message = r"tiny\.cu does not compile with VALUE=7 BROKEN=1:\n(.|\n)*tiny\.cu\(4\): error(.|\n)*does_not_exist"
    for _ in range(2):  # the failure is not remembered as a success
        with pytest.raises(CompilationError, match=message):
            compiler.compile_source(tiny(7, ("BROKEN", 1)))
    with pytest.raises(CompilationError, match=message):
        compiler.compile_sources([tiny(), tiny(7, ("BROKEN", 1))])
    assert "tiny" in cubin.kernels(compiler.compile_source(tiny()).image)


def test_worker_process_makes_the_same_code(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    here = [compiler.compile_source(tiny(value)) for value in (1, 2)]
    assert len(machine.compiled) == 2
    machine.forget()
    monkeypatch.setenv("JAX_SPLITK_CACHE_DIR", str(machine.cache / "other"))
    there = compiler.compile_sources([tiny(1), tiny(2), tiny(1)])
    assert len(machine.compiled) == 2, "these had to be compiled in other processes"
    assert [c.image for c in there] == [here[0].image, here[1].image, here[0].image]
    assert cubin.reports(there[0].log) == cubin.reports(here[0].log)


def test_a_worker_that_dies_is_an_error_with_its_words(tmp_path: pathlib.Path) -> None:
    with pytest.raises(NvrtcError, match=r"ended with status 1: (.|\n)*no_such_library\.so"):
        compile_in_worker(tmp_path / "no_such_library.so", TINY, "tiny.cu", [])


def test_many_threads_compile_a_source_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_text = Nvrtc.compile
    barrier = threading.Barrier(8)

    def slow(nvrtc: Nvrtc, *request: Any) -> tuple[bytes | None, str]:
        time.sleep(0.2)
        return compile_text(nvrtc, *request)

    def ask(value: int) -> compiler.Compiled:
        barrier.wait()
        return compiler.compile_source(tiny(value))

    monkeypatch.setattr(Nvrtc, "compile", slow)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(ask, [1, 2] * 4))
    assert len(machine.compiled) == 2
    assert len({id(result) for result in results}) == 2


# ---- ahead of whoever asks -----------------------------------------------------------------------------------------


def finished(*sources: Source) -> None:
    """Waits until the workers have compiled what they were given."""
    outcomes = [compiler.pool._outcomes[compiler.source_key(source)] for source in sources]
    assert all(outcome.wait(60) and outcome.exception() is None for outcome in outcomes)


def test_threads_that_want_each_others_sources_all_end(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """One that compiles a source itself takes it from the workers, which another one waits for."""
    sources = [Source("contraction/im2col.cu", (("NUMBER", i),)) for i in range(30)]

    def machine_code(source: Source, *, in_worker: bool) -> tuple[bytes, str]:
        time.sleep(0.003)
        return b"machine code", ""

    monkeypatch.setenv("JAX_SPLITK_CACHE_DIR", str(tmp_path))
    for name, value in (("_machine_code", machine_code), ("_memory", {}), ("_in_flight", {}), ("pool", pool.Pool())):
        monkeypatch.setattr(compiler, name, value)
    monkeypatch.setattr(pool, "cores", lambda: 2)
    given_up = threading.Event()

    def work(number: int) -> None:
        rng = random.Random(number)
        for count in (8, 1, 5, 1, 1, 8):
            compiler.compile_sources(rng.sample(sources, count), given_up)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(12)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 30
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    alive = sum(thread.is_alive() for thread in threads)
    given_up.set()
    assert alive == 0


def test_what_was_compiled_ahead_is_there_when_it_is_asked_for(machine: Machine) -> None:
    compiler.compile_ahead([tiny(1), tiny(2), tiny(1)])
    finished(tiny(1), tiny(2))
    assert not machine.cache.exists(), "it may not be needed"
    one, two = (compiler.compile_source(tiny(value)) for value in (1, 2))
    assert one.image != two.image
    assert machine.compiled == []
    assert len(list(machine.cache.glob("cubin/*"))) == 2
    machine.forget()
    compiler.compile_ahead([tiny(1)])
    assert compiler.compile_source(tiny(1)) == one, "from disk"
    assert compiler.pool._outcomes == {}


def test_its_errors_are_for_whoever_asks(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    broken = tiny(7, ("BROKEN", 1))
    compiler.compile_ahead([broken])
    finished(broken)
    assert caplog.records == []
    message = r"tiny\.cu does not compile with VALUE=7 BROKEN=1:\n(.|\n)*not_exist"
    for compilations in (0, 1):
        with pytest.raises(CompilationError, match=message):
            compiler.compile_source(broken)
        assert len(machine.compiled) == compilations


def test_a_worker_that_dies_is_replaced(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    died = threading.Event()

    def killed(*_: object) -> None:
        died.set()
        raise NvrtcError("the compiler's process ended with status -9")

    monkeypatch.setattr(compiler, "compile_in_worker", killed)
    compiler.compile_ahead([tiny()])
    assert died.wait(60)
    assert list(cubin.kernels(compiler.compile_source(tiny()).image)) == ["tiny"]
    assert len(machine.compiled) == 1


@pytest.mark.parametrize("begun", [True, False])
def test_a_worker_that_is_at_it_is_waited_for_and_nothing_else(
    begun: bool, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller compiles a source that still waits for a core itself, and no worker does."""
    at_work, may_end, asked = threading.Event(), threading.Event(), []

    def held(library: pathlib.Path, text: str, name: str, options: list[str], _: object) -> tuple[bytes | None, str]:
        asked.append([option for option in options if "VALUE" in option])
        at_work.set()
        assert may_end.wait(60)
        return compile_in_worker(library, text, name, options)

    monkeypatch.setattr(compiler, "compile_in_worker", held)
    monkeypatch.setattr(pool, "cores", lambda: 1)
    compiler.compile_ahead([tiny(1), tiny(2)])
    assert at_work.wait(60)
    if begun:
        threading.Timer(0.05, may_end.set).start()
    compiler.compile_source(tiny(1 if begun else 2))
    assert len(machine.compiled) == (0 if begun else 1)
    may_end.set()
    finished(*([tiny(2)] if begun else [tiny(1)]))
    assert asked == [["-DVALUE=1"], ["-DVALUE=2"]][: 2 if begun else 1]


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_process_compiles_although_its_parent_is_at_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_work, may_end = threading.Event(), threading.Event()
    monkeypatch.setattr(compiler, "compile_in_worker", lambda *_: at_work.set() or (may_end.wait(60) and b"", ""))
    compiler.compile_ahead([tiny()])
    assert at_work.wait(60)
    child = os.fork()
    if child == 0:
        os._exit(len(cubin.kernels(compiler.compile_source(tiny()).image)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    may_end.set()


SLOW = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background processes ignore
import jax
from jax_splitk.runtime import compiler
compiler.Source.text = lambda source, **_: "#include <cutlass/arch/barrier.h>\\n__device__ int x = VALUE;"
compiler.compile_ahead(compiler.Source("slow.cu", (("VALUE", value),)) for value in range(40))
children = pathlib.Path("/proc/self/task")
pids = []
while not pids:
    pids = [int(pid) for task in children.iterdir() for pid in (task / "children").read_text().split()]
print(*pids, flush=True)
if sys.argv[1] == "interrupted":
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
elif sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def is_running(pid: int) -> bool:
    """Whether a process runs. Zombies do not: their parent may be slow to collect them."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("how", "status"), [("returns", 0), ("interrupted", -signal.SIGINT), ("killed", -signal.SIGKILL)]
)
def test_no_worker_outlives_the_process(how: str, status: int, tmp_path: pathlib.Path) -> None:
    """The process ends without an error although many kernels wait to be compiled."""
    process = start(SLOW, how, CACHE_DIR=str(tmp_path))
    out, err = process.communicate(timeout=120)
    assert process.returncode == status, err
    assert "Exception ignored" not in err, err
    assert (how == "interrupted") == ("KeyboardInterrupt" in err), err
    while any(is_running(int(pid)) for pid in out.split()):  # or the test's time is over
        time.sleep(0.01)
    assert not list(tmp_path.rglob("*.cubin"))


# ---- what is not installed -----------------------------------------------------------------------------------------


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch):
    """Hides files of the installed wheels from the compiler's search."""

    def _hide(*names: str) -> None:
        exists = pathlib.Path.exists
        monkeypatch.setattr(pathlib.Path, "exists", lambda path: not str(path).endswith(names) and exists(path))
        toolchain.find_nvrtc.cache_clear()
        toolchain.include_folders.cache_clear()

    yield _hide
    monkeypatch.undo()
    toolchain.find_nvrtc.cache_clear()
    toolchain.include_folders.cache_clear()


@pytest.mark.parametrize(("name", "package"), [
    ("libnvrtc.so.13", "nvidia-cuda-nvrtc"),
    ("cute/config.hpp", "nvidia-cutlass"),
    ("cuda_fp16.h", "nvidia-cuda-runtime"),
    ("cuda/std/cstdint", "nvidia-cuda-cccl"),
])  # fmt: skip
def test_missing_package_is_named(hide, name: str, package: str) -> None:
    assert toolchain.unavailable() is None
    hide(name)
    reason = str(toolchain.unavailable())
    packages = ("nvidia-cuda-nvrtc", "nvidia-cutlass", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
    assert [p for p in packages if p in reason] == [package]
    # The command works however the package was installed: it names the missing packages in supported versions.
    (requirement,) = re.findall(r": pip install '([^']+)'$", reason)
    project = tomllib.loads((pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert requirement in toolchain.REQUIREMENTS
    assert list(toolchain.REQUIREMENTS) == project["optional-dependencies"]["compiler"]


def test_all_missing_headers_are_named_at_once(hide) -> None:
    hide("cute/config.hpp", "cuda_fp16.h", "cuda/std/cstdint")
    with pytest.raises(CompilerUnavailable, match=r"nvidia-cutlass, nvidia-cuda-cccl, nvidia-cuda-runtime"):
        toolchain.include_folders()


def test_headers_may_lie_in_different_site_folders(
    hide, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """CCCL's headers are included as "cuda/..." and, by CUTLASS, as "cccl/cuda/..."."""
    hide()
    folders = [tmp_path / site / "nvidia/cu13" for site in ("one", "two")]
    for folder, header in zip(folders, ("cuda_fp16.h", "cccl/cuda/std/cstdint"), strict=True):
        path = folder / "include" / header
        path.parent.mkdir(parents=True)
        path.touch()
    monkeypatch.setattr(toolchain, "_nvidia_folders", lambda: folders)
    for name in ("cuda/std/cstdint", "cccl/cuda/std/cstdint", "cuda_fp16.h"):
        assert any((folder / name).exists() for folder in toolchain.include_folders()), name


def test_without_any_nvidia_wheel(hide, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_package_folders", lambda name: [])
    hide()
    with pytest.raises(
        CompilerUnavailable, match=r"nvidia-cuda-nvrtc 13, nvidia-cutlass, .* are not installed: pip install"
    ):
        toolchain.find_nvrtc()
    with pytest.raises(CompilerUnavailable, match=r"nvidia-cutlass, nvidia-cuda-cccl, nvidia-cuda-runtime"):
        toolchain.include_folders()


@pytest.mark.parametrize("stub", ["a bare module", "a package without a specification", "blocked"])
def test_a_stub_in_a_packages_place_does_not_hide_its_files(stub: str, hide, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests and builders of documentation leave such stubs in `sys.modules`."""
    hide()
    folders = toolchain.include_folders()
    hide()
    for name in ("nvidia", "cutlass_library"):
        module = None if stub == "blocked" else types.ModuleType(name)
        if stub == "a package without a specification":
            module.__path__ = []
            del module.__spec__
        monkeypatch.setitem(sys.modules, name, module)
    assert toolchain.include_folders() == folders
    assert toolchain.unavailable() is None


def test_a_library_that_cannot_be_loaded_is_a_reason(
    hide, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libnvrtc.so.13").write_bytes(b"not a library")
    monkeypatch.setattr(toolchain, "_nvidia_folders", lambda: [tmp_path])
    hide()
    assert "libnvrtc.so.13 cannot be used" in str(toolchain.unavailable())


def lowered(**options: str) -> str:
    """The text of a weight gradient lowered for CUDA."""
    x, g = jnp.zeros((2, 9, 11, 72), jnp.bfloat16), jnp.zeros((2, 9, 11, 40), jnp.bfloat16)
    numbers = ("NHWC", "HWIO", "NHWC")
    wgrad = lambda x, g: jax_splitk.conv_wgrad(  # noqa: E731
        x, g, (1, 1, 72, 40), (1, 1), "VALID", dimension_numbers=numbers, **options
    )
    text = jax.jit(wgrad).trace(x, g).lower(lowering_platforms=("cuda",)).as_text()
    assert "jax_splitk_launch" not in text
    assert "stablehlo.convolution" in text
    return text


def test_without_compiler_and_kernel_lowering_for_cuda_falls_back_to_xla(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(toolchain, "unavailable", lambda: "nvidia-cuda-nvrtc 13 is not installed: reason of the test")
    with caplog.at_level(logging.INFO, "jax_splitk"):
        lowered()
    assert "XLA where a kernel would serve: wgrad_im2col: nvidia-cuda-nvrtc 13 is not installed: reason" in caplog.text
    with pytest.raises(NotImplementedError, match=r"reason of the test.*Use implementation=None"):
        lowered(implementation="cutlass")


def test_a_kernel_that_does_not_compile_falls_back_to_xla_with_one_warning(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.source_text('#error "these headers do not do"\n')
    with caplog.at_level(logging.INFO, "jax_splitk"):
        lowered()
        lowered()
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "XLA instead of wgrad_" in warning.getMessage()
    assert "these headers do not do" in warning.getMessage()
    assert re.search(r": XLA \(wgrad_\w+: \w+/\w+\.cu does not compile with .*:\)", caplog.text)
    assert len(machine.compiled) == 1, "the compilation that fails is not repeated"
    with pytest.raises(CompilationError, match="these headers do not do"):
        lowered(implementation="cutlass")


@pytest.mark.parametrize(
    ("mode", "reads", "writes"), [("off", 0, 0), ("read", 1, 0), ("frozen", 1, 0), ("update", 1, 1)]
)
def test_the_cache_mode_holds_for_machine_code(
    mode: str, reads: bool, writes: bool, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_SPLITK_CACHE_MODE", mode)
    compiler.compile_sources([tiny(1), tiny(2)])
    assert len(list(machine.cache.rglob("*.cubin"))) == 2 * writes
    monkeypatch.delenv("JAX_SPLITK_CACHE_MODE")
    machine.forget()
    compiler.compile_source(tiny(1))
    machine.forget()
    machine.compiled.clear()
    monkeypatch.setenv("JAX_SPLITK_CACHE_MODE", mode)
    compiler.compile_source(tiny(1))
    assert len(machine.compiled) == 1 - reads


def test_origins_of_what_is_stored(machine: Machine) -> None:
    compiler.compile_source(tiny())
    current = compiler.origin("tiny.cu")
    path = machine.file()
    origins = lambda: [(path, kernel and kernel.origin) for path, kernel in compiler.cached(machine.cache)]  # noqa: E731
    assert origins() == [(path, current)]
    machine.source_text(TINY + "// a newer kernel\n")
    assert compiler.origin("tiny.cu") != current
    assert origins() == [(path, current)]
    path.write_bytes(path.read_bytes()[:-1])
    assert origins() == [(path, None)]
    assert list(compiler.cached(machine.cache / "nowhere")) == []


def test_another_compilers_kernels_are_used_where_nothing_is_written(
    machine: Machine, hide, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Kernels of this machine's compiler come first; of others, the newest."""
    code = {name: compiler.Compiled(name.encode(), "log") for name in ("13.2", "13.10", "own")}

    def found() -> bytes:
        machine.forget()
        return compiler.compile_source(tiny()).image

    for name in ("13.2", "13.10"):
        with monkeypatch.context() as patch:
            patch.setattr(toolchain, "identity", lambda name=name: f"NVRTC {name}, nvidia-cutlass 4.2.1")
            assert compiler.store(machine.cache, tiny(), code[name])
    assert found() not in (b"13.2", b"13.10")
    assert len(machine.compiled) == 1  # "update": kernels that this machine compiles
    (own,) = (p for p, kernel in compiler.cached(machine.cache) if kernel and kernel.compiler == toolchain.identity())
    own.unlink()
    with caplog.at_level(logging.INFO, "jax_splitk"):
        for mode in ("read", "frozen"):
            monkeypatch.setenv("JAX_SPLITK_CACHE_MODE", mode)
            assert found() == b"13.10"
    assert "tiny.cu of a cache is used, which NVRTC 13.10, nvidia-cutlass 4.2.1 compiled" in caplog.text
    assert compiler.store(machine.cache, tiny(), code["own"])
    assert found() == b"own"
    monkeypatch.delenv("JAX_SPLITK_CACHE_MODE")
    own.unlink()
    hide("libnvrtc.so.13")
    assert found() == b"13.10"
    monkeypatch.setenv("JAX_SPLITK_CACHE_MODE", "off")
    machine.forget()
    assert compiler.held(tiny()) is None
    with pytest.raises(CompilerUnavailable):
        compiler.compile_source(tiny())


def test_kernels_of_an_earlier_version_are_mentioned_once(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    old = machine.cache / "cubin" / f"{'a1' * 32}.cubin"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"jax_splitk cubin 4\n")
    compiler.compile_sources([tiny(1), tiny(2)])
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{machine.cache} has kernels of another version of jax_splitk")
    assert len(list(machine.cache.glob("cubin/*"))) == 3


def test_source_text_is_the_packages_file() -> None:
    source = small_hopper_plan().source
    text = source.text()
    assert "KERNEL(_partial)" in text
    assert text.isascii()
    assert all(name.removesuffix("(role)") in text for name, _ in source.defines), "a macro that the code does not read"
