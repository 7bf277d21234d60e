"""In an install without NVIDIA's packages, `explain` says what an H200 would gain on a model that does not use
jax_splitk."""

import json
import pathlib
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import jax
import pytest

import jax_splitk
from jax_splitk.runtime import toolchain
from jax_splitk.runtime.target import DEFAULT_CUDA
from jax_splitk.tuning import key, table
from jax_splitk.tuning.key import key_for
from tests.command_line import run, text
from tests.entries import as_dict, as_json

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="about a machine without a GPU")

UNET = '''
    import jax
    from jax import lax, numpy as jnp

    NUMBERS = ("NHWC", "HWIO", "NHWC")

    def conv(x, w, stride=1):
        return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=NUMBERS)

    def unet(params, x):
        skips = []
        x = conv(x, params["stem"])
        for level in params["down"]:
            x = jax.nn.silu(conv(jax.nn.silu(conv(x, level["first"])), level["second"]))
            skips.append(x)
            x = conv(x, level["down"], 2)
        for level, skip in zip(params["up"], reversed(skips)):
            x = lax.conv_transpose(x, level["up"], (2, 2), "SAME", dimension_numbers=NUMBERS)
            x = jax.nn.silu(conv(jnp.concatenate([x, skip], axis=-1), level["first"]))
        return conv(x, params["head"])

    def loss(params, x, y):
        return jnp.mean(jnp.square((unet(params, x) - y).astype(jnp.float32)))

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def filters(inputs, outputs, size=3):
        return array(size, size, inputs, outputs)

    WIDTHS = (64, 128, 256)
    params = {"stem": filters(3, 64), "head": filters(64, 3), "down": [], "up": []}
    for width in WIDTHS:
        after = min(2 * width, 256)
        params["down"].append({"first": filters(width, width), "second": filters(width, width)})
        params["down"][-1]["down"] = filters(width, after)
        params["up"].insert(0, {"up": filters(after, width, 2), "first": filters(2 * width, width)})
    images = array(16, 64, 64, 3)
'''  # fmt: skip
SCRIPT = UNET + "    jax.jit(jax.grad(loss)).lower(params, images, images)\n"


@pytest.fixture(autouse=True)
def plain_install(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As after `pip install .`: NVIDIA's packages cannot be imported."""
    caches = (toolchain.find_nvrtc, toolchain.include_folders, key._cuda_major)
    with monkeypatch.context() as patch:
        patch.setattr(toolchain, "_package_folders", lambda name: [])
        for cached in caches:
            cached.cache_clear()
        yield
    for cached in caches:
        cached.cache_clear()


@pytest.fixture(scope="module")
def model() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(textwrap.dedent(UNET), names)
    return names


def check(said: str, last: str) -> None:
    """The report is legible, names the GPU and the extra, and its sums are right."""
    lines = said.splitlines()
    assert max(map(len, lines)) <= 100
    assert "platform cuda: NVIDIA H200, which is assumed: this machine has no CUDA GPU" in lines
    assert len([line for line in lines if "The extra" in line]) == 1
    assert "`compiler` has what is missing" in said
    pattern = rf"{last} \d+ operations: about (\d+) of (\d+) us saved"
    found = re.fullmatch(rf"{pattern}(; \d+ operations? not known)?", lines[-1])
    assert found, lines[-1]
    assert 0 < int(found[1]) < int(found[2])


def test_an_unmodified_unet(model: dict[str, Any]) -> None:
    given = (model["params"], model["images"], model["images"])
    found = jax_splitk.explain(jax.grad(model["loss"]), *given, platform="cuda")
    assert found.decisions == ()
    ops = {d.problem.op for d in found.unrouted if d.family is not None}
    assert ops == {"conv_fprop", "conv_dgrad", "conv_wgrad"}
    saved = sum(d.count * (d.saved_us or 0) for d in found.unrouted)
    assert saved == pytest.approx(found.gain_if_routed.saved_us)
    check(str(found), "routing")
    repeated = [d for d in found.unrouted if d.count > 1 and d.ours_us is not None]
    assert repeated
    assert all(re.search(rf" {d.count} x ~?{d.ours_us:.1f} ", str(found)) for d in repeated)
    # After routing, the report is the same for the same operations.
    routed = jax_splitk.explain(jax.grad(jax_splitk.intercept()(model["loss"])), *given, platform="cuda")
    assert routed.unrouted == ()
    check(str(routed), "sum of")
    assert {d for d in routed.decisions if d.family is not None} == {d for d in found.unrouted if d.family is not None}


def test_an_unmodified_script(model: dict[str, Any], tmp_path: pathlib.Path, capsys: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    said = text(capsys, "explain", script, "--platform", "cuda")
    check(said, "routing")
    given = (model["params"], model["images"], model["images"])
    expected = jax_splitk.explain(jax.grad(model["loss"]), *given, platform="cuda")
    assert said == f"{expected}\n"
    found = run(capsys, "explain", script, "--platform", "cuda")
    assert [(d["problem"], d["count"], d["saved_us"]) for d in found["unrouted"]] == [
        (as_dict(d.problem), d.count, d.saved_us) for d in expected.unrouted
    ]
    assert found["gain_if_routed"]["saved_us"] == expected.gain_if_routed.saved_us
    assert (found["device"], found["assumed"]) == ("NVIDIA H200", True)
    verbose = text(capsys, "explain", script, "--platform", "cuda", "--verbose")
    kernels = [d for d in expected.unrouted if d.family is not None]
    assert all(f"{d.family} {d.config}\n" in verbose and f"{d.family} {d.config}" not in said for d in kernels)


def test_tables_and_problem_files_need_no_compiler(capsys: Any) -> None:
    """The command and the function print the first rows of a shipped table."""
    rows = table.read(table.FOLDER / "nvidia_h200" / "conv_wgrad.json")
    for row in list(rows.rows)[:3]:
        problem = key.problem_from_dict("conv_wgrad", json.loads(row))
        entry = table.lookup(key_for(problem, DEFAULT_CUDA))
        assert entry is not None
        (decision,) = run(capsys, "explain", as_json(problem), "--platform", "cuda")["decisions"]
        assert (decision["implementation"], decision["because"]) == ("cutlass", "shipped table")
        assert (decision["ours_us"], decision["measured"]) == (entry.us(entry.choice), True)


def test_the_one_command_names_all_that_is_missing() -> None:
    said = str(toolchain.unavailable())
    names = "nvidia-cuda-nvrtc 13, nvidia-cutlass, nvidia-cuda-cccl, nvidia-cuda-runtime"
    assert said.startswith(f"{names} are not installed: ")
    assert all(f"'{requirement}'" in said.partition(": pip install ")[2] for requirement in toolchain.REQUIREMENTS)
