"""benchmarks/models: the networks are those that their names say, and compute the same with lax and with jax_splitk;
`explain` names what computes each of their convolutions; a run, its report, and to which pass a kernel belongs."""

import dataclasses
import functools
import json
import pathlib
import re

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import jax_splitk
from benchmarks import models
from benchmarks.models import atari, convnext, efficientnet, hifigan, passes, regnet, resnet, resnet3d, wav2vec2
from benchmarks.models.__main__ import main
from benchmarks.models.layers import OURS, STOCK, Layers, Model, Params, Weights
from benchmarks.models.measure import train_step
from benchmarks.models.passes import FORWARD, INPUT, OTHER, PRODUCT, WEIGHT, Launch
from jax_splitk.ops.equations import walk
from jax_splitk.tuning import watch
from tests.exhaustive import drawn

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="the sizes are for the CPU"),
]

SAME = ("resnet50_b256", "resnet50_b32", "diffusion_unet", "mlp_4096")  # code that another model has, when it is tiny
DIFFERENT = [name for name in models.MODELS if name not in SAME]


def disturbed(model: Model, rng: np.random.Generator) -> Params:
    """Initial weights with noise: a scale of 0, as some layers begin with, would hide all weights before it."""
    return jax.tree.map(lambda w: jnp.asarray(w + 0.1 * rng.standard_normal(w.shape, np.float32)), model.initial())


@pytest.mark.parametrize("name", drawn(DIFFERENT, 2, 66))
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


@pytest.fixture
def no_random_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of 0, which take neither time nor memory."""
    monkeypatch.setattr(Weights, "_normal", lambda self, shape, variance: np.broadcast_to(np.float32(0), shape))


@pytest.mark.usefixtures("no_random_weights")
def test_sizes_are_those_of_the_papers() -> None:
    assert size(resnet.initial(resnet.Net())) == 25_557_032
    assert size(resnet.initial(resnet.RESNEXT)) == 25_028_904
    assert size(regnet.initial(regnet.X_1_6GF)) == 9_190_136
    assert size(atari.initial_dqn(84, 512)) == 1_693_362
    assert size(hifigan.initial(hifigan.V1)) == 13_926_017
    # The published encoder has a vector for masked frames and the scales of a weight normalization, but no head.
    width, head = 768, 769 * wav2vec2.BASE.classes
    assert size(wav2vec2.initial(wav2vec2.BASE)) == 94_371_712 - width - wav2vec2.TAPS + head
    assert size(convnext.initial((3, 3, 9, 3), (96, 192, 384, 768), 1000)) == 28_589_128
    assert size(resnet3d.initial((64, 128, 256, 512), 400)) == 33_371_472
    # The published 5,288,548, less two dense layers with biases for each block.
    widths = [32, *(stage.width for stage in efficientnet.B0 for _ in range(stage.blocks))]
    expansions = [stage.expansion for stage in efficientnet.B0 for _ in range(stage.blocks)]
    pairs = [(x * e, x // 4) for x, e in zip(widths, expansions, strict=False)]
    excitation = sum(2 * inner * squeezed + squeezed + inner for inner, squeezed in pairs)
    assert size(efficientnet.initial(efficientnet.B0, 32, 1280, 1000)) == 5_288_548 - excitation


@pytest.mark.parametrize("name", ["wav2vec2_base", "hifigan", "replknet_31b"])
@pytest.mark.usefixtures("no_random_weights")
def test_every_convolution_is_explained(name: str) -> None:
    (model,) = models.find([name])
    params, data = model.initial(), model.data(np.random.default_rng(0))
    loss = jax.make_jaxpr(functools.partial(model.loss, STOCK))(params, *data)
    convolutions = sum(equation.primitive.name == "conv_general_dilated" for equation in walk(loss.jaxpr))
    found = jax_splitk.explain(functools.partial(train_step, model, OURS), params, *data, platform="cuda")
    counts = {op: 0 for op in ("conv_fprop", "conv_dgrad", "conv_wgrad", "dot_general")}
    for decision in found.decisions:
        assert decision.why
        counts[decision.problem.op] += decision.count
    assert counts["conv_wgrad"] == convolutions
    silent = re.search(r"^(\d+) more pass", "\n".join(found.notes), re.MULTILINE)
    implied = 2 * convolutions - 1  # nobody asks for the gradient of the model's input
    assert counts["conv_fprop"] + counts["conv_dgrad"] + (int(silent[1]) if silent else 0) == implied
    assert all(jnp.dtype(model.dtype).name in str(decision.problem) for decision in found.decisions)


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
