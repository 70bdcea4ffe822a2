"""Measures augmented views per second: two views of random images with the augmentation of the CIFAR-10 recipes.

  python profiling/bench_augment.py [--batch_size=256] [--image_size=32] [--repeats=10]

Figures are medians of the repeats, per second of wall time and per second of CPU time.
"""

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from jepa_jax.base.console import Console
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser

if TYPE_CHECKING:
    from jepa_jax.config.augment import AugmentConfig


def add_flags(parser: Parser) -> None:
    parser.add_flag("batch_size", "N", "images per batch", 256, least=1)
    parser.add_flag("image_size", "N", "height and width of the images", 32, least=1)
    parser.add_flag("views", "N", "views per image", 2, least=1)
    parser.add_flag("repeats", "N", "measurements, of which the median is the result", 10, least=1)
    parser.add_flag("seconds", "SECONDS", "length of a measurement", 0.5, least=0.01)


def reference_augment() -> "AugmentConfig":
    """Returns crop .2-1, jitter .4 .4 .2 .1 (p .8), grayscale .2, solarize .1, flip .5, normalise."""
    from jepa_jax.config.augment import AugmentConfig, GrayscaleConfig, JitterConfig, SolarizeConfig

    return AugmentConfig(
        jitter=JitterConfig(probability=0.8),
        grayscale=GrayscaleConfig(probability=0.2),
        solarize=SolarizeConfig(probability=0.1),
    )


def rates(step: Callable[..., Any], key: Any, images: Any, views: int, seconds: float) -> tuple[float, float]:
    """Returns views per second of wall and of CPU time; each step has a new key and is waited for."""
    import jax

    wall, cpu, steps = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - wall < seconds:
        step(jax.random.fold_in(key, steps), images).block_until_ready()
        steps += 1
    done = steps * views * len(images)
    return done / (time.perf_counter() - wall), done / (time.process_time() - cpu)


def bench(arguments: Arguments, console: Console) -> Result:
    import jax

    from jepa_jax.data.augment import augment_views

    size, views = arguments.image_size, arguments.views
    shape = (arguments.batch_size, size, size, 3)
    images = jax.device_put(np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))
    key, config = jax.random.key(0), reference_augment()
    start = time.perf_counter()
    step = jax.jit(lambda key, images: augment_views(key, images, config, views))
    step(key, images).block_until_ready()
    compile_seconds = time.perf_counter() - start
    rates(step, key, images, views, arguments.seconds)  # warm-up

    measured = []
    for repeat in range(arguments.repeats):
        measured.append(rates(step, key, images, views, arguments.seconds))
        console.line(
            f"repeat {repeat + 1}: {measured[-1][0]:,.0f} views/s, {measured[-1][1]:,.0f} views per CPU second"
        )
    wall, cpu = zip(*measured, strict=True)
    result = {
        "views_per_sec": round(statistics.median(wall), 1),
        "views_per_sec_min": round(min(wall), 1),
        "views_per_sec_max": round(max(wall), 1),
        "views_per_cpu_sec": round(statistics.median(cpu), 1),
        "views_per_cpu_sec_max": round(max(cpu), 1),
        "batch_size": arguments.batch_size,
        "image_size": size,
        "views": views,
        "repeats": arguments.repeats,
        "compile_seconds": round(compile_seconds, 2),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {jax.devices()[0].device_kind}",
        "load_average": round(os.getloadavg()[0], 2),
        "jax": jax.__version__,
    }
    return Result([result], f"median {result['views_per_sec']:,.0f} views/s ({min(wall):,.0f} to {max(wall):,.0f})")


if __name__ == "__main__":
    sys.exit(Command("profiling/bench_augment.py", __doc__, add_flags, bench, program="python").main())
