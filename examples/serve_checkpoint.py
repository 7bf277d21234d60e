"""Generates text from quantized checkpoints: GPTQ, AWQ, compressed-tensors, bitsandbytes, MXFP4, NVFP4 and fp8.

    python examples/serve_checkpoint.py

A small transformer with Llama's layers is trained on a text that comes with Python. Its weights are written in each
format, as a folder of Hugging Face's libraries has them (examples/checkpoint_formats.py). `load_checkpoint` reads and
packs them; the packed weights generate text, greedily, and so do the same weights dequantized to float32. The table
shows the bytes of the weights, the loss on text that was not trained on, and how many tokens agree.
"""

import functools
import math
import pathlib
import pydoc_data.topics
import tempfile

import jax
import numpy as np
from checkpoint_formats import WRITERS, save
from digits import exit_with, start, train_step
from jax import numpy as jnp
from tqdm import trange

import jax_splitk

VOCABULARY, WIDTH, HEADS, HIDDEN, LAYERS, LENGTH = 128, 128, 4, 256, 2, 80
BATCH, STEPS, LEARNING_RATE = 16, 160, 3e-3
PROMPT, TOKENS = "The following ", 48
SHAPES = {
    **{f"self_attn.{name}_proj": (WIDTH, WIDTH) for name in ("q", "k", "v", "o")},
    **{f"mlp.{name}_proj": (WIDTH, HIDDEN) for name in ("gate", "up")},
    "mlp.down_proj": (HIDDEN, WIDTH),
}
TOPICS = ("assignment", "class", "exprlists", "function", "import", "numbers", "try", "with", "calls", "naming")
NEEDED_LOSS, ALLOWED_LOSS, NEEDED_AGREEMENT = 2.4, 0.1, 1.0


def init(key):
    """Weights by the names of Hugging Face's Llama, those of projections as [k, features]."""
    keys = iter(jax.random.split(key, 1 + LAYERS * len(SHAPES)))
    params = {"model.embed_tokens.weight": jax.random.normal(next(keys), (VOCABULARY, WIDTH)) * 0.1}
    for layer in range(LAYERS):
        for name, (k, features) in SHAPES.items():
            weight = jax.random.normal(next(keys), (k, features)) / math.sqrt(k)
            params[f"model.layers.{layer}.{name}.weight"] = weight
        for name in ("input", "post_attention"):
            params[f"model.layers.{layer}.{name}_layernorm.weight"] = jnp.ones(WIDTH)
    return params | {"model.norm.weight": jnp.ones(WIDTH)}


def dot(x, weight):
    """The product with a projection's weight, of activations that are rounded to bfloat16; float32 in and out."""
    x = x.astype(jnp.bfloat16)
    if isinstance(weight, jax.Array):
        return jnp.matmul(x.astype(weight.dtype), weight, preferred_element_type=jnp.float32)
    return jax_splitk.quantized_matmul(x, weight, preferred_element_type=jnp.float32)


def norm(x, weight):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight.astype(jnp.float32)


def rotate(x):
    """Rotary position embeddings (arXiv:2104.09864) of [batch, length, heads, size]."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention(weights, x):
    q, k, v = (dot(x, weights(f"self_attn.{name}_proj")).reshape(*x.shape[:2], HEADS, -1) for name in "qkv")
    mixed = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
    return dot(mixed.reshape(x.shape), weights("self_attn.o_proj"))


def mlp(weights, x):
    gate, up = (dot(x, weights(f"mlp.{name}_proj")) for name in ("gate", "up"))
    return dot(jax.nn.silu(gate) * up, weights("mlp.down_proj"))


def logits(params, tokens):
    embedding = params["model.embed_tokens.weight"].astype(jnp.float32)
    x = embedding[tokens]
    for layer in range(LAYERS):
        weights = lambda name, layer=layer: params[f"model.layers.{layer}.{name}.weight"]  # noqa: E731
        x = x + attention(weights, norm(x, weights("input_layernorm")))
        x = x + mlp(weights, norm(x, weights("post_attention_layernorm")))
    return norm(x, params["model.norm.weight"]) @ embedding.T


@jax.jit
def loss(params, tokens):
    log_probabilities = jax.nn.log_softmax(logits(params, tokens[:, :-1]))
    return -jnp.mean(jnp.take_along_axis(log_probabilities, tokens[:, 1:, None], axis=-1))


@jax.jit
def generate(params, prompt, length):
    """Tokens [LENGTH]: the prompt's first `length`, then the likeliest next one, TOKENS times."""

    def step(i, tokens):
        following = jnp.argmax(logits(params, tokens[None])[0, length + i - 1])
        return tokens.at[length + i].set(following)

    return jax.lax.fori_loop(0, TOKENS, step, prompt)


def text():
    """Bytes of some topics of Python's help: rows to train on, and others."""
    joined = " ".join(" ".join(pydoc_data.topics.topics[name].split()) for name in TOPICS)
    data = np.frombuffer(joined.encode("ascii", "ignore"), np.uint8).astype(np.int32)
    rows = data[: len(data) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
    order = np.random.default_rng(0).permutation(len(rows))
    return rows[order[64:]], rows[order[:64]]


def train(params, rows):
    step = train_step(loss, rate=LEARNING_RATE, decay=0.99)
    state, rng = start(params), np.random.default_rng(1)
    progress = trange(STEPS, desc="training", unit="step")
    for i in progress:
        params, state, value = step(params, state, rng.choice(rows, BATCH))
        if i % 10 == 9:
            progress.set_postfix(loss=f"{float(value):.3f}", refresh=False)
    return params


def write(folder, params, writer):
    """A checkpoint whose projections have the writer's format, and whose other weights are bfloat16."""
    tensors, description = {}, None
    for name, weight in params.items():
        stem = name.removesuffix(".weight")
        if stem.endswith("_proj"):
            parts, description = writer(weight)
            tensors |= {stem + end: part for end, part in parts.items()}
        else:
            tensors[name] = jax.device_get(weight.astype(jnp.bfloat16))
    save(folder, tensors, description)


def oriented(weights):
    """Projections that are plain arrays, [features, k] in the files, as [k, features]."""
    return {
        name: weight.T if name.endswith("_proj.weight") and isinstance(weight, jax.Array) else weight
        for name, weight in weights.items()
    }


def nbytes(weights):
    return sum(leaf.nbytes for name, weight in weights.items() if "_proj" in name for leaf in jax.tree.leaves(weight))


def dequantized(weight):
    return weight if isinstance(weight, jax.Array) else jax_splitk.dequantize(jax_splitk.unpack(weight), jnp.float32)


def main():
    rows, held_out = text()
    params = train(init(jax.random.key(0)), rows)
    prompt = np.frombuffer(PROMPT.encode().ljust(LENGTH), np.uint8).astype(np.int32)
    greedy = functools.partial(generate, prompt=prompt, length=len(PROMPT))
    print(f"\n{'checkpoint':<26}{'kB':>6}{'loss':>8}{'tokens as dequantized':>24}  text")
    losses, agreements = {}, {}
    with tempfile.TemporaryDirectory() as parent:
        for name, writer in WRITERS.items():
            folder = pathlib.Path(parent) / name
            write(folder, params, writer)

            weights = oriented(jax_splitk.load_checkpoint(folder, pack=True).read())
            losses[name] = float(loss(weights, held_out))
            tokens = np.asarray(greedy(weights))[len(PROMPT) : len(PROMPT) + TOKENS]

            floats = {name: dequantized(weight) for name, weight in weights.items()}
            expected = np.asarray(greedy(floats))[len(PROMPT) : len(PROMPT) + TOKENS]
            agreements[name] = np.mean(tokens == expected)
            shown = bytes(tokens.astype(np.uint8)).decode("ascii", "replace")
            row = f"{name:<26}{nbytes(weights) / 1000:>6.0f}{losses[name]:>8.3f}{agreements[name]:>24.0%}"
            print(f"{row}  {PROMPT}{shown[:40]}...")
    worst = max(losses, key=losses.__getitem__)
    problems = [f"{name}: {share:.0%} of the tokens agree" for name, share in agreements.items()
                if share < NEEDED_AGREEMENT]  # fmt: skip
    if losses["bfloat16"] > NEEDED_LOSS:
        problems.append(f"the loss is {losses['bfloat16']:.2f}, more than {NEEDED_LOSS}")
    if losses[worst] > losses["bfloat16"] + ALLOWED_LOSS:
        problems.append(f"{worst} loses {losses[worst] - losses['bfloat16']:.2f}, more than {ALLOWED_LOSS}")
    exit_with(problems)


if __name__ == "__main__":
    main()
