"""Trains a small convolutional network on handwritten digits, with jax_splitk's weight gradients.

    python examples/digits.py [--implementation host]

The weights are float32, the convolutions compute in bfloat16, and each weight gradient is a split-k product
whose float32 sums reach the optimizer unrounded. The data, 8x8 images, comes with scikit-learn.
"""

import argparse
import functools
import re
import sys

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from sklearn.datasets import load_digits
from tqdm import trange

import jax_splitk

EPOCHS, BATCH, LEARNING_RATE = 12, 64, 2e-3
NEEDED_ACCURACY, NEEDED_AGREEMENT = 0.95, 2e-2
TUNING_SECONDS = 1

# (input channels, output channels, stride) of the 3x3 convolutions; the last one leaves 4x4 pixels.
LAYERS = ((1, 32, 1), (32, 64, 2), (64, 64, 1))

# Convolutions by name, in the notation of docs/results.md: images, height and width, channels in and out, taps, stride,
# groups.
COMPARED = {
    "64, 8, 32 -> 64, 3x3 stride 2": (64, 8, 32, 64, 3, 2, 1),
    "64, 4, 64 -> 64, 3x3": (64, 4, 64, 64, 3, 1, 1),
    "16, 28, 3 -> 32, 7x7 stride 2": (16, 28, 3, 32, 7, 2, 1),
    "16, 28, 64 -> 128, 1x1": (16, 28, 64, 128, 1, 1, 1),
    "4, 28, 64 depthwise, 7x7": (4, 28, 64, 64, 7, 1, 64),
    "2, 14, 64 -> 64, 3x3, 16 groups": (2, 14, 64, 64, 3, 1, 16),
}


def split_conv(x, w, stride, implementation=None):
    """The drop-in replacement: lax's arguments, plus the dtype to compute in."""
    return jax_splitk.conv_general_dilated(
        x,
        w,
        window_strides=(stride, stride),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        compute_dtype=jnp.bfloat16,
        implementation=implementation,
    )


def lax_conv(x, w, stride):
    """The convolution for comparison: lax in float32, on operands that are rounded to bfloat16 like ours. Both sides
    must round alike, because rounding alone changes the gradients of this network by 5 percent.
    """
    round_to_bfloat16 = functools.partial(lax.reduce_precision, exponent_bits=8, mantissa_bits=7)
    x, w = round_to_bfloat16(x), round_to_bfloat16(w)
    strides, dimensions = (stride, stride), ("NHWC", "HWIO", "NHWC")
    out = lax.conv_general_dilated(x, w, strides, "SAME", dimension_numbers=dimensions, precision="highest")
    return round_to_bfloat16(out)


def init(key):
    keys = jax.random.split(key, len(LAYERS) + 1)
    params = {}
    for i, (fan_in, fan_out, _) in enumerate(LAYERS):
        w = jax.random.normal(keys[i], (3, 3, fan_in, fan_out)) * np.sqrt(2 / (9 * fan_in))
        params[f"conv{i + 1}"] = {"w": w, "b": jnp.zeros(fan_out)}
    features = 4 * 4 * LAYERS[-1][1]
    w = jax.random.normal(keys[-1], (features, 10)) / np.sqrt(features)
    return params | {"dense": {"w": w, "b": jnp.zeros(10)}}


def logits(params, images, conv):
    x = images
    for i, (_, _, stride) in enumerate(LAYERS):
        layer = params[f"conv{i + 1}"]
        x = jax.nn.relu(conv(x, layer["w"], stride).astype(jnp.float32) + layer["b"])
    return x.reshape(len(x), -1) @ params["dense"]["w"] + params["dense"]["b"]


def loss(params, images, labels, conv):
    log_probabilities = jax.nn.log_softmax(logits(params, images, conv))
    return -jnp.mean(jnp.take_along_axis(log_probabilities, labels[:, None], axis=1))


def adam(params, grads, state, rate=LEARNING_RATE, decay=0.999):
    """One step of Adam (Kingma and Ba, 2015). `decay` is that of the squares' mean."""
    step, mean, square = state
    step += 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
    square = jax.tree.map(lambda s, g: decay * s + (1 - decay) * g * g, square, grads)
    corrected = rate * jnp.sqrt(1 - decay**step) / (1 - 0.9**step)
    params = jax.tree.map(lambda p, m, s: p - corrected * m / (jnp.sqrt(s) + 1e-8), params, mean, square)
    return params, (step, mean, square)


def train_step(loss, **options):
    """The compiled step of Adam, with these options, on `loss(params, *batch)`: it also returns the loss, last."""

    @jax.jit
    def step(params, state, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return *adam(params, grads, state, **options), value

    return step


def start(params):
    """Adam's state before the first step."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    return jnp.zeros(()), zeros, zeros


def train(step, params, images, labels, epochs, description="training"):
    """Trains for some epochs of random batches, and returns the parameters."""
    state, value, rng = start(params), jnp.nan, np.random.default_rng(1)
    progress = trange(epochs, desc=description, unit="epoch")
    for _ in progress:
        order = rng.permutation(len(labels))
        for first in range(0, len(order) - BATCH + 1, BATCH):
            rows = order[first : first + BATCH]
            params, state, value = step(params, state, images[rows], labels[rows])
        progress.set_postfix(loss=f"{float(value):.4f}")
    return params


def exit_with(problems):
    """Ends the script as failed, if there are problems."""
    if problems:
        sys.exit(f"FAILED: {'; '.join(problems)}")


def load(seed=0, test_images=360):
    """Images [n, 8, 8, 1] in 0..1 and labels [n]: train images, train labels, test images, test labels."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    images = pixels[order].reshape(-1, 8, 8, 1).astype(np.float32) / 16
    labels = labels[order].astype(np.int32)
    return images[test_images:], labels[test_images:], images[:test_images], labels[:test_images]


def disagreement(params, images, labels, conv):
    """||ours - lax's|| / ||lax's|| of each convolution's weight gradient, with the same parameters and batch."""
    ours = jax.jit(jax.grad(lambda p: loss(p, images, labels, conv)))(params)
    reference = jax.jit(jax.grad(lambda p: loss(p, images, labels, lax_conv)))(params)
    return {
        name: float(jnp.linalg.norm(ours[name]["w"] - grads["w"]) / jnp.linalg.norm(grads["w"]))
        for name, grads in reference.items()
        if name.startswith("conv")
    }


def measured(function, *args, implementation=None):
    """Measures the function's operations against XLA's, and returns jax_splitk's choices. The user's cache keeps them
    for later lowerings."""
    if implementation is None:
        jax_splitk.tune(function, *args, seconds=TUNING_SECONDS)
    return jax_splitk.explain(function, *args)


def compare(implementation):
    """Prints the times of weight gradients by jax_splitk's choice, which may be XLA's, and by XLA."""
    print(f"\n{'weight gradient on this machine':<34}{'jax_splitk us':>14}{'XLA us':>10}{'ratio':>8}  chosen")
    for name, (images, size, inputs, outputs, taps, stride, groups) in COMPARED.items():
        x = jax.ShapeDtypeStruct((images, size, size, inputs), jnp.bfloat16)
        g = jax.ShapeDtypeStruct((images, size // stride, size // stride, outputs), jnp.bfloat16)

        def wgrad(x, g, shape=(taps, taps, inputs // groups, outputs), stride=stride, groups=groups):
            geometry = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": groups}
            return jax_splitk.conv_wgrad(
                x, g, shape, (stride, stride), "SAME", **geometry, implementation=implementation
            )

        (decision,) = measured(wgrad, x, g, implementation=implementation).decisions
        ours_us, xla_us = decision.ours_us, decision.xla_us
        ratio = "same" if decision.family is None else f"{xla_us / ours_us:.2f}" if ours_us and xla_us else "?"
        ours, xla = ("?" if us is None else f"{us:.0f}" for us in (ours_us, xla_us))
        print(f"{name:<34}{ours:>14}{xla:>10}{ratio:>8}  {decision.family or 'xla'}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--implementation", choices=("cutlass", "host", "xla"), help="default: the best available")
    implementation = parser.parse_args().implementation

    def conv(x, w, stride):
        return split_conv(x, w, stride, implementation)

    step = train_step(lambda params, images, labels: loss(params, images, labels, conv))
    train_images, train_labels, test_images, test_labels = load()
    params = init(jax.random.key(0))
    state = start(params)
    batch = (jnp.asarray(train_images[:BATCH]), jnp.asarray(train_labels[:BATCH]))

    print(f"Which kernel is the fastest for each weight gradient? Measured, about {TUNING_SECONDS:g} s each:")
    explained = measured(step, params, state, *batch, implementation=implementation)
    print(explained)
    hlo = step.lower(params, state, *batch).as_text()
    targets = sorted(set(re.findall(r"custom_call @(jax_splitk\w*)", hlo)))
    print(f"Custom calls in the train step: {', '.join(targets) or 'none'}\n")

    differences = disagreement(params, *batch, conv)
    for name, difference in differences.items():
        print(f"{name}: weight gradient differs from lax's in float32 by {difference:.1e} (relative norm)")

    params = train(step, params, train_images, train_labels, EPOCHS)
    predicted = jax.jit(lambda p, x: jnp.argmax(logits(p, x, conv), axis=1))(params, test_images)
    accuracy = float(np.mean(np.asarray(predicted) == test_labels))
    print(f"Test accuracy: {accuracy:.1%} of {len(test_labels)} images")
    compare(implementation)
    print("The kernels that jax_splitk is made for run on an H100 or H200: docs/results.md.")

    problems = []
    if bool(targets) != any(decision.family for decision in explained.decisions):
        problems.append("the custom calls in the train step are not what the table above says")
    if max(differences.values()) > NEEDED_AGREEMENT:
        problems.append(f"weight gradients differ from lax's by more than {NEEDED_AGREEMENT}")
    if accuracy < NEEDED_ACCURACY:
        problems.append(f"test accuracy {accuracy:.1%} is below {NEEDED_ACCURACY:.0%}")
    exit_with(problems)


if __name__ == "__main__":
    main()
