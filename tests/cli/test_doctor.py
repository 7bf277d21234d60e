"""`python -m jax_splitk doctor` reports the state of the installation."""

import dataclasses
import importlib.metadata
import json
import pathlib
import sys
from typing import Any

import jax
import pytest

import jax_splitk
from jax_splitk.__main__ import main
from jax_splitk.cli import doctor, machine
from jax_splitk.runtime import nvml, toolchain
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests.command_line import command, refused, run, text
from tests.tuning_cache import ENVIRONMENT

on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="about a machine without a GPU")


def run_doctor(*arguments: str, code: int = 0, **environment: str) -> str:
    done = command("doctor", *arguments, **environment)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    return done.stdout


@on_cpu
def test_json_is_true(tmp_path: pathlib.Path) -> None:
    report = json.loads(run_doctor("--json", JAX_SPLITK_CACHE_DIR=str(tmp_path)))
    assert report["python"] == ".".join(map(str, sys.version_info[:3]))
    assert report["versions"]["jax"] == jax.__version__
    for package, version in report["versions"].items():
        try:
            assert version == importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            assert version is None
    assert (report["backend"], report["cache_dir"]) == ("cpu", str(tmp_path))
    major, minor = toolchain.find_nvrtc().version
    assert report["compiler"] == f"NVRTC {major}.{minor} for sm_90a"
    implementations = report["implementations"]
    assert implementations.keys() == {"cutlass", "host", "xla"}
    assert (implementations["host"], implementations["xla"]) == (None, None)
    assert implementations["cutlass"].startswith("compiles, but ")


@on_cpu
def test_text_has_every_finding() -> None:
    lines = run_doctor().splitlines()
    for line in doctor.text(doctor.examine()).splitlines():
        assert line in lines
    assert f"jax {jax.__version__}" in "\n".join(lines)
    assert "implementations host, xla: can run" in lines
    assert lines[-2:] == [
        "verdict: the CPU kernels run here; explain says what a Hopper GPU would gain",
        "next: python -m jax_splitk explain YOUR_SCRIPT.py --platform cuda",
    ]


@on_cpu
def test_without_a_backend_it_says_so() -> None:
    report = json.loads(run_doctor("--json", code=1, JAX_PLATFORMS="cuda"))
    (why,) = report["problems"]
    assert why.startswith("jax starts no backend with JAX_PLATFORMS=cuda (")
    assert (report["backend"], report["devices"]) == (None, [])
    implementations = report["implementations"]
    assert (implementations["host"], implementations["xla"]) == (why, why)
    assert implementations["cutlass"].startswith("compiles, but ")
    lines = run_doctor(code=1, JAX_PLATFORMS="cuda").splitlines()
    assert [line for line in lines if why in line] == [f"problem: {why}"]
    assert {"backend none", "implementations host, xla: cannot run", "next: unset JAX_PLATFORMS"} <= set(lines)


def test_settings_are_shown_and_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: Any) -> None:
    def set_to(**values: str) -> None:
        for name in ENVIRONMENT:
            monkeypatch.delenv(f"JAX_SPLITK_{name}", raising=False)
        for name, value in ({"CACHE_DIR": str(tmp_path / "new" / "cache")} | values).items():
            monkeypatch.setenv(f"JAX_SPLITK_{name}", value)

    set_to()
    report = doctor.examine()
    assert report["problems"] == []
    assert report["settings"] == {
        "JAX_SPLITK_CACHE_MODE": "update",
        "JAX_SPLITK_AUTOTUNE": "off" if jax.default_backend() == "cpu" else "on_miss",
        "JAX_SPLITK_COMPILE_AHEAD": "on",
        "JAX_SPLITK_TUNE_BUDGET_S": "10",
        "JAX_SPLITK_TUNE_LOSS": "0.015",
        "JAX_SPLITK_AGREEMENT_TIMEOUT_S": "60",
        "JAX_SPLITK_PROGRESS": "auto",
        "JAX_SPLITK_CACHE_DIR": str(tmp_path / "new" / "cache"),
        "JAX_SPLITK_CACHE_PATH": "",
    }
    lines = text(capsys, "doctor").splitlines()
    assert "JAX_SPLITK_CACHE_MODE=update" in lines
    assert f"cache {tmp_path}/new/cache (can be written)" in lines
    assert not (tmp_path / "new").exists()
    file = tmp_path / "file"
    file.touch()
    for name, value, part in (
        ("CACHE_MODE", "junk", "JAX_SPLITK_CACHE_MODE='junk'; accepted: 'off', 'read', 'update', 'frozen'"),
        ("AUTOTUNE", "junk", "JAX_SPLITK_AUTOTUNE='junk'; accepted: 'off', 'on_miss'"),
        ("TUNE_BUDGET_S", "0", "JAX_SPLITK_TUNE_BUDGET_S='0'; accepted: a number of seconds above 0"),
        ("TUNE_LOSS", "1", "JAX_SPLITK_TUNE_LOSS='1'; accepted: a number of at least 0 and below 1"),
        ("AGREEMENT_TIMEOUT_S", "x", "JAX_SPLITK_AGREEMENT_TIMEOUT_S='x'; accepted: a number of seconds above 0"),
        ("CACHE_PATH", f"{tmp_path}:/no/such", "JAX_SPLITK_CACHE_PATH: /no/such is not a folder"),
        ("PROGRESS", "loud", "JAX_SPLITK_PROGRESS='loud'; accepted: 'auto', 'off'"),
        ("CACHE_DIR", str(file / "cache"), f"the cache {file}/cache cannot be written"),
    ):
        set_to(**{name: value})
        (problem,) = doctor.examine()["problems"]
        assert problem.startswith(part)
        assert f"problem: {problem}" in text(capsys, "doctor", code=1).splitlines()
    set_to(CACHE_DIR=str(file / "cache"), CACHE_MODE="read")
    report = doctor.examine()
    assert (report["problems"], report["cache_can_be_written"]) == ([], False)
    assert f"cache {file}/cache (cannot be written)" in text(capsys, "doctor").splitlines()
    set_to()
    (tmp_path / "new" / "cache" / "cubin").mkdir(parents=True)
    for folder in (tmp_path / "new" / "cache", tmp_path / "new" / "cache" / "cubin"):
        folder.chmod(0o777)
        assert doctor.examine()["problems"] == [f"the code in {folder} is not used: anybody may write to it"]
        folder.chmod(0o755)
    for name in ("CACHE_DIR", "CACHE_PATH"):
        for value in ("gs://bucket/cache", "~no_such_user_here/cache", "$HOME/cache"):
            set_to(**{name: value})
            (problem,) = doctor.examine()["problems"]
            assert problem.startswith(f"JAX_SPLITK_{name}={value!r}; accepted: a local path")
            assert f"problem: {problem}" in text(capsys, "doctor", code=1).splitlines()
    set_to(CACHE_DIR=str(file))
    assert (
        f"JAX_SPLITK_CACHE_DIR='{file}'; accepted: a folder, which is made if need be" in doctor.examine()["problems"]
    )


class FakeNvml:
    """NVML with two GPUs, the second of which has fallen off the bus. Functions return 0 or an error, like NVML's."""

    def nvmlInit_v2(self) -> int:
        return 0

    nvmlShutdown = nvmlInit_v2

    def nvmlSystemGetDriverVersion(self, text: Any, size: int) -> int:
        text.value = b"580.65.06"
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = 7
        return 15 * index

    def nvmlDeviceGetName(self, handle: Any, text: Any, size: int) -> int:
        text.value = b"NVIDIA H200"
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total, memory._obj.free = 150 * 2**30, 149 * 2**30
        return 0


def test_the_driver_and_the_memory_are_shown(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(nvml, "_library", FakeNvml)
    lines = text(capsys, "doctor").splitlines()
    assert "NVIDIA driver 580.65.06" in lines
    assert [line for line in lines if line.startswith("GPU ")] == ["GPU 0: NVIDIA H200, 150.0 GiB, 149.0 free"]
    monkeypatch.setattr(FakeNvml, "nvmlInit_v2", lambda self: 9)
    assert (doctor.examine()["driver"], doctor.examine()["gpus"]) == (None, [])
    monkeypatch.setattr(nvml, "_library", object)
    assert nvml.driver() == (None, [])


@pytest.mark.gpu
def test_nvml_sees_what_jax_sees() -> None:
    version, gpus = nvml.driver()
    assert version
    assert version[0].isdigit()
    for device in jax.local_devices():
        assert device.device_kind in [gpu.name for gpu in gpus]
    assert all(gpu.memory_bytes >= gpu.free_bytes > 0 for gpu in gpus)


def test_without_nvrtc_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(toolchain, "_nvidia_folders", list)
    for cached in (toolchain.find_nvrtc, toolchain.include_folders):
        cached.cache_clear()
    try:
        report, lines = run(capsys, "doctor"), text(capsys, "doctor").splitlines()
    finally:
        monkeypatch.undo()
        for cached in (toolchain.find_nvrtc, toolchain.include_folders):
            cached.cache_clear()
    names, wheels = ("nvidia-cuda-nvrtc 13", "nvidia-cuda-cccl", "nvidia-cuda-runtime"), toolchain.REQUIREMENTS[1:]
    missing = f"{', '.join(names)} are not installed: pip install {' '.join(map(repr, wheels))}"
    assert report["compiler"] == missing
    why = "no compiler for device code; kernels that a cache or an exported function has need none"
    assert report["implementations"] == {"cutlass": why, "host": None, "xla": None}
    assert f"implementation cutlass: {why}" in lines
    assert [line for line in lines if missing in line] == [f"device code compiler: {missing}"]


@pytest.mark.parametrize(("driver", "backend", "capability", "expected"), [
    ("libcuda.so.1 cannot be opened", "cpu", "9.0", "compiles, but cannot run here: libcuda.so.1 cannot be opened"),
    ("", "cpu", "9.0", "compiles, but jax sees no GPU (is jax[cuda13] installed?)"),
    ("", "gpu", "8.0", "needs compute capability 9.0 (Hopper); NVIDIA H200 has 8.0"),
    ("", "gpu", "9.0", None),
])  # fmt: skip
def test_on_other_machines(
    driver: str, backend: str, capability: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine._ffi, "driver_error", lambda: driver)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    target = dataclasses.replace(DEFAULT_CUDA, compute_capability=capability)
    monkeypatch.setattr(machine, "target_for", lambda platform: target)
    report = doctor.examine()
    assert report["implementations"]["cutlass"] == expected
    assert report["backend"] == backend


@pytest.mark.parametrize("arguments", [["surgeon"], ["doctor", "--xml"]])
def test_other_commands_are_refused_with_the_usage(arguments: list[str], capsys: Any) -> None:
    assert "usage: python -m jax_splitk" in refused(capsys, *arguments)


@pytest.mark.parametrize("arguments", [[], ["bench"], ["cache"]])
def test_without_a_command_the_help_is_printed(arguments: list[str], capsys: Any) -> None:
    said = text(capsys, *arguments)
    assert said.startswith(f"usage: {' '.join(['python -m jax_splitk', *arguments])} ")
    assert "COMMAND" in said


def test_the_version_is_printed(capsys: Any) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"jax_splitk {jax_splitk.__version__}\n"


@on_cpu
@pytest.mark.parametrize(
    ("problem", "command"),
    [
        ("jax 0.6.2 is installed: pip install --upgrade 'jax>=0.10.2'", "pip install --upgrade 'jax>=0.10.2'"),
        ("it is not built: run `pip install -e .` in /home/me/jax_splitk", "pip install -e ."),
        ("the code in /home/me/my cache is not used: anybody may write to it", "chmod go-w '/home/me/my cache'"),
        ("the cache /proc/x cannot be written: ...", "export JAX_SPLITK_CACHE_DIR=A_FOLDER_THAT_CAN_BE_WRITTEN"),
        ("JAX_SPLITK_AUTOTUNE='junk'; accepted: 'off', 'on_miss'", "unset JAX_SPLITK_AUTOTUNE"),
    ],
)
def test_a_problem_has_a_command(problem: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(machine, "_cache_problems", lambda values: [problem])
    assert text(capsys, "doctor", code=1).splitlines()[-3:] == [
        f"problem: {problem}",
        "verdict: jax_splitk runs, but not as it is set up to: see the problem",
        f"next: {command}",
    ]
