"""A profiled run as its user meets it: every metric name, monotonic steps, profile.json, report, resume, traces."""

import dataclasses
import json
import os
import pathlib
import re
import signal
import sys

import jax
import numpy as np
import pytest

from jepa_jax.base.signals import Interrupted
from jepa_jax.cli.main import main
from jepa_jax.profiling.compilations import CompilationCounter, CompiledStep
from jepa_jax.profiling.epoch_record import gpu_figures
from jepa_jax.profiling.metrics import epoch_metrics, epoch_summary, epoch_time
from jepa_jax.profiling.sections import EpochSection, Section, Timeline
from jepa_jax.profiling.speed import MATRIX, REPEATS, measure_product, mfu, peak_flops
from jepa_jax.profiling.trace import TraceWindow, short_window
from jepa_jax.reports.run_report import write_report
from jepa_jax.training.run import train
from jepa_jax.training.setup import Hooks
from tests.profiling.records import record, sample
from tests.runs import Silent, rows
from tests.tiny import tiny_config

# Dashboards know these names; i is the number of a GPU.
NAMES = """
batch_time_avg batch_time_std batches_per_second epoch_total_time epoch_throughput_batches_per_hour
timing_data_transfer_avg timing_forward_pass_avg timing_backward_pass_avg timing_optimizer_step_avg
timing_ema_update_avg timing_validation_epoch_avg timing_visualization_generation_avg
epoch_forward_pass_percentage epoch_backward_pass_percentage epoch_data_transfer_percentage
epoch_optimizer_step_percentage epoch_validation_epoch_percentage epoch_ema_update_percentage
epoch_visualization_generation_percentage epoch_other_percentage
ram_usage_percent ram_available_gb gpu_i_memory_allocated_gb gpu_i_memory_utilization epoch_max_ram_usage
epoch_max_gpu_i_memory
cpu_usage_percent data_generation_time data_transfer_time data_gen_percentage transfer_percentage
bottleneck_data_generation data_gen_bottleneck_severity bottleneck_memory memory_pressure bottleneck_gpu_i_memory
gpu_i_memory_pressure
epoch_data_wait_percentage epoch_augment_percentage epoch_compile_percentage epoch_checkpoint_percentage mfu
images_per_second
""".split()


class FakeWandb:
    """Stands in for the module `wandb` and for its run; remembers what it is given."""

    def __init__(self):
        self.settings, self.rows, self.alerts, self.finished = {}, [], [], 0

    def Image(self, image):
        return image

    def init(self, **settings):
        self.settings = settings
        return self

    def log(self, values, step):
        self.rows.append((step, values))

    def alert(self, title, text, level):
        self.alerts.append((title, text, level))

    def finish(self):
        self.finished += 1


@dataclasses.dataclass
class Finished:
    workdir: pathlib.Path
    console: Silent
    wandb: FakeWandb


def profiled(workdir, **overrides):
    console = Silent()
    # 96 images in batches of 16: 6 steps per epoch.
    settings = dict(mesh__data=1, profile__enabled=True, profile__peak_tflops=0.1, train__checkpoint_every_steps=0)
    config = tiny_config(**(settings | overrides))
    return train(config, workdir, console=console, hooks=Hooks(write_report=write_report)), console


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir, wandb = tmp_path_factory.mktemp("profiled") / "run", FakeWandb()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", wandb)
        patch.setattr("jepa_jax.profiling.bottlenecks.DISPATCH", -1.0)  # a bottleneck that every epoch has
        _, console = profiled(workdir, log__tensorboard=True, log__wandb_project="profiles", profile__trace_steps="8:9")
    return Finished(workdir, console, wandb)


def profile_rows(workdir):
    return [row for row in rows(workdir) if "profiling/mfu" in row]


def missing_names(values):
    """Returns the names that are not there; the first GPU has its names even where there is none."""
    return [name for name in NAMES if f"profiling/{name.replace('gpu_i', 'gpu_0')}" not in values]


def test_every_name_is_in_every_epoch_and_steps_never_go_back(finished):
    workdir = finished.workdir
    found = profile_rows(workdir)
    assert [row["step"] for row in found] == [6, 12]
    for row in found:
        assert not missing_names(row)
        empty = {name for name, value in row.items() if value is None}
        assert all("gpu_0" in name for name in empty), empty
    steps = [row["step"] for row in rows(workdir)]
    assert steps == sorted(steps)


def test_the_percentages_of_every_epoch_add_up_to_100(finished):
    for row in profile_rows(finished.workdir):
        shares = [value for name, value in row.items() if re.fullmatch(r"profiling/epoch_.*_percentage", name)]
        assert len(shares) == len(EpochSection) and sum(shares) == pytest.approx(100, abs=1e-6)
        assert (
            row["profiling/epoch_forward_pass_percentage"] > 0 and row["profiling/epoch_backward_pass_percentage"] > 0
        )


def test_figures_agree_with_each_other(finished):
    workdir = finished.workdir
    row = profile_rows(workdir)[1]
    batch = row["profiling/batch_time_avg"]
    assert row["profiling/batches_per_second"] == pytest.approx(1 / batch)
    assert row["profiling/epoch_throughput_batches_per_hour"] == pytest.approx(3600 / batch)
    assert row["profiling/images_per_second"] == pytest.approx(16 / batch)
    profile = json.loads((workdir / "profile.json").read_text())
    assert row["profiling/mfu"] == pytest.approx(profile["flops_per_step"] / batch / 0.1e12 / jax.device_count())
    device = profile["device"]
    assert sum(device["phases"].values()) == pytest.approx(1) and 0 < device["attributed"] <= 1
    assert {"encoder", "optimizer", "augment"} <= {row["scope"] for row in device["scopes"]}


def test_tensorboard_has_the_names_too(finished):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished.workdir / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert not missing_names(tags)
    assert [event.step for event in events.Scalars("profiling/batch_time_avg")] == [6, 12]


def test_wandb_has_the_names_too(finished):
    workdir, wandb = finished.workdir, finished.wandb
    assert wandb.settings["project"] == "profiles" and wandb.settings["dir"] == str(workdir)
    assert json.loads(json.dumps(wandb.settings["config"])) == json.loads((workdir / "config.json").read_text())
    logged = [(step, values) for step, values in wandb.rows if "profiling/mfu" in values]
    assert [step for step, _ in logged] == [6, 12]
    for _, values in logged:
        assert not missing_names(values)
    steps = [step for step, _ in wandb.rows]
    assert steps == sorted(steps) and wandb.finished == 1


def test_wandb_gets_one_alert_per_bottleneck_of_a_run(finished):
    epochs = json.loads((finished.workdir / "profile.json").read_text())["epochs"]
    flags = [(epoch["epoch"], one) for epoch in epochs for one in epoch["bottlenecks"] if one["warning"]]
    first = {}
    for epoch, one in flags:
        first.setdefault(one["name"], (f"{one['name']} (epoch {epoch})", one["message"], "WARN"))
    assert finished.wandb.alerts == list(first.values())
    assert first["dispatch"][0] == "dispatch (epoch 1)" and [one["name"] for _, one in flags].count("dispatch") == 2


def test_the_terminal_gets_a_line_per_epoch_and_the_line_to_open_the_trace(finished):
    workdir, console = finished.workdir, finished.console
    (first, second) = [line for line in console.lines if line.startswith("epoch ")]
    assert re.fullmatch(r"epoch 1/2  loss \S+  \S+ images/s  online probe \S+ %.*  \S+ s( \(.* %\))?", first)
    assert second.startswith("epoch 2/2  ")
    assert any("tensorboard --logdir=" in line and "ui.perfetto.dev" in line for line in console.lines)
    assert list((workdir / "trace").rglob("perfetto_trace.json.gz"))


def test_a_step_of_the_trace_covers_its_wait_and_its_dispatch_and_python_is_left_out(finished):
    (file,) = (finished.workdir / "trace").rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_serialized_xspace(file.read_bytes()).planes
    (host,) = [plane for plane in planes if plane.name == "/host:CPU"]
    events = [(event, dict(event.stats)) for line in host.lines for event in line.events]
    steps = {stats["step_num"]: event for event, stats in events if event.name == "train"}
    assert sorted(steps) == [8, 9] and steps[8].end_ns <= steps[9].start_ns
    for step in steps.values():
        inside = [e.name for e, _ in events if step.start_ns <= e.start_ns and e.end_ns <= step.end_ns]
        for section in ("IteratorGetNext: data_wait", "dispatch", "device_wait"):
            assert inside.count(section) == 1, section
    assert not [event.name for event, _ in events if event.name.startswith("$")]  # calls of Python


def test_the_line_of_an_epoch_names_what_took_much_of_it_besides_the_step():
    assert (
        epoch_time(record({Section.DATA_WAIT: 8.0, Section.CHECKPOINT: 20.0}, device=72.0))
        == "1 min 40 s (checkpoint 20 %)"
    )
    assert epoch_time(record({Section.DATA_WAIT: 8.0}, device=92.0)) == "1 min 40 s"


def test_sections_are_listed_largest_first_and_other_last():
    lines = epoch_summary(record({Section.DATA_WAIT: 30.0, Section.CHECKPOINT: 20.0}, device=50.0))
    shares = [float(line.split("%")[0].split()[-1]) for line in lines[1:-1]]
    assert shares == sorted(shares, reverse=True) and "other" in lines[-1]
    assert "1.0000" not in lines[0] and "0.8000 s per batch  4,500 batches/hour" in lines[0]


def test_the_report_has_a_profile_part(finished):
    page = (finished.workdir / "report.html").read_text()
    for words in ("Time by epoch", "Throughput by epoch", "Memory over time", "Device time by scope", "Longest device"):
        assert words in page, words
    assert "This part failed" not in page and not re.search(r"https?:", page)


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"epochs": []}', '{"epochs": [{"steps": 3}]}'])
def test_a_broken_profile_is_said_in_words_or_left_out(tmp_path, content):
    (tmp_path / "profile.json").write_text(content)
    assert "Profile" in write_report(tmp_path).read_text()


@pytest.mark.slow
def test_the_profiler_can_be_switched_off(tmp_path):
    summary, console = profiled(tmp_path / "run", profile__enabled=False)
    assert summary["status"] == "finished" and not profile_rows(tmp_path / "run")
    assert not (tmp_path / "run" / "profile.json").exists()
    assert [line.partition("  loss")[0] for line in console.lines if line.startswith("epoch")] == [
        "epoch 1/2",
        "epoch 2/2",
    ]


@pytest.mark.slow
def test_a_resumed_run_keeps_the_epochs_before_and_starts_inside_one(tmp_path):
    def interrupt(text):
        if text.startswith("epoch 1/2  "):
            os.kill(os.getpid(), signal.SIGINT)

    config = tiny_config(mesh__data=1, profile__enabled=True, train__checkpoint_every_steps=0)
    with pytest.raises(Interrupted):
        train(config, tmp_path / "run", console=Silent(interrupt))
    train(config, tmp_path / "run", console=Silent())
    epochs = json.loads((tmp_path / "run" / "profile.json").read_text())["epochs"]
    assert sum(epoch["steps"] for epoch in epochs) == 12
    assert [epoch["last_step"] for epoch in epochs] == sorted(epoch["last_step"] for epoch in epochs)
    steps = [row["step"] for row in rows(tmp_path / "run")]
    assert steps == sorted(steps)


def test_a_run_of_one_step_is_accounted_for(tmp_path):
    profiled(tmp_path / "run", train__max_steps=1)
    (row,) = profile_rows(tmp_path / "run")
    assert row["step"] == 1 and row["profiling/timing_forward_pass_avg"] > 0


def test_short_recordings_keep_out_of_the_way_of_the_one_for_people(tmp_path):
    kept = TraceWindow("3:5", tmp_path, Timeline())
    assert short_window(0, 100, kept) == range(6, 8)
    assert short_window(100, 200, kept) == range(102, 104)
    assert short_window(0, 1, TraceWindow("", tmp_path, Timeline())) == range(0, 1)
    assert short_window(0, 6, TraceWindow("0:9", tmp_path, Timeline())) is None


def test_a_second_shape_is_compiled_again_and_counted():
    step = CompiledStep(jax.jit(lambda state, batch: (state @ state, {"loss": batch["image"].sum()})))
    moved = []
    with CompilationCounter(moved.append) as counter:
        for size in (4, 4, 8):
            batch = {"image": np.ones(size, np.float32)}
            if not step.is_ready_for(batch):
                step.compile(np.eye(3, dtype=np.float32), batch)
            _, metrics = step(np.eye(3, dtype=np.float32), batch)
            assert metrics["loss"] == size
    assert step.count == 2 and counter.count >= 2 and sum(moved) == pytest.approx(counter.seconds)
    assert step.flops == 2 * 3**3 and "HloModule" in step.text()


def test_gpus_have_numbered_names():
    gpu = {"memory_used_gb": 22.0, "memory_total_gb": 24.0, "allocated_gb": 19.0, "allocated_peak_gb": 19.0,
           "allocator_limit_gb": 20.0, "utilization": 90.0, "temperature_c": 70.0, "power_watts": 300.0,
           "clock_mhz": 1700.0, "max_clock_mhz": 2500.0, "throttled": 0.0}  # fmt: skip
    samples = [sample(gpus=[gpu, gpu])]
    metrics = epoch_metrics(dataclasses.replace(record(samples=samples), gpus=gpu_figures(samples)))
    assert metrics["gpu_1_memory_utilization"] == 95 and metrics["bottleneck_gpu_1_memory"] == 1
    assert metrics["gpu_0_power_watts"] == 300 and metrics["gpu_0_energy_joules"] is None
    counted = epoch_metrics(record(samples=samples))  # of 100 steps of 64 images in 100 s
    assert counted["gpu_1_energy_joules"] == pytest.approx(30_000)
    assert counted["images_per_joule"] == pytest.approx(6400 / 60_000)
    assert metrics["epoch_max_gpu_0_memory"] == 19 and metrics["gpu_0_memory_pressure"] == 0.95


def test_profiles_are_compared_in_one_json_line(finished, capsys):
    workdir = str(finished.workdir)
    assert main(["compare-profiles", workdir, workdir]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["changed"] == []
    assert main(["compare-profiles", workdir, "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_the_peak_of_a_processor_is_measured_beside_the_run():
    readings = iter([at for i in range(REPEATS + 1) for at in (10.0 * i, 10.0 * i + (0.5 if i == 3 else 2.0))])
    assert measure_product(lambda: next(readings)) == 2 * MATRIX**3 / 0.5  # the fastest product counts
    assert "measured beside this run" in peak_flops(0.0, "float32")[1]
    assert peak_flops(2.0, "float32") == (2e12 * jax.device_count(), "profile.peak_tflops")


def test_an_mfu_that_cannot_be_believed_is_unknown():
    assert mfu(2e9, 0.01, 100, 1e12) == pytest.approx(0.2)
    assert mfu(2e9, 0.01, 4, 1e12) is None  # four steps tell no time per step
    assert mfu(2e9, 0.01, 100, 1e11) is None  # faster than the peak: it is not the peak
    assert mfu(2e9, 0.01, 100, None) is None and mfu(None, 0.01, 100, 1e12) is None
    assert mfu(2e9, None, 0, 1e12) is None
