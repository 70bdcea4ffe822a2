"""Sinks: metrics.jsonl, TensorBoard and Weights & Biases."""

import json
import math
import sys
import types

import numpy as np
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.program.workdir import Workdir
from jepa_jax.train.sinks import MetricsFile, TensorBoard, WandB, open_sinks
from tests.tiny import tiny_config


def test_a_resumed_file_drops_later_and_half_written_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = MetricsFile(path, 0)
    for step in (1, 2, 3):
        sink.write(step, {"train/loss": step / 2, "train/bad": math.inf, "speed": None})
    sink.close()
    path.write_text(path.read_text() + '{"step": 4, "train/l')
    sink = MetricsFile(path, 2)
    sink.write(3, {"train/loss": 9.0})
    sink.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["step"], row["train/loss"]) for row in rows] == [(1, 0.5), (2, 1.0), (3, 9.0)]
    assert rows[0]["train/bad"] == "inf" and rows[0]["speed"] is None


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
        self.settings, self.logged, self.ended = {}, [], False

    def init(self, **settings):
        self.settings = settings
        return self

    def log(self, values, *, step):
        self.logged.append((step, values))

    def Image(self, image):
        return ("image", image.shape)

    def finish(self):
        self.ended = True


def test_wandb_gets_every_name_and_a_resumed_run_keeps_its_id(tmp_path, monkeypatch):
    config, ids = tiny_config(log__wandb_project="mine"), []
    for start_step in (0, 6):
        fake = FakeWandb()
        monkeypatch.setitem(sys.modules, "wandb", fake)
        sinks = open_sinks(Workdir(tmp_path), config, start_step)
        assert isinstance(sinks[-1], WandB)
        sinks[-1].write(12, {"profiling/mfu": None, "train/loss": 2.0})
        sinks[-1].picture(12, "pictures", np.zeros((4, 4, 3), np.uint8))
        for sink in sinks:
            sink.close()
        assert fake.logged == [
            (12, {"profiling/mfu": None, "train/loss": 2.0}),
            (12, {"pictures": ("image", (4, 4, 3))}),
        ]
        assert fake.ended and fake.settings["project"] == "mine" and fake.settings["resume"] == "allow"
        assert fake.settings["config"] == config.to_dict()
        ids.append(fake.settings["id"])
    assert ids[0] == ids[1] and ids[0].startswith(tmp_path.name)


def test_a_missing_wandb_is_named_with_the_way_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="wandb is not installed; pip install"):
        open_sinks(Workdir(tmp_path), tiny_config(log__wandb_project="mine"), 0)
