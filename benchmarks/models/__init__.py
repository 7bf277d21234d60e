"""Networks whose whole training steps are measured: `python -m benchmarks.models`. Each module describes one."""

import functools
from collections.abc import Callable, Iterable, Mapping

from jax import numpy as jnp

from benchmarks.models import (
    alphazero,
    atari,
    audio,
    conformer,
    convnext,
    diffusion,
    efficientnet,
    hifigan,
    mlp,
    regnet,
    replknet,
    resnet,
    resnet3d,
    unet3d,
    wav2vec2,
)
from benchmarks.models.layers import Model

# Models by name, in the order of tables. Each takes `tiny`, for a model that a CPU trains in a moment.
MODELS: Mapping[str, Callable[..., Model]] = {
    "resnet50_b256": functools.partial(resnet.model, 256),
    "resnet50_b32": functools.partial(resnet.model, 32),
    "convnext_t": convnext.model,
    "diffusion_unet": diffusion.model,
    "r3d_18": resnet3d.model,
    "unet_3d": unet3d.model,
    "audio_encoder": audio.model,
    "efficientnet_b0": efficientnet.model,
    "nature_dqn": atari.dqn,
    "impala": atari.impala,
    "alphazero": alphazero.model,
    "conformer_l": conformer.model,
    "hifigan": hifigan.model,
    "resnext50_b128": functools.partial(resnet.model, 128, resnext=True),
    "regnetx_1_6gf": regnet.model,
    "wav2vec2_base": wav2vec2.model,
    "diffusion_unet_float32": functools.partial(diffusion.model, jnp.float32),
    "replknet_31b": replknet.model,
    "mlp_4096": functools.partial(mlp.model, 4096, 14336, 16384, 1),
    "mlp_256": functools.partial(mlp.model, 256, 1024, 65536, 4),
}


def find(names: Iterable[str], tiny: bool = False) -> list[Model]:
    """The models of these names, in the order of `MODELS`; without names, all. Raises ValueError for an unknown
    name."""
    wanted = set(names)
    if unknown := sorted(wanted - set(MODELS)):
        raise ValueError(f"model {', '.join(unknown)}; accepted: {', '.join(MODELS)}")
    return [make(tiny=tiny) for name, make in MODELS.items() if not wanted or name in wanted]
