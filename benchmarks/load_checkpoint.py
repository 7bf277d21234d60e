"""Times `load_checkpoint` on a Llama-shaped checkpoint of random numbers, and its peak of the host's memory.

    python -m benchmarks.load_checkpoint gptq mxfp4 --json FILE     # 8 billion parameters: 32 layers
    python -m benchmarks.load_checkpoint gptq --layers 1            # to try it

For each format a process of its own writes the files, as Hugging Face's libraries do, and asks the system to forget
their pages, so that reading begins at the disk. Another process reads and packs all weights by the three lines of code
that a user has. The report has its seconds, and the most memory of the process while it read, less that before. Without
a GPU that memory holds the packed weights, too.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax import numpy as jnp

import jax_splitk
from benchmarks import report

WIDTH, HIDDEN, KEYS, TOKENS = 4096, 14336, 1024, 128256
# [k, features] of a layer's products.
PRODUCTS = {
    "self_attn.q_proj": (WIDTH, WIDTH),
    "self_attn.k_proj": (WIDTH, KEYS),
    "self_attn.v_proj": (WIDTH, KEYS),
    "self_attn.o_proj": (WIDTH, WIDTH),
    "mlp.gate_proj": (WIDTH, HIDDEN),
    "mlp.up_proj": (WIDTH, HIDDEN),
    "mlp.down_proj": (HIDDEN, WIDTH),
}
GROUP = 128  # of GPTQ
FILE_BYTES = 5 * 10**9  # the most of a file, as Hugging Face's libraries divide checkpoints
DTYPES = {"int32": "I32", "uint8": "U8", "float16": "F16", "bfloat16": "BF16"}

Named = Iterator[tuple[str, np.ndarray]]


def _words(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    return np.frombuffer(rng.bytes(4 * int(np.prod(shape))), np.int32).reshape(shape)


def _gptq(rng: np.random.Generator, name: str, k: int, features: int) -> Named:
    """Symmetric, version 1: every stored zero point is 7."""
    yield f"{name}.qweight", _words(rng, (k // 8, features))
    yield f"{name}.qzeros", np.full((k // GROUP, features // 8), 0x77777777, np.int32)
    yield f"{name}.scales", rng.uniform(0.002, 0.004, (k // GROUP, features)).astype(np.float16)
    yield f"{name}.g_idx", np.arange(k, dtype=np.int32) // GROUP


def _mxfp4(rng: np.random.Generator, name: str, k: int, features: int) -> Named:
    yield f"{name}.weight_packed", _words(rng, (features, k // 8)).view(np.uint8)
    yield f"{name}.weight_scale", rng.integers(116, 120, (features, k // 32), np.uint8)


_COMPRESSED = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
# The tensors of a weight, and config.json's description.
FORMATS: dict[str, tuple[Callable[[np.random.Generator, str, int, int], Named], dict[str, Any]]] = {
    "gptq": (
        _gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
        | {"checkpoint_format": "gptq"},
    ),
    "mxfp4": (
        _mxfp4,
        {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "ignore": ["lm_head"]}
        | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": _COMPRESSED}}},
    ),
}


# ---- writing ---------------------------------------------------------------------------------------------------------


def _tensors(form: str, layers: int) -> Named:
    rng = np.random.default_rng(41)
    normals = lambda *shape: (rng.random(shape, np.float32) - 0.5).astype(ml_dtypes.bfloat16)  # noqa: E731
    yield "model.embed_tokens.weight", normals(TOKENS, WIDTH)
    for layer in range(layers):
        for name, (k, features) in PRODUCTS.items():
            yield from FORMATS[form][0](rng, f"model.layers.{layer}.{name}", k, features)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{layer}.{norm}.weight", normals(WIDTH)
    yield "model.norm.weight", normals(WIDTH)
    yield "lm_head.weight", normals(TOKENS, WIDTH)


def write(folder: pathlib.Path, form: str, layers: int) -> None:
    """Writes a checkpoint, and leaves none of its pages in the system's cache."""
    held: dict[str, np.ndarray] = {}
    files = 0
    for name, tensor in _tensors(form, layers):
        if held and sum(array.nbytes for array in held.values()) + tensor.nbytes > FILE_BYTES:
            _write_file(folder / f"model-{files:05}.safetensors", held)
            held, files = {}, files + 1
        held[name] = tensor
    _write_file(folder / f"model-{files:05}.safetensors", held)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": FORMATS[form][1]}))


def _write_file(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
    header, end = {}, 0
    for name, array in tensors.items():
        start, end = end, end + array.nbytes
        header[name] = {"dtype": DTYPES[array.dtype.name], "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# ---- reading ---------------------------------------------------------------------------------------------------------


def _peak_bytes() -> int:
    """The most memory that this process had since it began."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def read(folder: pathlib.Path) -> dict[str, Any]:
    """Reads and packs a checkpoint in this process, which has read none before."""
    # The backend, its compiler, and the library of kernels belong to any program.
    q = jax_splitk.quantize(jnp.ones((256, 256), jnp.bfloat16), "int4", group_size=64)
    jax.block_until_ready(jax_splitk.prepack(q).words)
    before, began = _peak_bytes(), time.perf_counter()
    weights = jax_splitk.load_checkpoint(folder, pack=True).read()
    jax.block_until_ready(weights)
    seconds = time.perf_counter() - began
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    peak = _peak_bytes() - before
    return {
        "bytes": sum(sizes),
        "largest_file_bytes": max(sizes),
        "seconds": seconds,
        "peak_bytes": peak,
        "peak_over_largest_file": peak / max(sizes),
        "device_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(weights)),
        "device": jax.devices()[0].device_kind,
    }


def _here(argument: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "benchmarks.load_checkpoint", "--here", argument, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="+", choices=list(FORMATS), metavar="FORMAT", help=", ".join(FORMATS))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--folder", type=pathlib.Path, help="where to write; the system's temporary folder")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the report to FILE")
    parser.add_argument("--here", choices=("write", "read"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.here == "write":
        return write(options.folder, options.formats[0], options.layers)
    if options.here == "read":
        return print(json.dumps(read(options.folder)))
    results = {}
    for form in options.formats:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            _here("write", form, "--folder", folder, "--layers", str(options.layers))
            results[form] = found = json.loads(_here("read", form, "--folder", folder))
        largest, peak = found["largest_file_bytes"] / 1e9, found["peak_over_largest_file"]
        print(
            f"{form}: {found['bytes'] / 1e9:.2f} GB in {found['seconds']:.1f} s, "
            f"host memory at most {peak:.2f} times the largest file of {largest:.2f} GB"
        )
    if options.json:
        about = {"benchmark": "load_checkpoint", "environment": report.environment(), "layers": options.layers}
        report.write(options.json, about | {"results": results})
    return None


if __name__ == "__main__":
    main()
