"""`python -m jax_splitk`: tuning, explaining and keeping caches from the command line."""

import dataclasses
import datetime
import json
import logging
import os
import pathlib
import shlex
import subprocess
import sys
import textwrap
import time
from typing import Any

import jax
import pytest
from jax import numpy as jnp

import jax_splitk
from jax_splitk.__main__ import main
from jax_splitk.kernels.wgrad import host as wgrad_host
from jax_splitk.ops import lowering
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime import compiler, disk
from jax_splitk.runtime.target import target_for
from jax_splitk.tuning import agreement, store, tuner
from jax_splitk.tuning.entry import XLA, Candidate, Entry, Measurement
from jax_splitk.tuning.key import SCHEMA, Key, key_for
from jax_splitk.tuning.result import TuningResult

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="tunes the host family")

PROBLEM = ConvWgradProblem(
    batch=4,
    input_spatial=(8, 8),
    output_spatial=(8, 8),
    kernel_spatial=(3, 3),
    in_channels=8,
    out_channels=8,
    window_strides=(1, 1),
    padding=((1, 1), (1, 1)),
    lhs_dilation=(1, 1),
    rhs_dilation=(1, 1),
    feature_group_count=1,
    dtype="float32",
    out_dtype="float32",
)
PROBLEMS = [dataclasses.replace(PROBLEM, batch=batch) for batch in (4, 5, 6, 7)]
A, B, C = (Candidate("wgrad_host", wgrad_host.Config(splits, 128)) for splits in (1, 2, 4))
X = Candidate(XLA)
OLD, NEW = "2024-01-01T00:00:00+00:00", "2025-06-01T12:00:00+00:00"

SCRIPT = """
    import sys
    import jax
    from jax import numpy as jnp
    import jax_splitk
    from beside import BATCH

    def loss(w, x):
        y = jax_splitk.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return y.sum()

    if __name__ == "__main__":
        print("arguments", sys.argv[1:])
        x, w = jnp.ones((BATCH, 8, 8, 8)), jnp.ones((3, 3, 8, 8))
        jax.jit(jax.grad(loss)).lower(w, x)
        explicit = jax_splitk.conv_wgrad(x[:2], x[:2], (3, 3, 8, 8), (1, 1), "SAME", dimension_numbers=(
            "NHWC", "HWIO", "NHWC"), implementation="xla")
        if "fail" in sys.argv:
            raise KeyError("on purpose")
        sys.exit(0)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("JAX_SPLITK_CACHE_DIR", str(folder))
    monkeypatch.setenv("JAX_SPLITK_TUNE_BUDGET_S", "0.1")
    for name in ("JAX_SPLITK_CACHE_PATH", "JAX_SPLITK_CACHE_MODE", "JAX_SPLITK_AUTOTUNE"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def script(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "beside.py").write_text("BATCH = 4\n")
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    yield path
    sys.modules.pop("beside", None)


def key_of(problem: ConvWgradProblem = PROBLEM, **environment: Any) -> Key:
    key = key_for(problem, target_for("cpu"))
    return dataclasses.replace(key, environment=dataclasses.replace(key.environment, **environment))


def entry_of(key: Key, times: dict[Candidate, float], date: Any = OLD) -> Entry:
    measurements = tuple(Measurement(candidate, us) for candidate, us in times.items())
    return Entry(key.as_dict(), min(times, key=lambda c: times[c]), measurements, A, {"date": date, "jax": "0"})


def put(folder: pathlib.Path, key: Key, times: dict[Candidate, float], date: Any = OLD) -> pathlib.Path:
    path = folder / key.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(entry_of(key, times, date).dumps())
    return path


def got(folder: pathlib.Path, key: Key) -> Entry | None:
    return store.read(folder / key.file, key)


def as_json(problem: ConvWgradProblem) -> dict[str, Any]:
    return json.loads(json.dumps({"op": problem.op, **dataclasses.asdict(problem)}))


def run(capsys: Any, *arguments: Any, code: int = 0) -> Any:
    """What the command prints as JSON, and nothing else, on stdout."""
    words = [str(a) for a in arguments]
    at = words.index("--") if "--" in words else len(words)
    assert main([*words[:at], "--json", *words[at:]]) == code
    return json.loads(capsys.readouterr().out)


def text(capsys: Any, *arguments: Any, code: int = 0) -> str:
    assert main([str(a) for a in arguments]) == code
    return capsys.readouterr().out


def refused(capsys: Any, *arguments: Any) -> str:
    with pytest.raises(SystemExit) as exit_:
        main([str(a) for a in arguments])
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(p for p in sys.path if p)
    return subprocess.run(
        [sys.executable, "-m", "jax_splitk", *arguments],
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


# ---- tune ----------------------------------------------------------------------------------------------------------


def test_tune_problems_measures_once_and_stores(cache: pathlib.Path, tmp_path: pathlib.Path, capsys: Any) -> None:
    file = tmp_path / "problems.json"
    file.write_text(json.dumps([as_json(p) for p in (*PROBLEMS[:2], PROBLEMS[0])]))
    found = run(capsys, "tune", file, "--seconds", "0.05")
    assert [d["problem"] for d in found["decided"]] == [as_json(p) for p in PROBLEMS[:2]]
    assert [d["measured"] for d in found["decided"]] == [True, True]
    assert (found["undecided"], found["failed"]) == ([], [])
    for decision, problem in zip(found["decided"], PROBLEMS, strict=False):
        entry = got(cache, key_of(problem))
        assert entry is not None
        assert decision["choice"] == entry.choice.as_dict()
        assert (decision["us"], decision["xla_us"]) == (entry.us(entry.choice), entry.us(X))
        assert decision["speedup"] == decision["xla_us"] / decision["us"]
        assert decision["regret"] == entry.regret
    again = run(capsys, "tune", json.dumps(as_json(PROBLEM)))
    assert [d["measured"] for d in again["decided"]] == [False]
    before = (cache / key_of().file).read_bytes()
    again = run(capsys, "tune", json.dumps(as_json(PROBLEM)), "--again")
    assert [d["measured"] for d in again["decided"]] == [True]
    assert (cache / key_of().file).read_bytes() != before
    assert "from a cache" in text(capsys, "tune", json.dumps(as_json(PROBLEM)))


def test_tune_goes_on_after_a_failure_and_says_what_is_not_tuned(
    cache: pathlib.Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune = tuner.tune

    def failing(key: Key, *args: Any) -> Entry:
        if key.problem == PROBLEMS[0]:
            raise RuntimeError("out of memory")
        return tune(key, *args)

    monkeypatch.setattr(tuner, "tune", failing)
    double = dataclasses.replace(PROBLEM, dtype="float64", out_dtype="float64")
    found = run(capsys, "tune", json.dumps([as_json(p) for p in (PROBLEMS[0], double, PROBLEMS[1])]), code=1)
    assert [d["problem"] for d in found["decided"]] == [as_json(PROBLEMS[1])]
    assert [d["problem"] for d in found["undecided"]] == [as_json(double)]
    (failure,) = found["failed"]
    assert failure["problem"] == as_json(PROBLEMS[0])
    assert "RuntimeError: out of memory" in failure["why"]


def test_tune_says_when_the_decision_was_not_stored(
    cache: pathlib.Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write_text("a file where the folder should be")
    found = run(capsys, "tune", json.dumps(as_json(PROBLEM)), code=1)
    assert found["decided"][0]["measured"]
    assert found["failed"][0]["why"] == f"{PROBLEM}: measured, but not stored"


def test_tune_script_tunes_what_it_lowers(cache: pathlib.Path, script: pathlib.Path, capsys: Any) -> None:
    state = (list(sys.argv), list(sys.path), os.environ.get("JAX_SPLITK_AUTOTUNE"))
    functions = (lowering.announce, agreement.agree, tuner.tune)
    assert main(["tune", str(script), "--json", "--", "--json", "x y"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert "arguments ['--json', 'x y']" in captured.err
    assert f"tuned {PROBLEM} in " in captured.err
    assert (list(sys.argv), list(sys.path), os.environ.get("JAX_SPLITK_AUTOTUNE")) == state
    assert (lowering.announce, agreement.agree, tuner.tune) == functions
    assert [(d["problem"], d["measured"]) for d in found["decided"]] == [(as_json(PROBLEM), True)]
    # The operation for which XLA was asked has nothing to tune. It runs eagerly, so that its lowering may be cached.
    assert {u["why"] for u in found["undecided"]} <= {"implementation='xla' was asked for"}
    before = got(cache, key_of())
    assert before is not None
    found = run(capsys, "tune", script)
    assert [d["measured"] for d in found["decided"]] == [False]
    assert got(cache, key_of()) == before
    found = run(capsys, "tune", script, "--again")
    assert [d["measured"] for d in found["decided"]] == [True]
    assert got(cache, key_of()) != before


def test_a_failing_script_is_reported_after_what_it_lowered(
    cache: pathlib.Path, script: pathlib.Path, capsys: Any
) -> None:
    for name in ("tune", "explain"):
        assert main([name, str(script), "--json", "--", "fail"]) == 1
        captured = capsys.readouterr()
        assert "KeyError: 'on purpose'" in captured.err
        found = json.loads(captured.out)
        assert (found["decided"] if name == "tune" else found["decisions"])[0]["problem"] == as_json(PROBLEM)


def test_the_command_of_a_miss_works_when_pasted(
    cache: pathlib.Path, capsys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        y = jax_splitk.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return y.sum()

    arguments = jnp.ones((3, 3, 8, 8)), jnp.ones((4, 8, 8, 8))
    with caplog.at_level(logging.INFO, "jax_splitk"):
        jax.jit(jax.grad(loss)).lower(*arguments)
    (line,) = [r.getMessage() for r in caplog.records if "ahead of time: " in r.getMessage()]
    pasted = shlex.split(line.partition("ahead of time: ")[2])
    assert pasted[:4] == ["python", "-m", "jax_splitk", "tune"]
    done = command(*pasted[3:])
    assert (done.returncode, done.stderr.count("tuned conv_wgrad")) == (0, 1)
    assert "measured now" in done.stdout
    # The same operation now finds it.
    (decision,) = jax_splitk.explain(jax.grad(loss), *arguments).decisions
    assert decision.why.startswith("user cache: ")


def test_the_callers_limit_bounds_what_is_tuned(cache: pathlib.Path, capsys: Any) -> None:
    problem, limit = json.dumps(as_json(PROBLEM)), 500_000
    constraints = ("--workspace-limit-bytes", limit)
    (decision,) = run(capsys, "tune", problem, *constraints)["decided"]
    assert decision["workspace_limit_bytes"] == limit
    key = key_for(PROBLEM, target_for("cpu"))
    assert [path.stem for path in store.files(cache)] == [key.digest[:40]]
    assert run(capsys, "explain", problem, *constraints)["decisions"][0]["why"].startswith("user cache")
    (again,) = run(capsys, "tune", problem)["decided"]  # what a larger limit allows was not measured
    assert (again["measured"], again["workspace_limit_bytes"]) == (True, 256 * 2**20)
    (again,) = run(capsys, "tune", problem, *constraints)["decided"]
    assert not again["measured"]
    assert "accepted: an integer of at least 0" in refused(capsys, "tune", problem, "--workspace-limit-bytes=-1")


@pytest.mark.parametrize(
    ("argument", "part"),
    [
        ("missing.py", "accepted: an existing .py file"),
        ("x" * 5000, "accepted: an existing .py file"),
        ("{", "not JSON"),
        ("[]", "an empty list"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "problem 0: 1 is not an object with 'op'"),
        ('{"batch": 1}', "is not an object with 'op'"),
        ('{"op": "gemm"}', "op='gemm'; accepted: 'conv_wgrad', 'quantized_matmul'"),
        ('{"op": []}', "unhashable"),
        ('{"op": "conv_wgrad", "batch": 1, "size": 2}', "unknown fields ['size']"),
        (json.dumps({**as_json(PROBLEM), "dtype": "int8"}), "dtype='int8'; accepted:"),
        (json.dumps({**as_json(PROBLEM), "padding": 1}), "padding=1; accepted:"),
    ],
)
def test_wrong_problems_are_refused(argument: str, part: str, capsys: Any) -> None:
    for name in ("tune", "explain"):
        message = refused(capsys, name, argument)
        assert "SCRIPT_OR_PROBLEMS=" in message
        assert part in message


def test_wrong_arguments_are_refused(
    script: pathlib.Path, tmp_path: pathlib.Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = json.dumps(as_json(PROBLEM))
    for seconds in ("0", "-1", "inf", "nan", "soon"):
        assert f"{seconds!r}; accepted: a number above 0" in refused(capsys, "tune", problem, f"--seconds={seconds}")
    assert "accepted only with a script" in refused(capsys, "tune", problem, "--", "x")
    assert "accepted only with a script" in refused(capsys, "explain", problem, "--", "x")
    assert "accepted only with problems" in refused(capsys, "explain", script, "--platform", "cuda")
    assert "accepted only by tune and explain" in refused(capsys, "doctor", "--", "x")
    assert "usage: python -m jax_splitk cache" in refused(capsys, "cache")
    assert "--layer=2; accepted: 0 to 1" in refused(capsys, "cache", "ls", "--layer", "2")
    assert "DIR='nowhere'; accepted: a cache folder" in refused(capsys, "cache", "verify", "nowhere")
    assert "accepted: --environment, --older-than, --damaged" in refused(capsys, "cache", "prune", "--dry-run")
    assert "accepted: a number of at least 0" in refused(capsys, "cache", "prune", "--older-than=-1")
    assert "FILE='nothing.json' cannot be read" in refused(capsys, "cache", "import", "nothing.json")
    assert "is a folder" in refused(capsys, "cache", "export", tmp_path)
    assert "there is none" in refused(capsys, "cache", "show", "xyz")
    assert "there is none" in refused(capsys, "cache", "show", "")
    for mode in ("read", "off", "frozen"):
        monkeypatch.setenv("JAX_SPLITK_CACHE_MODE", mode)
        for words in (("tune", problem), ("cache", "import", "x"), ("cache", "prune", "--damaged")):
            assert f"JAX_SPLITK_CACHE_MODE='{mode}'; accepted by this command" in refused(capsys, *words)
    monkeypatch.setenv("JAX_SPLITK_CACHE_MODE", "sometimes")
    assert "JAX_SPLITK_CACHE_MODE='sometimes'; accepted:" in refused(capsys, "explain", problem)
    monkeypatch.delenv("JAX_SPLITK_CACHE_MODE")
    monkeypatch.setenv("JAX_SPLITK_TUNE_BUDGET_S", "much")
    assert "JAX_SPLITK_TUNE_BUDGET_S='much'; accepted:" in refused(capsys, "tune", problem)


# ---- explain -------------------------------------------------------------------------------------------------------


def test_explain_problems_selects_without_measuring(cache: pathlib.Path, capsys: Any) -> None:
    problem = json.dumps(as_json(PROBLEM))
    found = run(capsys, "explain", problem)
    assert found["platform"] == "cpu"
    (decision,) = found["decisions"]
    assert decision["problem"] == as_json(PROBLEM)
    assert (decision["implementation"], decision["family"]) == ("host", "wgrad_host")
    assert decision["why"].startswith("the cost model's best of ")
    config = wgrad_host.Config(**decision["config"])
    assert decision["splits"] == config.splits
    assert decision["workspace_bytes"] == wgrad_host.FAMILY.workspace_bytes(PROBLEM, config)
    assert not cache.exists()
    put(cache, key_of(), {X: 30.0, A: 20.0, B: 10.0})
    (decision,) = run(capsys, "explain", problem)["decisions"]
    assert decision["config"] == dataclasses.asdict(B.config)
    assert decision["why"] == "user cache: 10.0 us, XLA 30.0 us"
    wide = dataclasses.replace(PROBLEM, in_channels=64, out_channels=64, dtype="bfloat16")
    (decision,) = run(capsys, "explain", json.dumps([as_json(wide)]), "--platform", "cuda")["decisions"]
    assert decision["implementation"] == "cutlass"
    assert str(wide) in text(capsys, "explain", json.dumps(as_json(wide)), "--platform", "cuda")


def test_explain_script_shows_what_was_lowered(cache: pathlib.Path, script: pathlib.Path, capsys: Any) -> None:
    put(cache, key_of(), {X: 30.0, A: 20.0, B: 10.0})
    found = run(capsys, "explain", script, "--", "--platform")
    decision = found["decisions"][0]
    assert (decision["problem"], decision["count"]) == (as_json(PROBLEM), 1)
    assert (decision["implementation"], decision["config"]) == ("host", dataclasses.asdict(B.config))
    assert decision["why"] == "user cache: 10.0 us, XLA 30.0 us"
    shown = text(capsys, "explain", script)
    assert shown.startswith("arguments []\nplatform cpu\n")
    assert str(PROBLEM) in shown


def test_explain_in_a_process_of_its_own(script: pathlib.Path, cache: pathlib.Path) -> None:
    put(cache, key_of(), {X: 30.0, A: 20.0})
    # Also what the script's own subprocesses print is kept from stdout.
    (script.parent / "beside.py").write_text("import os\nos.system('echo from below')\nBATCH = 4\n")
    done = command("explain", str(script), "--json", "--", "a")
    assert done.returncode == 0, done.stderr
    decisions = json.loads(done.stdout)["decisions"]
    assert [d["implementation"] for d in decisions] == ["host", "xla"]
    assert "from below" in done.stderr
    assert "arguments ['a']" in done.stderr


# ---- cache: looking ------------------------------------------------------------------------------------------------


def test_ls_shows_all_layers(cache: pathlib.Path, tmp_path: pathlib.Path, capsys: Any, monkeypatch: Any) -> None:
    assert run(capsys, "cache", "ls", "--layer", "0")["entries"] == []
    assert "no entries" in text(capsys, "cache", "ls", "--layer", "0")
    other = tmp_path / "other"
    monkeypatch.setenv("JAX_SPLITK_CACHE_PATH", f"{other}{os.pathsep}{tmp_path / 'missing'}")
    mine = put(cache, key_of(), {X: 30.0, A: 20.0, B: 10.0}, NEW)
    theirs = put(other, key_of(PROBLEMS[1]), {X: 5.0, A: 10.0}, "nonsense")
    bad = mine.with_name("0" * 40 + ".json")
    bad.write_text("{")
    found = run(capsys, "cache", "ls")
    assert [layer["folder"] for layer in found["layers"]][:2] == [str(cache), str(other)]
    assert found["layers"][3]["name"] == "shipped table"
    first, second = (entry for entry in found["entries"] if entry["layer"] < 3)
    assert (first["layer"], first["file"]) == (0, str(mine))
    assert first["problem"] == as_json(PROBLEM)
    assert (first["us"], first["xla_us"], first["speedup"], first["regret"]) == (10.0, 30.0, 3.0, 1.0)
    assert first["date"] == NEW
    assert first["digest"] == mine.stem
    assert (second["layer"], second["file"], second["choice"]["family"]) == (1, str(theirs), XLA)
    assert (second["speedup"], second["date"]) == (1.0, None)
    assert found["unusable"] == [{"file": str(bad), "reason": found["unusable"][0]["reason"], "foreign": False}]
    (only,) = run(capsys, "cache", "ls", "--layer", "1")["entries"]
    assert only == second
    shown = text(capsys, "cache", "ls")
    for part in (str(PROBLEM), str(B), "10.0", "30.0", "3.00", "100.0%", "2025-06-01 12:00"):
        assert part in shown


def test_show_sorts_the_measurements(cache: pathlib.Path, capsys: Any) -> None:
    path = put(cache, key_of(), {X: 30.0, A: 20.0, B: 10.0}, NEW)
    fields = json.loads(path.read_text())
    tables = fields["measurements"]
    tables.insert(0, {**tables[1], "rows": [Measurement(C, None, "wrong \x1b[2J result").row()]})
    fields["metadata"]["note"] = "\ud800"
    path.write_text(json.dumps(fields))
    found = run(capsys, "cache", "show", path.stem[:6])
    assert [m["us"] for m in found["measurements"]] == [10.0, 20.0, 30.0, None]
    assert found["predicted"] == A.as_dict()
    assert found["metadata"]["jax"] == "0"
    assert run(capsys, "cache", "show", path) == found
    shown = text(capsys, "cache", "show", path.stem)
    assert "wrong \\x1b[2J result" in shown
    assert f"choice {B}: 10.0 us, XLA 30.0 us, speedup 3.00, regret of the cost model 100.0%" in shown
    put(cache, key_of(PROBLEMS[1]), {X: 1.0})
    put(cache, key_of(PROBLEMS[2]), {X: 1.0})
    (path.parent / f"{path.stem[:8]}{'f' * 32}.json").write_text("")
    assert "accepted: more of one of" in refused(capsys, "cache", "show", path.stem[:8])
    assert run(capsys, "cache", "show", path.parent / f"{path.stem[:8]}{'f' * 32}.json", code=1)["foreign"] is False


def damage(folder: pathlib.Path, good: pathlib.Path) -> dict[pathlib.Path, str]:
    """Damaged files of every kind beside a good one, and a part of what is said of each."""
    whole = good.read_text()
    fields = json.loads(whole)
    environment = good.parent
    illegal = json.loads((folder / key_of(PROBLEMS[3]).file).read_text())
    illegal["choice"]["config"]["splits"] = 10**6
    (folder / key_of(PROBLEMS[3]).file).write_text(json.dumps(illegal))
    files = {
        "1" * 40: (whole[: len(whole) // 2].encode(), "not JSON"),
        "2" * 40: (b"\xff\x00\xfe", "not JSON"),
        "3" * 40: (b"[" * 100_000, "not JSON"),
        "4" * 40: (b"[]", "a list; accepted: an object"),
        "5" * 40: (json.dumps({**fields, "key": None}).encode(), "key None"),
        "6" * 40: (json.dumps({**fields, "metadata": 3}).encode(), "metadata"),
        "7" * 40: (whole.encode(), "it is not where it would be looked for"),
        "8" * 40: (b"", "not JSON"),
        "9" * 40: (json.dumps({**fields, "schema": "1"}).encode(), f"schema '1'; accepted: {SCHEMA}"),
    }
    found = {folder / key_of(PROBLEMS[3]).file: "is not legal: splits=1000000"}
    for name, (data, part) in files.items():
        path = environment / f"{name}.json"
        path.write_bytes(data)
        found[path] = part
    (environment / f"{'a' * 40}.json").mkdir()
    found[environment / f"{'a' * 40}.json"] = "it cannot be read"
    return found


def foreign(folder: pathlib.Path, good: pathlib.Path) -> dict[pathlib.Path, str]:
    """Files that only another version of the package can use."""
    fields = json.loads(good.read_text())
    newer = good.parent / f"{'b' * 40}.json"
    newer.write_text(json.dumps({**fields, "schema": SCHEMA + 1}))
    op = good.parent / f"{'c' * 40}.json"
    op.write_text(json.dumps({**fields, "key": {**fields["key"], "op": "matmul"}}))
    family = put(folder, key_of(PROBLEMS[0], abi=("wgrad_host:1", "wgrad_avx:1")), {X: 3.0, A: 2.0})
    family.write_text(family.read_text().replace('"family": "wgrad_host"', '"family": "wgrad_avx"'))
    return {newer: f"schema {SCHEMA + 1}; accepted: {SCHEMA}", op: "op='matmul'", family: "family 'wgrad_avx'"}


def test_verify_reports_every_file_that_cannot_be_used(cache: pathlib.Path, capsys: Any) -> None:
    assert run(capsys, "cache", "verify")["usable"] >= 0
    good = put(cache, key_of(), {X: 30.0, A: 20.0})
    put(cache, key_of(PROBLEMS[1], cores=999), {X: 30.0, A: 20.0})
    assert run(capsys, "cache", "verify", cache) == {"folders": [str(cache)], "usable": 2, "unusable": []}
    put(cache, key_of(PROBLEMS[3]), {X: 30.0, A: 20.0})
    damaged, others = damage(cache, good), foreign(cache, good)
    (good.parent / "notes.txt").write_text("not ours")
    found = run(capsys, "cache", "verify", cache, code=1)
    assert found["usable"] == 2
    reasons = {pathlib.Path(item["file"]): item for item in found["unusable"]}
    assert reasons.keys() == {*damaged, *others}
    for path, part in {**damaged, **others}.items():
        assert part in reasons[path]["reason"]
        assert reasons[path]["foreign"] == (path in others)
    shown = text(capsys, "cache", "verify", code=1)
    assert all(str(path) in shown for path in (*damaged, *others))
    assert "files cannot" in shown


def test_verify_the_shipped_table(capsys: Any) -> None:
    if any(store.files(store.SHIPPED)):
        assert run(capsys, "cache", "verify", store.SHIPPED)["unusable"] == []


def test_diff_shows_what_differs(tmp_path: pathlib.Path, capsys: Any) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    put(a, key_of(PROBLEMS[0]), {X: 30.0, A: 20.0})
    put(b, key_of(PROBLEMS[1]), {X: 30.0, A: 20.0})
    for folder, best in ((a, A), (b, B)):
        put(folder, key_of(PROBLEMS[2]), {X: 30.0, A: 20.0, B: 21.0, best: 7.5})
        put(folder, key_of(PROBLEMS[3]), {X: 30.0, A: 20.0})
    found = run(capsys, "cache", "diff", a, b)
    assert [item["problem"] for item in found["only_in_a"]] == [as_json(PROBLEMS[0])]
    assert [item["problem"] for item in found["only_in_b"]] == [as_json(PROBLEMS[1])]
    (pair,) = found["different"]
    assert (pair["a"]["choice"], pair["b"]["choice"]) == (A.as_dict(), B.as_dict())
    assert (pair["a"]["us"], pair["b"]["us"]) == (7.5, 7.5)
    assert (found["same"], found["unusable"]) == (1, [])
    shown = text(capsys, "cache", "diff", a, b)
    assert shown.endswith("only in A 1, only in B 1, different 1, same 1\n")
    assert text(capsys, "cache", "diff", a, a).endswith("only in A 0, only in B 0, different 0, same 3\n")
    (a / key_of(PROBLEMS[0]).file).write_text("")
    assert len(run(capsys, "cache", "diff", a, b, code=1)["unusable"]) == 1


# ---- cache: combining ----------------------------------------------------------------------------------------------


def test_merge_keeps_every_entry_and_the_newer_decision(tmp_path: pathlib.Path, capsys: Any) -> None:
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    keys = [key_of(p) for p in PROBLEMS]
    elsewhere = key_of(PROBLEMS[0], cores=999)
    put(a, keys[0], {X: 30.0, A: 20.0}, OLD)
    put(b, keys[0], {X: 29.0, B: 15.0}, NEW)
    put(c, keys[0], {X: 31.0, C: 10.0}, "2024-06-01T00:00:00")
    put(a, keys[1], {X: 30.0, A: 20.0})
    put(b, elsewhere, {X: 30.0, A: 20.0})
    put(c, keys[2], {X: 30.0, A: 20.0})
    found = run(capsys, "cache", "merge", a, b, c)
    assert [len(found[name]) for name in ("added", "updated", "unchanged", "failed", "unusable")] == [2, 2, 0, 0, 0]
    merged = got(c, keys[0])
    assert merged is not None
    assert (merged.choice, merged.metadata["date"]) == (B, NEW)
    assert {m.candidate: m.us for m in merged.measurements} == {X: 29.0, A: 20.0, B: 15.0, C: 10.0}
    assert all(got(c, key) is not None for key in (keys[1], keys[2], elsewhere))
    # Again: nothing changes, and nothing is written.
    before = {path: path.stat().st_mtime_ns for path in store.files(c)}
    found = run(capsys, "cache", "merge", a, c)
    assert [len(found[name]) for name in ("added", "updated", "unchanged")] == [0, 0, 2]
    assert {path: path.stat().st_mtime_ns for path in store.files(c)} == before
    # The sources are as they were, and a new folder may be the destination.
    assert "added 3" in text(capsys, "cache", "merge", a, b, tmp_path / "new")
    assert len(list(store.files(tmp_path / "new"))) == 3


def test_merge_skips_and_reports_damage(cache: pathlib.Path, tmp_path: pathlib.Path, capsys: Any) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    good = put(a, key_of(), {X: 30.0, A: 20.0})
    put(a, key_of(PROBLEMS[3]), {X: 30.0, A: 20.0})
    damaged = damage(a, good)
    # A damaged file in the destination does not stand in a good one's way; a damaged source destroys nothing.
    broken = put(b, key_of(), {X: 1.0})
    broken.write_text("{")
    kept = put(b, key_of(PROBLEMS[3]), {X: 30.0, B: 20.0})
    before = kept.read_bytes()
    found = run(capsys, "cache", "merge", a, b, code=1)
    assert {item["file"] for item in found["unusable"]} == set(map(str, damaged))
    assert [item["file"] for item in found["added"]] == [str(broken)]
    assert got(b, key_of()) == entry_of(key_of(), {X: 30.0, A: 20.0})
    assert kept.read_bytes() == before
    assert "is also a SRC" in refused(capsys, "cache", "merge", a, b, a)
    assert "SRC=" in refused(capsys, "cache", "merge", tmp_path, b)
    assert "accepted: a cache folder" in refused(capsys, "cache", "merge", a, good)


def test_export_and_import_make_the_round(cache: pathlib.Path, tmp_path: pathlib.Path, capsys: Any) -> None:
    keys = [key_of(PROBLEMS[0]), key_of(PROBLEMS[1], cores=999)]
    for key in keys:
        put(cache, key, {X: 30.0, A: 20.0})
    bad = cache / key_of(PROBLEMS[2]).file
    bad.write_text("{")
    file = tmp_path / "exported.json"
    found = run(capsys, "cache", "export", file)
    assert (found["entries"], found["written"]) == (2, True)
    assert [item["file"] for item in found["unusable"]] == [str(bad)]
    assert {key for key, _ in TuningResult.loads(file.read_text())} == set(keys)
    before = {path: path.read_bytes() for path in store.files(cache) if path != bad}
    for path in [*before, bad]:
        path.unlink()
    assert len(run(capsys, "cache", "import", file)["added"]) == 2
    assert {path: path.read_bytes() for path in store.files(cache)} == before
    assert len(run(capsys, "cache", "import", file)["unchanged"]) == 2
    # An import is a merge: what is newer here stays the choice, and learns the times.
    put(cache, keys[0], {X: 30.0, B: 25.0}, NEW)
    assert len(run(capsys, "cache", "import", file)["updated"]) == 1
    entry = got(cache, keys[0])
    assert entry is not None
    assert (entry.choice, entry.us(A)) == (B, 20.0)


@pytest.mark.parametrize("content", ["{", "{}", '[{"key": 1}]', "[" * 100_000, "[null]"])
def test_import_of_a_damaged_file_changes_nothing(
    content: str, cache: pathlib.Path, tmp_path: pathlib.Path, capsys: Any
) -> None:
    file = tmp_path / "exported.json"
    file.write_text(content)
    assert main(["cache", "import", str(file), "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "nothing imported: FILE=" in captured.err
    assert not cache.exists()


# ---- cache: cleaning -----------------------------------------------------------------------------------------------


def test_prune_deletes_only_what_was_asked(cache: pathlib.Path, capsys: Any) -> None:
    today = datetime.datetime.now(datetime.UTC).isoformat()
    good = put(cache, key_of(), {X: 30.0, A: 20.0}, today)
    old = put(cache, key_of(PROBLEMS[1]), {X: 30.0, A: 20.0}, OLD)
    undated = put(cache, key_of(PROBLEMS[2]), {X: 30.0, A: 20.0}, 5)
    gpu = put(cache, key_for(PROBLEM, target_for("cuda")), {X: 30.0}, today)
    other = put(cache, key_of(PROBLEMS[1], cores=999), {X: 30.0, A: 20.0}, today)
    other_old = put(cache, key_of(PROBLEMS[2], cores=999), {X: 30.0, A: 20.0}, OLD)
    put(cache, key_of(PROBLEMS[3]), {X: 30.0, A: 20.0})
    damaged, others = damage(cache, good), foreign(cache, good)
    notes, cubin = good.parent / "notes.txt", cache / "cubin" / "x.txt"
    fresh, dead = good.parent / ".tmp-fresh", good.parent / ".tmp-dead"
    cubin.parent.mkdir()
    for path in (notes, cubin, fresh, dead):
        path.write_text("")
    os.utime(dead, (time.time() - 7200,) * 2)
    everything = {path for path in cache.rglob("*") if path.is_file()}

    def gone() -> set[pathlib.Path]:
        return everything - {path for path in cache.rglob("*") if path.is_file()}

    def prune(*options: str, code: int = 0) -> set[pathlib.Path]:
        listed = run(capsys, "cache", "prune", "--dry-run", *options)
        assert listed["dry_run"]
        before = gone()
        found = run(capsys, "cache", "prune", *options, code=code)
        tried = {item["file"] for item in (*found["deleted"], *found["failed"])}
        assert tried == {item["file"] for item in listed["deleted"]}
        deleted = {pathlib.Path(item["file"]) for item in found["deleted"]}
        assert gone() - before == deleted
        return deleted

    run(capsys, "cache", "prune", "--environment", "all", "--damaged", "--dry-run")
    assert gone() == set()
    assert prune("--environment", "other", "--older-than", "30") == {other_old}
    assert prune("--older-than", "30") == {old}
    # This machine's entries stay, those for lowering to CUDA from here too.
    family = next(path for path, part in others.items() if "wgrad_avx" in part)
    assert prune("--environment", "other") == {other, family}
    folders = {path for path in damaged if path.is_dir()}
    assert prune("--damaged", code=1) == {*damaged, dead} - folders
    for folder in folders:
        folder.rmdir()
    assert "deleted 0 files" in text(capsys, "cache", "prune", "--damaged")
    newer = set(others) - {family}
    assert prune("--environment", "all") == {good, undated, gpu, *newer}
    assert everything - gone() == {notes, cubin, fresh}


@pytest.mark.skipif(compiler.unavailable() is not None, reason="needs NVRTC")
def test_prune_deletes_machine_code(cache: pathlib.Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cache / "cubin"

    def put_cubin(name: str, days: float = 0.0) -> pathlib.Path:
        path, compiled = folder / f"{name}.cubin", compiler.Compiled(b"machine code", "log")
        assert disk.write(path, compiler._pack(name, compiler.origin("wgrad/im2col.cu"), compiled))
        os.utime(path, (time.time() - days * 86400,) * 2)
        return path

    def prune(*options: str) -> set[pathlib.Path]:
        before = {path for path in folder.iterdir() if path.exists()}
        listed = run(capsys, "cache", "prune", *options)["deleted"]
        assert {pathlib.Path(item["file"]) for item in listed} == before - set(folder.iterdir())
        return before - set(folder.iterdir())

    current, old = put_cubin("current"), put_cubin("old", days=40)
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "header_versions", lambda: {"nvidia-cutlass": "0.1"})
        other, other_old = put_cubin("other"), put_cubin("other_old", days=40)
    damaged, fresh, dead = folder / "damaged.cubin", folder / ".tmp-fresh", folder / ".tmp-dead"
    for path in (damaged, fresh, dead):
        path.write_bytes(b"x")
    os.utime(dead, (time.time() - 7200,) * 2)
    assert prune("--damaged") == {damaged, dead}
    assert prune("--environment", "other", "--older-than", "30") == {other_old}
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "unavailable", lambda: "no compiler in this test")
        assert prune("--environment", "other") == set()
    assert prune("--environment", "other") == {other}
    assert prune("--older-than", "30") == {old}
    assert prune("--environment", "all") == {current}
    assert list(folder.iterdir()) == [fresh]


def test_the_cache_commands_leave_stdout_to_json(cache: pathlib.Path, tmp_path: pathlib.Path) -> None:
    put(cache, key_of(), {X: 30.0, A: 20.0}).with_name("x.json").write_text("{")
    done = command("cache", "verify", "--json")
    assert done.returncode == 1, done.stderr
    assert len(json.loads(done.stdout)["unusable"]) == 1
    done = command("cache", "diff", str(cache), str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"B={str(tmp_path)!r}; accepted: a cache folder" in done.stderr
