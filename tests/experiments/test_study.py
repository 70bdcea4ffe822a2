"""Studies with a stand-in for train.py that finishes, diverges, crashes, hangs or is killed as its rate says."""

import collections
import json
import pathlib
import signal
import subprocess
import sys
import time
import types

import psutil
import pytest

from jepa_jax.base import processes
from jepa_jax.base.errors import UserError
from jepa_jax.base.text import parse_numbers
from jepa_jax.cli import studies
from jepa_jax.experiments import study
from jepa_jax.experiments.study import run_study
from tests.runs import unlabelled

# What the stand-in does is chosen by optim.lr. Like train.py it goes on from its own checkpoint.
CONFIG = """
from jepa_jax.configs import quickstart

def get_config():
    config = quickstart.get_config()
    config.optim.epochs, config.optim.warmup_epochs = 300.0, 10.0
    return config
"""
STAND_IN = """
import json, os, pathlib, signal, sys, time
flags = dict(argument.lstrip("-").split("=", 1) for argument in sys.argv[1:])
workdir = pathlib.Path(flags["workdir"])
lr, epochs = float(flags.get("config.optim.lr", .25)), int(flags["config.optim.epochs"])
with open(workdir / "calls.txt", "a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
def stop(number, frame):
    (workdir / "stopped").write_text(str(number))
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
checkpoint = workdir / "checkpoint"
first = int(checkpoint.read_text()) if checkpoint.exists() else 0
with open(workdir / "metrics.jsonl", "a") as file:
    for epoch in range(first + 1, epochs + 1):
        file.write(json.dumps({"step": epoch, "epoch": epoch, "train/loss": 1 / epoch}) + "\\n")
        checkpoint.write_text(str(epoch))
if lr == 2:
    sys.exit("error: --config.optim.lr = 2: too large")
if lr == 20:
    print("error: optim.lr = 20: | too large; use:\\n  a = 1", file=sys.stderr)
    sys.exit(2)
if lr == 3:
    (workdir / "summary.json").write_text(json.dumps({"status": "diverged", "steps": 7}))
    print("step 7: loss is nan", file=sys.stderr)
    sys.exit(3)
if lr == 9:
    os.kill(os.getpid(), signal.SIGKILL)
if lr == 8 or (lr == 7 and not (workdir / "go").exists()):
    if os.fork() == 0:  # a worker that outlives the run unless the group is killed
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (workdir / "worker").write_text(str(os.getpid()))
    time.sleep(600)
if lr == 6:
    signal.signal(signal.SIGTERM, lambda *_: (workdir / "asked").write_text("to stop"))
    (workdir / "worker").write_text(str(os.getpid()))
    time.sleep(600)
if lr == 5:
    sys.exit(0)
held_out = 60 - 100 * abs(lr - .3) + int(flags["config.train.seed"]) / 10
summary = {"status": "finished", "probe_held_out_accuracy": held_out, "probe_accuracy": 100 - held_out,
           "untrained_probe_accuracy": 30.5, "knn_accuracy": float("nan"), "wall_seconds": 2.0 * epochs,
           "cpu_seconds": 3.0 * epochs, "steps": 10 * epochs}
(workdir / "summary.json").write_text(json.dumps(summary))
"""


@pytest.fixture
def make(tmp_path):
    (tmp_path / "train.py").write_text(STAND_IN)
    (tmp_path / "config.py").write_text(CONFIG)

    def make(kind="lr_search", **changes):
        command = (sys.executable, "-S", str(tmp_path / "train.py"))
        return study.Study(kind, str(tmp_path / "config.py"), tmp_path / "out", command, **changes)

    return make


@pytest.fixture
def leaping_clock(tmp_path, monkeypatch):
    """The clock leaps by 12 minutes for each run that hangs or ignores a signal: no waiting, however slow the machine.

    It leaps in several calls, so that a time limit which begins between two of them still passes.
    """
    leaps: collections.Counter[pathlib.Path] = collections.Counter()

    def monotonic():
        for path in [*tmp_path.glob("out/*/worker"), *tmp_path.glob("out/*/asked")]:
            leaps[path] = min(12, leaps[path] + (path.stat().st_size > 0))
        return time.monotonic() + 60 * sum(leaps.values())

    monkeypatch.setattr(processes, "time", types.SimpleNamespace(monotonic=monotonic, sleep=time.sleep))


def runs_of(*lrs, epochs=(2,), seeds=(0,)):
    return study.plan_runs(lrs, epochs, seeds)


def execute(the_study, runs, **options):
    """Runs a study; returns its rows."""
    return run_study(the_study, runs, **options)[1]


def calls(the_study, name):
    return (the_study.output_dir / name / "calls.txt").read_text().splitlines()


def is_alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def ends(pid):
    """Waits for a process that was killed: the system may need a moment for that."""
    for _ in range(3000):
        if not is_alive(pid):
            return True
        time.sleep(0.02)
    return False


def wait_for(path, process):
    while not (path.exists() and path.read_text()):
        assert process.poll() is None, f"{path} did not appear"
        time.sleep(0.02)
    return path.read_text()


def test_each_end_is_a_row_with_its_reason_and_the_study_goes_on(make):
    rows = execute(make(), runs_of(0.1, 3.0, 2.0, 20.0, 9.0, 5.0, 0.3))
    ends = {row.lr: (row.status, row.reason, row.exit_code) for row in rows}
    assert ends == {
        0.1: ("finished", "", 0),
        3.0: ("diverged", "step 7: loss is nan", 3),
        2.0: ("failed", "exit code 1; its last message: --config.optim.lr = 2: too large", 1),
        20.0: ("failed", "optim.lr = 20: | too large; use: a = 1", 2),
        9.0: ("killed", "killed by SIGKILL: as the kernel does when the machine's memory is used up", -9),
        5.0: ("failed", "exit code 0, but no readable summary.json was written", 0),
        0.3: ("finished", "", 0),
    }
    best = rows[-1]
    assert (best.probe_held_out_accuracy, best.probe_accuracy) == (60.0, 40.0)
    assert (best.untrained_probe_accuracy, best.steps) == (30.5, 20)
    assert (best.wall_seconds, best.cpu_seconds, best.final_loss, best.knn_accuracy) == (4.0, 6.0, 0.5, None)
    assert rows[1].steps == 7 and rows[1].probe_accuracy is None


def test_a_run_that_hangs_is_stopped_with_its_workers(make, leaping_clock):
    the_study = make()
    rows = execute(the_study, runs_of(8.0, 6.0), timeout=600.0, grace=600.0)
    assert [row.status for row in rows] == ["timeout", "timeout"]
    assert rows[0].reason == "stopped after 600 s (--timeout: raise it for a slow machine); its log is empty"
    assert rows[0].exit_code == 143 and rows[1].exit_code == -9  # one checkpoints, one has to be killed
    for name in ("lr8.0_epochs2_seed0", "lr6.0_epochs2_seed0"):
        assert ends(int((the_study.output_dir / name / "worker").read_text()))


def test_what_is_done_is_not_run_again_and_the_rest_is_resumed(make, leaping_clock):
    the_study, name = make(), "lr7.0_epochs2_seed0"
    runs = runs_of(0.1, 3.0, 7.0)
    first = execute(the_study, runs, timeout=600.0, grace=600.0)
    assert [row.status for row in first] == ["finished", "diverged", "timeout"]
    (the_study.output_dir / name / "go").touch()
    second = execute(the_study, runs_of(0.1, 3.0, 7.0, 0.3))
    assert [row.status for row in second] == ["finished", "diverged", "finished", "finished"]
    assert second[:2] == first[:2]
    assert [len(calls(the_study, run.name)) for run in runs] == [1, 1, 2]
    assert second[2].attempts == 2
    epochs = [json.loads(line)["epoch"] for line in open(the_study.output_dir / name / "metrics.jsonl")]
    assert epochs == [1, 2]  # the second attempt began where the first had stopped


def test_a_run_whose_row_was_lost_is_taken_over(make):
    the_study, name = make(), "lr0.1_epochs2_seed0"
    rows = execute(the_study, runs_of(0.1))
    study.save_rows(the_study, [])  # killed between the end of the run and its row
    again = execute(the_study, runs_of(0.1))
    assert again[0].probe_accuracy == rows[0].probe_accuracy and len(calls(the_study, name)) == 1


def test_noresume_refuses_a_directory_with_results(make):
    execute(make(), runs_of(0.1), resume=False)
    with pytest.raises(UserError, match="holds a study already"):
        execute(make(), runs_of(0.1), resume=False)


def test_another_study_in_the_directory_is_refused(make):
    execute(make(), runs_of(0.1))
    with pytest.raises(UserError, match=r"other settings \(overrides: \[\] -> \['--config.data.seed=8'\]\)"):
        execute(make(overrides=("--config.data.seed=8",)), runs_of(0.1))
    (make().output_dir / "results.json").write_text("{")
    with pytest.raises(UserError, match="does not hold the results of a study"):
        execute(make(), runs_of(0.1))


def test_two_studies_never_share_a_directory(make):
    def start_another(rows):
        with pytest.raises(UserError, match="another study is running"):
            execute(make(), runs_of(0.2))

    assert len(execute(make(), runs_of(0.1), on_rows=start_another)) == 1


def test_bad_values_are_refused_before_anything_runs(make, tmp_path):
    with pytest.raises(UserError, match="--config.optim.lr=1: the study itself sets this key"):
        execute(make(overrides=("--config.optim.lr=1",)), runs_of(0.1))
    with pytest.raises(UserError, match="no such file"):
        execute(study.Study("lr_search", "absent.py", tmp_path / "out", ()), runs_of(0.1))
    assert not (tmp_path / "out").exists()
    for text in ("", ".1,", "a", "-1", "0", "nan", "inf"):
        with pytest.raises(UserError, match="--lrs"):
            parse_numbers("lrs", text)
    for text in ("0", "1.5", "-3"):
        with pytest.raises(UserError, match="--epochs"):
            parse_numbers("epochs", text, int, smallest=1)
    assert parse_numbers("lrs", ".1,1e-3,.1") == [0.1, 0.001]
    assert parse_numbers("seeds", "0,1", int) == [0, 1]


def test_runs_without_a_linear_probe_are_refused_before_anything_runs(command, tmp_path):
    code, _, said = command(studies.TRADEOFF, "--config=emberformer_cpu", "--config.data.validation=0", "--epochs=2")
    assert code == 2 and "config.method.name = 'emberformer': has no linear probe" in said
    unlabelled(tmp_path)
    data = {"source": "npz", "dir": tmp_path / "data.npz", "image_size": 16, "num_train": 0, "num_test": 0}
    npz = [f"--config.data.{key}={value}" for key, value in data.items()]
    code, _, said = command(studies.LR_SEARCH, "--lrs=.1", *npz)
    assert code == 2 and "config.data.source = 'npz': has no labels" in said and "probe_held_out_accuracy" in said
    assert not (tmp_path / "out").exists()


def test_the_command_of_a_run():
    the_study = study.Study(
        "lr_search", "configs/x.py:small", pathlib.Path("D"), ("python", "t.py"), ("--config.a.b=c",)
    )
    (run,) = study.plan_runs([0.3], [5], [1])
    assert the_study.run_command(run) == [
        "python", "t.py", "--config=configs/x.py:small", "--workdir=D/lr0.3_epochs5_seed1", "--resume=auto",
        "--config.a.b=c", "--config.optim.epochs=5", "--config.train.seed=1", "--config.optim.lr=0.3",
    ]  # fmt: skip


@pytest.fixture
def command(make, tmp_path, monkeypatch, capsys):
    """Runs a command of studies in the folder of the stand-in; returns exit code, result and standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(studies, "TRAIN_COMMAND", make().command)

    def command(which, *flags):
        code = which.main(["--config=config.py", "--output_dir=out", *flags])
        said = capsys.readouterr()
        return code, json.loads(said.out.splitlines()[-1]) if said.out else None, said.err

    return command


def test_lr_search_from_the_command_line(command, tmp_path):
    flags = ("--lrs=.1,.3,20", "--epochs=2", "--seeds=0,1", "--config.data.seed=8")
    code, result, said = command(studies.LR_SEARCH, *flags)
    assert code == 0 and result["best_lr"] == 0.3 and result["runs"] == 6 and result["finished"] == 4
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    assert content["header"]["overrides"] == ["--config.data.seed=8"] and len(content["rows"]) == 6
    assert "optim.lr = 20: \\| too large; use: a = 1" in (tmp_path / "out" / "results.md").read_text()
    assert "<svg" in (tmp_path / "out" / "results.svg").read_text()
    assert "Best learning rate: 0.3" in (tmp_path / "out" / "study.html").read_text()
    # Test accuracies (60 % at 0.1, 40 % at 0.3) disagree with held-out ones (40 % and 60 %), which decide.
    assert result["chosen_by"] == "probe_held_out_accuracy"
    assert result["probe_held_out_accuracy"] == 60.05 and result["probe_accuracy"] == 39.95
    assert "lr0.3_epochs2_seed1 · finished · 60.1 % held-out, 39.9 % test" in said


def test_epoch_tradeoff_from_the_command_line(command):
    code, result, _ = command(studies.TRADEOFF, "--epochs=2,4")
    assert code == 0 and result["time_grows"]
    assert [point["wall_seconds"] for point in result["points"]] == [4.0, 8.0]


@pytest.mark.parametrize("extra", ["--lrs=0", "--config.optim.lr=1", "--config.a", "--config.optim.momentum=x"])
def test_bad_flags_end_in_one_error_and_code_2(command, tmp_path, extra):
    code, result, said = command(studies.LR_SEARCH, "--lrs=.1", extra)
    assert code == 2 and result is None and said.startswith("error: ") and said.count("error: ") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_run_cleanly_and_keeps_what_was_measured(make, monkeypatch, number, code):
    the_study = make()
    workdir = the_study.output_dir / "lr8.0_epochs2_seed0"

    def raise_when_hanging(folder, epochs):
        if folder == workdir and (workdir / "worker").exists() and (workdir / "worker").read_text():
            signal.raise_signal(number)
        return 0.0

    monkeypatch.setattr(study, "reached_epoch", raise_when_hanging)
    found, rows = run_study(the_study, runs_of(0.1, 8.0, 0.3))
    assert found == code and [row.status for row in rows] == ["finished", "interrupted"]
    assert (workdir / "stopped").exists() and ends(int((workdir / "worker").read_text()))


DRIVER = """
import pathlib, sys
from jepa_jax.experiments import study
folder = pathlib.Path(sys.argv[1])
command = (sys.executable, "-S", str(folder / "train.py"))
study.run_study(
    study.Study("lr_search", str(folder / "config.py"), folder / "out", command), study.plan_runs([0.1, 7.0], [2], [0])
)
"""


def test_a_killed_study_goes_on_and_does_nothing_twice(make, tmp_path):
    process = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], stderr=subprocess.DEVNULL)
    workdir = tmp_path / "out" / "lr7.0_epochs2_seed0"
    worker = int(wait_for(workdir / "worker", process))
    [left_over] = [member.pid for member in processes.members(workdir) if member.pid != worker]
    process.kill()
    process.wait()
    assert is_alive(left_over)  # its study is gone, the run is not
    (workdir / "go").touch()
    code, rows = run_study(make(), runs_of(0.1, 7.0))
    assert code == 0 and [row.status for row in rows] == ["finished", "finished"]
    assert (workdir / "stopped").read_text() == str(int(signal.SIGTERM))  # asked, so that it could checkpoint
    assert ends(left_over) and ends(worker)
    assert len(calls(make(), "lr0.1_epochs2_seed0")) == 1 and len(calls(make(), "lr7.0_epochs2_seed0")) == 2


def test_a_short_run_keeps_the_share_of_warm_up(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(CONFIG)
    share = study.warmup_share(str(path), ())
    (run,) = study.plan_runs([None], [30], [0])
    the_study = study.Study("epoch_tradeoff", str(path), tmp_path, (), warmup_share=share)
    assert "--config.optim.warmup_epochs=1.0" in the_study.run_overrides(run)
    assert study.warmup_share(str(path), ("--config.optim.warmup_epochs=2",)) is None
