"""What the profiler costs: the same training with and without it, in turns, in one process.

    python profiling/bench_overhead.py

Two sessions of one run, one profiled, train with the same compiled step and take turns: a quarter of an epoch of one, a
quarter of the other, the order changing each time. The profiled one is as long as a run of `quickstart`, so it holds
everything a run has: the clock of the device, the monitor, a recording of two steps, the account of each epoch and what
is written of it.
The small case is a step of a few milliseconds, where everything that is paid for each step weighs most. The overhead is
the mean over pairs of epochs of CPU time (all threads of the process) with its 95 % interval; wall time is printed too.
"""

import pathlib
import statistics
import tempfile
import time

from absl import flags

from jepa_jax.cli import commands

_PAIRS = flags.DEFINE_integer("pairs", 12, "Pairs of epochs.", lower_bound=2)
_CASES = flags.DEFINE_list("cases", ["quickstart", "small"], "Which of quickstart and small to run.")
PARTS = 4  # of an epoch, that take turns
CONFIG = pathlib.Path(__file__).parents[1] / "configs" / "quickstart.py"


class StopWatch:
    """A clock that stands still while it is not this session's turn."""

    def __init__(self):
        self._elapsed, self._since = 0.0, None

    def __call__(self):
        return self._elapsed + (0.0 if self._since is None else time.perf_counter() - self._since)

    def run(self):
        self._since = time.perf_counter()

    def stop(self):
        self._elapsed, self._since = self(), None


def make_config(case, pairs):
    from ml_collections import ConfigDict

    from jepa_jax.config.schema import load_config_file

    config = load_config_file(str(CONFIG))
    if case == "small":
        config.model = ConfigDict(
            {"name": "patchnet", "patch_size": 4, "stride": 2, "stem_width": 32, "widths": (64, 128)}
        )
        config.method.views = 2
        config.data.batch_size, config.data.num_train = 32, 32 * 128
    config.optim.epochs = float(pairs + 2)
    return config


class Arm:
    """A session that trains an epoch at a time."""

    def __init__(self, config, program, source, compiled, folder, stack):
        from jepa_jax.base.console import Console
        from jepa_jax.data.pipeline import train_batches
        from jepa_jax.program.workdir import Workdir
        from jepa_jax.runtime.mesh import batch_sharding
        from jepa_jax.train.session import Session

        self.watch, self.step, self.length = StopWatch(), 0, program.length
        workdir = Workdir(folder)
        workdir.check(config.to_dict(), "never")
        quiet = Console(stack.enter_context(open(pathlib.Path(folder) / "console.txt", "w")))
        self.session = stack.enter_context(Session(config, workdir, program.length, quiet, clock=self.watch))
        sample = source.batch(range(config.data.batch_size))["image"]
        self.state = self.session.restore_or(lambda: program.factory.create(0, sample), program)
        self.session.train_step = compiled  # one program for both
        if self.session.profiler is not None:
            self.session.profiler.compiled = compiled
            self.session.profiler.monitor.stop()
        self.batches = stack.enter_context(
            train_batches(config.data, source, seed=0, sharding=batch_sharding(program.mesh))
        )
        self.started = False

    def part_of_epoch(self):
        """Wall and CPU seconds of a part of an epoch, with everything that the loop does around its steps."""
        session, profiler, whole = self.session, self.session.profiler, self.length.steps_per_epoch
        wall, cpu = time.perf_counter(), time.process_time()
        self.watch.run()
        if profiler is not None:
            profiler.monitor.start()
        if not self.started:
            session.start_loop()
            self.started = True
        end = self.step + whole // PARTS
        while self.step < end:
            session.before_step(self.step)
            with session.timeline.section("data_wait"):
                batch, info = next(self.batches)
            self.state = session.dispatch(self.step + 1, self.state, batch, info)
            self.step += 1
            quiet = self.step == end or session.wants_quiet(self.step)  # no step runs on into the other's turn
            session.read_metrics(all_but=0 if quiet else 1)
            session.after_step(self.step)
        if self.step % whole == 0:
            session.close_epoch(self.step)
        if profiler is not None:
            profiler.monitor.stop()
        self.watch.stop()
        return time.perf_counter() - wall, time.process_time() - cpu


def epoch_in_turns(arms, first):
    """Wall and CPU seconds of an epoch of each arm; parts of epochs take turns, so that a slow moment meets both."""
    spent = {name: (0.0, 0.0) for name in arms}
    for part in range(PARTS):
        for name in list(arms)[:: 1 if (part + first) % 2 == 0 else -1]:
            wall, cpu = arms[name].part_of_epoch()
            spent[name] = spent[name][0] + wall, spent[name][1] + cpu
    return spent


def interval(values):
    """Mean and 95 % t interval."""
    from scipy import stats

    mean = statistics.fmean(values)
    half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    return {"mean": mean, "low": mean - half, "high": mean + half}


def bench(case, pairs, console):
    import contextlib

    import numpy as np

    from jepa_jax.config.schema import validate
    from jepa_jax.data.sources import open_source
    from jepa_jax.profiling.compilations import CompiledStep
    from jepa_jax.program.build import build_program
    from jepa_jax.runtime.start import setup

    config = make_config(case, pairs)
    validate(config)
    mesh = setup(config)
    source = open_source(config.data, "train")
    sample = source.batch(np.arange(config.data.batch_size))["image"]
    program = build_program(
        config, num_train=len(source), num_classes=len(source.classes), sample=sample, mesh=mesh
    )  # fmt: skip
    compiled, rounds = CompiledStep(program.train_step), []
    with contextlib.ExitStack() as stack:
        arms = {}
        for name in ("on", "off"):
            config.profile.enabled = name == "on"
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench_overhead_"))
            arms[name] = Arm(config.copy_and_resolve_references(), program, source, compiled, folder, stack)
        for _ in range(PARTS):
            arms["off"].part_of_epoch()  # compiles, and fills caches; not counted
        for i in range(pairs):
            rounds.append(epoch_in_turns(arms, i))
            console.line(
                f"{case} pair {i + 1}: "
                + "  ".join(f"{name} {wall:.3f} s, {cpu:.3f} CPU s" for name, (wall, cpu) in rounds[-1].items())
            )
        profile = arms["on"].session.profiler.summary()
    steps = program.length.steps_per_epoch
    result = {
        f"{clock}_overhead_percent": interval([100 * (r["on"][k] / r["off"][k] - 1) for r in rounds])
        for k, clock in enumerate(("wall", "cpu"))
    }
    for k, clock in enumerate(("wall", "cpu")):  # all epochs together: a recording counts as often as there was one
        together = sum(r["on"][k] for r in rounds) / sum(r["off"][k] for r in rounds)
        result[f"{clock}_overhead_percent_together"] = 100 * (together - 1)
    result |= {
        "pairs": pairs,
        "steps_per_epoch": steps,
        "step_milliseconds": 1e3 * statistics.median(r["off"][0] for r in rounds) / steps,
        "recordings": sum(epoch["traced"] for epoch in profile["epochs"]),
        "profiler_seconds": profile["profiler_seconds"],
        "rounds": rounds,
    }
    for clock in ("cpu", "wall"):
        figures = result[f"{clock}_overhead_percent"]
        console.line(
            f"{case}: {result['step_milliseconds']:.1f} ms a step; {clock} overhead {figures['mean']:+.2f} % "
            f"({figures['low']:+.2f} .. {figures['high']:+.2f}), of all epochs together "
            f"{result[f'{clock}_overhead_percent_together']:+.2f} %"
        )
    return result


def main(argv: list[str]) -> int:
    commands.refuse_arguments(argv)

    def command(console):
        from jepa_jax.runtime.provenance import environment

        results = {case: bench(case, _PAIRS.value, console) for case in _CASES.value}
        environment = environment()
        return results | {key: environment[key] for key in ("devices", "processor", "cores", "jax")}

    return commands.run(command)


if __name__ == "__main__":
    commands.main(main)
