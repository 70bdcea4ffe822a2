"""Device shares of the profiler against programs that do only a part of a step, timed on their own.

    python profiling/check_device_shares.py

For a ResNet and a ViT step: forward, backward and optimizer as read from recordings of single steps, beside the CPU
time of separately compiled programs, interleaved: the forward pass alone, forward and backward, the whole step. A
forward pass that is followed by a backward pass also stores what that one needs; `keeping` times it so (`jax.vjp`).
Then an optimizer that does its work twice, which must show as more of the optimizer. Timed figures are the least of the
rounds, those from recordings medians.
"""

import pathlib

from absl import flags

from jepa_jax.cli import commands

_ROUNDS = flags.DEFINE_integer("rounds", 20, "Interleaved rounds.", lower_bound=1)

ENCODERS = {
    "resnet": {"name": "resnet10", "stem": "cifar", "width": 16},
    "vit": {
        "name": "vit", "width": 96, "depth": 4, "heads": 3, "patch_size": 4,
        "pool": "mean", "cls_token": True, "positions": "learned",
    },
}  # fmt: skip
BATCH_SIZE, SMALL_BATCH, TOLERANCE = 24, 4, 8.0  # images, images, points of percent
CONFIG = pathlib.Path(__file__).parents[1] / "configs" / "quickstart.py"
LARGE_PROJECTOR = (1024, 1024, 256)  # makes the optimizer a large part of a small step


def build(model=None, *, batch_size, projector=(64, 64)):
    import jax
    import numpy as np
    from ml_collections import ConfigDict

    from jepa_jax.config.schema import load_config_file
    from jepa_jax.program.build import build_program
    from jepa_jax.runtime.mesh import batch_sharding, make_mesh

    config = load_config_file(str(CONFIG))
    config.data.batch_size, config.data.augment.crop.size = batch_size, 0
    config.method.views, config.method.projector = 2, projector
    if model:
        config.model = ConfigDict(model)
    mesh = make_mesh(1, 1)
    images = np.random.default_rng(0).integers(0, 256, (batch_size, 32, 32, 3), np.uint8)
    program = build_program(config, num_train=10 * batch_size, num_classes=10, sample=images, mesh=mesh)
    batch = {"image": images, "label": np.zeros(batch_size, np.int32)}
    return program, program.factory.create(0, images), jax.device_put(batch, batch_sharding(mesh))


class Running:
    """A program that is trained and recorded step by step."""

    def __init__(self, program, state, batch):
        import jax

        from jepa_jax.profiling.compilations import CompiledStep

        self.program, self.state, self.batch = program, state, batch
        self.step = CompiledStep(program.train_step)
        self.step.compile(state, batch)
        for _ in range(2):
            jax.block_until_ready(self())

    def __call__(self):
        self.state, metrics = self.step(self.state, self.batch)
        return metrics

    def recorded(self):
        import jax

        from jepa_jax.profiling.device_time import read_device_time
        from jepa_jax.profiling.trace import ShortTrace

        recording = ShortTrace()
        recording.start()
        jax.block_until_ready(self())
        return read_device_time(recording.stop(), self.step.text(), steps=1)


def partial_programs(running):
    """Calls that compute a part of the step of `running` on its present parameters."""
    import jax
    import numpy as np
    from flax import nnx

    program, batch = running.program, running.batch

    def loss(params, stats):
        model = nnx.merge(program.factory.graphdef, params, stats, copy=True)
        output = program.method.loss(model, None, batch, jax.random.key(0), np.int32(0))
        return output.loss, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))

    def keeping(params, stats):
        return jax.vjp(lambda params: loss(params, stats), params)

    def call(function):
        compiled = jax.jit(function)
        return lambda: compiled(running.state.params["model"], running.state.stats)

    return call(loss), call(keeping), call(jax.grad(loss, has_aux=True))


def cpu_seconds(call):
    """CPU time of all threads: another process on the machine is no part of it."""
    import time

    import jax

    start = time.process_time()
    jax.block_until_ready(call())
    return time.process_time() - start


def median_phases(recordings):
    """Median share of the step by phase, and median seconds of each."""
    import statistics

    names = recordings[0].phases
    shares = {name: statistics.median(r.phases[name] for r in recordings) for name in names}
    return shares, {name: statistics.median(r.phases[name] * r.busy_seconds for r in recordings) for name in names}


def shares_of(encoder, rounds):
    """Percent of the step by part: traced, timed, and timed with a forward pass that keeps what the backward needs."""
    running = Running(*build(ENCODERS[encoder], batch_size=BATCH_SIZE))
    calls = [*partial_programs(running), running]
    for call in calls:
        cpu_seconds(call)
    times, recordings = [], []
    for _ in range(rounds):
        times.append([cpu_seconds(call) for call in calls])
        recordings.append(running.recorded())
    forward, keeping, both, whole = (min(column) for column in zip(*times, strict=True))

    def timed(first):
        parts = {"forward": first, "backward": both - first, "optimizer": whole - both}
        return {name: 100 * seconds / whole for name, seconds in parts.items()}

    traced = {name: 100 * share for name, share in median_phases(recordings)[0].items()}
    traced["forward"] += traced.pop("augment")  # the forward programs make their views too
    return {"traced": traced, "timed": timed(forward), "timed_keeping": timed(keeping)}


def doubled_optimizer(rounds):
    """Seconds of the optimizer in a step, as it is and doing its work twice."""
    import jax
    import optax

    from jepa_jax.program import optim

    make = optim.make_optimizer

    def make_twice(*args, **kwargs):
        tx, rate = make(*args, **kwargs)

        def update(grads, state, params):
            once, state = tx.update(grads, state, params)
            # Without the barrier both would be one pass over the same memory.
            once, state, grads = jax.lax.optimization_barrier((once, state, grads))
            again, state = tx.update(grads, state, params)
            return jax.tree.map(lambda a, b: (a + b) / 2, once, again), state

        return optax.GradientTransformation(tx.init, update), rate

    options = {"batch_size": SMALL_BATCH, "projector": LARGE_PROJECTOR}
    plain = Running(*build(**options))
    optim.make_optimizer = make_twice
    try:
        slower = Running(*build(**options))
    finally:
        optim.make_optimizer = make
    pairs = [(plain.recorded(), slower.recorded()) for _ in range(rounds)]
    once, twice = (median_phases(column) for column in zip(*pairs, strict=True))
    return {
        "share_once": 100 * once[0]["optimizer"],
        "share_twice": 100 * twice[0]["optimizer"],
        "seconds_once": once[1]["optimizer"],
        "seconds_twice": twice[1]["optimizer"],
    }


def main(argv):
    commands.refuse_arguments(argv)

    def command(console):
        from jepa_jax.runtime.allocator import keep_freed_memory
        from jepa_jax.runtime.start import start_compile_cache

        keep_freed_memory()
        start_compile_cache()
        result = {"rounds": _ROUNDS.value}
        for encoder in ENCODERS:
            found = result[encoder] = shares_of(encoder, _ROUNDS.value)
            for name in ("forward", "backward", "optimizer"):
                traced, timed, keeping = (found[kind][name] for kind in ("traced", "timed", "timed_keeping"))
                verdict = "agrees" if abs(traced - timed) <= TOLERANCE else "differs"
                console.line(
                    f"{encoder:<8}{name:<12} traced {traced:5.1f} %   timed {timed:5.1f} %   "
                    f"keeping {keeping:5.1f} %   {verdict}"
                )
        twice = result["doubled_optimizer"] = doubled_optimizer(_ROUNDS.value)
        console.line(
            f"optimizer, once and twice: {twice['share_once']:.1f} and {twice['share_twice']:.1f} % of the step, "
            f"{1e3 * twice['seconds_once']:.2f} and {1e3 * twice['seconds_twice']:.2f} ms"
        )
        return result

    return commands.run(command)


if __name__ == "__main__":
    commands.main(main)
