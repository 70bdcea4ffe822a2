"""Times the training step of a config, and the same step with plain `lax.conv`, interleaved in one run.

    python profiling/bench_step.py --config=configs/image_jepa.py --batch_size=64 --precision=float32

Both programs run the same method, augmentation, loss and optimizer on random images. The plain one is what JAX does out
of the box: `lax.conv`, and the C library's own way with freed memory; ours has both parts of `jepa_jax` that make steps
fast on a CPU (models/conv.py, memory.py). Rates are of the median round; all rounds are in the JSON.
"""

import contextlib
import platform
import statistics
import time

from absl import flags
from ml_collections import config_flags

from jepa_jax.cli import commands

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file; --config.group.key=value overrides.")
_BATCH = flags.DEFINE_integer("batch_size", 64, "Images a step.", lower_bound=2)
_PRECISION = flags.DEFINE_enum("precision", "float32", ["float32", "bfloat16"], "What the model computes in.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed rounds; each runs both programs once.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 1, "Steps a round.", lower_bound=1)
flags.mark_flags_as_required(["config"])


@contextlib.contextmanager
def plain_convolution():
    """While it is open, models are traced with `lax.conv_general_dilated` on every platform."""
    import jax

    from jepa_jax.models import patchnet, resnet

    def plain(x, kernel, *, stride=1, padding):
        pads = [(padding, padding)] * 2
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), pads, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    fast = resnet.conv2d
    resnet.conv2d = patchnet.conv2d = plain
    try:
        yield
    finally:
        resnet.conv2d = patchnet.conv2d = fast


def build(config):
    """A compiled step, its state and a batch of random images."""
    import jax
    import numpy as np

    from jepa_jax.program.build import build_program
    from jepa_jax.runtime.mesh import make_mesh

    size, count = config.data.image_size, config.data.batch_size
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (count, size, size, 3), np.uint8)
    batch = {"image": images, "label": rng.integers(0, 10, count).astype(np.int32)}
    program = build_program(config, num_train=50_000, num_classes=10, sample=images, mesh=make_mesh(1, 1))
    step, factory = program.train_step, program.factory
    start = time.perf_counter()
    state, metrics = step(factory.create(0, images), batch)
    jax.block_until_ready(metrics)
    return {"step": step, "state": state, "batch": batch, "first_step_seconds": time.perf_counter() - start}


def timed_round(program, steps):
    """Wall and CPU seconds a step."""
    import jax

    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        program["state"], metrics = program["step"](program["state"], program["batch"])
    jax.block_until_ready(metrics)
    return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps


def main(argv: list[str]) -> int:
    commands.refuse_arguments(argv)

    def command(console):
        import jax

        from jepa_jax.config.schema import validate
        from jepa_jax.runtime.allocator import keep_freed_memory
        from jepa_jax.runtime.provenance import environment
        from jepa_jax.runtime.start import setup

        config = _CONFIG.value
        config.data.batch_size, config.train.precision = _BATCH.value, _PRECISION.value
        validate(config)
        setup(config)
        with plain_convolution():
            lax_conv = build(config)
        ours = build(config)
        console.line(
            f"compiled: ours {ours['first_step_seconds']:.0f} s, lax.conv {lax_conv['first_step_seconds']:.0f} s"
        )
        rounds: dict[str, list] = {"ours": [], "lax_conv": []}
        for i in range(_REPEATS.value):
            # The order alternates, so that a slow minute of the machine does not always meet the same program.
            for name, program in [("ours", ours), ("lax_conv", lax_conv)][:: 1 if i % 2 == 0 else -1]:
                keep_freed_memory(name == "ours")
                timed_round(program, 1)  # settles the heap after the change; not counted
                rounds[name].append(timed_round(program, _STEPS.value))
                console.line(
                    f"round {i + 1}: {name:<9} {rounds[name][-1][0]:7.3f} s a step, {rounds[name][-1][1]:7.3f} CPU s"
                )
        wall = {name: statistics.median(wall for wall, _ in times) for name, times in rounds.items()}
        cpu = {name: statistics.median(cpu for _, cpu in times) for name, times in rounds.items()}
        return {
            "images_per_sec": config.data.batch_size / wall["ours"],
            "lax_conv_images_per_sec": config.data.batch_size / wall["lax_conv"],
            "ratio": wall["lax_conv"] / wall["ours"],
            "cpu_time_ratio": cpu["lax_conv"] / cpu["ours"],
            "rounds": rounds,
            "batch_size": config.data.batch_size,
            "precision": config.train.precision,
            "device": jax.devices()[0].device_kind,
            "machine": platform.machine(),
            "cores": environment()["cores"],
            "processor": environment()["processor"],
        }

    return commands.run(command)


if __name__ == "__main__":
    commands.main(main)
