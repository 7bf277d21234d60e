"""The order in which layers, modes and variables decide."""

import dataclasses
import fractions
import functools
import json
import logging
import os
import pathlib
import pwd
import re
import shutil
from typing import Any

import jax
import numpy as np
import pytest
from jax import export

import jax_splitk
from jax_splitk.kernels.cpu import wgrad as wgrad_host
from jax_splitk.runtime import disk, settings
from jax_splitk.runtime.target import DEFAULT_CUDA
from jax_splitk.tuning import agreement, measurement, once, search, select, store, table, tuner
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.entry import Entry, Measurement, whole
from jax_splitk.tuning.key import key_for, problem_from_dict
from jax_splitk.tuning.options import Options, current
from tests.problems import generator
from tests.tuning_cache import (
    CASE,
    CPU,
    FIVE,
    FOUR,
    ONE,
    SIX,
    THREE,
    TWO,
    entry_of,
    lowered_config,
    operands,
    product,
    put,
    result_of,
    ship,
    wgrad,
)

pytestmark = pytest.mark.usefixtures("cache")


def test_precedence(monkeypatch: pytest.MonkeyPatch, cache: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """config argument, TuningResult, user's cache, read-only layers in order, shipped table, cost model."""
    lhs, g, expected = operands(generator(10))
    problem = CASE.problem()
    key = key_for(problem, CPU)
    near, far = tmp_path / "near", tmp_path / "far"
    monkeypatch.setenv("JAX_SPLITK_CACHE_PATH", f"{near}{os.pathsep}{os.pathsep}{far}{os.pathsep}")
    layers = [(cache, TWO), (near, THREE), (far, FOUR)]
    for folder, config in layers:
        put(folder, key, entry_of(key, config).dumps())
    shipped = ship(key, Candidate(wgrad_host.FAMILY, FIVE))
    folders = [("user cache", cache), ("read-only cache", near), ("read-only cache", far)]
    assert store.layers() == [*folders, ("shipped table", table.FOLDER)]

    def found(**options: Any) -> tuple[Any, str]:
        config = lowered_config(lambda x, y: wgrad(x, y, **options), lhs, g)
        choice = select.select(problem, CPU, dataclasses.replace(current(), **options))
        assert choice.config == config
        np.testing.assert_array_equal(wgrad(lhs, g, **options), expected)
        return config, choice.why

    with result_of(ONE):
        assert found(config=SIX) == (SIX, "the config was given explicitly")
        assert found() == (ONE, "the TuningResult in force")
    assert found(config=SIX) == (SIX, "the config was given explicitly")
    for (folder, config), (name, _) in zip(layers, folders, strict=True):
        assert found() == (config, name)
        # Without a time for the host family the decision stands; XLA's would not do for an explicit "host".
        assert found(implementation="host") == (config, name)
        (folder / key.file).unlink()
    assert found() == found(implementation="host") == (FIVE, "shipped table: 5.0 us, XLA 9.0 us")
    shipped.unlink()
    monkeypatch.setattr(once, "state", once.Once())  # a process reads a table once
    config, why = found()
    assert config not in (ONE, TWO, THREE, FOUR, FIVE, SIX)
    assert why.startswith("the cost model's best of ")


def test_a_damaged_layer_is_passed_over(cache: pathlib.Path) -> None:
    key = key_for(CASE.problem(), CPU)
    put(cache, key, entry_of(key, TWO).dumps()[:-20])
    ship(key, Candidate(wgrad_host.FAMILY, FIVE))
    assert select.select(CASE.problem(), CPU, Options()).config == FIVE


def test_an_entry_where_xla_won(cache: pathlib.Path) -> None:
    lhs, g, expected = operands(generator(11))
    key = key_for(CASE.problem(), CPU)
    times = (
        Measurement(XLA, 1.0),
        *(Measurement(Candidate(wgrad_host.FAMILY, c), us) for c, us in ((ONE, 3.0), (TWO, 2.0))),
    )
    assert store.save(Entry.of(key, XLA, times, None, {}))
    assert lowered_config(wgrad, lhs, g) is None
    assert select.select(CASE.problem(), CPU, Options()).why == "user cache: XLA 1.0 us, ours 2.0 us"
    np.testing.assert_array_equal(wgrad(lhs, g), expected)
    choice = select.select(CASE.problem(), CPU, Options(implementation="host"))
    assert (choice.config, choice.why) == (TWO, "user cache: 2.0 us, XLA 1.0 us")


@pytest.mark.parametrize("mode", settings.WORDS["JAX_SPLITK_CACHE_MODE"])
def test_modes(mode: str, monkeypatch: pytest.MonkeyPatch, cache: pathlib.Path) -> None:
    lhs, g, _ = operands(generator(12))
    key = key_for(CASE.problem(), CPU)
    unmeasured = lowered_config(wgrad, lhs, g)
    monkeypatch.setenv("JAX_SPLITK_CACHE_MODE", mode)
    assert disk.mode() == mode
    if mode == "frozen":
        told = r"no entry, and JAX_SPLITK_CACHE_MODE=frozen; .*python -m jax_"
        with pytest.raises(jax_splitk.FrozenCacheMiss, match=told):
            lowered_config(wgrad, lhs, g)
        with pytest.raises(jax_splitk.FrozenCacheMiss):  # also where nothing could be measured
            export.export(jax.jit(wgrad))(lhs, g)
        other = dataclasses.replace(CASE, batch=31)  # which no test has compiled before
        with pytest.raises(jax_splitk.FrozenCacheMiss, match=told):
            wgrad(*operands(generator(12), other)[:2], other)
        with pytest.raises(jax_splitk.FrozenCacheMiss, match=told):
            jax_splitk.quantized_matmul(*product(31))
        select.select(CASE.problem(), CPU, Options())  # only looked at
        # What needs no decision is no miss.
        assert lowered_config(lambda x, y: wgrad(x, y, config=THREE), lhs, g) == THREE
        assert lowered_config(lambda x, y: wgrad(x, y, implementation="xla"), lhs, g) is None
        with result_of(FOUR):
            assert lowered_config(wgrad, lhs, g) == FOUR
        with monkeypatch.context() as patched:  # nor is what tuning would not measure
            patched.setattr(wgrad_host.WgradHost, "why_not_tuned", lambda self, problem: "XLA is as fast here")
            assert lowered_config(wgrad, lhs, g) == unmeasured
    assert store.save(entry_of(key, TWO)) is (mode == "update")
    assert list(store.files(cache)) == ([cache / key.file] if mode == "update" else [])
    put(cache, key, entry_of(key, ONE).dumps())
    assert (lowered_config(wgrad, lhs, g) == ONE) is (mode != "off")
    assert (store.lookup(key) is None) is (mode == "off")


def test_a_miss_says_how_to_tune(caplog: pytest.LogCaptureFixture) -> None:
    lhs, g, _ = operands(generator(13))
    with caplog.at_level(logging.INFO, "jax_splitk"):
        lowered_config(wgrad, lhs, g)
    (line,) = [r.getMessage() for r in caplog.records if "not tuned" in r.getMessage()]
    found = re.search(r"python -m jax_splitk tune '(.*)'$", line)
    assert found is not None
    fields = json.loads(found[1])
    assert problem_from_dict(fields.pop("op"), fields) == CASE.problem()


WRONG = {
    "CACHE_MODE": ("readonly", ["'off'", "'read'", "'update'", "'frozen'"], disk.mode),
    "AUTOTUNE": ("always", ["'off'", "'on_miss'"], lambda: measurement.autotune(CPU)),
    "TUNE_BUDGET_S": ("-3", ["seconds above 0"], tuner.budget_seconds),
    "AGREEMENT_TIMEOUT_S": ("soon", ["seconds above 0"], agreement.timeout_seconds),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_variable_is_an_error_that_says_what_is_accepted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value, accepted, read = WRONG[name]
    default = read()
    monkeypatch.setenv(f"JAX_SPLITK_{name}", "")
    assert read() == default == {"CACHE_MODE": "update", "AUTOTUNE": False}.get(name, default)
    values = {value}
    if name in ("TUNE_BUDGET_S", "AGREEMENT_TIMEOUT_S"):
        values |= {"0", "nan", "ten", "-inf"}
    for wrong in values:
        monkeypatch.setenv(f"JAX_SPLITK_{name}", wrong)
        with pytest.raises(ValueError, match=rf"^JAX_SPLITK_{name}='{wrong}'; accepted: ") as caught:
            read()
        assert all(word in str(caught.value) for word in accepted)


@pytest.mark.parametrize(
    "seconds", [0, -1, float("nan"), float("inf"), "10", True, np.True_, 1j, pytest.param(10**400, id="huge")]
)
def test_a_wrong_budget_is_refused(seconds: Any) -> None:
    with pytest.raises(ValueError, match=r"seconds=.*; accepted: None or a number above 0"):
        jax_splitk.tune_problems([CASE.problem()], seconds=seconds)
    with pytest.raises(ValueError, match=r"seconds=.*; accepted: None or a number above 0"):
        jax_splitk.tune(lambda: None, seconds=seconds)


@pytest.mark.parametrize("seconds", [np.float32(0.25), np.float64(0.25), fractions.Fraction(1, 4), 1, np.int32(1)])
def test_any_real_number_is_a_budget(seconds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = []

    def tune(key: Any, limit: Any, old: Any, budget: Any) -> Entry:
        budgets.append(budget)
        return entry_of(key, ONE)

    monkeypatch.setattr(tuner, "tune", tune)
    jax_splitk.tune_problems([CASE.problem()], seconds=seconds)
    assert budgets == [float(seconds)]
    assert type(budgets[0]) is float


def test_wrong_problems_are_refused_before_anything_is_tuned(cache: pathlib.Path) -> None:
    good = CASE.problem()
    for wrong in (3, "conv_wgrad", None, {"op": "conv_wgrad"}, CASE):
        with pytest.raises(TypeError, match=r"problems\[1\]=.*; accepted: .*ConvWgradProblem, DotProblem"):
            jax_splitk.tune_problems([good, wrong])
    wrong = dataclasses.replace(good, output_spatial=(3, 3))
    with pytest.raises(ValueError, match=r"problems\[1\]: output_spatial=\(3, 3\); the convolution gives"):
        jax_splitk.tune_problems([good, wrong])
    assert not cache.exists()


@pytest.mark.parametrize("mode", settings.WORDS["JAX_SPLITK_CACHE_MODE"])
def test_tune_says_what_it_did_not_store(
    mode: str, monkeypatch: pytest.MonkeyPatch, cache: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JAX_SPLITK_CACHE_MODE", mode)
    monkeypatch.setattr(search, "FIRST_ROUND", 2)
    ((key, entry),) = jax_splitk.tune_problems([CASE.problem()], seconds=0.01)
    assert entry.measurements
    assert list(store.files(cache)) == ([cache / key.file] if mode == "update" else [])
    said = [r.getMessage() for r in caplog.records if "measured, but not stored" in r.getMessage()]
    assert len(said) == (mode != "update")
    assert all(f"JAX_SPLITK_CACHE_MODE={mode}" in line for line in said)


@pytest.mark.parametrize("name", ["CACHE_MODE", "AUTOTUNE", "TUNE_BUDGET_S"])
def test_a_wrong_variable_is_an_error_of_the_users_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lhs, g, _ = operands(generator(14))
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "on_miss")
    monkeypatch.setenv(f"JAX_SPLITK_{name}", WRONG[name][0])
    with pytest.raises(ValueError, match=f"JAX_SPLITK_{name}="):
        lowered_config(wgrad, lhs, g)


def test_on_miss_is_the_default_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (measurement.autotune(CPU), measurement.autotune(DEFAULT_CUDA)) == (False, True)
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "off")
    assert measurement.autotune(DEFAULT_CUDA) is False
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "on_miss")
    assert measurement.autotune(CPU) is True
    assert tuner.budget_seconds() == 10
    monkeypatch.setenv("JAX_SPLITK_TUNE_BUDGET_S", "2.5")
    assert tuner.budget_seconds() == 2.5


@pytest.mark.parametrize("obstacle", ["a file in its place", "a file for a folder", "a folder for the entry"])
def test_a_cache_that_cannot_be_written_is_no_error(
    obstacle: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    lhs, g, expected = operands(generator(15))
    key = key_for(CASE.problem(), CPU)
    folder = tmp_path / "there"
    monkeypatch.setenv("JAX_SPLITK_CACHE_DIR", str(folder))
    if obstacle == "a file in its place":
        folder.write_text("")
    elif obstacle == "a file for a folder":
        folder.mkdir()
        (folder / "tuning").write_text("")
    else:
        (folder / key.file).mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "jax_splitk"):
        assert store.save(entry_of(key, ONE)) is False
    assert "cannot write" in caplog.text
    assert store.lookup(key) is None
    np.testing.assert_array_equal(wgrad(lhs, g), expected)


def test_without_a_home_there_is_no_cache_and_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Containers may run under a user number without a home folder."""

    def nobody(uid: int) -> Any:
        raise KeyError(uid)

    lhs, g, expected = operands(generator(16))
    monkeypatch.delenv("JAX_SPLITK_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.chdir(tmp_path)
    np.testing.assert_array_equal(jax.jit(functools.partial(wgrad)).lower(lhs, g).compile()(lhs, g), expected)
    assert [store.save(entry_of(key_for(CASE.problem(), CPU), ONE)) for _ in range(2)] == [False, False]
    (record,) = caplog.records
    assert record.getMessage().startswith("there is no home folder for a cache: set JAX_SPLITK_CACHE_DIR")
    assert list(tmp_path.iterdir()) == []


def test_a_frozen_miss_names_the_machines_that_a_cache_is_for(
    monkeypatch: pytest.MonkeyPatch, cache: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    lhs, g, _ = operands(generator(18))
    problem = CASE.problem()
    for folder, target in (
        (cache, dataclasses.replace(CPU, cores=CPU.cores + 3)),
        (tmp_path / "other", dataclasses.replace(CPU, cores=CPU.cores + 5)),
        (tmp_path / "other", dataclasses.replace(CPU, device_kind="another", cores=CPU.cores + 7)),
    ):
        key = key_for(problem, target)
        assert disk.write(folder / key.file, entry_of(key, ONE).dumps().encode())
        # An entry that cannot be read is passed over without a word: this says why.
        assert whole(json.loads((folder / key.file).read_bytes())).key.environment == key.environment
    assert disk.write(cache / "tuning" / "v3-damaged" / "x.json", b"{")
    assert len(store.elsewhere(key_for(problem, CPU))) == 1  # JAX_SPLITK_CACHE_PATH is not set yet
    monkeypatch.setenv("JAX_SPLITK_CACHE_PATH", str(tmp_path / "other"))
    monkeypatch.setenv("JAX_SPLITK_CACHE_MODE", "frozen")
    told = f"a cache has it for {CPU.cores + 3} and for {CPU.cores + 5} CPU cores, here are {CPU.cores}, .*NPROC="
    with pytest.raises(jax_splitk.FrozenCacheMiss, match=f"{told}.*to tune it ahead of time"):
        lowered_config(wgrad, lhs, g)
    shutil.rmtree(cache)
    for path in (tmp_path / "other").rglob("*.json"):
        if json.loads(path.read_text())["key"]["environment"]["device_kind"] != "another":
            path.unlink()
    with pytest.raises(jax_splitk.FrozenCacheMiss, match=r"a cache has it for another \(cpu, .*, this machine is "):
        lowered_config(wgrad, lhs, g)


@pytest.mark.parametrize("name", ["JAX_SPLITK_CACHE_DIR", "JAX_SPLITK_CACHE_PATH"])
@pytest.mark.parametrize(
    "value",
    [
        *("gs://bucket/cache", "s3://bucket/cache", "file:///tmp/cache", "hf://a/b", "file:/tmp/cache"),
        *("$HOME/cache", "${HOME}/cache", "/scratch/$USER/cache", "~no_such_user_here/cache"),
    ],
)
def test_what_is_no_local_path_is_refused(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """Otherwise a folder of that name would be created here without a warning."""
    lhs, g, _ = operands(generator(17))
    monkeypatch.chdir(tmp_path)
    given = value if name.endswith("DIR") else f"{tmp_path}:{value}"
    monkeypatch.setenv(name, given)
    with pytest.raises(ValueError, match=f"^{name}='.*{re.escape(value)}'; accepted: a local path, with a leading ~"):
        jax.jit(functools.partial(wgrad)).lower(lhs, g)
    assert list(tmp_path.iterdir()) == []
    assert any(mistake.startswith(f"{name}=") for mistake in settings.mistakes())


@pytest.mark.parametrize("name", ["costs$", "a:b", "50%", "a~b", "x=://y"])
def test_unusual_folders_are_folders(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("JAX_SPLITK_CACHE_DIR", str(tmp_path / name))
    assert disk.cache_dir() == tmp_path / name


def test_a_layer_that_is_no_folder_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    lhs, g, _ = operands(generator(19))
    typo, file, good = (tmp_path / name for name in ("typo", "file", "good"))
    file.touch(), good.mkdir()
    layers = map(str, (typo, f"{file}/", "/dev/null", typo, good))
    monkeypatch.setenv("JAX_SPLITK_CACHE_PATH", os.pathsep.join(layers))
    wrong = [
        f"JAX_SPLITK_CACHE_PATH: {f} is not a folder; nothing is read from it" for f in (typo, f"{file}/", "/dev/null")
    ]
    assert settings.mistakes() == wrong
    key = key_for(CASE.problem(), CPU)
    put(good, key, entry_of(key, THREE).dumps())
    assert lowered_config(wgrad, lhs, g) == THREE  # behind the wrong ones
    put(typo, key, entry_of(key, TWO).dumps())
    assert lowered_config(wgrad, lhs, g) == TWO  # made meanwhile
    assert settings.mistakes() == wrong[1:]
    assert caplog.records == []


def test_what_comes_after_a_hit_is_not_looked_at(
    monkeypatch: pytest.MonkeyPatch, cache: pathlib.Path, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    lhs, g, _ = operands(generator(20))
    key = key_for(CASE.problem(), CPU)
    near = tmp_path / "near"
    looked_at: list[pathlib.Path] = []
    monkeypatch.setattr(store, "_look_for_old_entries", looked_at.append)
    monkeypatch.setenv("JAX_SPLITK_CACHE_PATH", f"{near}{os.pathsep}{tmp_path / 'far'}")
    put(cache, key, entry_of(key, TWO).dumps())
    assert lowered_config(wgrad, lhs, g) == TWO
    (cache / key.file).unlink()
    put(near, key, entry_of(key, THREE).dumps())
    assert lowered_config(wgrad, lhs, g) == THREE
    assert looked_at == [cache]
    assert "CACHE_PATH" not in caplog.text
