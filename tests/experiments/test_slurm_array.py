"""A sweep as SLURM tasks: what is submitted, what is collected of it, and what is submitted again."""

import json
import pathlib
import re
import sys

import pytest
from submitit.core.utils import DelayedSubmission

from jepa_jax.base.errors import UserError
from jepa_jax.cli.throughput import SWEEP
from jepa_jax.experiments import trial
from jepa_jax.experiments.slurm import make_executor
from tests.fake_slurm import install_fake_slurm

ROOT = pathlib.Path(__file__).parents[2]
FAKE_TRIAL = pathlib.Path(__file__).with_name("fake_trial.py")


@pytest.fixture(autouse=True)
def cluster(tmp_path, monkeypatch):
    install_fake_slurm(tmp_path, monkeypatch)


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs a sweep's command and returns the object that it prints."""
    monkeypatch.setattr(trial, "TRIAL_COMMAND", (sys.executable, "-S", str(FAKE_TRIAL)))

    def run(*flags, repeats=2):
        shared = [f"--config={ROOT / 'tests' / 'tiny_config.py'}", f"--output_json={tmp_path / 'sweep.json'}"]
        grid = ["--batch_sizes=8,16", "--grad_accum=1,2,3", f"--repeats={repeats}", "--use_dummy_data"]
        code = SWEEP.main([*shared, *grid, *flags])
        assert code == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


def run_task(folder, job, number, monkeypatch, card="0"):
    """Does what SLURM would: runs a submitted function on a node that has one card."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", card)
    names = [f"{job}_{number}_submitted.pkl", f"{job}_submitted.pkl"]  # of an array, of a single job
    DelayedSubmission.load(next(folder / name for name in names if (folder / name).exists())).result()


def test_tasks_are_submitted_run_and_collected(command, tmp_path, monkeypatch):
    options = "--slurm_options=--partition=a100 --gres=gpu:a100:1 --exclusive"
    submitted = command("--slurm_array", options, "--memory_fraction=0.9")
    # Three parts of 8 or 16 images cannot be: known without a task.
    assert submitted["tasks"] == 2 * 2 * 2 and submitted["job"] == "1"
    folder = tmp_path / "sweep_trials" / "slurm"
    script = (folder / "1_submission.sh").read_text()
    assert re.findall(r"#SBATCH (--array=\S+)", script) == ["--array=0-7%8"]
    for flag in ("--gres=gpu:a100:1", "--partition=a100", "--exclusive", "--time=11", "--job-name=jepa-jax-sweep"):
        assert script.count(f"#SBATCH {flag}\n") == 1, flag
    assert re.search(rf"export PYTHONPATH={ROOT}", script)
    for number in range(5):
        run_task(folder, 1, number, monkeypatch, str(number // 2 % 2))
    part = command("--collect", "--memory_fraction=0.9")
    assert part["missing"] > 0 and part["refused"] == 2
    again = command("--slurm_array", "--resume", "--memory_fraction=0.9")
    assert again["tasks"] == part["missing"] and again["job"] == "2"
    for number in range(again["tasks"]):
        run_task(folder, 2, number, monkeypatch, str(number // 2 % 2))
    whole = command("--collect", "--memory_fraction=0.9")
    assert whole["missing"] == 0 and whole["ok"] == 2 and whole["out_of_memory"] == 2
    rows = json.loads((tmp_path / "sweep.json").read_text())["rows"]
    assert [row["reason"] for row in rows if row["status"] == "out_of_memory"][0].endswith("(killed by SIGABRT)")
    assert {repeat["card"] for row in rows for repeat in row["repeats"] if "card" in repeat} == {"here 0", "here 1"}
    assert (tmp_path / "sweep.html").exists()
    assert command("--slurm_array", "--resume", "--memory_fraction=0.9")["tasks"] == 0


def test_a_task_that_took_too_long_says_so(command, tmp_path, monkeypatch):
    folder = tmp_path / "sweep_trials" / "slurm"
    assert command("--slurm_array", "--time_limit=7", repeats=1)["tasks"] == 4
    run_task(folder, 1, 3, monkeypatch)
    with monkeypatch.context() as patched:
        ended = trial.processes.Ended(-15, True, "compiling")
        patched.setattr(trial.processes, "run", lambda *_, **__: ended)
        run_task(folder, 1, 0, monkeypatch)
    run_task(folder, 1, 2, monkeypatch)  # another one, so that there is a result
    command("--collect", "--time_limit=7", repeats=1)
    row = json.loads((tmp_path / "sweep.json").read_text())["rows"][0]
    assert row["status"] == "timed_out" and "stopped after 7 s (--time_limit" in row["reason"]


def test_nothing_is_collected_where_nothing_was_begun(command, capsys):
    with pytest.raises(AssertionError, match="begin it with --slurm_array"):
        command("--collect")


def test_what_cannot_be_submitted_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="--slurm_options=-p gpu: -p is not a flag of the form --name=value"):
        make_executor(tmp_path / "slurm", "name", "-p gpu")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match='Could not detect "srun".*from a node with sbatch'):
        make_executor(tmp_path / "slurm", "name", "")
