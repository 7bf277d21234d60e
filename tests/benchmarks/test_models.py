"""benchmarks/models: the networks are those that their names say, and compute the same with lax and with jax_splitk; a
run, its report, and to which pass a kernel belongs."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from benchmarks import models
from benchmarks.models import convnext, efficientnet, passes, resnet3d
from benchmarks.models.__main__ import main
from benchmarks.models.layers import OURS, STOCK, Layers, Model, Params
from benchmarks.models.passes import FORWARD, INPUT, OTHER, PRODUCT, WEIGHT, Launch
from jax_splitk.tuning import watch

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the sizes are for the CPU")

QUICK = "audio_encoder"
DIFFERENT = [name for name in models.MODELS if name not in ("resnet50_b32", "mlp_4096")]  # when they are tiny


def disturbed(model: Model, rng: np.random.Generator) -> Params:
    """Initial weights with noise: a scale of 0, as some layers begin with, would hide all weights before it."""
    return jax.tree.map(lambda w: jnp.asarray(w + 0.1 * rng.standard_normal(w.shape, np.float32)), model.initial())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == QUICK else pytest.mark.exhaustive) for name in DIFFERENT]
)
def test_stock_and_ours_agree(name: str) -> None:
    (model,) = models.find([name], tiny=True)
    rng = np.random.default_rng(0)
    params, data = disturbed(model, rng), model.data(rng)

    def both(layers: Layers) -> tuple[jax.Array, Params]:
        exact = dataclasses.replace(layers, dtype=jnp.float32)
        return jax.jit(jax.value_and_grad(lambda params: model.loss(exact, params, *data)))(params)

    stock, stock_gradients = both(STOCK)
    with watch.state.watching() as watched:
        ours, our_gradients = both(OURS)
    assert "host" in {choice.implementation for choice in watched.choices}
    assert float(ours) == pytest.approx(float(stock), rel=1e-4)
    pairs = zip(jax.tree_util.tree_leaves_with_path(stock_gradients), jax.tree.leaves(our_gradients), strict=True)
    largest = max(float(jnp.linalg.norm(a)) for a in jax.tree.leaves(stock_gradients))
    for (path, a), b in pairs:
        assert float(jnp.linalg.norm(a)) > 0, path
        # A bias before a normalization has a gradient of rounding errors.
        assert float(jnp.linalg.norm(a - b)) <= 1e-3 * float(jnp.linalg.norm(a)) + 1e-6 * largest, path


def size(params: Params) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def test_sizes_are_those_of_the_papers() -> None:
    assert size(convnext.initial((3, 3, 9, 3), (96, 192, 384, 768), 1000)) == 28_589_128
    assert size(resnet3d.initial((64, 128, 256, 512), 400)) == 33_371_472
    # The published 5,288,548, less two dense layers with biases for each block.
    widths = [32, *(stage.width for stage in efficientnet.B0 for _ in range(stage.blocks))]
    expansions = [stage.expansion for stage in efficientnet.B0 for _ in range(stage.blocks)]
    pairs = [(x * e, x // 4) for x, e in zip(widths, expansions, strict=False)]
    excitation = sum(2 * inner * squeezed + squeezed + inner for inner, squeezed in pairs)
    assert size(efficientnet.initial(efficientnet.B0, 32, 1280, 1000)) == 5_288_548 - excitation


def test_a_run_and_what_is_added_to_its_report(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "off")  # which the run sets, too
    path = tmp_path / "models.json"
    words = ["mlp_256", "--tiny", "--losses", "4", "--rounds", "1", "--steps", "1", "--out", str(path)]
    assert main(words) == 0
    report = json.loads(path.read_text())
    (result,) = report["results"]
    assert result["ratio"] == result["stock"]["ms"] / result["ours"]["ms"]
    assert result["loss_difference"] < 0.01 and len(result["ours"]["losses"]) == 4
    assert result["ours"]["losses"][-1] < result["ours"]["losses"][0]
    assert "dot_host" in {operation["choice"].split()[0] for operation in result["ours"]["operations"]}
    assert not result["stock"]["operations"]
    assert result["ours"]["peak_bytes"] > result["ours"]["temp_bytes"] > 0 and result["ours"]["tuning_seconds"] is None
    assert "| 2 MLP blocks, 16 -> 32, 128 tokens |" in capsys.readouterr().out
    path.write_text(json.dumps(report | {"results": [result, result | {"name": "r3d_18"}]}))

    monkeypatch.setattr("benchmarks.models.__main__.measure", lambda model, settings: result | {"title": "anew"})
    assert main(words) == 0
    found = [(r["name"], r["title"]) for r in json.loads(path.read_text())["results"]]
    assert found == [("r3d_18", result["title"]), ("mlp_256", "anew")]
    report["environment"]["driver"] = "another"
    path.write_text(json.dumps(report))
    assert main(words) == 2
    assert "it was measured with other driver; accepted: a new file" in capsys.readouterr().err
    assert main(["mlp", "--tiny"]) == 2
    assert "model mlp; accepted: resnet50_b256" in capsys.readouterr().err


PROGRAM = """
  %cudnn-conv-bw-filter.3 = (bf16[3,3,64,64]{3,2,1,0}, u8[0]{0}) custom-call(%a, %b), window={size=3x3}, \
custom_call_target="__cudnn$convBackwardFilter", metadata={op_name="jit(step)/transpose(jvp())/conv_general_dilated"}
  ROOT %custom-call.8 = bf16[3]{0} custom-call(%a), custom_call_target="__cublas$lt$matmul"
  %custom-call.9 = bf16[3]{0} custom-call(%a), custom_call_target="jax_splitk_launch_v2"
"""


def test_passes_of_kernels() -> None:
    instructions = passes.of_instructions(PROGRAM)
    assert instructions == {"cudnn-conv-bw-filter.3": WEIGHT, "custom-call.8": PRODUCT}
    kernels = {
        "sm90_xmma_fprop_implicit_gemm_bf16bf16": FORWARD,
        "void dgrad2d_grouped_direct_kernel<__nv_bfloat16>": INPUT,
        "wgrad_im2col_partial": WEIGHT,
        "wgrad_im2col_reduce_splits": WEIGHT,
        "nvjet_sm90_tst_64x64": PRODUCT,
        "dot_tma_reduce": PRODUCT,
        "dot_few_rows": PRODUCT,
        "fprop_im2col": FORWARD,
        "dgrad_toeplitz": INPUT,
        "quantized_stream_int4": PRODUCT,
        "loop_add_fusion": OTHER,
    }
    assert {name: passes.of_launch(Launch(name, "", 0, 1), instructions) for name in kernels} == kernels
    launches = [Launch("nchwToNhwcKernel", "cudnn-conv-bw-filter.3", 0.0, 4e6), Launch("loop_add_fusion", "", 2e6, 6e6)]
    found = passes.milliseconds(launches, PROGRAM, steps=2)
    assert found == {"busy": 3.0, FORWARD: 0.0, INPUT: 0.0, WEIGHT: 2.0, PRODUCT: 0.0, OTHER: 2.0}
