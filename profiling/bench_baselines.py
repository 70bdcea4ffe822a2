"""Measures accuracies that need no learning: ridge regression on raw pixels and on untrained whitened patches.

  python profiling/bench_baselines.py --dir=DIR

The data is CIFAR-10. Patches are 6x6, contrast-normalised and ZCA-whitened on a sample; 256 of them, drawn at random
from the training images, are the filters. Responses go through a two-sided ReLU at 0.5 and are averaged over the whole
image (512 numbers) or over its quadrants (2,048 numbers). The ridge penalty is chosen on 5,000 images held out of the
training set.
"""

import sys
from typing import Any

import numpy as np

from jepa_jax.base.console import Console
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser

PATCH, FILTERS, THRESHOLD = 6, 256, 0.5
HELD_OUT = 5_000
PENALTIES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)


def add_flags(parser: Parser) -> None:
    parser.add_flag("dir", "DIR", "folder or archive of CIFAR-10", required=True)
    parser.add_flag("seed", "N", "seed of the patches that become filters", 0)


def contrast_normalised(patches: Any) -> Any:
    """Returns patches [..., 108] with mean 0 and contrast 1 each; NumPy and JAX arrays alike."""
    centred = patches - patches.mean(-1, keepdims=True)
    return centred / (centred.var(-1, keepdims=True) + 10 / 255**2) ** 0.5


def sample_patches(images: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Returns random contrast-normalised patches [count, 108] of float images."""
    index = rng.integers(len(images), size=count)
    y, x = rng.integers(32 - PATCH + 1, size=(2, count))
    patches = np.stack([images[i, a : a + PATCH, b : b + PATCH] for i, a, b in zip(index, y, x, strict=True)])
    return contrast_normalised(patches.reshape(count, -1))


def whitening(patches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean and the ZCA matrix of patches."""
    mean = patches.mean(0)
    variances, directions = np.linalg.eigh(np.cov(patches - mean, rowvar=False))
    return mean, (directions / np.sqrt(variances + 0.1)) @ directions.T


def patch_features(images: np.ndarray, mean: np.ndarray, matrix: np.ndarray, filters: np.ndarray) -> list[np.ndarray]:
    """Returns features pooled over the image [N, 512] and over its quadrants [N, 2048]."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def features(batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        positions = 32 - PATCH + 1
        rows = [batch[:, y : y + positions, x : x + positions] for y in range(PATCH) for x in range(PATCH)]
        patches = contrast_normalised(jnp.stack(rows, axis=3).reshape(len(batch), positions, positions, -1))
        response = (patches - mean) @ matrix @ filters
        both = jnp.concatenate([jax.nn.relu(response - THRESHOLD), jax.nn.relu(-response - THRESHOLD)], -1)
        middle = (positions + 1) // 2
        halves = (slice(0, middle), slice(middle, None))
        quadrants = [both[:, a, b].mean((1, 2)) for a in halves for b in halves]
        return both.mean((1, 2)), jnp.concatenate(quadrants, -1)

    parts = [features(images[i : i + 100]) for i in range(0, len(images), 100)]
    return [np.concatenate([np.asarray(part[k]) for part in parts]) for k in (0, 1)]


def ridge_fits(x: np.ndarray, y: np.ndarray, penalties: tuple[float, ...]) -> list[np.ndarray]:
    """Returns the weights of ridge regression of y on x for each penalty."""
    gram, moments = x.T @ x, x.T @ y  # once: they are all the work
    return [np.linalg.solve(gram + p * len(x) * np.eye(len(gram)), moments) for p in penalties]


def percent_right(weights: np.ndarray, x: np.ndarray, labels: np.ndarray) -> float:
    return 100 * float(np.mean(np.argmax(x @ weights, 1) == labels))


def ridge_accuracy(train: np.ndarray, train_labels: np.ndarray, test: np.ndarray, test_labels: np.ndarray) -> float:
    """Returns the percentage of test images that are right; the penalty is chosen on images held out of `train`."""
    mean, std = train.mean(0), train.std(0) + 1e-8
    train, test = (np.append((x - mean) / std, np.ones((len(x), 1)), 1).astype(np.float32) for x in (train, test))
    targets = 2.0 * np.eye(10)[train_labels] - 1
    candidates = ridge_fits(train[HELD_OUT:], targets[HELD_OUT:], PENALTIES)
    held = [percent_right(weights, train[:HELD_OUT], train_labels[:HELD_OUT]) for weights in candidates]
    (weights,) = ridge_fits(train, targets, (PENALTIES[int(np.argmax(held))],))
    return percent_right(weights, test, test_labels)


def bench(arguments: Arguments, console: Console) -> Result:
    from jepa_jax.config.groups import DataConfig
    from jepa_jax.data.sources import open_splits
    from jepa_jax.runtime.allocator import keep_freed_memory
    from jepa_jax.runtime.start import start_compile_cache

    keep_freed_memory()
    start_compile_cache()
    sources = open_splits(DataConfig(source="cifar10", dir=arguments.dir))
    whole = [source.batch(np.arange(len(source))) for source in sources]
    train, test = (batch["image"].astype(np.float32) / 255 for batch in whole)
    train_labels, test_labels = (batch["label"] for batch in whole)
    rng = np.random.default_rng(arguments.seed)
    mean, matrix = whitening(sample_patches(train, 100_000, rng))
    filters = (sample_patches(train, FILTERS, rng) - mean) @ matrix
    filters = (filters / np.linalg.norm(filters, axis=1, keepdims=True)).T.astype(np.float32)
    mean, matrix = mean.astype(np.float32), matrix.astype(np.float32)
    console.line("computing features of patches")
    pooled = [patch_features(images, mean, matrix, filters) for images in (train, test)]
    flat = [images.reshape(len(images), -1) for images in (train, test)]
    result = {
        "raw_pixels": ridge_accuracy(flat[0], train_labels, flat[1], test_labels),
        "whitened_patches_512": ridge_accuracy(pooled[0][0], train_labels, pooled[1][0], test_labels),
        "whitened_patches_2048": ridge_accuracy(pooled[0][1], train_labels, pooled[1][1], test_labels),
    }
    return Result([result], "\n".join(f"{name:<24} {accuracy:5.1f} %" for name, accuracy in result.items()))


if __name__ == "__main__":
    sys.exit(Command("profiling/bench_baselines.py", __doc__, add_flags, bench, program="python").main())
