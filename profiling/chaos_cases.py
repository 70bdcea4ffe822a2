"""Faults of `profiling/chaos.py` that are no signals: streams, data, checkpoints, cached programs and other code.

Each case starts tiny runs, breaks something, and returns what did not hold; nothing if all did.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from PIL import Image

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = f"--config={ROOT / 'tests/tiny_config.py'}"
ONE_DEVICE = "--config.mesh.data=1"
KEEP_TWO = "--config.train.checkpoint_keep=2"
XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=1"
LIMIT = 1200.0  # seconds for a run on a busy machine
STEP = 16  # after which something is broken, of 48


@dataclasses.dataclass
class Case:
    """Where a case works, and the parameters that an undisturbed run ends with.

    Attributes:
      seconds: within which a run must end that was asked to stop.
    """

    folder: pathlib.Path
    expected: str | None
    seconds: float
    problems: list[str] = dataclasses.field(default_factory=list)

    def command(self, workdir: pathlib.Path, *flags: str) -> list[str]:
        train = ["train", CONFIG, f"--workdir={workdir}", ONE_DEVICE, KEEP_TWO, "--config.profile.enabled=False"]
        return [sys.executable, "-m", "jepa_jax", *train, *flags]

    @contextlib.contextmanager
    def started(self, workdir: pathlib.Path, *flags: str, **environment: str) -> Iterator[subprocess.Popen[Any]]:
        """Starts a run whose output goes to a log beside its folder, and kills it if it is left alone too long."""
        with open(workdir.with_suffix(".log"), "ab") as log:
            process = subprocess.Popen(
                self.command(workdir, *flags), cwd=ROOT, env=variables(**environment), stdout=log, stderr=log
            )
        try:
            yield process
            process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self.problems.append(f"still runs: {said(workdir)[-800:]}")
        finally:
            process.kill()
            process.wait()

    def run(self, workdir: pathlib.Path, *flags: str, **environment: str) -> int:
        """Trains to the end; returns the exit code."""
        with self.started(workdir, *flags, **environment) as process:
            pass
        return process.returncode

    def stopped(self, workdir: pathlib.Path, *flags: str) -> None:
        """Trains up to a step and a checkpoint, and stops by SIGTERM."""
        with self.started(workdir, *flags) as process:
            wait_until(process, lambda: last_step(workdir) >= STEP)
            process.send_signal(signal.SIGTERM)
        self.check(process.returncode == 143, f"exit code {process.returncode} after SIGTERM", workdir)

    def check(self, held: bool, problem: str, workdir: pathlib.Path) -> None:
        if not held:
            self.problems.append(f"{problem}: {said(workdir)[-800:]}")

    def check_finished(self, workdir: pathlib.Path, expected: str | None = None) -> None:
        """Checks that a run has finished, with the parameters of an undisturbed one."""
        summary = read_summary(workdir)
        same = summary.get("params_sha256") == (expected or self.expected)
        self.check(summary.get("status") == "finished" and same, "not finished, or with other parameters", workdir)
        self.check("Traceback" not in said(workdir), "a traceback", workdir)


def variables(**more: str) -> dict[str, str]:
    python_path = os.pathsep.join(filter(None, [more.pop("PYTHONPATH", ""), str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": XLA_FLAGS, "PYTHONPATH": python_path} | more


def said(workdir: pathlib.Path) -> str:
    log = workdir.with_suffix(".log")
    return log.read_text(errors="replace") if log.exists() else ""


def read_summary(workdir: pathlib.Path) -> dict:
    try:
        return json.loads((workdir / "summary.json").read_text())
    except (OSError, ValueError):
        return {}


def last_step(workdir: pathlib.Path) -> int:
    """Returns the newest step of metrics.jsonl; 0 before there is one."""
    with contextlib.suppress(OSError):
        for line in reversed((workdir / "metrics.jsonl").read_text().splitlines()):
            with contextlib.suppress(ValueError):  # half a line: it is being written
                return json.loads(line)["step"]
    return 0


def checkpoints(workdir: pathlib.Path) -> list[int]:
    """Returns the steps of the checkpoints, ascending."""
    names = (path.name.removeprefix("step_") for path in (workdir / "checkpoints").glob("step_*"))
    return sorted(int(name) for name in names if name.isdigit())


def wait_until(process: subprocess.Popen[Any], happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not happened() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)


# --- streams ---


def through_a_shell(case: Case, redirection: str) -> None:
    """Trains with redirected output, whose own exit code does not count."""
    workdir = case.folder / "run"
    command = " ".join(f"'{word}'" for word in case.command(workdir))
    subprocess.run(["bash", "-c", f"{command} {redirection}"], cwd=ROOT, env=variables(), timeout=LIMIT, check=False)
    case.check_finished(workdir)


def output_that_nobody_reads(case: Case) -> None:
    through_a_shell(case, "2>&1 | head -2 > /dev/null")


def output_on_a_full_disk(case: Case) -> None:
    through_a_shell(case, "> /dev/full 2>&1")


def closed_output(case: Case) -> None:
    through_a_shell(case, ">&- 2>&-")


# --- data ---


def images(folder: pathlib.Path) -> list[str]:
    """Writes a set of photographs, which are read batch by batch; returns the flags that train on it."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 96), ("test", 32)):
        for index in range(count):
            path = folder / split / "ab"[index % 2] / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).save(path)
    sizes = ["--config.data.num_train=0", "--config.data.num_test=0", "--config.data.num_workers=2"]
    return ["--config.data.source=folder", f"--config.data.dir={folder}", *sizes]


def break_data(case: Case, break_them: Callable[[pathlib.Path], object], *more: str, stop: bool) -> None:
    """Breaks the data of a run in the middle; it saves, and continues to the same end when they are back."""
    data, workdir, whole = case.folder / "data", case.folder / "run", case.folder / "whole"
    flags = [*images(data), *more]
    case.check(case.run(whole, *flags) == 0, "the undisturbed run failed", whole)
    shutil.copytree(data, case.folder / "copy")
    began = 0.0
    with case.started(workdir, *flags) as process:
        wait_until(process, lambda: last_step(workdir) >= STEP)
        break_them(data)
        if stop:
            time.sleep(2)  # it is waiting for data now
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
    took, kept = time.monotonic() - began, checkpoints(workdir)
    right = process.returncode == (143 if stop else 2)
    case.check(right, f"exit code {process.returncode}", workdir)
    case.check(not stop or took < case.seconds, f"ended {took:.0f} s after SIGTERM", workdir)
    case.check(bool(kept) and kept[-1] == read_summary(workdir).get("steps"), f"checkpoints {kept}", workdir)
    shutil.rmtree(data, ignore_errors=True)
    (case.folder / "copy").rename(data)
    case.check(case.run(workdir, *flags) == 0, "does not continue", workdir)
    case.check_finished(workdir, read_summary(whole).get("params_sha256"))


def data_that_disappear(case: Case) -> None:
    break_data(case, lambda data: shutil.rmtree(data), stop=False)


def data_that_hang(case: Case) -> None:
    source = "--config.data.source=tests.data.failing_shapes:HangingPhotos"
    break_data(case, lambda data: (data / "hangs").touch(), source, stop=True)


def data_that_become_pipes(case: Case) -> None:
    def replace_by_pipes(data: pathlib.Path) -> None:
        for path in (data / "train").rglob("*.png"):
            os.mkfifo(path.with_suffix(".pipe"))
            path.with_suffix(".pipe").replace(path)

    break_data(case, replace_by_pipes, stop=False)


# --- checkpoints ---


def swapped_checkpoints(case: Case) -> None:
    workdir = case.folder / "run"
    case.stopped(workdir)
    steps = checkpoints(workdir)
    swap(*(workdir / "checkpoints" / f"step_{step}" for step in steps))
    code = case.run(workdir)
    named = all(f"it is the checkpoint of step {step}, " in said(workdir) for step in steps)
    case.check(code == 2 and named, f"exit code {code}", workdir)
    swap(*(workdir / "checkpoints" / f"step_{step}" for step in steps))
    case.check(case.run(workdir) == 0, "does not continue", workdir)
    case.check_finished(workdir)


def swap(one: pathlib.Path, other: pathlib.Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def renamed_checkpoint(case: Case) -> None:
    workdir = case.folder / "run"
    case.stopped(workdir)
    before, newest = checkpoints(workdir)
    (workdir / "checkpoints" / f"step_{newest}").rename(workdir / "checkpoints" / "step_999")
    case.check(case.run(workdir) == 0, "does not continue", workdir)
    case.check(f"resumed at step {before} " in said(workdir), f"not resumed at step {before}", workdir)
    case.check((workdir / "checkpoints" / "damaged_step_999").is_dir(), "not set aside", workdir)
    case.check_finished(workdir)


def foreign_checkpoint(case: Case) -> None:
    workdir, other = case.folder / "run", case.folder / "other"
    case.stopped(workdir)
    case.stopped(other, "--config.train.seed=5")
    shutil.rmtree(workdir / "checkpoints")
    shutil.copytree(other / "checkpoints", workdir / "checkpoints")
    code = case.run(workdir)
    case.check(code == 2 and "config.train.seed: 5 -> 0" in said(workdir), f"exit code {code}", workdir)
    before = (workdir / "config.json").read_text()
    (workdir / "config.json").unlink()
    case.check(case.run(workdir) == 2 and not (workdir / "config.json").exists(), "without config.json", workdir)
    shutil.rmtree(workdir / "checkpoints")
    (workdir / "config.json").write_text(before)


# --- programs ---


def damaged_programs(case: Case) -> None:
    environment = {"XDG_CACHE_HOME": str(case.folder / "cache"), "JAX_COMPILATION_CACHE_DIR": ""}
    names = [case.folder / name for name in ("fill", "run", "again")]
    case.check(case.run(names[0], **environment) == 0, "cannot fill the cache", names[0])
    entries = sorted((case.folder / "cache").rglob("*-cache"))
    rng = np.random.default_rng(0)
    for entry in entries:
        content = bytearray(entry.read_bytes())
        content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
        entry.write_bytes(content[: len(content) // 2] if rng.random() < 0.3 else content)
    (case.folder / "cache/jepa_jax/xla/loading-crashed").write_text(entries[0].name.removesuffix("-cache"))
    case.check(bool(entries) and case.run(names[1], **environment) == 0, "failed with damaged programs", names[1])
    text = said(names[1])
    counted = text.count("is damaged; it is removed") + text.count("crashed the process that loaded it; it is removed")
    case.check(counted >= len(entries) - 1, f"{counted} of {len(entries)} were named", names[1])
    case.check_finished(names[1])
    case.check(
        case.run(names[2], **environment) == 0 and "it is removed" not in said(names[2]), "named again", names[2]
    )


def other_code_in_one_process(case: Case) -> None:
    other = case.folder / "other_code"
    shutil.copytree(ROOT / "jepa_jax", other / "jepa_jax", ignore=shutil.ignore_patterns("__pycache__"))
    with open(other / "jepa_jax" / "losses" / "__init__.py", "a") as file:
        file.write("# another version\n")
    differing_processes(case, "another code", PYTHONPATH=str(other))


def other_data_in_one_process(case: Case) -> None:
    flags = [*images(case.folder / "data"), "--config.data.dir=data"]  # of each process's own folder
    shutil.copytree(case.folder / "data", case.folder / "second" / "data")
    next((case.folder / "second").rglob("train/a/*.png")).unlink()
    differing_processes(case, "another data", *flags)


def differing_processes(case: Case, named: str, *flags: str, **variables_of_second: str) -> None:
    """Starts two processes, each in a folder of its own; both must name what differs, and train nothing."""
    workdir, second = case.folder / "run", case.folder / "second"
    second.mkdir(exist_ok=True)
    place = [f"--coordinator=127.0.0.1:{free_port()}", "--num_processes=2", "--config.mesh.data=2", *flags]
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        processes = []
        for index, (log, folder) in enumerate(((workdir, case.folder), (second, second))):
            output = stack.enter_context(open(log.with_suffix(".log"), "wb"))
            own = variables(**variables_of_second) if index else variables()
            command = [*case.command(workdir, *place), f"--process_id={index}"]
            process = subprocess.Popen(command, cwd=folder, env=own, stdout=output, stderr=output)
            stack.callback(process.kill)
            processes.append(process)
        codes = [process.wait(LIMIT) for process in processes]
    for log in (workdir, second):
        case.check(f"process 1 has {named} than process 0" in said(log), "not named", log)
    case.check(codes == [2, 2], f"exit codes {codes} after {time.monotonic() - began:.0f} s", workdir)
    case.check(not checkpoints(workdir), "it trained", workdir)


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


CASES: dict[str, Callable[[Case], None]] = {
    "output that nobody reads": output_that_nobody_reads,
    "output on a full disk": output_on_a_full_disk,
    "closed output": closed_output,
    "data that disappear": data_that_disappear,
    "data that hang": data_that_hang,
    "data that become pipes": data_that_become_pipes,
    "swapped checkpoints": swapped_checkpoints,
    "renamed checkpoint": renamed_checkpoint,
    "foreign checkpoint": foreign_checkpoint,
    "damaged programs": damaged_programs,
    "other code in one process": other_code_in_one_process,
    "other data in one process": other_data_in_one_process,
}


def chosen(text: str) -> list[str]:
    """Returns the cases that --cases names: all, none, or some, by their beginnings and with commas."""
    if text in ("all", "none"):
        return list(CASES) if text == "all" else []
    return [name for name in CASES if any(name.startswith(part.strip()) for part in text.split(",") if part.strip())]


def run_cases(
    names: Sequence[str], folder: pathlib.Path, expected: str | None, seconds: float
) -> Iterator[tuple[str, list[str]]]:
    """Yields each case with what did not hold."""
    for name in names:
        case = Case(folder / name.replace(" ", "_"), expected, seconds)
        case.folder.mkdir(parents=True)
        try:
            CASES[name](case)
        except Exception as error:
            case.problems.append(f"{type(error).__name__}: {error}")
        yield name, case.problems
