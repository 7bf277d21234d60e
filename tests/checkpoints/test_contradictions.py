"""Files that contradict themselves are refused, and the message shows both sides."""

import pathlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import jax_splitk
from tests.checkpoints import writers
from tests.checkpoints.test_formats import same_bits, values
from tests.checkpoints.writers import Written
from tests.problems import generator

Change = Callable[[Written], Any]


def tensors(**changed: Any) -> Change:
    """Replaces tensors, named by the ends of their names without the dot; None removes one."""

    def change(written: Written) -> None:
        for name, array in changed.items():
            if array is None:
                del written.tensors["." + name]
            else:
                old = written.tensors.get("." + name)
                written.tensors["." + name] = array(old) if callable(array) else array

    return change


def config(**changed: Any) -> Change:
    return lambda written: written.config.update(changed)


def gptq(**options: Any) -> Written:
    return writers.gptq(generator(1), 128, 64, 32, **options)


def awq() -> Written:
    return writers.awq(generator(2), 64, 16, 32)


def packed(**options: Any) -> Written:
    return writers.pack_quantized(generator(3), 64, 16, 32, **options)


def nvfp4(library: str) -> Written:
    return writers.nvfp4(generator(4), 64, 16, library=library)


def groups(**changed: Any) -> Change:
    return lambda written: written.config["config_groups"]["group_0"]["weights"].update(changed)


def other_index(index: np.ndarray) -> np.ndarray:
    return np.where(index == 1, 0, index).astype(np.int32)


NO_TENSOR = "no tensor is quantized so"
CASES: dict[str, tuple[Written, Change, str]] = {
    "version 1 of GPTQ with the zeros of version 2": (
        gptq(symmetric=True, version=2), config(checkpoint_format="gptq"),
        r"checkpoint_format='gptq'.*qzeros that are all 8 \(version 2\).*format='gptq_v2'",
    ),
    "version 2 with the zeros of version 1": (
        gptq(symmetric=True), config(checkpoint_format="gptq_v2"),
        r"checkpoint_format='gptq_v2'.*all 7 \(version 1\).*format='gptq'",
    ),
    "an unnamed version with the zeros of version 2": (
        gptq(symmetric=True, version=2), lambda written: written.config.pop("checkpoint_format"), "all 8",
    ),
    "another version of zeros that differ": (
        writers.gptq(generator(5), 256, 128, 128, version=2), config(checkpoint_format="gptq"),
        r"'gptq'.*elements -?0\.\d\d above qzeros in the mean: version 2",
    ),
    "another version 1 of zeros that differ": (
        writers.gptq(generator(6), 256, 128, 128, act_order=True), config(checkpoint_format="gptq_v2"),
        r"'gptq_v2'.*elements [01]\.\d\d above qzeros in the mean: version 1",
    ),
    "marlin": (gptq(), config(checkpoint_format="marlin"), "checkpoint_format='marlin'.*'gptq' and 'gptq_v2' only"),
    "shapes of GPTQ in a file of AWQ": (gptq(), config(quant_method="awq"), r"'awq'.*stored as GPTQ: qweight"),
    "shapes of AWQ in a file of GPTQ": (awq(), config(quant_method="gptq"), r"'gptq'.*stored as AWQ: qweight"),
    "gemv": (awq(), config(version="gemv"), "version='gemv'.*'gemm' only"),
    "other bits": (gptq(), config(bits=8), "bits=8.* has 4 bits"),
    "3 bits": (
        gptq(), tensors(qzeros=lambda zeros: np.zeros((4, 6), np.int32), qweight=np.zeros((12, 64), np.int32)),
        "3 bits; accepted: 4, 8",
    ),
    "other groups": (gptq(), config(group_size=64), "group_size=64.* has 4 groups of k = 128"),
    "other groups of AWQ": (awq(), config(group_size=-1), "group_size=-1.* has 2 groups of k = 64"),
    "act-order without g_idx": (gptq(g_idx=False), config(desc_act=True), "desc_act=True.* has no g_idx"),
    "act-order that is denied": (gptq(act_order=True), config(desc_act=False), "desc_act=False.*act-order"),
    "groups of several sizes": (gptq(act_order=True), tensors(g_idx=other_index), "g_idx does not give each"),
    "a g_idx of another length": (
        gptq(), tensors(g_idx=np.zeros(64, np.int32)), r"g_idx int32\[64\].*g_idx of \[128\]",
    ),
    "no zeros": (gptq(), tensors(qzeros=None), "without 'layers.0.up.qzeros'"),
    "zeros of another shape": (gptq(), tensors(qzeros=np.zeros((3, 8), np.int32)), r"qzeros int32\[3, 8\]"),
    "words of another type": (gptq(), tensors(qweight=lambda w: w.astype(np.int64)), r"qweight int64\[16, 64\]"),
    "a matrix without elements": (gptq(), tensors(qweight=np.zeros((0, 64), np.int32)), r"qweight int32\[0, 64\]"),
    "a weight twice": (gptq(), tensors(weight=np.ones((64, 128), np.float16)), "'layers.0.up.weight' is stored twice"),
    "an unknown method": (gptq(), config(quant_method="hqq"), "quant_method='hqq'; accepted: gptq, gptq_v2, awq"),
    "no quantized weight": (
        Written({".weight": np.ones((2, 2), np.float16)}, {"quant_method": "gptq"}, np.ones(())), config(), NO_TENSOR,
    ),
    "a weight of fp8 without scales": (
        gptq(), lambda written: written.tensors.update({"2.weight": np.ones((2, 2), writers.E4M3)}),
        r"float8_e4m3fn\[2, 2\], without scales",
    ),
    "scales without a weight": (
        gptq(), lambda written: written.tensors.update({"2.scales": np.ones((2, 2), np.float16)}),
        "'layers.0.up2.scales' belongs to no weight",
    ),
    "compressed-tensors in a file of GPTQ": (packed(), config(quant_method="gptq"), "'gptq'.*compressed-tensors"),
    "another format of compressed-tensors": (
        packed(), config(format="nvfp4-pack-quantized"), "format='nvfp4-pack-quantized'.*stored as pack-quantized",
    ),
    "no shape": (packed(), tensors(weight_shape=None), "without 'layers.0.up.weight_shape'"),
    "another shape": (packed(), tensors(weight_shape=np.array([16, 72])), r"weight_shape says \(16, 72\)"),
    "no zero points": (packed(), groups(symmetric=False), "has no weight_zero_point"),
    "zero points of another shape": (
        packed(zeros="packed"), tensors(weight_zero_point=np.zeros((3, 2), np.int32)),
        r"weight_zero_point int32\[3, 2\].*accepted: zero points of int32 \[2, 2\]",
    ),
    "other groups of compressed-tensors": (packed(), groups(group_size=16), "has 2 groups of k = 64"),
    "other bits of compressed-tensors": (packed(), groups(num_bits=8), "has 4 bits"),
    "a g_idx that is not whole": (
        packed(act_order=True), tensors(weight_g_idx=other_index), "weight_g_idx does not give each group 32 of 64",
    ),
    "nf4 that should be fp4": (
        writers.nf4(generator(7), 64, 16), config(bnb_4bit_quant_type="fp4"), "'fp4'.* is stored as nf4",
    ),
    "another table": (
        writers.nf4(generator(7), 64, 16), tensors(**{"weight.quant_map": np.linspace(-1, 1, 16, dtype=np.float32)}),
        "quant_map.*accepted: the values of nf4",
    ),
    "too few scales of nf4": (
        writers.nf4(generator(7), 64, 16), tensors(**{"weight.absmax": np.ones(15, np.float32)}), "need 16 absmax",
    ),
    "bytes as scales of nf4": (
        writers.nf4(generator(7), 64, 16), tensors(**{"weight.absmax": np.ones(16, np.uint8)}), "or nested_absmax",
    ),
    "a state that is no JSON": (
        writers.nf4(generator(7), 64, 16),
        tensors(**{"weight.quant_state.bitsandbytes__nf4": np.frombuffer(b"{", np.uint8)}), "no state of an nf4",
    ),
    "8 bits of bitsandbytes": (
        Written({".weight": np.ones((2, 2), np.int8), ".SCB": np.ones(2, np.float32)}, {}, np.ones(())), config(),
        "LLM.int8",
    ),
    "nvfp4 of the other library": (
        nvfp4("modelopt"), config(quant_method="compressed-tensors"), "stored as NVFP4 of ModelOpt",
    ),
    "a global scale that multiplies, to divide by": (
        nvfp4("compressed-tensors"), tensors(weight_global_scale=np.array([2e-4], np.float32)),
        "weight_global_scale' is 0.0002. A scale of this name divides.*looks like a scale that multiplies",
    ),
    "a global scale that divides, to multiply with": (
        nvfp4("modelopt"), tensors(weight_scale_2=np.array(5000, np.float32)), "looks like a scale that divides",
    ),
    "joined weights with several global scales": (
        nvfp4("modelopt"), tensors(weight_scale_2=np.array([2e-4, 3e-4, 2e-4], np.float32)),
        r"3 global scales; accepted: one for a weight; those of joined weights \(q, k, v\)",
    ),
    "a global scale of 0": (
        nvfp4("modelopt"), tensors(weight_scale_2=np.array(0, np.float32)), "accepted: positive numbers",
    ),
    "no global scale": (nvfp4("compressed-tensors"), tensors(weight_global_scale=None), "without.*weight_global_scale"),
    "scales of another group": (
        nvfp4("modelopt"), tensors(weight_scale=np.ones((16, 2), writers.E4M3)), r"weight_scale float8_e4m3fn\[16, 2\]",
    ),
    "transposed scales of blocks": (
        writers.fp8_blocks(generator(8), 256, 128), tensors(weight_scale_inv=lambda scale: scale.T.copy()),
        r"weight_block_size=\[128, 128\].*weight_scale_inv of \[2, 1\], where blocks need \[1, 2\]",
    ),
    "other blocks": (writers.fp8_blocks(generator(8), 256, 128), config(weight_block_size=[64, 64]), r"need \[2, 4\]"),
    "scales of MXFP4 that do not fit": (
        writers.mxfp4(generator(9), 2, 64, 8),
        lambda written: written.tensors.update({"_scales": np.ones((2, 8, 1), np.uint8)}), r"scales uint8\[2, 8, 1\]",
    ),
    "MXFP4 in a file of GPTQ": (writers.mxfp4(generator(9), 2, 64, 8), config(quant_method="gptq"), "stored as MXFP4"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_contradictions_are_refused(name: str, tmp_path: pathlib.Path) -> None:
    written, change, message = CASES[name]
    written = Written(dict(written.tensors), {**written.config}, written.expected, written.name)
    if "config_groups" in written.config:
        weights = dict(written.config["config_groups"]["group_0"]["weights"])
        written.config["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    change(written)
    folder = writers.save(tmp_path, written)
    with pytest.raises(jax_splitk.CheckpointError, match=re.compile(message, re.DOTALL)) as raised:
        jax_splitk.load_checkpoint(folder).read()
    assert "layers.0.up" in str(raised.value) or "config.json" in str(raised.value)


@pytest.mark.parametrize("version", [1, 2])
def test_the_argument_format_takes_the_other_version(version: int, tmp_path: pathlib.Path) -> None:
    """A way out if config.json is wrong. A file without a description is read so, too."""
    written = gptq(symmetric=True, version=version)
    written.config["checkpoint_format"] = "gptq" if version == 2 else "gptq_v2"
    name = "gptq" if version == 1 else "gptq_v2"
    (weight,) = jax_splitk.load_checkpoint(writers.save(tmp_path, written), format=name).values()
    assert weight.zero_point is None
    same_bits(values(weight, np.float16), written.expected)
    other = "gptq" if version == 2 else "gptq_v2"
    (weight,) = jax_splitk.load_checkpoint(tmp_path, format=other).values()
    assert int(weight.zero_point[0, 0]) == (9 if version == 2 else 7)


def test_a_module_may_have_settings_of_its_own(tmp_path: pathlib.Path) -> None:
    written = gptq()
    written.config |= {"group_size": 128, "dynamic": {"-:.*down": {}, r"+:layers\.0\..*": {"group_size": 32}}}
    (weight,) = jax_splitk.load_checkpoint(writers.save(tmp_path, written)).values()
    same_bits(values(weight, np.float16), written.expected)


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"pack": 1}, TypeError, "pack=1; accepted: True or False"),
    ({"format": "gguf"}, ValueError, "format='gguf'; accepted: 'gptq', 'gptq_v2', 'awq'"),
])  # fmt: skip
def test_wrong_arguments(arguments: Any, error: type[Exception], message: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(error, match=re.escape(message)):
        jax_splitk.load_checkpoint(writers.save(tmp_path, gptq()), **arguments)
