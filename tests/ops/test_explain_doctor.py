"""`jax_splitk.explain` and `python -m jax_splitk doctor` say what is so."""

import dataclasses
import functools
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import jax
import pytest
from jax import lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

import jax_splitk
from jax_splitk import __main__, explain
from jax_splitk.cli import doctor
from jax_splitk.kernels.wgrad import host as wgrad_host
from jax_splitk.kernels.wgrad import im2col
from jax_splitk.runtime import toolchain
from jax_splitk.runtime.plan import HOST_WGRAD_TARGET
from jax_splitk.runtime.target import DEFAULT_CUDA, target_for
from jax_splitk.tuning.options import Options
from jax_splitk.tuning.select import select

NHWC = ("NHWC", "HWIO", "NHWC")
LHS = jax.ShapeDtypeStruct((8, 14, 14, 64), jnp.bfloat16)
RHS = jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.bfloat16)
FIRST = jax.ShapeDtypeStruct((8, 14, 14, 3), jnp.bfloat16)
FIRST_RHS = jax.ShapeDtypeStruct((3, 3, 3, 64), jnp.bfloat16)

on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="about a machine without a GPU")


def layer(x: jax.Array, w: jax.Array, **options: Any) -> jax.Array:
    return jax_splitk.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC, **options)


def loss(w: jax.Array, x: jax.Array, **options: Any) -> jax.Array:
    return layer(x, w, **options).astype(jnp.float32).sum()


def counts(fn: Any, *args: Any, platform: str = "cuda") -> list[tuple[str, int]]:
    return [(str(d.problem), d.count) for d in explain(fn, *args, platform=platform).decisions]


PROBLEM_TEXT = "conv_wgrad bfloat16->bfloat16 lhs 8x14x14x64 g 8x14x14x64 kernel 3x3 stride 1x1"
ONE = [(PROBLEM_TEXT, 1)]


def test_the_forward_pass_has_none() -> None:
    found = explain(loss, RHS, LHS, platform="cuda")
    assert found.decisions == ()
    assert str(found) == "no jax_splitk operations (platform cuda)"
    assert explain(jax.grad(loss, 1), RHS, LHS, platform="cuda").decisions == ()


def test_found_in_grad_and_jit() -> None:
    assert counts(jax.grad(loss), RHS, LHS) == ONE
    assert counts(jax.jit(jax.grad(loss)), RHS, LHS) == ONE
    assert counts(jax.jit(lambda w, x: 2 * jax.jit(jax.grad(loss))(w, x)), RHS, LHS) == ONE


def test_found_in_remat() -> None:
    assert counts(jax.grad(jax.checkpoint(loss)), RHS, LHS) == ONE


def test_found_in_scan_while_and_cond() -> None:
    grad = jax.grad(loss)

    def scanned(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.scan(lambda w, _: (w - grad(w, x), None), w, None, 5)[0]

    def looped(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda w: w.sum() > 0, lambda w: w - grad(w, x), w)

    def branched(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.cond(w.sum() > 0, lambda: grad(w, x), lambda: w)

    for fn in (scanned, looped, branched, jax.jit(jax.checkpoint(scanned))):
        assert counts(fn, RHS, LHS) == ONE


def test_found_in_shard_map_with_a_devices_part() -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    fn = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    assert counts(fn, RHS, LHS) == [(PROBLEM_TEXT.replace("8x14", "2x14"), 1)]


def test_what_xla_partitions_is_xlas() -> None:
    """By the shardings of arguments, of jit and inside the function; and what is lowered then has no call of ours."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = (jax.sharding.NamedSharding(mesh, spec) for spec in (P("data"), P()))
    lhs, rhs = LHS, RHS
    sharded = jax.ShapeDtypeStruct(lhs.shape, lhs.dtype, sharding=split)
    grad = jax.grad(loss)
    constrained = jax.jit(lambda w, x: grad(w, lax.with_sharding_constraint(x, split)))
    held = jax.device_put(jnp.ones(lhs.shape, lhs.dtype), split)
    for fn, args in (
        (grad, (rhs, sharded)),
        (jax.jit(grad), (rhs, held)),
        (jax.jit(grad, in_shardings=(whole, split)), (rhs, lhs)),
        (constrained, (rhs, lhs)),
    ):
        (decision,) = explain(fn, *args, platform="cpu").decisions
        assert (decision.implementation, decision.family) == ("xla", None)
        assert decision.why.startswith("automatic partitioning over several devices")
        assert HOST_WGRAD_TARGET not in jax.jit(fn).lower(*args).as_text()
    (decision,) = explain(lambda w: grad(w, held), rhs, platform="cpu").decisions
    assert decision.implementation == "host"
    assert HOST_WGRAD_TARGET in jax.jit(lambda w: grad(w, held)).lower(rhs).as_text()
    each = jax.shard_map(grad, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    both = jax.jit(lambda w, x: each(w, x) + grad(w, x))
    found = explain(both, rhs, sharded, platform="cpu").decisions
    assert sorted(d.implementation for d in found) == ["host", "xla"]
    assert jax.jit(both).lower(rhs, sharded).as_text().count(HOST_WGRAD_TARGET) == 1
    (decision,) = explain(jax.grad(functools.partial(loss, implementation="host")), rhs, sharded).decisions
    assert decision.implementation == "none"
    assert "under automatic partitioning" in decision.why
    assert jax_splitk.tune(grad, rhs, sharded, seconds=0.05).entries == ()


@pytest.mark.parametrize("platform", ["tpu9", "", 3, pytest.param("gpu", id="a backend")])
def test_an_unknown_platform_is_refused(platform: Any) -> None:
    with pytest.raises(ValueError, match=r"platform=.*; accepted: None, 'cpu', 'cuda', 'rocm', 'tpu'"):
        explain(jax.grad(loss), RHS, LHS, platform=platform)


def test_vmap_shows_the_batched_problem() -> None:
    many = jax.ShapeDtypeStruct((5, *LHS.shape), LHS.dtype)
    wgrad = functools.partial(
        jax_splitk.conv_wgrad, rhs_shape=RHS.shape, window_strides=(1, 1), padding="SAME", dimension_numbers=NHWC
    )
    assert counts(jax.vmap(wgrad, (None, 0)), LHS, many) == [(PROBLEM_TEXT.replace("g 8x14x14x64", "g 8x14x14x320"), 1)]
    assert counts(jax.vmap(wgrad), many, many) == ONE


def test_equal_operations_are_counted_and_others_listed_in_order() -> None:
    def net(ws: list[jax.Array], x: jax.Array) -> jax.Array:
        x = layer(x, ws[0])
        for w in ws[1:4]:
            x = layer(x, w)
        return layer(x, ws[4], workspace_limit_bytes=0).astype(jnp.float32).sum()

    found = explain(jax.grad(net), [FIRST_RHS, RHS, RHS, RHS, RHS], FIRST, platform="cuda").decisions
    # Backwards: the last layer has options of its own, the first has another shape.
    assert [(d.count, d.implementation, d.problem.in_channels) for d in found] == [
        (1, "cutlass", 64),
        (3, "cutlass", 64),
        (1, "cutlass", 3),
    ]
    assert found[0].workspace_bytes == 0


@on_cpu
def test_platform_cuda_on_a_machine_without_a_gpu() -> None:
    (decision,) = explain(jax.grad(loss), RHS, LHS, platform="cuda").decisions
    choice = select(decision.problem, DEFAULT_CUDA, Options())
    assert (decision.implementation, decision.family) == ("cutlass", choice.family.name)
    assert decision.config == choice.config
    assert decision.splits == choice.config.splits
    assert decision.workspace_bytes == im2col.FAMILY.workspace_bytes(decision.problem, choice.config)
    assert decision.why == choice.why


@on_cpu
def test_default_platform_is_the_backends() -> None:
    found = explain(jax.grad(loss), RHS, LHS)
    assert found.platform == "cpu"
    choice = select(found.decisions[0].problem, target_for("cpu"), Options())
    assert (found.decisions[0].implementation, found.decisions[0].config) == ("host", choice.config)


@on_cpu
def test_what_is_explained_is_what_is_lowered() -> None:
    for options in ({}, {"implementation": "xla"}, {"config": wgrad_host.Config(3, 64)}):
        grad = jax.grad(functools.partial(loss, **options))
        (decision,) = explain(grad, RHS, LHS).decisions
        text = jax.jit(grad).lower(RHS, LHS).as_text()
        assert (decision.implementation == "host") == (HOST_WGRAD_TARGET in text)
        if decision.config is not None:
            assert f"splits = {decision.config.splits} : i64" in text
            assert f"tensor<{decision.workspace_bytes}xui8>" in text


def test_an_impossible_choice_is_shown_not_raised() -> None:
    grad = jax.grad(functools.partial(loss, implementation="host"))
    (decision,) = explain(grad, RHS, LHS, platform="cuda").decisions
    assert (decision.implementation, decision.family, decision.workspace_bytes) == ("none", None, 0)
    assert "wgrad_host: runs on cpu, not cuda" in decision.why
    config = wgrad_host.Config(10**6, 64)
    (decision,) = explain(jax.grad(functools.partial(loss, config=config)), RHS, LHS, platform="cpu").decisions
    assert (decision.implementation, decision.config) == ("none", config)
    assert "is not legal" in decision.why


def test_the_table_shows_every_field() -> None:
    found = explain(lambda *xs: (jax.grad(loss)(*xs), jax.grad(loss)(*xs)), RHS, LHS, platform="cuda")
    (d,) = found.decisions
    title, header, row = str(found).splitlines()
    assert title == "platform cuda"
    assert header.split() == ["operation", "x", "implementation", "family", "config", "splits", "workspace", "why"]
    size = f"{d.workspace_bytes / 2**20:.2f} MiB"
    for field in (d.problem, "2", d.implementation, d.family, d.config, d.splits, size, d.why):
        assert f" {field} " in f" {row} "


def test_nothing_runs_and_keyword_arguments_pass() -> None:
    ran = []

    def fn(w: jax.Array, *, x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: ran.append(1))
        return jax.grad(loss)(w, x)

    assert len(explain(fn, RHS, x=LHS, platform="cuda").decisions) == 1
    assert ran == []


# ---- doctor --------------------------------------------------------------------------------------------------------


def run_doctor(*arguments: str, code: int = 0, **environment: str) -> str:
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-m", "jax_splitk", "doctor", *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    return done.stdout


@on_cpu
def test_doctors_json_is_true(tmp_path: Any) -> None:
    report = json.loads(run_doctor("--json", JAX_SPLITK_CACHE_DIR=str(tmp_path), JAX_PLATFORMS="cpu"))
    assert report["python"] == ".".join(map(str, sys.version_info[:3]))
    assert report["versions"]["jax"] == jax.__version__
    for package, version in report["versions"].items():
        try:
            assert version == importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            assert version is None
    assert report["backend"] == "cpu"
    assert report["cache_dir"] == str(tmp_path)
    major, minor = toolchain.find_nvrtc().version
    assert report["compiler"] == f"NVRTC {major}.{minor} for sm_90a"
    implementations = report["implementations"]
    assert implementations.keys() == {"cutlass", "host", "xla"}
    assert (implementations["host"], implementations["xla"]) == (None, None)
    assert implementations["cutlass"].startswith("compiles, but ")


def test_doctors_text_has_every_finding() -> None:
    report = doctor.examine()
    text = run_doctor()
    for line in doctor.text(report).splitlines():
        assert line in text.splitlines()
    assert f"jax {jax.__version__}" in text
    assert "implementation host: can run" in text
    assert "implementation xla: can run" in text


@on_cpu
def test_doctor_without_a_backend_says_so() -> None:
    report = json.loads(run_doctor("--json", code=1, JAX_PLATFORMS="cuda"))
    (why,) = report["problems"]
    assert why.startswith("jax starts no backend with JAX_PLATFORMS=cuda (")
    assert (report["backend"], report["devices"]) == (None, [])
    implementations = report["implementations"]
    assert (implementations["host"], implementations["xla"]) == (why, why)
    assert implementations["cutlass"].startswith("compiles, but ")
    text = run_doctor(code=1, JAX_PLATFORMS="cuda").splitlines()
    assert f"problem: {why}" in text
    assert "backend none: " in text


def test_doctor_shows_and_checks_the_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: Any
) -> None:
    def set_to(**values: str) -> None:
        for name in ("CACHE_DIR", "CACHE_PATH", "CACHE_MODE", "AUTOTUNE", "TUNE_BUDGET_S", "AGREEMENT_TIMEOUT_S"):
            monkeypatch.delenv(f"JAX_SPLITK_{name}", raising=False)
        for name, value in ({"CACHE_DIR": str(tmp_path / "new" / "cache")} | values).items():
            monkeypatch.setenv(f"JAX_SPLITK_{name}", value)

    set_to()
    report = doctor.examine()
    assert report["problems"] == []
    assert report["settings"] == {
        "JAX_SPLITK_CACHE_MODE": "update",
        "JAX_SPLITK_AUTOTUNE": "off" if jax.default_backend() == "cpu" else "on_miss",
        "JAX_SPLITK_TUNE_BUDGET_S": "10.0",
        "JAX_SPLITK_AGREEMENT_TIMEOUT_S": "60.0",
        "JAX_SPLITK_CACHE_PATH": "",
    }
    assert __main__.main(["doctor"]) == 0
    assert "JAX_SPLITK_CACHE_MODE=update" in capsys.readouterr().out.splitlines()
    file = tmp_path / "file"
    file.touch()
    for name, value, part in (
        ("CACHE_MODE", "junk", "JAX_SPLITK_CACHE_MODE='junk'; accepted: 'off', 'read', 'update', 'frozen'"),
        ("AUTOTUNE", "junk", "JAX_SPLITK_AUTOTUNE='junk'; accepted: 'off', 'on_miss'"),
        ("TUNE_BUDGET_S", "0", "JAX_SPLITK_TUNE_BUDGET_S='0'; accepted: a number of seconds above 0"),
        ("AGREEMENT_TIMEOUT_S", "x", "JAX_SPLITK_AGREEMENT_TIMEOUT_S='x'; accepted: a number of seconds above 0"),
        ("CACHE_PATH", f"{tmp_path}:/no/such", "JAX_SPLITK_CACHE_PATH: /no/such is not a folder"),
        ("CACHE_DIR", str(file / "cache"), f"the cache {file}/cache cannot be written"),
    ):
        set_to(**{name: value})
        (problem,) = doctor.examine()["problems"]
        assert problem.startswith(part)
        assert __main__.main(["doctor"]) == 1
        assert f"problem: {problem}" in capsys.readouterr().out.splitlines()
    set_to(CACHE_DIR=str(file / "cache"), CACHE_MODE="read")
    assert doctor.examine()["problems"] == []


def test_doctor_without_nvrtc_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(toolchain, "_nvidia_folders", list)
    toolchain.find_nvrtc.cache_clear()
    try:
        assert __main__.main(["doctor", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert __main__.main(["doctor"]) == 0
        text = capsys.readouterr().out
    finally:
        monkeypatch.undo()
        toolchain.find_nvrtc.cache_clear()
    missing = "nvidia-cuda-nvrtc 13 is not installed: pip install 'jax_splitk[cuda13]'"
    assert report["compiler"] == missing
    assert report["implementations"] == {"cutlass": f"cannot compile: {missing}", "host": None, "xla": None}
    assert f"implementation cutlass: cannot compile: {missing}" in text.splitlines()


@pytest.mark.parametrize(
    ("driver", "backend", "capability", "expected"),
    [
        ("libcuda.so.1 cannot be opened", "cpu", "9.0", "compiles, but cannot run here: libcuda.so.1 cannot be opened"),
        ("", "cpu", "9.0", "compiles, but jax sees no GPU (is jax[cuda13] installed?)"),
        ("", "gpu", "8.0", "needs compute capability 9.0 (Hopper); NVIDIA H200 has 8.0"),
        ("", "gpu", "9.0", None),
    ],
)
def test_doctor_on_other_machines(
    driver: str, backend: str, capability: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor._ffi, "driver_error", lambda: driver)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    target = dataclasses.replace(DEFAULT_CUDA, compute_capability=capability)
    monkeypatch.setattr(doctor, "target_for", lambda platform: target)
    report = doctor.examine()
    assert report["implementations"]["cutlass"] == expected
    assert report["backend"] == backend


@pytest.mark.parametrize("arguments", [[], ["surgeon"], ["doctor", "--xml"]])
def test_other_commands_are_refused_with_the_usage(arguments: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as exit_:
        __main__.main(arguments)
    assert exit_.value.code == 2
    assert "usage: python -m jax_splitk" in capsys.readouterr().err
