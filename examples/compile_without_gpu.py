"""Compiles a program for an H200 on a machine without a GPU, and prints what it calls and the memory that it takes.

The program decodes a token: it scans over stacked layers of int4 weights. XLA reads each layer where it lies in the
stack, so the temporary memory is smaller than a layer. `pip install 'jax[cuda13]'` must have been run; no driver is
needed.
"""

import os
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["JAX_PLATFORMS"] = "cpu"  # where there is a driver, JAX fails if it finds no GPU
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # JAX's check of its CUDA libraries asks for a driver

import jax
from jax import numpy as jnp
from jax.experimental import topologies

import jax_splitk

LAYERS, WIDTH, HIDDEN = 16, 4096, 14336
H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  memory_bandwidth: 4800000000000
  device_memory_size: 150000000000
  l2_cache_size: 62914560
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 19 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""


def weights() -> dict[str, jax_splitk.PackedWeight]:
    def stack(k: int, n: int) -> jax_splitk.PackedWeight:
        w = jax_splitk.quantize(jnp.ones((LAYERS, k, n)), "int4", group_size=64, axis=1)
        return jax_splitk.prepack(w, axis=1, stack=1)

    return {"up": stack(WIDTH, HIDDEN), "down": stack(HIDDEN, WIDTH)}


def decode(layers: dict[str, jax_splitk.PackedWeight], x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: dict[str, jax_splitk.PackedWeight]) -> tuple[jax.Array, None]:
        y = jax_splitk.quantized_matmul(x, w["up"], norm_epsilon=1e-5, activation="silu")
        return jax_splitk.quantized_matmul(y, w["down"], residual=x), None

    return jax.lax.scan(layer, x, layers)[0]


described = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1")
(device,) = described.devices
there = jax.sharding.SingleDeviceSharding(device)
of_x = jax.ShapeDtypeStruct((1, WIDTH), jnp.bfloat16)
shapes = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=there), (jax.eval_shape(weights), of_x)
)
program = jax.jit(decode).lower(*shapes).compile()

calls = (program.as_text() or "").count('custom_call_target="jax_splitk_launch')
memory: Any = program.memory_analysis()
print(f"calls of kernels in the scan's body: {calls}")
print(f"weights of a layer: {memory.argument_size_in_bytes / LAYERS / 1e6:.1f} MB")
print(f"temporary memory:   {memory.temp_size_in_bytes / 1e6:.1f} MB")
