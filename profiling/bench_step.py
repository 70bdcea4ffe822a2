"""Times the training step of a config, and the same step with plain `lax.conv`, interleaved in one run.

  python profiling/bench_step.py --config=image_jepa --batch_size=64 --precision=float32

Both programs run the same method, augmentation, loss and optimizer on random images. The plain one is what JAX does out
of the box: `lax.conv`, and the C library's default handling of freed memory. Ours has the two parts of `jepa_jax` that
make steps fast on a CPU (models/conv.py and runtime/allocator.py). Rates are those of the median round; the JSON
contains all rounds.
"""

import contextlib
import dataclasses
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from random_images import build_on_random_images

from jepa_jax.base.console import Console
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser, config_from

if TYPE_CHECKING:
    import jax

    from jepa_jax.config.groups import Config


def add_flags(parser: Parser) -> None:
    parser.add_config()
    parser.add_flag("batch_size", "N", "images per step", 64, least=2)
    parser.add_choice("precision", ("float32", "bfloat16"), "what the model computes in", default="float32")
    parser.add_flag("repeats", "N", "timed rounds, each of which runs both programs once", 5, least=1)
    parser.add_flag("steps", "N", "steps per round", 1, least=1)


def lax_convolution(x: "jax.Array", kernel: "jax.Array", *, stride: int = 1, padding: int) -> "jax.Array":
    """Computes `jepa_jax.models.kernels.conv.conv2d` as XLA does by default."""
    import jax

    pads, order = [(padding, padding)] * 2, ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), pads, dimension_numbers=order)


@contextlib.contextmanager
def plain_convolution() -> Iterator[None]:
    """Traces models with `lax.conv_general_dilated` on every platform within a `with` block."""
    from unittest import mock

    from jepa_jax.models import patchnet, resnet, whitening

    with contextlib.ExitStack() as stack:
        for module in (patchnet, resnet, whitening):
            stack.enter_context(mock.patch.object(module, "conv2d", lax_convolution))
        yield


@dataclasses.dataclass
class StepProgram:
    """A compiled step with its state and a batch of random images."""

    step: Callable[..., Any]
    state: Any
    batch: Any
    first_step_seconds: float

    @classmethod
    def of(cls, config: "Config") -> "StepProgram":
        """Builds the program of a config and takes its first step, which compiles it."""
        import jax

        program, batch = build_on_random_images(config, num_train=50_000)
        start = time.perf_counter()
        state, metrics = program.train_step(program.factory.create(0, batch), batch)
        jax.block_until_ready(metrics)
        return cls(program.train_step, state, batch, time.perf_counter() - start)

    def timed_round(self, steps: int) -> tuple[float, float]:
        """Returns wall and CPU seconds per step."""
        import jax

        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready(metrics)
        return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps


def time_rounds(
    programs: dict[str, StepProgram], repeats: int, steps: int, console: Console
) -> dict[str, list[tuple[float, float]]]:
    """Returns wall and CPU seconds per step of each program in each round."""
    from jepa_jax.runtime.allocator import keep_freed_memory

    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    for i in range(repeats):
        # The order alternates, so that a slow minute of the machine does not always meet the same program.
        for name in list(programs)[:: 1 if i % 2 == 0 else -1]:
            keep_freed_memory(name == "ours")
            programs[name].timed_round(1)  # settles the heap after the change; not counted
            wall, cpu = programs[name].timed_round(steps)
            rounds[name].append((wall, cpu))
            console.line(f"round {i + 1}: {name:<9} {wall:7.3f} s per step, {cpu:7.3f} CPU s")
    return rounds


def bench(arguments: Arguments, console: Console) -> Result:
    import jax

    from jepa_jax.program.config import changed_config
    from jepa_jax.runtime.provenance import environment
    from jepa_jax.runtime.start import setup

    own = {"data.batch_size": arguments.batch_size, "train.precision": arguments.precision}
    config = changed_config(config_from(arguments), own)
    setup(config)
    with plain_convolution():
        plain = StepProgram.of(config)
    ours = StepProgram.of(config)
    console.line(f"compiled: ours {ours.first_step_seconds:.0f} s, lax.conv {plain.first_step_seconds:.0f} s")
    rounds = time_rounds({"ours": ours, "lax_conv": plain}, arguments.repeats, arguments.steps, console)
    wall = {name: statistics.median(wall for wall, _ in times) for name, times in rounds.items()}
    cpu = {name: statistics.median(cpu for _, cpu in times) for name, times in rounds.items()}
    machine = environment()
    result = {
        "images_per_sec": config.data.batch_size / wall["ours"],
        "lax_conv_images_per_sec": config.data.batch_size / wall["lax_conv"],
        "ratio": wall["lax_conv"] / wall["ours"],
        "cpu_time_ratio": cpu["lax_conv"] / cpu["ours"],
        "rounds": rounds,
        "batch_size": config.data.batch_size,
        "precision": config.train.precision,
        "device": jax.devices()[0].device_kind,
        "machine": platform.machine(),
        "cores": machine["cores"],
        "processor": machine["processor"],
    }
    text = (
        f"{result['images_per_sec']:.1f} images/s, with lax.conv {result['lax_conv_images_per_sec']:.1f}; "
        f"ratio {result['ratio']:.2f}, of CPU times {result['cpu_time_ratio']:.2f}"
    )
    return Result([result], text)


if __name__ == "__main__":
    sys.exit(Command("profiling/bench_step.py", __doc__, add_flags, bench, program="python").main())
