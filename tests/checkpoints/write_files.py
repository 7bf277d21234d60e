# ruff: noqa: PLC0415 - each function needs one library
"""Writes tests/checkpoints/files with the libraries of the formats: `python tests/checkpoints/write_files.py`.

Each folder has a small weight as the library stores it (model.safetensors, config.json), and the values that the
library itself makes of it (values.safetensors, [k, n]). Needs torch, compressed-tensors, bitsandbytes, gptqmodel,
autoawq and transformers; files/README.md says which versions wrote the files.
"""

import importlib.metadata
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import torch
from safetensors.torch import save_file

FOLDER = pathlib.Path(__file__).parent / "files"
LIBRARIES = ("torch", "compressed-tensors", "bitsandbytes", "gptqmodel", "autoawq", "transformers")
K, N, GROUP = 64, 32, 32
Case = tuple[str, dict[str, torch.Tensor], dict[str, Any], torch.Tensor, str]


def weight(seed: int, k: int = K, n: int = N) -> torch.Tensor:
    """[n, k], as torch.nn.Linear has it."""
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) / 16


def asymmetric(w: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float16 scales and zero points [n, groups] on 16 steps; `index` is the group of each k."""
    scales, zeros = [], []
    for group in range(int(index.max()) + 1):
        part = w[:, index == group]
        low, high = part.min(1).values.clamp(max=0), part.max(1).values.clamp(min=0)
        scales.append(((high - low) / 15).half())
        zeros.append((-low / scales[-1].float()).round().clamp(0, 15))
    return torch.stack(scales, 1), torch.stack(zeros, 1)


def gptq() -> Iterator[Case]:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    version = importlib.metadata.version("gptqmodel")
    for name, symmetric, act_order, first, bits in (
        ("gptq_v1", False, False, True, 4),
        ("gptq_v1_symmetric", True, False, True, 4),
        ("gptq_v1_act_order", False, True, True, 4),
        ("gptq_v2", False, False, False, 4),
        ("gptq_v1_8_bits", True, False, True, 8),
    ):
        w = weight(1)
        w[0, :GROUP] = w[0, :GROUP].abs()  # a group with the zero point 0
        order = torch.randperm(K, generator=torch.Generator().manual_seed(2))
        index = (torch.arange(K) // GROUP)[order] if act_order else torch.arange(K) // GROUP
        scales, zeros = asymmetric(w, index)
        if symmetric:
            parts = [w[:, index == group].abs().max(1).values for group in range(K // GROUP)]
            scales = (torch.stack(parts, 1) / (2 ** (bits - 1) - 1)).half()
            zeros = torch.full_like(zeros, 2 ** (bits - 1))
        linear = torch.nn.Linear(K, N, bias=False)
        linear.weight.data = w
        module = TorchLinear(
            bits=bits, group_size=GROUP, sym=symmetric, desc_act=act_order, in_features=K, out_features=N,
            bias=False, pack_dtype=torch.int32,
        )  # fmt: skip
        module.pack_original(linear, scales.float(), zeros, index.to(torch.int32))
        module.post_init()
        values = module.dequantize_weight()
        config = QuantizeConfig(bits=bits, group_size=GROUP, sym=symmetric, desc_act=act_order)
        if first:
            convert_gptq_v2_to_v1_format_module(module, config)
        names = ("qweight", "qzeros", "scales", "g_idx")
        tensors = {f"layer.{part}": getattr(module, part).clone().contiguous() for part in names}
        said = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": act_order, "sym": symmetric}
        said |= {"checkpoint_format": "gptq" if first else "gptq_v2", "meta": {"quantizer": [f"gptqmodel:{version}"]}}
        yield name, tensors, said, values, "gptqmodel"


def awq() -> Iterator[Case]:
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    scales, zeros = asymmetric(weight(3), torch.arange(K) // GROUP)
    linear = torch.nn.Linear(K, N, bias=True)
    linear.weight.data, linear.bias.data = weight(3), torch.ones(N)
    module = WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scales.T.contiguous(), zeros=zeros.T.contiguous())
    parts = ("qweight", "qzeros", "scales", "bias")
    tensors = {f"layer.{part}": getattr(module, part).clone().contiguous() for part in parts}
    values = dequantize_gemm(module.qweight, module.qzeros, module.scales, 4, GROUP)
    said = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    yield "awq", tensors, said, values, "autoawq"


def compressed() -> Iterator[Case]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    for name, form, arguments in (
        ("ct_int4", "pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": GROUP}),
        ("ct_int4_zeros", "pack-quantized",
         {"num_bits": 4, "strategy": "group", "group_size": GROUP, "symmetric": False}),
        ("ct_int8_zeros", "pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
        ("ct_int_quantized", "int-quantized", {"num_bits": 8, "strategy": "channel"}),
        ("ct_float_quantized", "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        ("ct_float_blocks", "float-quantized",
         {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]}),
        ("ct_nvfp4", "nvfp4-pack-quantized",
         {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
          "scale_dtype": torch.float8_e4m3fn, "zp_dtype": torch.float8_e4m3fn}),
        ("ct_mxfp4", "mxfp4-pack-quantized",
         {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8,
          "zp_dtype": torch.uint8}),
    ):  # fmt: skip
        args = QuantizationArgs(**{"symmetric": True, **arguments})
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        w = weight(4).bfloat16()
        state = {"weight": w}
        whole = None
        if args.strategy == "tensor_group":
            whole = generate_gparam(w.min(), w.max())
            state["weight_global_scale"] = whole
        groups = w.reshape(N, -1, args.group_size) if args.group_size and args.group_size > 0 else w.reshape(N, 1, K)
        low, high = groups.amin(-1), groups.amax(-1)
        if args.strategy == "block":
            rows, columns = args.block_structure
            blocks = w.reshape(N // rows, rows, K // columns, columns)
            low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
        scale, zero = calculate_qparams(low, high, args, global_scale=whole)
        scale = scale if scale.dtype.itemsize > 1 else scale.to(torch.float32)
        state |= {"weight_scale": scale if whole is not None else scale.to(torch.bfloat16)}
        if not args.symmetric:
            state["weight_zero_point"] = zero
        compressor = BaseCompressor.get_value_from_registry(form)
        stored = compressor.compress(dict(state), scheme)
        values = compressor.decompress(dict(stored), scheme)["weight"]
        said = {"targets": ["Linear"], "weights": json.loads(args.model_dump_json())}
        config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": said}}
        tensors = {f"layer.{end}": tensor.contiguous() for end, tensor in stored.items() if tensor is not None}
        yield name, tensors, config, values.T, "compressed-tensors"


def bitsandbytes() -> Iterator[Case]:
    from bitsandbytes import functional
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute

    for name, k, nested in (("nf4", K, False), ("nf4_nested", 4 * K, True), ("nf4_across_rows", 96, True)):
        w = weight(5, k, 64).bfloat16()
        packed, state = functional.quantize_4bit(w, quant_type="nf4", compress_statistics=nested)
        values = functional.dequantize_4bit(packed, state)
        if k % state.blocksize:
            # Its CPU kernel takes rows for whole blocks, though its quantization does not: the other implementation.
            absmax = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
            values = _dequantize_4bit_compute(packed.reshape(-1), absmax, state.code, 64, w.shape, w.dtype)
        assert (values - w).abs().max() < 0.05
        tensors = {"layer.weight": packed} | {
            f"layer.weight.{end}": tensor for end, tensor in state.as_dict(packed=True).items()
        }
        said = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
        yield name, tensors, {**said, "bnb_4bit_use_double_quant": nested}, values.T, "bitsandbytes"


def mxfp4() -> Iterator[Case]:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    random = torch.Generator().manual_seed(6)
    blocks = torch.randint(0, 256, (2, N, K // 32, 16), dtype=torch.uint8, generator=random)
    scales = torch.randint(100, 140, (2, N, K // 32), dtype=torch.uint8, generator=random)
    values = convert_moe_packed_tensors(blocks, scales)
    tensors = {"layer.gate_up_proj_blocks": blocks, "layer.gate_up_proj_scales": scales}
    tensors["layer.gate_up_proj_bias"] = torch.ones(2, N, dtype=torch.bfloat16)
    yield "gpt_oss", tensors, {"quant_method": "mxfp4"}, values, "transformers"


def main() -> None:
    rows = []
    for cases in (gptq, awq, compressed, bitsandbytes, mxfp4):
        for name, tensors, config, values, library in cases():
            folder = FOLDER / name
            folder.mkdir(parents=True, exist_ok=True)
            save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()},
                      folder / "model.safetensors")  # fmt: skip
            (folder / "config.json").write_text(json.dumps({"quantization_config": config}, indent=1) + "\n")
            dtype = str(values.dtype).removeprefix("torch.")
            save_file({"values": values.detach().contiguous()}, folder / "values.safetensors")
            rows.append(f"| `{name}` | {library} {importlib.metadata.version(library)} | {dtype} |")
    versions = ", ".join(f"{library} {importlib.metadata.version(library)}" for library in LIBRARIES)
    (FOLDER / "README.md").write_text(
        "# Weights written by the libraries of their formats\n\n"
        "`python tests/checkpoints/write_files.py` wrote them, and the values that the library makes of each\n"
        f"(values.safetensors), with {versions}.\n\n"
        "| Folder | Library | dtype of its values |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    )


if __name__ == "__main__":
    main()
