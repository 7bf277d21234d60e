"""The convolutional blocks of a latent diffusion UNet, without its attention: widths of 320, 640 and 1280."""

import jax
import numpy as np
from jax import numpy as jnp
from jax.typing import DTypeLike

from benchmarks.models.layers import Data, Layers, Model, Params, Weights, group_norm, normals, squared_error

CHANNELS = 4  # of the latents


def initial(widths: tuple[int, ...], depth: int) -> Params:
    """`depth` blocks of each width on the way down, and one more on the way up."""
    w, time = Weights(), 4 * widths[0]

    def block(channels: int, features: int) -> Params:
        return {
            "norms": (w.norm(channels), w.norm(features)),
            "convs": (w.conv((3, 3), channels, features), 0.1 * w.conv((3, 3), features, features)),
            "time": w.dense(time, features),
            "skip": w.conv((1, 1), channels, features) if channels != features else None,
        }

    params: Params = {
        "time": (w.dense(widths[0], time), w.dense(time, time)),
        "stem": w.conv((3, 3), CHANNELS, widths[0]),
    }
    skips, x = [widths[0]], widths[0]
    params["down"] = []
    for level, width in enumerate(widths):
        blocks = [block(x if i == 0 else width, width) for i in range(depth)]
        x = width
        last = level == len(widths) - 1
        params["down"].append({"blocks": blocks, "resample": None if last else w.conv((3, 3), x, x)})
        skips += [width] * (depth if last else depth + 1)
    params["middle"] = [block(x, x), block(x, x)]
    params["up"] = []
    for level, width in reversed(list(enumerate(widths))):
        blocks = []
        for _ in range(depth + 1):
            blocks.append(block(x + skips.pop(), width))
            x = width
        params["up"].append({"blocks": blocks, "resample": w.conv((3, 3), x, x) if level else None})
    return params | {"head": (w.norm(x), w.conv((3, 3), x, CHANNELS))}


def predicted_noise(layers: Layers, groups: int, params: Params, x: jax.Array, times: jax.Array) -> jax.Array:
    def block(x: jax.Array, p: Params) -> jax.Array:
        y = layers.conv(jax.nn.silu(group_norm(x, p["norms"][0], groups)), p["convs"][0])
        y = y + layers.dense(jax.nn.silu(embedded), p["time"])[:, None, None]
        y = layers.conv(jax.nn.silu(group_norm(y, p["norms"][1], groups)), p["convs"][1])
        return y + (x if p["skip"] is None else layers.conv(x, p["skip"]))

    frequencies = jnp.exp(-9.0 * jnp.linspace(0, 1, params["time"][0].shape[0] // 2))
    angles = times[:, None] * frequencies
    embedded = layers.dense(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1), params["time"][0])
    embedded = layers.dense(jax.nn.silu(embedded), params["time"][1])
    x = layers.conv(x, params["stem"])
    skips = [x]
    for level in params["down"]:
        for p in level["blocks"]:
            x = block(x, p)
            skips.append(x)
        if level["resample"] is not None:
            x = layers.conv(x, level["resample"], 2)
            skips.append(x)
    for p in params["middle"]:
        x = block(x, p)
    for level in params["up"]:
        for p in level["blocks"]:
            x = block(jnp.concatenate([x, skips.pop()], -1), p)
        if level["resample"] is not None:
            x = layers.conv(x.repeat(2, 1).repeat(2, 2), level["resample"])
    norm, head = params["head"]
    return layers.conv(jax.nn.silu(group_norm(x, norm, groups)), head)


def model(dtype: DTypeLike = jnp.bfloat16, tiny: bool = False) -> Model:
    widths, depth, size, batch, groups = ((8, 16), 1, 8, 2, 4) if tiny else ((320, 640, 1280), 2, 64, 16, 32)
    float32 = dtype == jnp.float32

    def data(rng: np.random.Generator) -> Data:
        latents = (normals(rng, batch, size, size, CHANNELS, dtype=dtype) for _ in range(2))
        return (*latents, rng.uniform(0, 1000, batch).astype(np.float32))

    def loss(layers: Layers, params: Params, x: jax.Array, noise: jax.Array, times: jax.Array) -> jax.Array:
        return squared_error(predicted_noise(layers, groups, params, x, times), noise)

    name = "diffusion_unet_float32" if float32 else "diffusion_unet"
    title = f"diffusion UNet blocks, {size}, batch {batch}{', f32' if float32 else ''}"
    made = lambda: initial(widths, depth)  # noqa: E731
    return Model(name, title, "arXiv:2112.10752", made, data, loss, rate=0.005, dtype=dtype)
