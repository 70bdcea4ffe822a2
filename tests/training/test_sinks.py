"""Sinks: metrics.jsonl, TensorBoard and Weights & Biases."""

import json
import math
import resource
import signal
import sys
import threading
import types

import numpy as np
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.program.workdir import Workdir
from jepa_jax.training import sinks
from jepa_jax.training.sinks import MetricsFile, TensorBoard, WandB, open_sinks
from tests.tiny import tiny_config


def test_a_resumed_file_drops_later_and_half_written_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = MetricsFile(path, 0, pytest.fail)
    for step in (1, 2, 3):
        sink.write(step, {"train/loss": step / 2, "train/bad": math.inf, "speed": None})
    sink.close()
    path.write_text(path.read_text() + '{"step": 4, "train/l')
    sink = MetricsFile(path, 2, pytest.fail)
    sink.write(3, {"train/loss": 9.0})
    sink.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["step"], row["train/loss"]) for row in rows] == [(1, 0.5), (2, 1.0), (3, 9.0)]
    assert rows[0]["train/bad"] == "inf" and rows[0]["speed"] is None


def test_what_is_measured_again_where_a_run_resumes_is_not_written_twice(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for start, time in ((0, 1.0), (4, 2.0)):
        file = MetricsFile(path, start, lambda text: None)
        for step in (3, 4) if not start else ():
            file.write(step, {"time": time, "train/loss": 0.5})
        file.write(4, {"time": time, "eval/knn": 10.0})
        file.write(8, {"time": time, "eval/knn": 20.0})
        file.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["step"], row["time"]) for row in rows] == [(3, 1.0), (4, 1.0), (4, 1.0), (8, 2.0)]


def test_damaged_lines_are_dropped_with_one_warning(tmp_path):
    path, warnings = tmp_path / "metrics.jsonl", []
    damaged = [b"garbage", b"\0\0\0", b"[1]", b"7", b"\xff\xfe", b'{"loss": 1}', b'{"step": "2"}', b"[" * 100_000]
    path.write_bytes(b"\n".join([b'{"step": 1}', *damaged, b'{"step": 2}', b'{"step": 9}', b'{"st']))
    sink = MetricsFile(path, 2, warnings.append)
    sink.close()
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    assert len(warnings) == 1 and "8 damaged lines" in warnings[0]


def test_a_disk_that_takes_no_more_costs_rows_and_nothing_else(tmp_path):
    """A write that stops half-way leaves no half line, and later ones succeed."""
    warnings = []
    sink, _ = open_sinks(Workdir(tmp_path), tiny_config(log__tensorboard=True), 0, warnings.append)
    sink.write(1, {"train/loss": 1.0})
    size = (tmp_path / "metrics.jsonl").stat().st_size
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, limits[1]))
    try:
        sink.write(2, {"train/loss": 2.0})
        sink.write(3, {"train/loss": 3.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    sink.write(4, {"train/loss": 4.0})
    sink.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 4]
    assert len(warnings) == 2 and "metrics.jsonl: cannot write (the file would be larger" in warnings[0]
    assert "metrics.jsonl: 2 entries could not be written" in warnings[1]


def test_a_sink_of_a_library_that_fails_is_named_once_and_dropped(tmp_path, monkeypatch):
    warnings, fake = [], FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    sink = open_sinks(Workdir(tmp_path), tiny_config(log__wandb_project="mine"), 0, warnings.append)[-1]
    monkeypatch.setattr(fake, "log", lambda *args, **more: 1 / 0)
    for step in (1, 2, 3):
        sink.write(step, {"train/loss": 1.0})
    sink.close()
    assert len(warnings) == 1 and "Weights & Biases: cannot write (ZeroDivisionError" in warnings[0]


def test_a_sink_that_cannot_be_opened_is_named_once(tmp_path, monkeypatch):
    warnings, fake = [], FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)

    def refuse(**settings):
        raise ConnectionError("no route to the service")

    monkeypatch.setattr(fake, "init", refuse)
    (tmp_path / "tensorboard").write_text("in the way")
    config = tiny_config(log__wandb_project="mine", log__tensorboard=True)
    opened = open_sinks(Workdir(tmp_path), config, 0, warnings.append)
    for sink in opened:
        sink.write(1, {"train/loss": 1.0})
    (tmp_path / "tensorboard").unlink()
    for sink in opened:
        sink.write(2, {"train/loss": 1.0})
        sink.close()
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1  # opened when that became possible
    assert [words.partition(": ")[0] for words in warnings] == [
        str(tmp_path / "tensorboard"), "Weights & Biases", str(tmp_path / "tensorboard"),
    ]  # fmt: skip
    assert "no route to the service" in warnings[1] and "1 entries could not be written" in warnings[2]


def test_metrics_that_cannot_be_read_are_set_aside(tmp_path):
    path, warnings = tmp_path / "metrics.jsonl", []
    path.mkdir()  # reading it is an OSError, as from a broken disk
    sink = open_sinks(Workdir(tmp_path), tiny_config(), 2, warnings.append)[0]
    sink.write(3, {"train/loss": 1.0})
    sink.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [3]
    assert len(warnings) == 1 and "metrics.jsonl: cannot be read" in warnings[0]
    assert (tmp_path / "damaged_metrics.jsonl").is_dir()


def test_a_service_that_does_not_finish_is_left_behind(tmp_path, monkeypatch):
    warnings, fake = [], FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(fake, "finish", threading.Event().wait)
    monkeypatch.setattr(sinks, "FINISH_SECONDS", 0.05)
    open_sinks(Workdir(tmp_path), tiny_config(log__wandb_project="mine"), 0, warnings.append)[-1].close()
    assert len(warnings) == 1 and "Weights & Biases: cannot write (not finished after 0.05 s)" in warnings[0]


def test_tensorboard_hides_what_came_after_the_step_a_run_is_resumed_from(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, steps in ((0, (1, 2, 3)), (1, (2, 3))):
        sink = TensorBoard(tmp_path, start)
        for step in steps:
            sink.write(step, {"train/loss": float(10 * start + step)})
        sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.0), (2, 12.0), (3, 13.0)]


def test_tensorboard_keeps_the_names_of_what_cannot_be_measured(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoard(tmp_path, 0)
    sink.write(1, {"profiling/mfu": None, "train/loss": 2.0, "text": "left out"})
    sink.picture(1, "pictures", np.zeros((4, 4, 3), np.uint8))
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"profiling/mfu", "train/loss"} and events.Tags()["images"] == ["pictures"]
    assert math.isnan(events.Scalars("profiling/mfu")[0].value)


class FakeWandb(types.ModuleType):
    """Records what a run of Weights & Biases is told."""

    def __init__(self):
        super().__init__("wandb")
        self.settings, self.logged, self.alerts, self.ended = {}, [], [], False

    def init(self, **settings):
        self.settings = settings
        return self

    def log(self, values, *, step):
        self.logged.append((step, values))

    def alert(self, title, text, level):
        self.alerts.append((title, text, level))

    def Image(self, image):
        return ("image", image.shape)

    def finish(self):
        self.ended = True


def test_wandb_gets_every_name_and_a_resumed_run_keeps_its_id(tmp_path, monkeypatch):
    config, ids = tiny_config(log__wandb_project="mine"), []
    for start_step in (0, 6):
        fake = FakeWandb()
        monkeypatch.setitem(sys.modules, "wandb", fake)
        opened = open_sinks(Workdir(tmp_path), config, start_step)
        assert isinstance(opened[-1].sink, WandB)
        opened[-1].write(12, {"profiling/mfu": None, "train/loss": 2.0})
        opened[-1].picture(12, "pictures", np.zeros((4, 4, 3), np.uint8))
        for sink in opened:
            sink.close()
        assert fake.logged == [
            (12, {"profiling/mfu": None, "train/loss": 2.0}),
            (12, {"pictures": ("image", (4, 4, 3))}),
        ]
        assert fake.ended and fake.settings["project"] == "mine" and fake.settings["resume"] == "allow"
        assert fake.settings["config"] == config.to_dict()
        ids.append(fake.settings["id"])
    assert ids[0] == ids[1] and ids[0].startswith(tmp_path.name)


def test_alerts_reach_wandb_as_warnings(tmp_path, monkeypatch):
    warnings, fake = [], FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    sink = open_sinks(Workdir(tmp_path), tiny_config(log__wandb_project="mine"), 0, warnings.append)[-1]
    sink.alert("data_generation (epoch 1)", "input-bound: data wait is 41 % of the epoch")
    assert fake.alerts == [("data_generation (epoch 1)", "input-bound: data wait is 41 % of the epoch", "WARN")]
    assert not warnings


def test_a_missing_wandb_is_named_with_the_way_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="needs the package wandb; pip install"):
        open_sinks(Workdir(tmp_path), tiny_config(log__wandb_project="mine"), 0)
