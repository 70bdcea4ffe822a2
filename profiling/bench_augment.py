"""Augmented views a second: two views of random 32x32 images with the augmentation of the CIFAR-10 recipes.

python profiling/bench_augment.py
"""

import json
import os
import platform
import statistics
import time

import jax
import numpy as np
from absl import app, flags

from jepa_jax.config.groups import AugmentConfig, GrayscaleConfig, JitterConfig, SolarizeConfig
from jepa_jax.data.augment import augment_views

BATCH_SIZE = flags.DEFINE_integer("batch_size", 256, "Images in a batch.", lower_bound=1)
IMAGE_SIZE = flags.DEFINE_integer("image_size", 32, "Height and width of the images.", lower_bound=1)
VIEWS = flags.DEFINE_integer("views", 2, "Views of an image.", lower_bound=1)
REPEATS = flags.DEFINE_integer("repeats", 10, "Measurements; the result is their median.", lower_bound=1)
SECONDS = flags.DEFINE_float("seconds", 0.5, "Length of a measurement.", lower_bound=0.01)


def reference_augment() -> AugmentConfig:
    """Returns crop .2-1, jitter .4 .4 .2 .1 (p .8), grayscale .2, solarize .1, flip .5, normalise."""
    return AugmentConfig(
        jitter=JitterConfig(probability=0.8),
        grayscale=GrayscaleConfig(probability=0.2),
        solarize=SolarizeConfig(probability=0.1),
    )


def rates(step, key, images, views: int, seconds: float) -> tuple[float, float]:
    """Views per second of wall and of CPU time, a new key and a wait each step as in training."""
    wall, cpu, steps = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - wall < seconds:
        step(jax.random.fold_in(key, steps), images).block_until_ready()
        steps += 1
    done = steps * views * len(images)
    return done / (time.perf_counter() - wall), done / (time.process_time() - cpu)


def main(argv):
    del argv
    size, views = IMAGE_SIZE.value, VIEWS.value
    shape = (BATCH_SIZE.value, size, size, 3)
    images = jax.device_put(np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))
    key, config = jax.random.key(0), reference_augment()
    start = time.perf_counter()
    step = jax.jit(lambda key, images: augment_views(key, images, config, views))
    step(key, images).block_until_ready()
    compile_seconds = time.perf_counter() - start
    rates(step, key, images, views, SECONDS.value)  # warm-up

    print(f"{'repeat':>6} {'views/s':>10} {'views/CPU-s':>12}")
    measured = []
    for repeat in range(REPEATS.value):
        measured.append(rates(step, key, images, views, SECONDS.value))
        print(f"{repeat:6d} {measured[-1][0]:10,.0f} {measured[-1][1]:12,.0f}")
    wall, cpu = zip(*measured, strict=True)
    result = {
        "views_per_sec": round(statistics.median(wall), 1),
        "views_per_sec_min": round(min(wall), 1),
        "views_per_sec_max": round(max(wall), 1),
        "views_per_cpu_sec": round(statistics.median(cpu), 1),
        "views_per_cpu_sec_max": round(max(cpu), 1),
        "batch_size": BATCH_SIZE.value,
        "image_size": size,
        "views": views,
        "repeats": REPEATS.value,
        "compile_seconds": round(compile_seconds, 2),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {jax.devices()[0].device_kind}",
        "load_average": round(os.getloadavg()[0], 2),
        "jax": jax.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
