"""Trials on several cards at once: each has its own, a slow card is no slow setting, and stopping ends all of them."""

import dataclasses
import json
import pathlib
import sys
import time

import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.cli.flags import Parser
from jepa_jax.cli.throughput import add_sweep_flags, gpus_from
from jepa_jax.experiments import trial
from jepa_jax.experiments.engine import Stopped, run_on_cards
from jepa_jax.experiments.settings import grid_values
from jepa_jax.experiments.sweep import Sweep, run_sweep
from tests.tiny import tiny_config

FAKE_TRIAL = pathlib.Path(__file__).with_name("fake_trial.py")


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(trial, "TRIAL_COMMAND", (sys.executable, "-S", str(FAKE_TRIAL)))
    values = grid_values(tiny_config(), {"batch_sizes": "8,16,32"})
    return Sweep(
        tiny_config(), "tiny", values, tmp_path / "sweep.json", use_dummy_data=True, repeats=2, gpus=(0, 1)
    )  # fmt: skip


def test_trials_run_at_the_same_time_each_on_its_own_card(sweep, monkeypatch):
    monkeypatch.setenv("JEPA_JAX_MEET", "2")
    code, document = run_sweep(sweep, time_limit=600, resume=False)
    assert code == 0 and [row["status"] for row in document["rows"]] == ["ok"] * 3
    for row in document["rows"]:
        # The trial saw one card alone, and both repeats of a combination were not on the same one.
        assert sorted(repeat["card"] for repeat in row["repeats"]) == ["here 0", "here 1"]
        assert sorted(repeat["round"] for repeat in row["repeats"]) == [0, 1]
        assert sorted(repeat["notes"][0] for repeat in row["repeats"]) == ["0", "1"]
    assert document["conclusion"]["noise_percent"] < 2  # although one card is slower by 10 %
    assert document["header"]["settings"]["gpus"] == (0, 1)
    with pytest.raises(UserError, match="--gpus: 0,1 -> None"):
        run_sweep(dataclasses.replace(sweep, gpus=None), time_limit=600, resume=True)


def test_failures_and_resuming_are_as_with_one_card(sweep):
    values = dict(sweep.values) | {"grad_accum": [1, 2]}
    sweep = dataclasses.replace(sweep, values=values, repeats=1)
    _, document = run_sweep(sweep, time_limit=600, resume=False)
    assert [row["status"] for row in document["rows"]][:4:2] == ["ok", "ok"]
    failed = [row for row in document["rows"] if row["combination"]["grad_accum_steps"] == 2]
    assert failed[0]["status"] == "out_of_memory" and "SIGABRT" in failed[0]["reason"]
    assert failed[-1]["status"] in ("skipped", "out_of_memory")  # it may have been under way
    before = json.loads(sweep.output.read_text())["rows"]
    run_sweep(sweep, time_limit=600, resume=True)
    assert json.loads(sweep.output.read_text())["rows"] == before


def test_an_interruption_ends_the_jobs_that_are_under_way():
    ended, jobs = [], iter(range(10))

    def run(job, card, check):
        if job == 0:
            return "done"
        try:
            while True:
                check()
                time.sleep(0.01)
        except Stopped:
            ended.append(job)
            raise

    def keep(job, outcome):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_on_cards((0, 1, 2), lambda card: next(jobs), run, keep)
    assert sorted(ended) == [1, 2]


def test_the_error_of_a_job_is_raised_and_no_job_is_lost_before():
    kept, jobs = [], iter(range(4))

    def run(job, card, check):
        if job == 3:
            raise OSError("disk full")
        return job

    with pytest.raises(OSError, match="disk full"):
        run_on_cards((0,), lambda card: next(jobs, None), run, lambda job, outcome: kept.append(outcome))
    assert kept == [0, 1, 2]


def test_flags_that_contradict_each_other_are_refused(monkeypatch):
    def parse(*flags):
        parser = Parser("sweep")
        add_sweep_flags(parser)
        return gpus_from(parser.parse(["--config=x", "--output_json=y", *flags]))

    assert parse() is None and parse("--gpus=0,3") == (0, 3)
    with pytest.raises(UserError, match="--gpu_index and --gpus contradict each other"):
        parse("--gpus=0", "--gpu_index=1")
    monkeypatch.setattr("jepa_jax.runtime.gpus.list_gpus", lambda: ["GPU-a", "GPU-b"])
    assert parse("--gpus=all") == (0, 1)
    with pytest.raises(UserError, match="--gpus=0,2: there are 2 GPUs here, numbered from 0"):
        parse("--gpus=0,2")
    monkeypatch.setattr("jepa_jax.runtime.gpus.list_gpus", lambda: [])
    with pytest.raises(UserError, match="--gpus=all: NVML finds no GPU here"):
        parse("--gpus=all")
