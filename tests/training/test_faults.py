"""Faults of the disk and of other programs: a run goes on, or ends with one clear message."""

import json
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.evals.inference import load_encoder
from jepa_jax.program.checksums import CHECKSUMS, MARK, METADATA, step_folders, verify, write_checksums
from jepa_jax.program.workdir import Workdir
from jepa_jax.training.run import train
from tests.runs import WHOLE, Silent, rows, run
from tests.tiny import tiny_config

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 6 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting is not permitted")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def train_on(disk: pathlib.Path, *markers: str) -> tuple[int, str]:
    """Trains on a disk that fills up at a line; returns the exit code and what was said."""
    command = [sys.executable, "tests/training/run_full_disk.py", str(disk / "run"), *markers]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert "Traceback" not in result.stderr, result.stderr
    return result.returncode, result.stderr


@pytest.mark.slow
def test_a_disk_that_is_full_for_a_while_costs_files_but_not_the_run(small_disk):
    code, said = train_on(small_disk, "epoch 1/4", "epoch 3/4", "-")
    assert code == 0, said
    for name in ("metrics.jsonl", "tensorboard"):
        assert said.count(f"{name}: cannot write (the disk is full") == 1, said
        assert len(re.findall(rf"{name}: \d+ entries could not be written", said)) == 1, said
    assert "could not be saved (the disk is full); training goes on" in said
    [(step, newest)] = step_folders(small_disk / "run" / "checkpoints")
    assert step == 24 and verify(newest).whole and Workdir(small_disk / "run").read_summary()["status"] == "finished"
    assert [row["step"] for row in rows(small_disk / "run")][-1] == 24


@pytest.mark.slow
def test_a_disk_that_is_full_at_the_end_is_named_and_the_run_resumes_when_it_is_not(small_disk):
    code, said = train_on(small_disk, "epoch 3/4", "-", "-")
    assert code == 2 and said.count("error: ") == 1 and "the disk is full" in said.partition("error: ")[2], said
    assert not list((small_disk / "run" / "checkpoints").glob("*tmp*"))
    (small_disk / "filler").unlink()
    code, said = train_on(small_disk, "-", "-", "-")
    assert code == 0 and re.search("resumed at step 1[258] of 24", said), said


@pytest.mark.slow
def test_sigterm_on_a_full_disk_says_what_is_saved(small_disk):
    code, said = train_on(small_disk, "epoch 1/4", "-", "epoch 2/4")
    whole = [step for step, folder in step_folders(small_disk / "run" / "checkpoints") if verify(folder).whole]
    kept = f"nothing newer than step {max(whole)} is saved" if whole else "nothing is saved"
    assert code == 2 and re.search(rf"error: .* the disk is full; .*; {kept}", said), said


def test_a_damaged_newest_checkpoint_and_damaged_metrics_cost_steps_but_not_the_run(tmp_path):
    whole = run(tmp_path, train__checkpoint_keep=3)
    folder = Workdir(tmp_path)
    folder.summary.unlink()
    newest = max((folder.checkpoints / "step_12").rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    newest.write_bytes(bytes(newest.stat().st_size))
    lines = folder.metrics.read_bytes()
    folder.metrics.write_bytes(b"garbage\n\0\0\n" + lines)
    load_encoder(tmp_path)  # of step 9
    assert (folder.checkpoints / "step_12").is_dir()
    console = Silent()
    resumed = run(tmp_path, console, train__checkpoint_keep=3)
    assert resumed["params_sha256"] == whole["params_sha256"] and resumed["probe_accuracy"] == whole["probe_accuracy"]
    said = "\n".join(console.lines)
    assert "step_12 is damaged: " in said and newest.name in said and "set aside as damaged_step_12" in said
    assert "resumed at step 9 of 12" in said and "2 damaged lines were dropped" in said
    assert [row["step"] for row in rows(tmp_path) if "train/loss" in row] == list(range(1, 13))


def test_a_run_without_a_whole_checkpoint_is_refused_every_time(tiny_run, tmp_path):
    shutil.copytree(tiny_run[0], tmp_path, dirs_exist_ok=True)
    folder = Workdir(tmp_path)
    folder.summary.unlink()
    metrics = folder.metrics.read_bytes()
    (folder.checkpoints / "step_12" / "progress" / "metadata").write_text("{")
    for _ in range(2):
        with pytest.raises(UserError, match=r"no whole checkpoint is left: .*step_12 is damaged: progress/metadata"):
            run(tmp_path, **WHOLE)
    with pytest.raises(UserError, match="no whole checkpoint"):
        load_encoder(tmp_path)
    assert folder.metrics.read_bytes() == metrics and (folder.checkpoints / "step_12").is_dir()


def test_a_second_training_in_a_folder_is_refused_and_a_stale_lock_is_not_in_the_way(tmp_path):
    folder = Workdir(tmp_path / "run")
    folder.create()
    with folder.held(), pytest.raises(UserError, match=r"run: another training is under way"):
        run(tmp_path / "run")
    assert list(folder.path.iterdir()) == []
    (folder.path / ".lock").write_text("")  # of a process that was killed
    assert run(tmp_path / "run")["status"] == "finished"
    assert not (folder.path / ".lock").exists()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_that_is_removed_or_replaced_during_a_run_does_not_end_as_finished(tmp_path, replaced):
    def remove(text: str) -> None:
        if text.startswith("epoch 1/2"):
            (tmp_path / "run").rename(tmp_path / "elsewhere")  # at once, even while a checkpoint is being written
            if replaced:
                (tmp_path / "run").mkdir(exist_ok=True)  # the checkpoint writer may have made it anew

    with pytest.raises(UserError, match="run: was removed or replaced during the run"):
        run(tmp_path / "run", Silent(remove))
    assert not Workdir(tmp_path / "run").summary.exists()


@pytest.mark.slow
def test_a_folder_that_is_removed_after_the_last_save_does_not_end_as_finished(tmp_path):
    def remove(text: str) -> None:
        if text.startswith("trained:"):
            shutil.rmtree(tmp_path / "run", ignore_errors=True)

    with pytest.raises(UserError, match="run: was removed or replaced during the run"):
        run(tmp_path / "run", Silent(remove))


def test_a_finished_run_with_a_damaged_checkpoint_says_so(tiny_run, tmp_path):
    shutil.copytree(tiny_run[0], tmp_path / "run")
    (folder,) = Workdir(tmp_path / "run").checkpoints.glob("step_*")
    array = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    array.write_bytes(b"\0" + array.read_bytes()[1:])
    console = Silent()
    assert run(tmp_path / "run", console, **WHOLE)["status"] == "finished"
    assert any("is damaged" in line and "summary.json and start again" in line for line in console.lines)


def test_a_run_does_not_continue_the_checkpoint_of_another_config_unless_allowed(tiny_run, tmp_path):
    shutil.copytree(tiny_run[0], tmp_path, dirs_exist_ok=True)
    folder = Workdir(tmp_path)
    folder.config.unlink()
    folder.summary.unlink()
    for _ in range(2):  # the first refusal leaves nothing that the second one would take for the run's own
        with pytest.raises(UserError, match=r"was made with other config; .*\n  config.optim.lr: .* -> 0.7"):
            run(tmp_path, **WHOLE, optim__lr=0.7)
    console, config = Silent(), tiny_config(mesh__data=1, optim__lr=0.7, **WHOLE)
    summary = train(config, tmp_path, allow_changed=["config"], console=console)
    assert summary["steps"] == 12 and "as allowed" in "\n".join(console.lines)


def test_figures_of_a_checkpoint_are_not_read_with_the_config_of_another_run(tiny_run, tmp_path):
    shutil.copytree(tiny_run[0], tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["train"]["seed"] = 5
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"is not of these checkpoints; .*\n  config.train.seed: 0 -> 5"):
        load_encoder(tmp_path)


def test_a_checkpoint_of_a_version_without_manifests_continues_with_one_line(tiny_run, tmp_path):
    shutil.copytree(tiny_run[0], tmp_path, dirs_exist_ok=True)
    [(_, newest)] = step_folders(tmp_path / "checkpoints")
    metadata = json.loads((newest / METADATA).read_text())
    (newest / METADATA).write_text(json.dumps(metadata | {"custom_metadata": MARK}))
    (newest / CHECKSUMS).unlink()
    write_checksums(newest)
    (tmp_path / "summary.json").unlink()
    console = Silent()
    summary = run(tmp_path, console, **WHOLE)
    assert summary["params_sha256"] == tiny_run[1]["params_sha256"]
    assert sum("does not say what it was made with" in line for line in console.lines) == 1
