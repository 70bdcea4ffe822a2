"""A sweep as SLURM tasks: what the script runs, what is collected of it, and what is submitted again."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from jepa_jax.cli.sweep import main as sweep_command
from jepa_jax.experiments import trial_process

ROOT = pathlib.Path(__file__).parents[2]
FAKE_TRIAL = pathlib.Path(__file__).with_name("fake_trial.py")


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs a sweep's command and returns the object that it prints."""
    monkeypatch.setattr(trial_process, "TRIAL_COMMAND", (sys.executable, "-S", str(FAKE_TRIAL)))

    def run(*flags, repeats=2):
        shared = [f"--config={ROOT / 'tests' / 'tiny_config.py'}", f"--output_json={tmp_path / 'sweep.json'}"]
        grid = ["--batch_sizes=8,16", "--grad_accum=1,2,3", f"--repeats={repeats}", "--use_dummy_data"]
        code = sweep_command([*shared, *grid, *flags])
        assert code == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


def run_task(script, number, card):
    variables = {"SLURM_ARRAY_TASK_ID": str(number), "CUDA_VISIBLE_DEVICES": card}
    subprocess.run(["bash", script], env=os.environ | variables, check=True)


def test_tasks_are_written_run_and_collected(command, tmp_path):
    written = command("--slurm_array", "--slurm_options=--partition=a100 --gres=gpu:a100:1", "--memory_fraction=0.9")
    # Three parts of 8 or 16 images cannot be: known without a task.
    assert written["tasks"] == 2 * 2 * 2
    script = pathlib.Path(written["script"]).read_text()
    assert "#SBATCH --array=0-7" in script and "export XLA_CLIENT_MEM_FRACTION=0.9" in script
    assert re.findall(r"#SBATCH (--gres=\S+)", script)[-1] == "--gres=gpu:a100:1"  # the last one counts
    for number in range(5):
        run_task(written["script"], number, str(number // 2 % 2))
    part = command("--collect", "--memory_fraction=0.9")
    assert part["missing"] > 0 and part["refused"] == 2
    again = command("--slurm_array", "--resume", "--memory_fraction=0.9")
    assert again["tasks"] == part["missing"]
    for number in range(again["tasks"]):
        run_task(again["script"], number, str(number // 2 % 2))
    whole = command("--collect", "--memory_fraction=0.9")
    assert whole["missing"] == 0 and whole["ok"] == 2 and whole["out_of_memory"] == 2
    rows = json.loads((tmp_path / "sweep.json").read_text())["rows"]
    assert [row["reason"] for row in rows if row["status"] == "out_of_memory"][0].endswith("(killed by SIGABRT)")
    assert {repeat["card"] for row in rows for repeat in row["repeats"] if "card" in repeat} == {"here 0", "here 1"}
    assert (tmp_path / "sweep.html").exists()


def test_a_task_that_took_too_long_says_so(command, tmp_path, monkeypatch):
    written = command("--slurm_array", "--time_limit=7", repeats=1)
    folder = tmp_path / "sweep_trials" / "000_round0"
    (folder / "exit_code").write_text("124\n")
    (folder / "log.txt").write_text("compiling")
    assert written["tasks"] == 4
    run_task(written["script"], 3, "0")  # another one, so that there is a result
    run_task(written["script"], 2, "0")
    command("--collect", "--time_limit=7", repeats=1)
    row = json.loads((tmp_path / "sweep.json").read_text())["rows"][0]
    assert row["status"] == "timed_out" and "stopped after 7 s (--time_limit" in row["reason"]


def test_nothing_is_collected_where_nothing_was_begun(command, capsys):
    with pytest.raises(AssertionError, match="begin it with --slurm_array"):
        command("--collect")
