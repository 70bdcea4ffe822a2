"""Parts that run the commands of a user: memory up to its limit, and a restart after `kill -9`."""

import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from jepa_jax.base.errors import EXIT_OK, EXIT_USER_ERROR
from jepa_jax.base.processes import has_ended
from jepa_jax.device_check.findings import Findings

COMMAND = (sys.executable, "-m", "jepa_jax")
PLANNED = "mae_cifar10"  # whose largest batch fills a card, on synthetic images
PLANNED_FLAGS = ("--config.data.source=shapes", "--config.data.num_train=1000000", "--config.eval.untrained=false")
SHORT = ("--config.train.max_steps=3", "--config.profile.enabled=false", "--config.log.tensorboard=false")
BEYOND = 1.3  # times the largest batch that fits
PEAK_LIMITS = (0.6, 1.05)  # of the allocator's peak over the planned need, margin included
RESUMED = (
    "--config=mae_quickstart", "--config.model.width=32", "--config.model.depth=1", "--config.data.num_train=320",
    "--config.data.num_test=32", "--config.eval.batch_size=32", "--config.eval.every_epochs=0",
    "--config.optim.epochs=2", "--config.log.every_steps=1", "--config.train.checkpoint_every_steps=5",
    "--config.train.deterministic=true", "--config.log.pictures_every_epochs=0", "--config.eval.untrained=false",
    "--config.log.tensorboard=false",
)  # fmt: skip
KILL_AT = 12  # of 40 steps: the save of step 10 has waited for the checkpoint of step 5
WAIT_SECONDS = 3600  # for a command on a busy machine


def run_command(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of the package to its end; its output is text."""
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=WAIT_SECONDS)


def last_json(text: str) -> dict[str, Any]:
    """Returns the object in the last line of a command's output, or an empty one."""
    try:
        return json.loads(text.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return {}


def last_error(ended: subprocess.CompletedProcess[str]) -> str:
    return next((line for line in reversed(ended.stderr.splitlines()) if line.strip()), f"exit code {ended.returncode}")


def run_memory(findings: Findings, minutes: float) -> None:
    """Runs the largest batch that a plan says fits, and one beyond it that has to fail with advice."""
    flags = (f"--config={PLANNED}", *PLANNED_FLAGS)
    planned = run_command("plan", *flags, "--gpu=here", "--novariants")
    plan = last_json(planned.stdout)
    largest = plan.get("largest_batch")
    if not largest:
        findings.true("a plan finds the largest batch that fits", False, last_error(planned))
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, size in (("fits", largest), ("beyond", 8 * round(BEYOND * largest / 8))):
            batch = f"--config.data.batch_size={size}"
            ended = run_command("train", *flags, *SHORT, batch, f"--workdir={folder}/{name}")
            check_memory(name, size, ended, findings)
            if name == "fits":
                needed = last_json(run_command("plan", *flags, "--gpu=here", "--novariants", batch).stdout)
                peak = last_json(ended.stdout).get("peak_memory_bytes") or 0
                planned_bytes = needed.get("peak_bytes", 0) + needed.get("margin_bytes", 0)
                findings.between("allocator's peak / planned need", peak / max(1, planned_bytes), *PEAK_LIMITS)
                findings.figures["memory"] = {"batch_size": size, "peak_bytes": peak, "planned_bytes": planned_bytes}


def check_memory(name: str, size: int, ended: subprocess.CompletedProcess[str], findings: Findings) -> None:
    """Judges how a training ended: one that "fits" succeeds, one "beyond" it is refused with words about the batch."""
    if name == "fits":
        findings.true(f"batch {size:,}, which fits, trains", ended.returncode == EXIT_OK, last_error(ended)[:200])
        return
    explained = ended.returncode == EXIT_USER_ERROR and "batch_size" in ended.stderr
    findings.true(f"batch {size:,} ends with advice", explained, f"{ended.returncode}: {last_error(ended)[:200]}")


def run_resume(findings: Findings, minutes: float) -> None:
    """Kills a training with SIGKILL, starts it again, and compares its weights with those of a whole one."""
    with tempfile.TemporaryDirectory() as folder:
        whole = last_json(run_command("train", *RESUMED, f"--workdir={folder}/whole").stdout)
        broken = pathlib.Path(folder) / "broken"
        command = [*COMMAND, "train", *RESUMED, f"--workdir={broken}"]
        killed = kill_at(command, broken / "metrics.jsonl", KILL_AT)
        findings.true(f"killed after step {KILL_AT} of {whole.get('steps')}", killed)
        ended = run_command("train", *RESUMED, f"--workdir={broken}", "--resume=must")
        resumed = last_json(ended.stdout)
        same = bool(whole) and whole.get("params_sha256") == resumed.get("params_sha256")
        findings.true("same bits after kill -9 and restart", same, "" if same else last_error(ended)[:200])


def kill_at(command: list[str], metrics: pathlib.Path, step: int) -> bool:
    """Starts a command and ends it with SIGKILL when a file of metrics has a row of this step or a later one.

    Returns whether that happened.
    """
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=quiet, stderr=quiet, start_new_session=True)
    deadline = time.monotonic() + WAIT_SECONDS
    try:
        while time.monotonic() < deadline and not has_ended(process):
            if newest_step(metrics) >= step:
                process.send_signal(signal.SIGKILL)
                return process.wait() == -signal.SIGKILL
            time.sleep(0.02)
        return False
    finally:
        process.kill()
        process.wait()


def newest_step(metrics: pathlib.Path) -> int:
    """Returns the step of the last whole row in a file of metrics; 0 before there is one."""
    rows = metrics.read_bytes().split(b"\n")[:-1] if metrics.exists() else []
    return json.loads(rows[-1])["step"] if rows else 0
