"""The loader and the augmentation in a plain JAX program, without a config.

    python docs/examples/load_own_data.py

Batch n depends on the seed and n alone: any number of workers gives the same one, and `start=n` goes on from there.
"""

import jax
import numpy as np

from jepa_jax import data
from jepa_jax.config.augment import AugmentConfig


def main(steps=4, workers=2):
    rng = np.random.default_rng(0)
    images = {"image": rng.integers(0, 256, (512, 32, 32, 3), np.uint8), "label": np.arange(512) % 10}
    batches = data.batch_dataset(data.as_source(images), 64, seed=0)  # a grain.MapDataset: batches[n] is batch n
    augment = AugmentConfig(mean=(0.5,) * 3, std=(0.25,) * 3)
    views = jax.jit(lambda key, images: data.augment_views(key, images, augment, 2))
    means = []
    with data.load_batches(batches, num_workers=workers) as loaded:  # laid out over all devices, ahead of time
        for n in range(steps):
            batch, info = next(loaded)
            means.append(float(views(jax.random.key(n), batch["image"]).mean()))
            print(f"step {n}: mean {means[-1]:+.3f}, waited {1000 * info['wait_seconds']:.1f} ms")
    return means


if __name__ == "__main__":  # worker processes import this file
    main()
