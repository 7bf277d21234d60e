"""Quantizes a network for handwritten digits to int4, and teaches it a new task through low-rank adapters.

    python examples/quantized_digits.py

A multilayer perceptron is trained in float32 on scikit-learn's 8x8 images. Its dense layers are quantized to 4 bits
and packed; the table shows the accuracy kept and the bytes saved. Then the images are turned upside down, and
adapters of rank 8 learn them, as QLoRA (arXiv:2305.14314) does: gradients flow through `quantized_matmul` to the
adapters while the 4-bit weights stay as they are.
"""

import functools
import time

import jax
import numpy as np
from digits import exit_with, load, train, train_step
from jax import numpy as jnp

from jax_splitk import prepack, quantize, quantized_matmul

WIDTHS = (64, 256, 256, 10)
EPOCHS, ADAPTER_EPOCHS, RANK = 12, 20, 8
GROUP_SIZES = (32, 64, None)
SIDE = 2048
NEEDED_ACCURACY, NEEDED_ADAPTED, ALLOWED_LOSS = 0.95, 0.90, 0.01


def init(key):
    keys = jax.random.split(key, len(WIDTHS) - 1)
    return [
        {"w": jax.random.normal(key, (k, features)) * np.sqrt(2 / k), "b": jnp.zeros(features)}
        for key, k, features in zip(keys, WIDTHS, WIDTHS[1:], strict=False)
    ]


def init_adapters(key):
    """Random a and zero b for each weight, to which the product a @ b is added."""
    keys = jax.random.split(key, len(WIDTHS) - 1)
    return [
        {"a": jax.random.normal(key, (k, RANK)) / np.sqrt(k), "b": jnp.zeros((RANK, features))}
        for key, k, features in zip(keys, WIDTHS, WIDTHS[1:], strict=False)
    ]


def mlp(layers, x, dense):
    """Logits; A multilayer perceptron. `dense(layer, x)` computes the product with a layer's weight."""
    for i, layer in enumerate(layers):
        x = dense(layer, x) + layer["b"]
        x = jax.nn.relu(x) if i < len(layers) - 1 else x
    return x


def float_dense(layer, x):
    return x @ layer["w"]


def quantized_dense(layer, x):
    """A dense layer with an int4 weight and bfloat16 activations, float32 in and out. Adds the adapter, if there is
    one."""
    out = quantized_matmul(x.astype(jnp.bfloat16), layer["w"], preferred_element_type=jnp.float32)
    return out + (x @ layer["adapter"]["a"]) @ layer["adapter"]["b"] if "adapter" in layer else out


def quantized(params, group_size):
    """The same layers with packed int4 weights."""
    return [
        layer | {"w": prepack(quantize(layer["w"], "int4", group_size=group_size, scale_dtype=jnp.bfloat16))}
        for layer in params
    ]


def with_adapters(layers, adapters):
    return [layer | {"adapter": adapter} for layer, adapter in zip(layers, adapters, strict=True)]


def microseconds(function, *args):
    """The time of a call of the jitted function: the least of several rounds."""
    compiled, times = jax.jit(function).lower(*args).compile(), []
    for _ in range(7):
        begin = time.perf_counter()
        jax.block_until_ready([compiled(*args) for _ in range(4)])
        times.append((time.perf_counter() - begin) / 4 * 1e6)
    return min(times)


def nll(logits, labels):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1))


@jax.jit
def quantized_logits(layers, images):
    return mlp(layers, images, quantized_dense)


def accuracy(logits, labels):
    return float(np.mean(np.asarray(jnp.argmax(logits, axis=1)) == labels))


def nbytes(layers):
    """Bytes of the weights and their scales, without the biases."""
    return sum(leaf.nbytes for layer in layers for leaf in jax.tree.leaves(layer["w"]))


def compare():
    """Prints the time of products with one large weight."""
    w = jax.random.normal(jax.random.key(0), (SIDE, SIDE), jnp.bfloat16)
    packed = prepack(quantize(w, "int4", group_size=64))
    print(f"\n{f'[n, {SIDE}] x [{SIDE}, {SIDE}], this machine':<40}{'n = 1':>9}{'n = 8':>9}{'n = 64':>9}  (us)")
    for name, weight, product in (
        ("bfloat16 weight, XLA", w, jnp.matmul),
        ("int4 weight, XLA", packed, functools.partial(quantized_matmul, implementation="xla")),
        ("int4 weight, jax_splitk", packed, quantized_matmul),
    ):
        xs = [jnp.ones((n, SIDE), jnp.bfloat16) for n in (1, 8, 64)]
        print(f"{name:<40}{''.join(f'{microseconds(product, x, weight):>9.0f}' for x in xs)}")
    print(f"The int4 weight has {packed.nbytes / w.nbytes:.0%} of the bytes. An H200's times: docs/results.md.")


def main():
    train_images, train_labels, test_images, test_labels = load()
    train_images, test_images = train_images.reshape(-1, 64), test_images.reshape(-1, 64)

    float_loss = lambda params, x, labels: nll(mlp(params, x, float_dense), labels)  # noqa: E731
    params = train(train_step(float_loss), init(jax.random.key(0)), train_images, train_labels, EPOCHS)
    kept = accuracy(mlp(params, test_images, float_dense), test_labels)
    print(f"\n{'weights':<22}{'accuracy':>10}{'bytes':>10}")
    print(f"{'float32':<22}{kept:>10.1%}{nbytes(params):>10,}")
    problems = [] if kept >= NEEDED_ACCURACY else [f"accuracy {kept:.1%} is below {NEEDED_ACCURACY:.0%}"]
    for group_size in GROUP_SIZES:
        layers = quantized(params, group_size)
        reached = accuracy(quantized_logits(layers, test_images), test_labels)
        name = f"int4, {'per channel' if group_size is None else f'groups of {group_size}'}"
        print(f"{name:<22}{reached:>10.1%}{nbytes(layers):>10,}  {nbytes(params) / nbytes(layers):.1f}x smaller")
        if group_size and reached < kept - ALLOWED_LOSS:
            problems.append(f"{name}: accuracy {reached:.1%} is more than {ALLOWED_LOSS:.0%} below {kept:.1%}")

    layers = quantized(params, 32)
    # Upside down: the pixels in reverse order.
    train_images, test_images = train_images[:, ::-1], test_images[:, ::-1]
    before = accuracy(quantized_logits(layers, test_images), test_labels)
    adapter_loss = lambda adapters, x, labels: nll(quantized_logits(with_adapters(layers, adapters), x), labels)  # noqa: E731
    adapters = init_adapters(jax.random.key(2))
    print()
    adapters = train(train_step(adapter_loss), adapters, train_images, train_labels, ADAPTER_EPOCHS, "adapters")
    after = accuracy(quantized_logits(with_adapters(layers, adapters), test_images), test_labels)
    trained, frozen = (sum(x.size for x in jax.tree.leaves(tree)) for tree in (adapters, [p["w"] for p in params]))
    print(f"Upside down: accuracy {before:.1%} before, {after:.1%} with adapters of rank {RANK}")
    print(f"Trained {trained:,} parameters on top of {frozen:,} frozen ones of 4 bits")
    compare()
    if after < NEEDED_ADAPTED:
        problems.append(f"accuracy with adapters {after:.1%} is below {NEEDED_ADAPTED:.0%}")
    exit_with(problems)


if __name__ == "__main__":
    main()
