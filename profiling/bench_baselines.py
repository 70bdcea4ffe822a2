"""Accuracies that need no learning: raw pixels and untrained whitened patches, with ridge regression on CIFAR-10.

    python profiling/bench_baselines.py --dir=DIR

Patches: 6x6, contrast-normalised, ZCA-whitened on a sample; 256 of them, drawn at random from the training images, are
the filters; responses go through a two-sided ReLU at 0.5 and are averaged over the whole image (512 numbers) or over
its quadrants (2,048 numbers). The ridge penalty is chosen on 5,000 images held out of the training set.
"""

from absl import flags

from jepa_jax.cli import commands

_DIR = flags.DEFINE_string("dir", None, "CIFAR-10: folder or archive.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the patches that become filters.")
flags.mark_flags_as_required(["dir"])

PATCH, FILTERS, THRESHOLD = 6, 256, 0.5
HELD_OUT = 5_000
PENALTIES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)


def sample_patches(images, count, rng):
    """Random patches of float images, each with its own mean and contrast removed: [count, 108]."""
    import numpy as np

    index = rng.integers(len(images), size=count)
    y, x = rng.integers(32 - PATCH + 1, size=(2, count))
    patches = np.stack([images[i, a : a + PATCH, b : b + PATCH] for i, a, b in zip(index, y, x, strict=True)])
    return contrast_normalised(patches.reshape(count, -1))


def contrast_normalised(patches):
    import numpy as np

    centred = patches - patches.mean(-1, keepdims=True)
    return centred / np.sqrt(centred.var(-1, keepdims=True) + 10 / 255**2)


def whitening(patches):
    """Mean and ZCA matrix of patches."""
    import numpy as np

    mean = patches.mean(0)
    variances, directions = np.linalg.eigh(np.cov(patches - mean, rowvar=False))
    return mean, (directions / np.sqrt(variances + 0.1)) @ directions.T


def patch_features(images, mean, matrix, filters):
    """[N, 2 grids]: globally pooled (512) and pooled by quadrant (2,048)."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    @jax.jit
    def features(batch):
        positions = 32 - PATCH + 1
        rows = [batch[:, y : y + positions, x : x + positions] for y in range(PATCH) for x in range(PATCH)]
        patches = jnp.stack(rows, axis=3).reshape(len(batch), positions, positions, -1)
        centred = patches - patches.mean(-1, keepdims=True)
        patches = centred * jax.lax.rsqrt(centred.var(-1, keepdims=True) + 10 / 255**2)
        response = (patches - mean) @ matrix @ filters
        both = jnp.concatenate([jax.nn.relu(response - THRESHOLD), jax.nn.relu(-response - THRESHOLD)], -1)
        middle = (positions + 1) // 2
        quadrants = [
            both[:, a, b].mean((1, 2))
            for a in (slice(0, middle), slice(middle, None))
            for b in (slice(0, middle), slice(middle, None))
        ]
        return both.mean((1, 2)), jnp.concatenate(quadrants, -1)

    parts = [features(images[i : i + 100]) for i in range(0, len(images), 100)]
    return [np.concatenate([np.asarray(part[k]) for part in parts]) for k in (0, 1)]


def ridge_accuracy(train, train_labels, test, test_labels):
    """Percent right on test; the penalty comes from images held out of train."""
    import numpy as np

    mean, std = train.mean(0), train.std(0) + 1e-8
    train, test = (np.append((x - mean) / std, np.ones((len(x), 1)), 1).astype(np.float32) for x in (train, test))
    targets = 2.0 * np.eye(10)[train_labels] - 1

    def fits(x, y, penalties):
        gram, moments = x.T @ x, x.T @ y  # once: they are all the work
        return [np.linalg.solve(gram + p * len(x) * np.eye(len(gram)), moments) for p in penalties]

    def score(weights, x, labels):
        return 100 * float(np.mean(np.argmax(x @ weights, 1) == labels))

    candidates = fits(train[HELD_OUT:], targets[HELD_OUT:], PENALTIES)
    held = [score(weights, train[:HELD_OUT], train_labels[:HELD_OUT]) for weights in candidates]
    (weights,) = fits(train, targets, [PENALTIES[int(np.argmax(held))]])
    return score(weights, test, test_labels)


def main(argv: list[str]) -> int:
    commands.refuse_arguments(argv)

    def command(console):
        import numpy as np

        from jepa_jax.config.groups import DataConfig
        from jepa_jax.data.sources import open_source
        from jepa_jax.runtime.allocator import keep_freed_memory
        from jepa_jax.runtime.start import start_compile_cache

        keep_freed_memory()
        start_compile_cache()
        data = DataConfig(source="cifar10", dir=_DIR.value)
        splits = []
        for name in ("train", "test"):
            source = open_source(data, name)
            batch = source.batch(np.arange(len(source)))
            splits.append((batch["image"].astype(np.float32) / 255, batch["label"]))
        (train, train_labels), (test, test_labels) = splits
        rng = np.random.default_rng(_SEED.value)
        mean, matrix = whitening(sample_patches(train, 100_000, rng))
        filters = (sample_patches(train, FILTERS, rng) - mean) @ matrix
        filters = (filters / np.linalg.norm(filters, axis=1, keepdims=True)).T.astype(np.float32)
        mean, matrix = mean.astype(np.float32), matrix.astype(np.float32)
        pooled = [patch_features(images, mean, matrix, filters) for images in (train, test)]
        flat = [images.reshape(len(images), -1) for images in (train, test)]
        result = {
            "raw_pixels": ridge_accuracy(flat[0], train_labels, flat[1], test_labels),
            "whitened_patches_512": ridge_accuracy(pooled[0][0], train_labels, pooled[1][0], test_labels),
            "whitened_patches_2048": ridge_accuracy(pooled[0][1], train_labels, pooled[1][1], test_labels),
        }
        for name, accuracy in result.items():
            console.line(f"{name:<24} {accuracy:5.1f} %")
        return result

    return commands.run(command)


if __name__ == "__main__":
    commands.main(main)
