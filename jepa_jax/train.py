"""The training loop: one for every method.

It dispatches step n and only then reads the metrics of step n - 1, so the device always has work queued and never
waits for the host. Checkpoints and evaluations happen between two steps.
"""

import collections
import contextlib
import dataclasses
import math
import pathlib
from typing import Any

import jax
import numpy as np

from jepa_jax import optim, runtime
from jepa_jax.checkpoint import Checkpoints, params_sha256
from jepa_jax.config import validate
from jepa_jax.data.pipeline import train_batches
from jepa_jax.data.sources import Source, open_source
from jepa_jax.errors import Diverged, UserError
from jepa_jax.evals.baselines import published_baselines
from jepa_jax.evals.schedule import Evaluator
from jepa_jax.files import write_json
from jepa_jax.interrupt import Interrupted, InterruptFlag
from jepa_jax.methods import build_method
from jepa_jax.pictures import example_views, save_views
from jepa_jax.profiling.compilations import CompilationCounter
from jepa_jax.profiling.speed import Speedometer, Usage, peak_memory_bytes
from jepa_jax.profiling.timers import Timeline
from jepa_jax.report import write_report
from jepa_jax.step import make_train_step, state_factory
from jepa_jax.workdir import Workdir
from jepa_jax.writers import Console, open_writers

INIT_IMAGES = 1024  # that a method may look at to initialise itself
PICTURED_IMAGES = 8  # in the picture of augmented views


@dataclasses.dataclass(frozen=True)
class Length:
    """How long a run is."""

    steps_per_epoch: int
    total_steps: int

    @classmethod
    def of(cls, config: Any, num_train: int) -> "Length":
        if config.data.batch_size > num_train:
            raise UserError(
                f"config.data.batch_size = {config.data.batch_size}: the train split has {num_train} images; "
                "use a smaller batch"
            )
        steps_per_epoch = num_train // config.data.batch_size
        total_steps = config.train.max_steps or max(1, round(config.optim.epochs * steps_per_epoch))
        return cls(steps_per_epoch, total_steps)


def train(config: Any, workdir: str | pathlib.Path, *, resume: str = "auto", console: Console) -> dict[str, Any]:
    """Trains as `config` says in `workdir`, from its newest checkpoint if there is one; returns the summary.

    Raises:
        UserError: something to fix; before anything is compiled where possible.
        Diverged: the loss became NaN or infinite.
        Interrupted: SIGINT or SIGTERM; a checkpoint of the last step is on disk.
    """
    validate(config)
    folder = Workdir(workdir)
    folder.open(config.to_dict(), resume)
    summary = folder.read_summary()
    if summary and summary["status"] == "finished":
        console.line(f"{folder.path}: finished already; nothing to do")
        return summary

    mesh = runtime.setup(config)
    runtime.check_batch(config, mesh)
    sources = open_source(config.data, "train"), open_source(config.data, "test")
    length = Length.of(config, len(sources[0]))
    write_json(folder.environment, runtime.environment())

    method = build_method(config)
    tx, learning_rate = optim.make_optimizer(
        config.optim, batch_size=config.data.batch_size,
        steps_per_epoch=length.steps_per_epoch, total_steps=length.total_steps,
    )  # fmt: skip
    sample = first_images(sources[0], INIT_IMAGES)
    factory = state_factory(method, tx, sample=sample, num_classes=len(sources[0].classes), mesh=mesh)
    train_step = make_train_step(
        method, tx, factory, accum_steps=config.train.accum_steps, learning_rate=learning_rate, mesh=mesh
    )

    with contextlib.ExitStack() as stack:
        stack.callback(console.stop)
        interrupt = stack.enter_context(InterruptFlag())
        compilations = stack.enter_context(CompilationCounter())
        checkpoints = stack.enter_context(Checkpoints(folder.checkpoints, config.train.checkpoint_keep))
        if checkpoints.latest_step() is None:
            state, progress = factory.create(config.train.seed, sample), new_progress()
            save_views(
                folder.views, sample[:PICTURED_IMAGES], example_views(method, sample[:PICTURED_IMAGES]),
                config.data.augment.mean, config.data.augment.std,
            )  # fmt: skip
        else:
            state, progress = checkpoints.restore(factory.abstract)
            console.line(f"resumed at step {progress['step']} of {length.total_steps} in {folder.path}")
        step = progress["step"]

        timeline = Timeline()
        usage = Usage(progress["wall_seconds"], progress["cpu_seconds"])
        speed = Speedometer(timeline, config.data.batch_size)
        writers = [stack.enter_context(writer) for writer in open_writers(folder, config, step)]

        def on_images(count: int) -> None:
            console.advance(count)
            interrupt.check()

        evaluator = Evaluator(
            config.eval, method, factory, mesh, sources,
            smoke=length.total_steps < length.steps_per_epoch, on_images=on_images,
        )  # fmt: skip
        batches = stack.enter_context(
            train_batches(
                config.data, sources[0], seed=config.train.seed, sharding=runtime.batch_sharding(mesh), start_step=step,
                process_index=jax.process_index(), process_count=jax.process_count(),
            )
        )  # fmt: skip

        def log(at: int, group: str, values: dict[str, Any]) -> None:
            row = {f"{group}/{name}": value for name, value in values.items()}
            for writer in writers:
                writer.write(at, {"epoch": at / length.steps_per_epoch, "time": usage.wall_seconds(), **row})

        def save() -> None:
            with timeline.section("checkpoint"):
                rate = speed.since("run")["images_per_sec"] or progress["images_per_sec"]
                progress.update(usage.totals(), step=step, images_per_sec=rate)
                checkpoints.save(step, state, progress)

        def measure(what: str, images: int, figures: Any) -> Any:
            """Runs an evaluation under its own progress bar."""
            with timeline.section("validation"):
                console.start(what, images)
                result = figures()
            console.start("train", length.total_steps, step)
            return result

        def leave_summary(status: str, **more: Any) -> None:
            """The summary and report of a run, finished or not."""
            summary = {
                "status": status,
                "untrained_probe_accuracy": progress["untrained_probe_accuracy"],
                "num_classes": len(sources[0].classes),
                "baselines": published_baselines(config.data.source),
                "images_per_sec": speed.since("run")["images_per_sec"] or progress["images_per_sec"],
                **usage.totals(),
                "steps": step,
                "epochs": step / length.steps_per_epoch,
                "peak_memory_bytes": peak_memory_bytes(),
                "skipped_images": progress["skipped_images"],
                "host_seconds": timeline.seconds(),
                **more,
            }
            write_json(folder.summary, summary)
            write_report(folder.path)

        pending: collections.deque = collections.deque()  # steps whose metrics are still on the device

        def read_pending(keep: int) -> dict[str, float] | None:
            """Reads all but the newest `keep` steps; their figures go to the progress bar and the writers."""
            values = None
            while len(pending) > keep:
                at, metrics = pending.popleft()
                with timeline.section("device_wait"):
                    values = {name: float(value) for name, value in jax.device_get(metrics).items()}
                require_finite(at, values, checkpoints.latest_step(), folder)
                speed.completed(at)
                with timeline.section("logging"):
                    console.advance(1, bar_note(values, speed))
                    if at % config.log.every_steps == 0 or at == length.total_steps:
                        log(at, "train", values)
                        log(at, "speed", speed.next_window())
            return values

        try:
            if config.eval.untrained and progress["untrained_probe_accuracy"] is None:
                accuracy = measure("untrained encoder", evaluator.num_images, lambda: evaluator.untrained(state))
                progress["untrained_probe_accuracy"] = accuracy
                console.line(f"untrained encoder: linear probe {accuracy:.1f} %")
            console.start("train", length.total_steps, step)
            step_compilations = 0
            while step < length.total_steps:
                with timeline.section("data_wait"):
                    batch, info = next(batches)
                compiled = compilations.count
                with timeline.section("dispatch"):
                    state, metrics = train_step(state, batch)
                step += 1
                pending.append((step, metrics))
                if compilations.count > compiled:
                    step_compilations += 1
                    if step_compilations > 1:
                        console.warn(f"step {step}: the training step was compiled again; did a shape change?")
                for name in info["skipped"]:
                    progress["skipped_images"] += 1
                    console.warn(f"{name}: unreadable, skipped ({progress['skipped_images']} so far)")

                epoch, within = divmod(step, length.steps_per_epoch)
                evaluate = within == 0 and evaluator.due(epoch)
                every = config.train.checkpoint_every_steps
                due = evaluate if every == 0 else step % every == 0
                checkpoint = due and step < length.total_steps  # the last one waits for calibrated statistics
                # Whatever looks at the state waits until it is known to be finite.
                values = read_pending(keep=0 if evaluate or checkpoint or interrupt.raised else 1)
                interrupt.check()
                if evaluate:
                    results = measure(
                        "test", len(sources[1]), lambda epoch=epoch, state=state: evaluator.at_epoch(state, epoch)
                    )
                    log(step, "eval", results)
                    progress.update(results)
                    console.line(epoch_line(epoch, length, values, results, speed))
                if checkpoint:
                    save()
            read_pending(keep=0)
            state = evaluator.calibrated(state)  # part of the encoder that is kept
            save()
            results = measure("linear probe", evaluator.num_images, lambda: evaluator.final(state))
            console.stop()
            log(step, "eval", {name: results[name] for name in ("probe_accuracy", "knn_accuracy")})
            checkpoints.wait()
        except Interrupted as stop:
            console.stop()
            read_pending(keep=0)
            save()
            checkpoints.wait()
            leave_summary("interrupted")
            console.line(f"{stop}: checkpoint of step {step} written; the same command goes on from there")
            raise
        except Diverged as error:
            checkpoints.wait()
            leave_summary("diverged", reason=str(error))
            raise

        leave_summary(
            "finished", **results, compilations=step_compilations, params_sha256=params_sha256(state.params["model"])
        )
    return folder.read_summary() or {}


def new_progress() -> dict[str, Any]:
    """What a checkpoint keeps beside the state: counters and results so far."""
    return {
        "step": 0,
        "wall_seconds": 0.0,
        "cpu_seconds": 0.0,
        "images_per_sec": None,
        "skipped_images": 0,
        "untrained_probe_accuracy": None,
    }


def first_images(source: Source, count: int) -> np.ndarray:
    return source.batch(np.arange(min(count, len(source))))["image"]


def require_finite(step: int, values: dict[str, float], last_good: int | None, folder: Workdir) -> None:
    """A loss or gradient that is not finite ends the run: later states are worth nothing."""
    if math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"]):
        return
    terms = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
    good = "none yet" if last_good is None else f"step {last_good} in {folder.checkpoints}"
    raise Diverged(
        f"step {step}: the loss or its gradient is not finite ({terms}); last good checkpoint: {good}; "
        "lower config.optim.lr, lengthen config.optim.warmup_epochs or set config.optim.clip_norm"
    )


def bar_note(values: dict[str, float], speed: Speedometer) -> str:
    """The text beside the progress bar."""
    note = f"loss {values['loss']:.4g}  lr {values['lr']:.2e}"
    figures = speed.since("run")
    if figures["images_per_sec"] is not None:
        note += f"  {figures['images_per_sec']:,.0f} img/s  data wait {figures['data_wait_percent']:.0f} %"
    return note


def epoch_line(epoch: int, length: Length, values: Any, results: dict[str, float], speed: Speedometer) -> str:
    """One line for an epoch that was evaluated."""
    epochs = length.total_steps / length.steps_per_epoch
    parts = [f"epoch {epoch}/{epochs:g}", bar_note(values, speed)]
    parts += [f"{name.removesuffix('_accuracy').replace('_', ' ')} {value:.1f} %" for name, value in results.items()]
    return "  ".join(parts)
