"""Compares the profiler's device shares with programs that compute only a part of a step, timed on their own.

  python profiling/check_device_shares.py [--rounds=20]

For a ResNet and a ViT step, it prints forward, backward and optimizer as read from recordings of single steps, beside
the CPU time of separately compiled programs, interleaved: the forward pass alone, forward and backward, the whole step.
A forward pass that is followed by a backward pass also stores what that one needs; `keeping` times it so (`jax.vjp`).
Then an optimizer does its work twice, which must show as a larger share of the optimizer. Timed figures are the minimum
over the rounds, those from recordings the median.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from unittest import mock

from random_images import build_on_random_images

from jepa_jax.base.console import Console
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser

if TYPE_CHECKING:
    import optax

    from jepa_jax.profiling.device_time import DeviceTime

ENCODERS = {
    "resnet": {"name": "resnet10", "stem": "cifar", "width": 16},
    "vit": {
        "name": "vit", "width": 96, "depth": 4, "heads": 3, "patch_size": 4,
        "pool": "mean", "cls_token": True, "positions": "learned",
    },
}  # fmt: skip
BATCH_SIZE, SMALL_BATCH, TOLERANCE = 24, 4, 8.0  # images, images, points of percent
LARGE_PROJECTOR = (1024, 1024, 256)  # makes the optimizer a large part of a small step


def add_flags(parser: Parser) -> None:
    parser.add_flag("rounds", "N", "interleaved rounds", 20, least=1)


class Running:
    """The program of quickstart with another encoder, which is trained and recorded step by step."""

    def __init__(self, encoder: str = "", *, batch_size: int, projector: tuple[int, ...] = (64, 64)):
        import jax

        from jepa_jax.profiling.compilations import CompiledStep
        from jepa_jax.program.config import load_config
        from jepa_jax.runtime.mesh import batch_sharding

        changes: dict[str, Any] = {
            "data.batch_size": batch_size,
            "data.augment.crop.size": 0,
            "method.views": 2,
            "method.projector": projector,
            **({"model": ENCODERS[encoder]} if encoder else {}),
        }
        self.program, batch = build_on_random_images(load_config("quickstart", changes), num_train=10 * batch_size)
        self.state = self.program.factory.create(0, batch)
        self.batch = jax.device_put(batch, batch_sharding(self.program.mesh))
        self.step = CompiledStep(self.program.train_step)
        self.step.compile(self.state, self.batch)
        for _ in range(2):
            jax.block_until_ready(self())

    def __call__(self) -> Any:
        self.state, metrics = self.step(self.state, self.batch)
        return metrics

    def recorded(self) -> "DeviceTime":
        """Returns the device time of one step."""
        import jax

        from jepa_jax.profiling.device_time import read_device_time
        from jepa_jax.profiling.trace import ShortTrace

        recording = ShortTrace()
        recording.start()
        jax.block_until_ready(self())
        found = read_device_time(recording.stop(), self.step.text(), steps=1)
        assert found is not None, "the recording does not contain the step"
        return found


def partial_programs(running: Running) -> list[Callable[[], Any]]:
    """Returns calls that compute a part of the step of `running` on its present parameters."""
    import jax
    import numpy as np
    from flax import nnx

    program, batch = running.program, running.batch

    def loss(params: Any, stats: Any) -> tuple[Any, Any]:
        model = program.factory.merge(params, stats)
        output = program.method.loss(model, None, batch, jax.random.key(0), np.int32(0))
        return output.loss, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))

    def keeping(params: Any, stats: Any) -> Any:
        return jax.vjp(lambda params: loss(params, stats), params)

    def call(function: Callable[..., Any]) -> Callable[[], Any]:
        compiled = jax.jit(function)
        return lambda: compiled(running.state.params["model"], running.state.stats)

    return [call(loss), call(keeping), call(jax.grad(loss, has_aux=True))]


def cpu_seconds(call: Callable[[], Any]) -> float:
    """Returns the CPU time of all threads, which contains nothing of other processes on the machine."""
    import jax

    start = time.process_time()
    jax.block_until_ready(call())
    return time.process_time() - start


def median_phases(recordings: Sequence["DeviceTime"]) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the median share of the step by phase, and the median seconds of each."""
    names = recordings[0].phases
    shares = {str(name): statistics.median(r.phases[name] for r in recordings) for name in names}
    seconds = {str(name): statistics.median(r.phases[name] * r.busy_seconds for r in recordings) for name in names}
    return shares, seconds


def shares_of(encoder: str, rounds: int) -> dict[str, dict[str, float]]:
    """Returns percent of the step by part: traced, timed, and timed with a forward pass that keeps its results."""
    running = Running(encoder, batch_size=BATCH_SIZE)
    calls: list[Callable[[], Any]] = [*partial_programs(running), running]
    for call in calls:
        cpu_seconds(call)
    times, recordings = [], []
    for _ in range(rounds):
        times.append([cpu_seconds(call) for call in calls])
        recordings.append(running.recorded())
    forward, keeping, both, whole = (min(column) for column in zip(*times, strict=True))

    def timed(first: float) -> dict[str, float]:
        parts = {"forward": first, "backward": both - first, "optimizer": whole - both}
        return {name: 100 * seconds / whole for name, seconds in parts.items()}

    traced = {name: 100 * share for name, share in median_phases(recordings)[0].items()}
    traced["forward"] += traced.pop("augment")  # the forward programs make their views too
    return {"traced": traced, "timed": timed(forward), "timed_keeping": timed(keeping)}


def working_twice(tx: "optax.GradientTransformation") -> "optax.GradientTransformation":
    """Returns an optimizer with the same updates that computes them twice."""
    import jax
    import optax

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        once, state = tx.update(grads, state, params)
        # Without the barrier both would be one pass over the same memory.
        once, state, grads = jax.lax.optimization_barrier((once, state, grads))
        again, state = tx.update(grads, state, params)
        return jax.tree.map(lambda a, b: (a + b) / 2, once, again), state

    return optax.GradientTransformation(tx.init, update)


def doubled_optimizer(rounds: int) -> dict[str, float]:
    """Returns share and seconds of the optimizer in a step, as it is and doing its work twice."""
    from jepa_jax.program import optim

    make = optim.make_optimizer

    def make_twice(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        tx, rate = make(*args, **kwargs)
        return working_twice(tx), rate

    plain = Running(batch_size=SMALL_BATCH, projector=LARGE_PROJECTOR)
    with mock.patch.object(optim, "make_optimizer", make_twice):
        slower = Running(batch_size=SMALL_BATCH, projector=LARGE_PROJECTOR)
    pairs = [(plain.recorded(), slower.recorded()) for _ in range(rounds)]
    once, twice = (median_phases(column) for column in zip(*pairs, strict=True))
    return {
        "share_once": 100 * once[0]["optimizer"],
        "share_twice": 100 * twice[0]["optimizer"],
        "seconds_once": once[1]["optimizer"],
        "seconds_twice": twice[1]["optimizer"],
    }


def check(arguments: Arguments, console: Console) -> Result:
    from jepa_jax.runtime.allocator import keep_freed_memory
    from jepa_jax.runtime.start import start_compile_cache

    keep_freed_memory()
    start_compile_cache()
    result: dict[str, Any] = {"rounds": arguments.rounds}
    for encoder in ENCODERS:
        found = result[encoder] = shares_of(encoder, arguments.rounds)
        for name in ("forward", "backward", "optimizer"):
            traced, timed, keeping = (found[kind][name] for kind in ("traced", "timed", "timed_keeping"))
            verdict = "agrees" if abs(traced - timed) <= TOLERANCE else "differs"
            console.line(
                f"{encoder:<8}{name:<12} traced {traced:5.1f} %   timed {timed:5.1f} %   "
                f"keeping {keeping:5.1f} %   {verdict}"
            )
    twice = result["doubled_optimizer"] = doubled_optimizer(arguments.rounds)
    shares = f"{twice['share_once']:.1f} and {twice['share_twice']:.1f} % of the step"
    times = f"{1e3 * twice['seconds_once']:.2f} and {1e3 * twice['seconds_twice']:.2f} ms"
    return Result([result], f"optimizer, once and twice: {shares}, {times}")


if __name__ == "__main__":
    sys.exit(Command("profiling/check_device_shares.py", __doc__, add_flags, check, program="python").main())
