"""`tune` and `explain`: scripts and problems from the command line."""

import dataclasses
import json
import logging
import os
import pathlib
import shlex
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax import numpy as jnp

import jax_splitk
from jax_splitk.__main__ import main
from jax_splitk.cli import stored
from jax_splitk.cli.schema import FIELDS
from jax_splitk.kernels.cpu import passes as conv_host
from jax_splitk.kernels.cpu import wgrad as wgrad_host
from jax_splitk.ops import lowering
from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.runtime.target import target_for
from jax_splitk.tuning import agreement, certainty, store, tuner
from jax_splitk.tuning.entry import Entry
from jax_splitk.tuning.key import Key
from tests.command_line import command, refused, run, text
from tests.entries import PROBLEM, PROBLEMS, A, B, X, as_dict, as_json, got, key_of, put
from tests.exhaustive import thinned

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="tunes the host family")

SHORT = {"op": "conv_wgrad", "batch": 4, "input_spatial": [8, 8], "kernel_spatial": [3, 3]}
SHORT |= {"in_channels": 8, "out_channels": 8}
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
def process(cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What a command changes for good in its own process is put back here.
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "")
    monkeypatch.setenv("JAX_SPLITK_TUNE_BUDGET_S", "0.1")


@pytest.fixture
def script(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    (tmp_path / "beside.py").write_text("BATCH = 4\n")
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    yield path
    sys.modules.pop("beside", None)


def test_tune_problems_measures_once_and_stores(cache: pathlib.Path, tmp_path: pathlib.Path, capsys: Any) -> None:
    file = tmp_path / "problems.json"
    file.write_text(as_json(*PROBLEMS[:2], PROBLEMS[0]))
    found = run(capsys, "tune", file, "--seconds", "0.05")
    assert [d["problem"] for d in found["decisions"]] == [as_dict(p) for p in PROBLEMS[:2]]
    assert [d["measured"] for d in found["decisions"]] == [True, True]
    assert found["failures"] == []
    for decision, problem in zip(found["decisions"], PROBLEMS, strict=False):
        entry = got(cache, key_of(problem))
        assert entry is not None
        assert decision["why"].startswith("measured now: ")
        assert decision["choice"] == entry.choice.as_dict()
        assert (decision["us"], decision["xla_us"]) == (entry.us(entry.choice), entry.us(X))
        assert decision["ratio"] == decision["xla_us"] / decision["us"]
        assert decision["regret"] == entry.regret
    again = run(capsys, "tune", as_json(PROBLEM))
    assert [d["measured"] for d in again["decisions"]] == [False]
    before = (cache / key_of().file).read_bytes()
    again = run(capsys, "tune", as_json(PROBLEM), "--again")
    assert [d["measured"] for d in again["decisions"]] == [True]
    assert (cache / key_of().file).read_bytes() != before
    assert "  user cache\n" in text(capsys, "tune", as_json(PROBLEM))


def test_tune_goes_on_after_a_failure_and_says_what_is_not_tuned(
    capsys: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune = tuner.tune

    def failing(key: Key, *args: Any) -> Entry:
        if key.problem == PROBLEMS[0]:
            raise RuntimeError("out of memory")
        return tune(key, *args)

    monkeypatch.setattr(tuner, "tune", failing)
    double = dataclasses.replace(PROBLEM, dtype="float64", out_dtype="float64")
    found = run(capsys, "tune", as_json(PROBLEMS[0], double, PROBLEMS[1]), code=1)
    assert [d["problem"] for d in found["decisions"]] == [as_dict(p) for p in (PROBLEMS[0], double, PROBLEMS[1])]
    assert [d["measured"] for d in found["decisions"]] == [False, False, True]
    assert found["failures"] == [f"{PROBLEM}: tuning failed, see the log"]
    assert "RuntimeError: out of memory" in caplog.text
    # What a cache has is kept, and the failure is one all the same.
    put(store.layers()[0][1], key_of(), {X: 30.0, A: 20.0})
    assert run(capsys, "tune", as_json(PROBLEM), "--again", code=1)["decisions"][0]["us"] == 20.0


def test_tune_says_when_the_decision_was_not_stored(cache: pathlib.Path, capsys: Any) -> None:
    cache.write_text("a file where the folder should be")
    found = run(capsys, "tune", as_json(PROBLEM), code=1)
    assert found["decisions"][0]["measured"]
    assert found["failures"] == [f"{PROBLEM}: measured, but not stored"]


def test_tune_script_tunes_what_it_lowers(cache: pathlib.Path, script: pathlib.Path, capsys: Any) -> None:
    functions = (lowering.announce, agreement.agree, tuner.tune)
    assert main(["tune", str(script), "--json", "--", "--json", "x y"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert "arguments ['--json', 'x y']" in captured.err
    assert f"tuned {PROBLEM} in " in captured.err
    assert (lowering.announce, agreement.agree, tuner.tune) == functions
    tuned, *others = found["decisions"]
    assert (tuned["problem"], tuned["measured"]) == (as_dict(PROBLEM), True)
    # The operation for which XLA was asked has nothing to tune. It runs eagerly, so that its lowering may be cached.
    assert {other["why"] for other in others} <= {"implementation='xla' was asked for"}
    before = got(cache, key_of())
    assert before is not None
    assert not run(capsys, "tune", script)["decisions"][0]["measured"]
    assert got(cache, key_of()) == before
    assert run(capsys, "tune", script, "--again")["decisions"][0]["measured"]
    assert got(cache, key_of()) != before


def test_a_failing_script_is_reported_after_what_it_lowered(script: pathlib.Path, capsys: Any) -> None:
    for name in ("tune", "explain"):
        assert main([name, str(script), "--json", "--", "fail"]) == 1
        captured = capsys.readouterr()
        assert "KeyError: 'on purpose'" in captured.err
        assert json.loads(captured.out)["decisions"][0]["problem"] == as_dict(PROBLEM)


def test_the_command_of_a_miss_works_when_pasted(capsys: Any, caplog: pytest.LogCaptureFixture) -> None:
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
    problem, limit = as_json(PROBLEM), 500_000
    constraints = ("--workspace-limit-bytes", limit)
    (decision,) = run(capsys, "tune", problem, *constraints)["decisions"]
    assert decision["workspace_limit_bytes"] == limit
    assert [path.stem for path in store.files(cache)] == [key_of().digest[:40]]
    assert run(capsys, "explain", problem, *constraints)["decisions"][0]["why"].startswith("user cache")
    (again,) = run(capsys, "tune", problem)["decisions"]  # what a larger limit allows was not measured
    assert (again["measured"], again["workspace_limit_bytes"]) == (True, 256 * 2**20)
    (again,) = run(capsys, "tune", problem, *constraints)["decisions"]
    assert not again["measured"]
    message = refused(capsys, "tune", problem, "--workspace-limit-bytes=-1")
    assert "workspace_limit_bytes=-1; accepted: None or an integer of at least 0" in message


@pytest.mark.parametrize(("argument", "part"), [
    ("missing.py", "accepted: an existing .py file"),
    ("missing.json", "accepted: an existing .py file"),
    ("x" * 5000, "accepted: an existing .py file"),
    ("{", "not JSON"),
    ("[]", "an empty list"),
    ("[" * 100_000, "not JSON"),
    ("[1]", "problem 0: 1 is not an object with 'op'"),
    ('{"batch": 1}', "is not an object with 'op'"),
    ('{"op": "gemm"}', "op='gemm'; accepted: 'conv_fprop', 'conv_dgrad', 'conv_wgrad', 'dot_general', "),
    ('{"op": []}', "op=[]; accepted: 'conv_fprop', 'conv_dgrad', 'conv_wgrad', 'dot_general', 'quantized_matmul'"),
    ('{"op": "conv_wgrad", "batch": 1, "size": 2}', "unknown fields ['size'], missing fields ['input_spatial', "),
    (json.dumps({**SHORT, "padding": "SOME"}), "padding='SOME'; accepted: 'SAME', 'SAME_LOWER', 'VALID', or pairs"),
    (json.dumps({**SHORT, "lhs_dilation": [2, 2]}), "padding='SAME' with lhs_dilation=[2, 2]; accepted: explicit"),
    (json.dumps({**SHORT, "window_strides": [0, 1]}), "window_strides=(0, 1); accepted: 2 integers of at least 1"),
    (json.dumps({**SHORT, "kernel_spatial": [3]}), "kernel_spatial=(3,); accepted: 2 integers of at least 1"),
    (json.dumps({**SHORT, "kernel_spatial": "33"}), "kernel_spatial='33'; accepted: 2 integers of at least 1"),
    (json.dumps({**SHORT, "input_spatial": 56}), "input_spatial=56; accepted: one to three integers"),
    (json.dumps({**SHORT, "output_spatial": [8, 9]}), "output_spatial=(8, 9); the convolution gives (8, 8)"),
    (json.dumps({**as_dict(PROBLEM), "dtype": "int8"}), "dtype='int8'; accepted:"),
    (json.dumps({**as_dict(PROBLEM), "padding": 1}), "padding=1; accepted:"),
])  # fmt: skip
def test_wrong_problems_are_refused(argument: str, part: str, capsys: Any) -> None:
    for name in ("tune", "explain"):
        message = refused(capsys, name, argument)
        assert "SCRIPT_OR_PROBLEMS=" in message
        assert part in message


def test_wrong_arguments_are_refused(script: pathlib.Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = as_json(PROBLEM)
    for seconds in ("0", "-1", "inf", "nan", "soon"):
        message = refused(capsys, "tune", problem, f"--seconds={seconds}")
        assert f"--seconds={seconds!r}; accepted: a number of seconds above 0" in message
    assert "accepted only with a script" in refused(capsys, "tune", problem, "--", "x")
    assert "accepted only with a script" in refused(capsys, "explain", problem, "--", "x")
    message = "unrecognized arguments: --lr 3"
    for name in ("tune", "explain"):
        assert f"{message}; those of the script come after --" in refused(capsys, name, script, "--lr", 3)
    assert f"{message}\n" in refused(capsys, "doctor", "--lr", 3)
    assert "accepted only by tune and explain" in refused(capsys, "doctor", "--", "x")
    for mode in ("read", "off", "frozen"):
        monkeypatch.setenv("JAX_SPLITK_CACHE_MODE", mode)
        assert f"JAX_SPLITK_CACHE_MODE='{mode}'; accepted by this command" in refused(capsys, "tune", problem)
    monkeypatch.setenv("JAX_SPLITK_CACHE_MODE", "sometimes")
    assert "JAX_SPLITK_CACHE_MODE='sometimes'; accepted:" in refused(capsys, "explain", problem)
    monkeypatch.delenv("JAX_SPLITK_CACHE_MODE")
    monkeypatch.setenv("JAX_SPLITK_TUNE_BUDGET_S", "much")
    assert "JAX_SPLITK_TUNE_BUDGET_S='much'; accepted:" in refused(capsys, "tune", problem)


def test_explain_problems_selects_without_measuring(cache: pathlib.Path, capsys: Any) -> None:
    found = run(capsys, "explain", as_json(PROBLEM))
    assert found["platform"] == "cpu"
    (decision,) = found["decisions"]
    assert decision["problem"] == as_dict(PROBLEM)
    assert (decision["implementation"], decision["family"]) == ("host", "wgrad_host")
    assert decision["why"].startswith("the cost model's best of ")
    config = wgrad_host.Config(**decision["config"])
    assert decision["splits"] == config.splits
    assert decision["workspace_bytes"] == wgrad_host.FAMILY.workspace_bytes(PROBLEM, config)
    assert not cache.exists()
    put(cache, key_of(), {X: 30.0, A: 20.0, B: 10.0})
    (decision,) = run(capsys, "explain", as_json(PROBLEM))["decisions"]
    assert decision["config"] == dataclasses.asdict(B.config)
    assert decision["why"] == "user cache: 10.0 us, XLA 30.0 us"
    wide = dataclasses.replace(PROBLEM, in_channels=64, out_channels=64, dtype="bfloat16")
    (decision,) = run(capsys, "explain", f"[{as_json(wide)}]", "--platform", "cuda")["decisions"]
    assert decision["implementation"] == "cutlass"
    assert wide.brief.removesuffix(", bf16->f32") in text(capsys, "explain", as_json(wide), "--platform", "cuda")


def test_explain_script_shows_what_was_lowered(cache: pathlib.Path, script: pathlib.Path, capsys: Any) -> None:
    put(cache, key_of(), {X: 30.0, A: 20.0, B: 10.0})
    decision = run(capsys, "explain", script, "--", "--platform")["decisions"][0]
    assert (decision["problem"], decision["count"]) == (as_dict(PROBLEM), 1)
    assert (decision["implementation"], decision["config"]) == ("host", dataclasses.asdict(B.config))
    assert decision["why"] == "user cache: 10.0 us, XLA 30.0 us"
    shown = text(capsys, "explain", script)
    assert shown.startswith(f"arguments []\nplatform cpu: {target_for('cpu').device_kind}\n")
    assert PROBLEM.brief in shown
    assert "\nsum of " in shown
    assert f"1 x {PROBLEM}\n" in text(capsys, "explain", script, "--verbose")
    for_cuda, *others = run(capsys, "explain", script, "--platform", "cuda")["decisions"]
    assert (for_cuda["problem"], for_cuda["implementation"]) == (as_dict(PROBLEM), "cutlass")
    assert {other["why"] for other in others} <= {"implementation='xla' was asked for"}
    script.write_text("")
    assert text(capsys, "explain", script).splitlines()[1:] == ["no jax_splitk operations"]


FORWARD = """
    import jax
    from jax import numpy as jnp
    import jax_splitk

    NUMBERS = ("NHWC", "HWIO", "NHWC")
    layer = lambda x, w: jax_splitk.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NUMBERS)
    w = jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.bfloat16)
    for batch, pixels in ((8, 14), (256, 56)):
        jax.jit(layer).lower(jax.ShapeDtypeStruct((batch, pixels, pixels, 64), jnp.bfloat16), w)
"""


def test_explain_script_shows_forward_passes_where_kernels_are_faster(
    script: pathlib.Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    faster_xla = lambda _, seconds, problem, *__, **___: seconds / 2 if problem.batch == 256 else None  # noqa: E731
    monkeypatch.setattr(certainty, "faster_xla", faster_xla)
    script.write_text(textwrap.dedent(FORWARD))
    assert text(capsys, "explain", script).splitlines()[1:] == ["no jax_splitk operations"]
    (decision,) = run(capsys, "explain", script, "--platform", "cuda")["decisions"]
    assert (decision["problem"]["op"], decision["problem"]["batch"]) == ("conv_fprop", 8)
    assert (decision["implementation"], decision["count"]) == ("cutlass", 1)


def test_explain_script_counts_passes_that_xla_computes_faster(
    script: pathlib.Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.write_text(textwrap.dedent(FORWARD))
    monkeypatch.setattr(conv_host.ConvHost, "competes", True)
    shown = text(capsys, "explain", script)
    assert shown.splitlines()[1] == "no jax_splitk operations"
    assert shown.splitlines()[2].startswith("2 more passes of convolutions (forward or input")


@pytest.mark.usefixtures("competing")
def test_tune_script_measures_forward_passes_without_a_gradient(
    cache: pathlib.Path, script: pathlib.Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of the script without `tune` does not measure them."""
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "on_miss")
    script.write_text(textwrap.dedent(FORWARD).replace("(256, 56)", "(2, 8)"))
    for what, measured in ("explain", []), ("tune", ["conv_fprop"] * 2):
        run(capsys, what, script, *(["--seconds", "0.05"] if what == "tune" else []))
        assert [item.entry.key.problem.op for item in stored.read_folder(cache) if item.entry] == measured


PLAIN = """
    import jax
    from jax import lax, numpy as jnp

    def loss(w, x):
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.square(y).sum()

    jax.jit(jax.grad(loss)).lower(jnp.ones((3, 3, 8, 8)), jnp.ones((4, 8, 8, 8)))
"""


@pytest.mark.parametrize("words", [("explain",), ("tune", "--dry-run"), ("tune", "--seconds", "0.05")])
def test_what_a_script_leaves_to_lax_is_listed(words: tuple[str, ...], script: pathlib.Path, capsys: Any) -> None:
    """Each operation is listed once, although the tuner lowers it in lax again."""
    routed = textwrap.dedent(SCRIPT).replace("explicit = ", "explicit = 0 and ")
    for others in ("", routed):
        script.write_text(textwrap.dedent(PLAIN) + others)
        shown = text(capsys, *words, script)
        header = "left to lax; routed to jax_splitk it would be:\n"
        (row,) = [line for line in shown.partition(header)[2].splitlines() if line.startswith("conv_")]
        assert row.startswith(PROBLEM.brief)
        assert "with jax_splitk.intercept():" in shown
        assert "\nrouting 1 operation: " in shown
        assert ("\nsum of 1 operation: " in shown) == bool(others)


def test_a_dry_run_says_what_would_be_measured(cache: pathlib.Path, script: pathlib.Path, capsys: Any) -> None:
    shown = text(capsys, "tune", "--dry-run", script, "--seconds", "3")
    assert f"1 problem would be measured, 3 s each at most:\n  {PROBLEM.brief}\n\nplatform cpu: " in shown
    named = run(capsys, "tune", "--dry-run", as_json(*PROBLEMS[:2]))
    assert named["to_measure"] == [as_dict(problem) for problem in PROBLEMS[:2]]
    assert not list(store.files(cache))
    run(capsys, "tune", script)
    for words, expected in (((), []), (("--again",), [as_dict(PROBLEM)])):
        assert run(capsys, "tune", "--dry-run", script, *words)["to_measure"] == expected
    assert text(capsys, "tune", "--dry-run", script).count("0 problems would be measured, 0.1 s each at most\n") == 1


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


@pytest.mark.parametrize("words", thinned(["cache ls", "cache ls --json", "doctor"], 3))
def test_a_reader_that_has_enough_is_no_error(words: str) -> None:
    """A reader such as `head` may close the output early."""
    read, write = os.pipe()
    os.close(read)
    try:
        done = command(*words.split(), stdout=write)
    finally:
        os.close(write)
    assert (done.returncode, "Error" in done.stderr) == (1, False), done.stderr


# ---- problem files -------------------------------------------------------------------------------------------------

DOCS = pathlib.Path(__file__).parent.parent.parent / "docs/reference/problem-files.md"  # tests/documents runs its JSON


def explained(capsys: Any, *problems: dict[str, Any]) -> list[dict[str, Any]]:
    return [d["problem"] for d in run(capsys, "explain", json.dumps(problems), "--platform", "cuda")["decisions"]]


def test_what_is_obvious_may_be_left_out(capsys: Any) -> None:
    (found,) = explained(capsys, SHORT)
    assert found == {**as_dict(PROBLEM), "dtype": "bfloat16", "out_dtype": "bfloat16"}
    assert explained(capsys, as_dict(PROBLEM)) == [as_dict(PROBLEM)]
    strided = {"window_strides": [2, 2], "dtype": "float32", "out_dtype": "float32", "rhs_dilation": [1, 2]}
    for padding, pads, out in (("VALID", [[0, 0], [0, 0]], [3, 2]), ("SAME", [[0, 1], [1, 2]], [4, 4])):
        (found,) = explained(capsys, {**SHORT, **strided, "padding": padding})
        assert (found["padding"], found["output_spatial"], found["out_dtype"]) == (pads, out, "float32")
    product = {"op": "quantized_matmul", "rows": 4, "k": 128, "features": 64, "qtype": "int8", "group_size": 32}
    (found,) = explained(capsys, {"op": "dot_general", "m": 64, "n": 32, "k": 128, "dtype": "float32"})
    assert (found["batch"], found["lhs_order"], found["rhs_order"], found["out_dtype"]) == (1, "bmk", "bkn", "float32")
    for x_dtype, out_dtype in (("bfloat16", "bfloat16"), ("float16", "float16"), ("float8_e4m3fn", "bfloat16")):
        (found,) = explained(capsys, {**product, "x_dtype": x_dtype})
        assert (found["out_dtype"], found["scale_dtype"], found["zero_dtype"]) == (out_dtype, "bfloat16", "none")


def test_the_documented_schema_is_the_schema(capsys: Any) -> None:
    assert FIELDS.keys() == OPERATIONS.keys()
    for op, fields in FIELDS.items():
        assert set(fields) == {field.name for field in dataclasses.fields(OPERATIONS[op].problem)}
        for name, (default, meaning) in fields.items():
            assert f"| `{name}` | {default or 'required'} | {meaning} |" in DOCS.read_text()
    for name in ("tune", "explain"):
        with pytest.raises(SystemExit):
            main([name, "--help"])
        shown = capsys.readouterr().out
        assert all(name in shown for fields in FIELDS.values() for name in fields)
        assert "docs/reference/problem-files.md" in shown
