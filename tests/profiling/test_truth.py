"""Injected truth: waits, evaluations, pictures and checkpoints of a known length are found where they were put."""

import dataclasses
import json
import time

import jax
import numpy as np
import pytest

from jepa_jax.base.files import write_atomically
from jepa_jax.data.sources import open_source
from jepa_jax.evals.schedule import Evaluator
from jepa_jax.program.checkpoint import Checkpoints
from jepa_jax.train import loop
from jepa_jax.train.loop import train
from tests.tiny import tiny_config
from tests.train.test_train import Silent

STEP_SECONDS = 0.2  # of every step on the device: long against the delays of a busy machine
STEPS = 4  # an epoch
SHARES = (0.8, 0.5, 0.2)  # the slowest first: it empties all buffers, and they stay empty
TOLERANCE = 3.0  # points of percent
ATTEMPTS = 3
THRESHOLD = 30.0  # percent of waiting for data from which on it is a bottleneck
computed: list[tuple[float, float]] = []  # when steps ran, by the test's own clock


class Sleepy:
    """A source whose batches take as long as a file says; it is read at every batch, also inside workers."""

    def __init__(self, source, path):
        self._source, self._path = source, path
        self.classes, self.spec = source.classes, source.spec

    def __len__(self):
        return len(self._source)

    def batch(self, indices):
        if len(indices) == 16:  # of training; evaluations take others
            time.sleep(float(self._path.read_text()))
        return self._source.batch(indices)


def slow_program(build):
    """The program with a training step that takes STEP_SECONDS on the device, whatever the machine does meanwhile."""

    def wait(step):
        start = time.perf_counter()
        time.sleep(STEP_SECONDS)
        computed.append((start, time.perf_counter()))
        return np.float32(step)

    def build_slow(*args, **kwargs):
        program = build(*args, **kwargs)

        def train_step(state, batch):
            figure = jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.float32), state.step)
            names = ("loss", "grad_norm", "update_norm", "lr")
            return dataclasses.replace(state, step=state.step + 1), dict.fromkeys(names, figure)

        return dataclasses.replace(program, train_step=jax.jit(train_step, donate_argnums=0))

    return build_slow


@pytest.fixture
def slow_steps(monkeypatch):
    computed.clear()
    monkeypatch.setattr(loop, "build_program", slow_program(loop.build_program))


def config(**overrides):
    settings = dict(
        mesh__data=1, data__num_train=16 * STEPS, data__batch_size=16, data__prefetch=1, optim__warmup_epochs=0.5,
        eval__every_epochs=0, eval__knn_every_epochs=0, eval__untrained=False, eval__batch_size=24,
        eval__calibration_images=0, train__checkpoint_every_steps=1000, log__every_steps=100,
    )  # fmt: skip
    return tiny_config(**(settings | overrides))


def records(workdir):
    epochs = json.loads((workdir / "profile.json").read_text())["epochs"]
    assert all(sum(epoch["sections"].values()) == pytest.approx(epoch["seconds"]) for epoch in epochs)
    return {epoch["epoch"]: epoch for epoch in epochs}


def percent(epoch, section):
    return 100 * epoch["sections"][section] / epoch["seconds"]


def waiting_percent(start, end):
    """Time before each step in which no step ran, of the time between the ends of two epochs."""
    steps = [span for span in computed if start < span[0] < end]
    assert len(steps) == STEPS
    before = [start] + [done for _, done in steps[:-1]]
    return 100 * sum(begin - free for (begin, _), free in zip(steps, before, strict=True)) / (end - start)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_sleeps_is_found_to_the_point(tmp_path, monkeypatch, slow_steps, workers):
    """Two epochs for each share of waiting: in the first the batches still under way have the pace of before.

    The truth is what was injected as the test's own clock saw it: on a busy machine a sleep is longer than asked for,
    and workers that got ahead make the wait shorter.
    """
    at_last_once(lambda attempt: check_waits(tmp_path / f"attempt_{attempt}", monkeypatch, workers))


def at_last_once(check):
    """A stall of a shared machine may fall between two clocks; a profiler that is wrong is so every time."""
    for attempt in range(ATTEMPTS):
        computed.clear()
        try:
            return check(attempt)
        except AssertionError:
            if attempt == ATTEMPTS - 1:
                raise


def check_waits(folder, monkeypatch, workers):
    folder.mkdir()
    control = folder / "seconds"
    monkeypatch.setattr(loop, "open_source", lambda data, split: Sleepy(open_source(data, split), control))
    loaders = max(workers, 1)
    paces = [loaders * STEP_SECONDS / (1 - share) for share in SHARES for _ in range(2)]
    write_atomically(control, str(paces[0]))

    ends = []

    def on_line(text):
        if "s a batch" in text:
            ends.append(time.perf_counter())
            write_atomically(control, str(paces[min(len(ends), len(paces) - 1)]))

    options = config(optim__epochs=float(len(paces)), data__num_workers=workers)
    train(options, folder / "run", console=Silent(on_line))
    epochs = records(folder / "run")
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    metrics = {round(row["epoch"]): row for row in rows if "profiling/mfu" in row}
    for index, share in enumerate(SHARES):
        number = 2 + 2 * index
        truth = waiting_percent(ends[number - 2], ends[number - 1])
        assert percent(epochs[number], "data_wait") == pytest.approx(truth, abs=TOLERANCE), (workers, share)
        row = metrics[number]
        assert row["profiling/data_generation_time"] == pytest.approx(paces[number - 1], rel=0.1)
        if abs(truth - THRESHOLD) > TOLERANCE:
            assert row["profiling/bottleneck_data_generation"] == int(truth > THRESHOLD)
            severity = row["profiling/data_gen_bottleneck_severity"]
            assert severity == pytest.approx(truth / 100 if truth > THRESHOLD else 0.0, abs=0.05)


def test_evaluations_pictures_and_checkpoints_are_found_to_the_point(tmp_path, monkeypatch, slow_steps):
    """The pauses of epoch 2 against the time of the whole epoch, taken by the test's own clock."""
    pauses = {"validation_epoch": 0.5, "visualization_generation": 0.3, "checkpoint": 0.2}
    marks, taken = [], {section: [] for section in pauses}
    at_epoch, save = Evaluator.at_epoch, Checkpoints.save

    def slowly(function, section):
        def call(*args, **kwargs):
            start = time.perf_counter()
            time.sleep(pauses[section])
            result = function(*args, **kwargs)
            taken[section].append((start, time.perf_counter()))
            return result

        return call

    monkeypatch.setattr(Evaluator, "at_epoch", slowly(at_epoch, "validation_epoch"))
    monkeypatch.setattr(Checkpoints, "save", slowly(save, "checkpoint"))
    picture = slowly(lambda state: np.zeros([1, 2, 16, 16, 3], np.float32), "visualization_generation")
    monkeypatch.setattr(loop, "painter", lambda *args: picture)
    console = Silent(lambda text: marks.append(time.perf_counter()) if "s a batch" in text else None)
    options = config(
        optim__epochs=4.0, eval__every_epochs=1, train__checkpoint_every_steps=0, log__pictures_every_epochs=1
    )
    train(options, tmp_path / "run", console=console)
    epoch = records(tmp_path / "run")[2]
    wall = marks[1] - marks[0]
    assert epoch["seconds"] == pytest.approx(wall, rel=0.05)
    for section, pause in pauses.items():
        (seconds,) = [end - start for start, end in taken[section] if marks[0] < start < marks[1]]
        assert seconds >= pause
        assert percent(epoch, section) == pytest.approx(100 * seconds / wall, abs=TOLERANCE), section
    device = 100 * epoch["device_seconds"] / epoch["seconds"]
    assert device == pytest.approx(100 * STEPS * STEP_SECONDS / wall, abs=TOLERANCE)
