"""Stops training runs with random signals at random times, and checks that nothing is lost and nothing is left.

  python profiling/chaos.py [--kills=25] [--processes=1,2] [--workers=0,2] [--seed=0] [--cases=all]

For each number of processes and of workers one tiny run is started again and again, and hit each time by SIGKILL,
SIGTERM or SIGINT: at any moment from its start on, at a step, while a checkpoint is written, or while it evaluates;
with two processes one of them or their launcher is hit. In the end it is left alone. What must hold:

- it finishes with the parameters of a run that nobody disturbed, bit for bit;
- each start continues at the newest checkpoint that was there, after SIGTERM and SIGINT at the step that was reached;
- every process that was hit or lost a companion ends within 30 s, with the right exit code and no traceback;
- no temporary file, shared memory or process is left.

Then come faults that are no signals, each a case of `chaos_cases.py`: output that nobody reads, on a full disk or
closed; data that disappear or hang; checkpoints that are swapped, renamed or of another run; damaged programs in the
compile cache; other code or other data in one of two processes.

The last line is JSON: `kills`, `equal` (whether all runs were), `leftovers` (how many), `cases` (whether each held) and
what went wrong, by name.
Exit code 0 only if all held.
"""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable

import psutil
from chaos_cases import chosen, last_step, read_summary, run_cases

from jepa_jax.base.console import Console
from jepa_jax.base.errors import EXIT_PROCESS_LOST
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser

ROOT = pathlib.Path(__file__).parents[1]
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
STEPS = 48  # of tests/tiny_config.py
TIMEOUT = 1200.0  # for a run on a busy machine
END_SECONDS = 30.0  # for the processes of a run that was hit
SHARED_MEMORY = pathlib.Path("/dev/shm")
PYTHON_STARTS = 1.0  # seconds; an interpreter that has not started yet cannot answer a signal
TEMPORARY = ("*orbax-checkpoint-tmp*", ".*.??????*")
MARK = "JEPA_JAX_CHAOS"


def add_flags(parser: Parser) -> None:
    parser.add_flag("kills", "N", "signals in all", 25, least=0)
    parser.add_flag("cases", "LIST", "all, none, or beginnings of the names of other faults", "all")
    parser.add_flag("processes", "LIST", "numbers of processes", "1,2")
    parser.add_flag("workers", "LIST", "numbers of workers that load data, in each process", "0,2")
    parser.add_flag("seed", "N", "of signals and moments", 0)
    parser.add_flag(
        "end_seconds", "S", "within which a run that was hit must end; a busy machine needs more", END_SECONDS
    )


@dataclasses.dataclass
class Storm:
    """One run and what happened to it."""

    name: str
    workdir: pathlib.Path
    processes: int
    workers: int
    rng: random.Random
    problems: list[str] = dataclasses.field(default_factory=list)
    patience: float = END_SECONDS
    delivered: int = 0  # signals to a living process
    newest: int = 0  # checkpoint that was whole before the last signal
    newest_at_start: int = 0  # and when the run was started again
    reached: int | None = None  # step of a run that said where it stopped

    def command(self) -> list[str]:
        train = [
            "train", f"--config={ROOT / 'tests/tiny_config.py'}", f"--workdir={self.workdir}",
            f"--config.data.num_workers={self.workers}", "--config.profile.enabled=False",
            "--config.train.checkpoint_keep=2", "--config.eval.every_epochs=2", "--config.eval.knn_every_epochs=0",
        ]  # fmt: skip
        devices = f"--config.mesh.data={2 * self.processes if self.processes > 1 else 1}"
        launch = ["launch", "-n", str(self.processes), "--devices=2", "--"] if self.processes > 1 else []
        return [sys.executable, "-m", "jepa_jax", *launch, *train, devices]

    def start(self) -> "Life":
        return Life(self.command(), self.workdir.with_suffix(".log"))

    def problem(self, text: str) -> None:
        self.problems.append(f"{self.name}: {text}")

    def hit(self) -> str:
        """Starts the run, hits it once and waits for its end; returns what was done."""
        how, victim_number = self.rng.choice(SIGNALS), self.rng.randrange(self.processes + 1)
        moment, wait = self.rng.choice(list(MOMENTS.items()))
        life, started = self.start(), time.monotonic()
        until(life, lambda: time.monotonic() - started > PYTHON_STARTS)
        waited = wait(self, life)
        self.newest = max(self.newest, newest_step(self.workdir))
        victim = life.victim(victim_number if self.processes > 1 else 0)
        self.delivered += deliver(victim, how)
        code = life.end(self, self.patience)
        self.check_start(life)
        self.check_code(code, how, life)
        self.note_end(code, how, life.began)
        return f"{how.name} {moment}{waited}: exit code {code}, checkpoint {newest_step(self.workdir)}"

    def check_code(self, code: int, how: signal.Signals, life: "Life") -> None:
        """Checks the exit code of a run that was hit: that of the signal, or of a loss, or 0 if it had finished."""
        right = {128 + how, EXIT_PROCESS_LOST, 143} if how == signal.SIGKILL else {128 + how}
        finished = read_summary(self.workdir).get("status") == "finished"
        if code not in right | ({0} if finished else set()):
            self.problem(f"exit code {code} after {how.name}: {life.text()[-1500:]}")

    def check_start(self, life: "Life") -> None:
        """Checks that a start continued where the one before it had stopped."""
        resumed = re.findall(r"resumed at step (\d+)", life.text())
        if not resumed:
            return
        step = int(resumed[0])
        if step < self.newest_at_start:
            self.problem(f"resumed at step {step} although checkpoint {self.newest_at_start} was whole")
        if self.reached is not None and step != self.reached:
            self.problem(f"resumed at step {step}, but had stopped at {self.reached}")
        self.reached = None

    def note_end(self, code: int, how: signal.Signals, began: float) -> None:
        self.newest_at_start = newest_step(self.workdir)
        if self.newest_at_start < self.newest:
            self.problem(f"checkpoint {self.newest} is gone after {how.name}")
        path = self.workdir / "summary.json"
        summary = read_summary(self.workdir) if path.exists() and path.stat().st_mtime > began else {}  # of this start
        if code in (130, 143) and summary.get("status") == "interrupted" and how != signal.SIGKILL:
            self.reached = summary["steps"]

    def finish(self) -> str | None:
        """Lets the run end; returns the digest of its parameters."""
        life = self.start()
        code = life.end(self, TIMEOUT)
        self.check_start(life)
        if code:
            self.problem(f"ended with exit code {code} when left alone: {life.text()[-1500:]}")
        return read_summary(self.workdir).get("params_sha256")


class Life:
    """A started command: a process, or a launcher with several."""

    def __init__(self, command: list[str], log: pathlib.Path):
        self.log, self.mark, self.began = log, uuid.uuid4().hex, time.time()
        flags = "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=1"
        environment = os.environ | {MARK: self.mark, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        with open(log, "w") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
            )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def victim(self, number: int) -> psutil.Process | None:
        """Returns the process that was started (0), or one of those that the launcher has started; None if it ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            family = [psutil.Process(self.process.pid)]
            family += family[0].children()
            return family[min(number, len(family) - 1)]
        return None

    def end(self, storm: Storm, patience: float) -> int:
        """Waits for all processes; returns the exit code of the first one."""
        try:
            self.process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            storm.problem(f"still runs after {patience:.0f} s: {self.text()[-1500:]}")
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        deadline = time.monotonic() + patience
        while (left := living(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        for process in left:
            storm.problem(f"process {process.pid} was left: {' '.join(process.cmdline())[:200]}")
            process.kill()
        # Ctrl-C while Python still imports shows its own traceback; the first line of a run is "method".
        if "Traceback" in self.text() and ("KeyboardInterrupt" not in self.text() or "\nmethod " in self.text()):
            storm.problem(f"a traceback: {self.text().partition('Traceback')[2][:1500]}")
        code = self.process.returncode
        return 128 - code if code < 0 else code


def deliver(victim: psutil.Process | None, how: signal.Signals) -> bool:
    """Sends a signal; returns whether the process was there and had not ended."""
    if victim is None:
        return False
    try:
        alive = victim.status() != psutil.STATUS_ZOMBIE
        victim.send_signal(how)
    except psutil.NoSuchProcess:
        return False
    return alive


def living(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def until(life: Life, happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not happened() and life.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)


def at_any_time(storm: Storm, life: Life) -> str:
    seconds = storm.rng.uniform(0, 15)
    end = time.monotonic() + seconds
    until(life, lambda: time.monotonic() > end)
    return f" ({seconds:.1f} s)"


def at_a_step(storm: Storm, life: Life) -> str:
    step = storm.rng.randint(1, STEPS - 1)
    until(life, lambda: last_step(storm.workdir) >= step)
    return f" ({last_step(storm.workdir)})"


def in_a_save(storm: Storm, life: Life) -> str:
    def temporary() -> set[str]:
        return {path.name for path in (storm.workdir / "checkpoints").glob("*orbax-checkpoint-tmp*")}

    count, left = storm.rng.randint(1, 3), temporary()  # by a run that was killed
    seen: set[str] = set()

    def saving() -> bool:
        seen.update(temporary() - left)
        return len(seen) >= count

    until(life, saving)
    return ""


def in_an_evaluation(storm: Storm, life: Life) -> str:
    until(life, lambda: "untrained:" in life.text() or "epoch " in life.text() or "resumed" in life.text())
    until(life, lambda: last_step(storm.workdir) % 12 == 0)  # two epochs: an evaluation follows
    time.sleep(storm.rng.uniform(0, 0.3))
    return ""


MOMENTS = {
    "at any time": at_any_time,
    "at a step": at_a_step,
    "in a save": in_a_save,
    "in an evaluation": in_an_evaluation,
}


def newest_step(workdir: pathlib.Path) -> int:
    names = (path.name.removeprefix("step_") for path in (workdir / "checkpoints").glob("step_*"))
    return max((int(name) for name in names if name.isdigit()), default=0)


def leftovers(workdirs: list[pathlib.Path], memory_before: set[str]) -> list[str]:
    files = [str(path) for folder in workdirs for pattern in TEMPORARY for path in folder.rglob(pattern)]
    return files + sorted(shared_memory() - memory_before)


def shared_memory() -> set[str]:
    return {path.name for path in SHARED_MEMORY.glob("*")} if SHARED_MEMORY.is_dir() else set()


def check(arguments: Arguments, console: Console) -> Result:
    rng, memory_before = random.Random(arguments.seed), shared_memory()
    processes, workers = (map(int, text.split(",")) for text in (arguments.processes, arguments.workers))
    variants = list(itertools.product(processes, workers))
    folder = pathlib.Path(tempfile.mkdtemp(prefix="chaos"))
    storms = [
        Storm(
            f"{p} processes, {w} workers",
            folder / f"run_{p}_{w}",
            p,
            w,
            random.Random(rng.random()),
            patience=arguments.end_seconds,
        )
        for p, w in variants
    ]
    expected: dict[int, str | None] = {}
    problems: list[str] = []
    counts = [p for p, _ in variants] if arguments.kills else []
    for count in dict.fromkeys([*counts, *([1] if arguments.cases != "none" else [])]):
        undisturbed = Storm(f"undisturbed, {count} processes", folder / f"whole_{count}", count, 0, rng, problems)
        expected[count] = undisturbed.finish()
        console.line(f"{undisturbed.name}: {str(expected[count])[:12]}")
    for attempt in itertools.count():
        kills = sum(storm.delivered for storm in storms)
        if kills >= arguments.kills:
            break
        storm = storms[attempt % len(storms)]
        if read_summary(storm.workdir).get("status") == "finished":  # hit too late: begin again
            if read_summary(storm.workdir)["params_sha256"] != expected[storm.processes]:
                storm.problem("finished with other parameters")
            shutil.rmtree(storm.workdir)
            storm.newest = storm.newest_at_start = 0
            storm.reached = None
        console.line(f"{kills + 1}/{arguments.kills} {storm.name}: {storm.hit()}")
    equal = True
    for storm in storms if kills else ():
        same = storm.finish() == expected[storm.processes]
        equal = equal and same
        console.line(f"{storm.name}: {'equal' if same else 'DIFFERENT'}")
    cases = {}
    for name, found in run_cases(chosen(arguments.cases), folder / "cases", expected.get(1), arguments.end_seconds):
        cases[name] = not found
        problems += [f"{name}: {problem}" for problem in found]
        console.line(f"{name}: {'held' if not found else 'DID NOT HOLD'}")
    left = leftovers([storm.workdir for storm in storms], memory_before)
    problems += [problem for storm in storms for problem in storm.problems]
    good = equal and not left and not problems
    if good:
        shutil.rmtree(folder)
    row = {
        "kills": kills, "equal": equal, "leftovers": len(left), "cases": cases, "problems": problems, "left": left,
    }  # fmt: skip
    text = "\n".join([*problems, *left, f"{kills} kills, {len(cases)} cases: {'all held' if good else 'NOT ALL HELD'}"])
    return Result([row], text, 0 if good else 1)


if __name__ == "__main__":
    command = Command("profiling/chaos.py", __doc__, add_flags, check, uses_jax=False, program="python")
    sys.exit(command.main())
