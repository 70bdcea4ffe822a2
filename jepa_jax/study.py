"""Studies: one training run a process, one row a run, nothing lost and nothing done twice.

`results.json` is written after every run. The same command goes on where it stopped: rows that are done stay, a run
that was cut off resumes from its own checkpoint. A run that fails, diverges, hangs or is killed is a row with its
reason, and the study goes on.
"""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jepa_jax.errors import EXIT_DIVERGED, EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED, EXIT_USER_ERROR, UserError
from jepa_jax.files import write_atomically, write_json

if TYPE_CHECKING:
    import psutil

FINISHED, DIVERGED, FAILED = "finished", "diverged", "failed"
KILLED, TIMEOUT, INTERRUPTED = "killed", "timeout", "interrupted"
DONE = (FINISHED, DIVERGED)  # running these again would give the same
SUMMARY_KEYS = ("probe_accuracy", "untrained_probe_accuracy", "knn_accuracy", "wall_seconds", "cpu_seconds", "steps")
EXIT_NONE_FINISHED = 1  # every run has a row, none of them an accuracy
GRACE_SECONDS = 120.0  # for a run that was asked to stop: it ends its step (or its compilation) and writes a checkpoint
POLL_SECONDS = 0.05

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run of a study: a directory, the values that vary and the overrides that set them."""

    name: str
    values: Mapping[str, float]
    overrides: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Study:
    """What is common to all runs; two studies share a directory only if their `identity` is the same."""

    kind: str
    config: str
    output_dir: pathlib.Path
    command: tuple[str, ...]  # what starts a run, e.g. (sys.executable, "scripts/train.py")
    overrides: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def identity(self) -> dict[str, Any]:
        return {"study": self.kind, "config": self.config, "overrides": list(self.overrides), **self.fixed}


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Command line -> (what the study's own flags read, the --config.key=value for the runs)."""
    own, overrides = [], []
    for argument in arguments:
        if re.match(r"--?config\.", argument):
            if "=" not in argument:
                raise UserError(f"{argument}: no value; write {argument}=VALUE, with the equals sign")
            overrides.append("--" + argument.lstrip("-"))
        else:
            own.append(argument)
    return own, tuple(overrides)


def parse_numbers(flag: str, text: str, kind: type = float, smallest: float = 0.0) -> list:
    """'.1,.3' -> [0.1, 0.3], in the given order, without repeats."""
    numbers = []
    for part in text.split(","):
        try:
            value = kind(part)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= smallest and (kind is int or value > smallest)):
            what = f"an integer >= {smallest:g}" if kind is int else f"a number > {smallest:g}"
            raise UserError(f"--{flag} = {text}: {part!r} is not {what}; give numbers separated by commas")
        if value not in numbers:
            numbers.append(value)
    return numbers


def plan_runs(lrs: Sequence[float | None], epochs: Sequence[int], seeds: Sequence[int]) -> list[Run]:
    """Every combination; a learning rate of None leaves the config's own."""
    runs = []
    for count in epochs:
        for lr in lrs:
            for seed in seeds:
                values = ({} if lr is None else {"lr": lr}) | {"epochs": count, "seed": seed}
                overrides = [f"--config.optim.epochs={count}", f"--config.train.seed={seed}"]
                overrides += [] if lr is None else [f"--config.optim.lr={lr!r}"]
                runs.append(Run("_".join(f"{k}{v}" for k, v in values.items()), values, tuple(overrides)))
    return runs


def run_command(study: Study, run: Run) -> list[str]:
    """The command of one run; its own values come last and so win."""
    workdir = study.output_dir / run.name
    flags = [f"--config={study.config}", f"--workdir={workdir}", "--resume=auto"]
    return [*study.command, *flags, *study.overrides, *run.overrides]


def check(study: Study, runs: Sequence[Run], resume: bool = True) -> None:
    """Refuses, before anything runs, what every run would fail on."""
    if not pathlib.Path(study.config.split(":")[0]).is_file():
        raise UserError(f"--config = {study.config}: there is no such file; give a file of configs/")
    varied = {override.split("=")[0] for run in runs for override in run.overrides}
    for override in study.overrides:
        if override.split("=")[0] in varied:
            raise UserError(f"{override}: the study itself sets this key; leave it out, or use the study's own flag")
    if not resume and (study.output_dir / "results.json").exists():
        raise UserError(
            f"--output_dir = {study.output_dir}: holds a study already; use another, or leave out --noresume"
        )
    load_rows(study)


def execute(
    study: Study,
    runs: Sequence[Run],
    *,
    timeout: float | None = None,
    resume: bool = True,
    grace: float = GRACE_SECONDS,
    on_tick: Callable[[Run, float], None] = lambda run, epoch: None,
    on_row: Callable[[Row, list[Row]], None] = lambda row, rows: None,
) -> list[Row]:
    """Runs what is not done yet, one process after the other; returns all rows of the directory.

    Args:
      timeout: seconds for one attempt of one run.
      resume: False refuses a directory that holds results.
      grace: seconds a run has to stop by itself before it is killed.
      on_tick: called a few times a second with the epoch that the run has reached.
      on_row: called with each new row and all rows so far.

    A KeyboardInterrupt (or any other exception raised in the callbacks) stops the run cleanly, keeps its row, and
    goes on to the caller.
    """
    check(study, runs, resume)
    study.output_dir.mkdir(parents=True, exist_ok=True)
    with _only_one_study(study.output_dir):
        rows = load_rows(study)
        save_rows(study, rows.values())  # the header first: a study killed in its first run is recognised
        for run in runs:
            workdir = study.output_dir / run.name
            if rows.get(run.name, {}).get("status") in DONE:
                continue
            _stop_left_over(workdir, grace)
            attempts = rows.get(run.name, {}).get("attempts", 0) + 1
            started = time.monotonic()
            outcome: Row = {"status": INTERRUPTED, "reason": "the study was interrupted", "exit_code": None}
            try:
                if _ended_unseen(workdir):
                    outcome = {"status": FINISHED, "reason": "", "exit_code": EXIT_OK}
                else:
                    outcome = _run_process(study, run, timeout, grace, on_tick)
            finally:
                outcome |= {"attempts": attempts, "attempt_seconds": round(time.monotonic() - started, 3)}
                rows[run.name] = make_row(run, outcome, workdir)
                save_rows(study, rows.values())
                (workdir / "process.json").unlink(missing_ok=True)
                on_row(rows[run.name], list(rows.values()))
    return list(rows.values())


def _run_process(
    study: Study, run: Run, timeout: float | None, grace: float, on_tick: Callable[[Run, float], None]
) -> Row:
    """One attempt: starts the process in its own group, waits, and leaves nothing of the group behind."""
    workdir = study.output_dir / run.name
    workdir.mkdir(exist_ok=True)
    log = workdir / "log.txt"
    with open(log, "ab") as output:
        begin = output.tell()
        process = subprocess.Popen(
            run_command(study, run),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C reaches the study alone, which then stops the run and waits for it
            env=os.environ | {"PYTHONUNBUFFERED": "1"},  # the error message is the last line of the log
        )
    stopped = ""
    try:
        _write_process_file(workdir, process.pid)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        next_tick = 0.0
        while not _has_ended(process):
            now = time.monotonic()
            if now > deadline:
                stopped = f"stopped after {timeout:g} s (--timeout)"
                _stop_group(process, signal.SIGTERM, grace)
                break
            if now >= next_tick:
                next_tick = now + 0.5
                on_tick(run, reached_epoch(workdir))
            time.sleep(POLL_SECONDS)
    except BaseException:
        _stop_group(process, signal.SIGINT, grace)
        raise
    finally:
        _kill_group(process)  # workers that outlived the run
        process.wait()
    if stopped:
        return {"status": TIMEOUT, "reason": stopped, "exit_code": process.returncode}
    status, reason = explain_exit(process.returncode, last_message(log, begin))
    return {"status": status, "reason": reason, "exit_code": process.returncode}


def explain_exit(code: int, message: str) -> tuple[str, str]:
    """Exit code of a run, last message of its log -> status, reason."""
    if code == EXIT_OK:
        return FINISHED, ""
    if code == EXIT_DIVERGED:
        return DIVERGED, message or "the loss became NaN or infinite"
    if code in (EXIT_INTERRUPTED, EXIT_TERMINATED):
        return INTERRUPTED, f"interrupted from outside (exit code {code}); the same command goes on"
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return KILLED, f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    if code == EXIT_USER_ERROR:
        return FAILED, message or "user error (exit code 2), see log.txt"
    return FAILED, f"exit code {code}: {message or 'see log.txt'}"


def _has_ended(process: subprocess.Popen) -> bool:
    # WNOWAIT leaves the process unreaped, so that its group id cannot pass to another before the group is killed.
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _stop_group(process: subprocess.Popen, how: signal.Signals, grace: float) -> None:
    """Asks the run to stop and gives it time for its checkpoint; a second Ctrl-C ends the waiting."""
    os.kill(process.pid, how)  # to the run alone: it stops its own workers
    with contextlib.suppress(KeyboardInterrupt):
        _wait_until(lambda: _has_ended(process), grace)


def _kill_group(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _write_process_file(workdir: pathlib.Path, pid: int) -> None:
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        write_json(workdir / "process.json", {"pid": pid, "created": psutil.Process(pid).create_time()})


def _ended_unseen(workdir: pathlib.Path) -> bool:
    """The run came to its end, but the study was killed before it wrote the row."""
    return (workdir / "process.json").exists() and read_json(workdir / "summary.json").get("status") == FINISHED


def _stop_left_over(workdir: pathlib.Path, grace: float) -> None:
    """Ends a run whose study was killed: it checkpoints and the study goes on from there."""
    import psutil

    record = read_json(workdir / "process.json")
    with contextlib.suppress(psutil.Error, KeyError, TypeError, ValueError):
        process = psutil.Process(record["pid"])
        if abs(process.create_time() - record["created"]) > 0.01:
            return  # the number belongs to another process by now
        family = [process, *process.children(recursive=True)]
        process.terminate()
        _wait_until(lambda: _is_gone(process), grace)
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        _wait_until(lambda: all(map(_is_gone, family)), 5.0)


def _is_gone(process: "psutil.Process") -> bool:
    """Ended, if only as a zombie: in a container the first process may never reap it."""
    import psutil

    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _wait_until(happened: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not happened():
        time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def _only_one_study(output_dir: pathlib.Path) -> Iterator[None]:
    import fcntl

    with open(output_dir / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"--output_dir = {output_dir}: another study is running there; wait for it or use another"
            raise UserError(message) from None
        yield


def make_row(run: Run, outcome: Row, workdir: pathlib.Path) -> Row:
    """The row of a run from how it ended and what it wrote."""
    row: Row = {"name": run.name, **run.values, **outcome, **dict.fromkeys(SUMMARY_KEYS), "final_loss": None}
    summary = read_json(workdir / "summary.json")
    if row["status"] == FINISHED and not summary:
        row |= {"status": FAILED, "reason": "exit code 0, but no readable summary.json was written"}
    elif row["status"] == FINISHED and summary.get("status", FINISHED) != FINISHED:
        row |= {"status": str(summary["status"]), "reason": f"summary.json says {summary['status']}"}
    if summary.get("status", FINISHED) == row["status"]:  # else it is of an earlier attempt
        row |= {key: finite(summary.get(key)) for key in SUMMARY_KEYS}
    if row["status"] == FINISHED:
        row["final_loss"] = finite(summary.get("final_loss", last_metric(workdir, "train/loss")))
    return row


def finite(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None


def last_metric(workdir: pathlib.Path, key: str) -> Any:
    """The last value of a metric in metrics.jsonl, from the end of the file."""
    try:
        with open(workdir / "metrics.jsonl", "rb") as file:
            file.seek(max(0, os.path.getsize(file.name) - 65536))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return json.loads(line)[key]
    return None


def reached_epoch(workdir: pathlib.Path) -> float:
    return finite(last_metric(workdir, "epoch")) or 0.0


def last_message(path: pathlib.Path, begin: int = 0) -> str:
    """The last error of a log from `begin` on, all its lines, or else the last line; at most 400 characters."""
    with open(path, "rb") as file:
        file.seek(max(begin, os.path.getsize(path) - 16384))
        lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    starts = [i for i, line in enumerate(lines) if line.startswith("error: ")]
    return " ".join(lines[starts[-1] if starts else -1 :]).removeprefix("error: ")[:400]


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object, empty if the file is absent or broken."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def save_rows(study: Study, rows: Iterable[Row]) -> None:
    write_json(study.output_dir / "results.json", {"header": study.identity(), "rows": list(rows)})


def load_rows(study: Study) -> dict[str, Row]:
    """Rows of an earlier call by name; a directory of another study is refused."""
    path = study.output_dir / "results.json"
    if not path.exists():
        return {}
    content = read_json(path)
    header, wanted = content.get("header"), study.identity()
    if not isinstance(header, dict) or not isinstance(content.get("rows"), list):
        raise UserError(f"{path}: not the results of a study; remove it or use another --output_dir")
    keys = [key for key in {**header, **wanted} if header.get(key) != wanted.get(key)]
    differ = [f"{key} {header.get(key)!r} there, {wanted.get(key)!r} here" for key in keys]
    if differ:
        raise UserError(f"--output_dir = {study.output_dir}: holds another study ({'; '.join(differ)}); use another")
    return {row["name"]: row for row in content["rows"]}


@dataclasses.dataclass(frozen=True)
class Group:
    """The rows of one value of what varies."""

    value: float
    rows: tuple[Row, ...]

    def numbers(self, key: str) -> list[float]:
        return [row[key] for row in self.rows if row["status"] == FINISHED and row.get(key) is not None]

    def failures(self, key: str) -> int:
        return len(self.rows) - len(self.numbers(key))

    def mean(self, key: str) -> float:
        """NaN if no run has finished with it."""
        numbers = self.numbers(key)
        return statistics.fmean(numbers) if numbers else math.nan


def group_rows(rows: Iterable[Row], key: str) -> list[Group]:
    """Groups in the order of their value."""
    rows = list(rows)
    return [Group(v, tuple(r for r in rows if r[key] == v)) for v in sorted({row[key] for row in rows})]


def seed_variance(groups: Iterable[Group], key: str) -> float | None:
    """Variance between seeds, pooled over the groups: sum (n-1) s^2 / sum (n-1); None with one seed each."""
    several = [numbers for group in groups if len(numbers := group.numbers(key)) > 1]
    freedom = sum(len(numbers) - 1 for numbers in several)
    return sum((len(n) - 1) * statistics.variance(n) for n in several) / freedom if freedom else None


def count_rows(rows: Sequence[Row]) -> dict[str, int]:
    return {"runs": len(rows), "finished": sum(row["status"] == FINISHED for row in rows)}


def conclude_lr(rows: Sequence[Row]) -> tuple[dict[str, Any], list[str]]:
    """The best learning rate by mean probe accuracy, as a JSON object and in words."""
    groups = group_rows(rows, "lr")
    measured = [group for group in groups if group.numbers("probe_accuracy")]
    result: dict[str, Any] = {
        "best_lr": None,
        "probe_accuracy": None,
        "at_edge": None,
        "within_noise": [],
    } | count_rows(rows)
    if not measured:
        return result, ["No run has finished with an accuracy: there is no best learning rate."]
    # A rate at which a seed failed is no recommendation while another held for all.
    best = max(measured, key=lambda g: (not g.failures("probe_accuracy"), g.mean("probe_accuracy")))
    accuracy, seeds = best.mean("probe_accuracy"), len(best.numbers("probe_accuracy"))
    # A run that was killed or could not start says nothing about its rate.
    tried = [group.value for group in groups if any(row["status"] in DONE for row in group.rows)]
    at_edge = best.value in (tried[0], tried[-1])
    result |= {"best_lr": best.value, "probe_accuracy": round(accuracy, 4), "at_edge": at_edge, "seeds": seeds}
    words = [f"Best learning rate: {best.value:g}, {accuracy:.2f} % (mean of {seeds})." if seeds > 1 else
             f"Best learning rate: {best.value:g}, {accuracy:.2f} %."]  # fmt: skip
    variance = seed_variance(measured, "probe_accuracy")
    if variance is None:
        words.append("One seed a rate: the noise is unknown; give --seeds=0,1,2 to see it.")
    else:

        def margin(other: Group) -> float:  # two standard errors of the difference of the means
            return 2 * math.sqrt(variance * (1 / seeds + 1 / len(other.numbers("probe_accuracy"))))

        others = [g for g in measured if g is not best and abs(accuracy - g.mean("probe_accuracy")) <= margin(g)]
        result |= {"within_noise": [g.value for g in others], "seed_std": round(math.sqrt(variance), 4)}
        close = ", ".join(f"{g.value:g}" for g in others)
        words.append(
            f"Within noise of it (2 standard errors): {close}." if close else "No other is within noise of it."
        )
    if len(tried) == 1:
        words.append("Only one rate was tried.")
    elif at_edge:
        side = "smallest" if best.value == tried[0] else "largest"
        words.append(f"It is the {side} rate tried: the best may lie beyond; widen --lrs.")
    else:
        words.append("It lies inside the range tried.")
    partly = [(group, group.failures("probe_accuracy")) for group in groups]
    words += [f"{group.value:g}: {n} of {len(group.rows)} runs did not finish." for group, n in partly if n]
    return result, words


def conclude_epochs(rows: Sequence[Row]) -> tuple[dict[str, Any], list[str]]:
    """Accuracy and time against epochs, and whether the times can be trusted."""
    groups = [g for g in group_rows(rows, "epochs") if g.numbers("probe_accuracy")]
    points: list[dict[str, Any]] = [
        {"epochs": g.value, "probe_accuracy": g.mean("probe_accuracy"), "wall_seconds": finite(g.mean("wall_seconds"))}
        for g in groups
    ]
    flagged = odd_times(rows)
    result = {"points": points, "flagged": list(flagged), "time_grows": True} | count_rows(rows)
    words = [f"{name}: {reason}." for name, reason in flagged.items()]
    for before, after in zip(points, points[1:], strict=False):
        gain = after["probe_accuracy"] - before["probe_accuracy"]
        text = f"{before['epochs']} to {after['epochs']} epochs: {gain:+.2f} points"
        if before["wall_seconds"] is not None and after["wall_seconds"] is not None:
            extra = after["wall_seconds"] - before["wall_seconds"]
            text += f" for {extra:+.0f} s"
            if extra <= 0:
                result["time_grows"] = False
                text += "; more epochs cannot take less time: do not trust these times"
        words.append(text + ".")
    variance = seed_variance(groups, "probe_accuracy")
    if variance is not None:
        result["seed_std"] = round(math.sqrt(variance), 4)
        words.append(f"Standard deviation between seeds: {math.sqrt(variance):.2f} points.")
    return result, words or ["Too few runs have finished to compare."]


def odd_times(rows: Iterable[Row], factor: float = 2.0) -> dict[str, str]:
    """Finished runs whose time an epoch is more than `factor` times off the median of all."""
    rates = {r["name"]: r["wall_seconds"] / r["epochs"] for r in rows if r["status"] == FINISHED and r["wall_seconds"]}
    median = statistics.median(rates.values()) if rates else 0.0
    return {
        name: f"{rate:.3g} s an epoch, the median is {median:.3g}"
        for name, rate in rates.items()
        if rate > factor * median or rate < median / factor
    }


COLUMNS = {
    "lr": "lr", "epochs": "epochs", "seed": "seed", "status": "status", "probe_accuracy": "probe %",
    "untrained_probe_accuracy": "untrained %", "knn_accuracy": "k-NN %", "final_loss": "loss", "wall_seconds": "time s",
    "cpu_seconds": "CPU s", "steps": "steps", "reason": "reason",
}  # fmt: skip
ONE_DECIMAL = {"wall_seconds", "cpu_seconds"}
TWO_DECIMALS = {"probe_accuracy", "untrained_probe_accuracy", "knn_accuracy"}


def table_cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and cells as text; columns that no row fills are left out."""
    keys = [key for key in COLUMNS if any(row.get(key) not in (None, "") for row in rows)]

    def text(key: str, value: Any) -> str:
        if value is None or isinstance(value, str):
            return value or ""
        decimals = 1 if key in ONE_DECIMAL else 2
        return f"{value:.{decimals}f}" if key in ONE_DECIMAL | TWO_DECIMALS else f"{value:.6g}"

    return [COLUMNS[key] for key in keys], [[text(key, row.get(key)) for key in keys] for row in rows]


def sort_rows(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row.get("lr") or 0, row["epochs"], row["seed"]))


def markdown(study: Study, rows: Sequence[Row], words: Sequence[str]) -> str:
    header, cells = table_cells(rows)
    lines = [header, ["---"] * len(header), *cells]
    table = "\n".join(
        "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in line) + " |" for line in lines
    )
    facts = " ".join([study.config, *study.overrides])
    return f"# {study.kind}: `{facts}`\n\n{table}\n\n" + "".join(f"- {word}\n" for word in words)


# What a kind of study plots against what: x, whether x is logarithmic, (title, key of a row, unit) of each chart.
CHARTS = {
    "lr_search": ("lr", True, (("Linear probe", "probe_accuracy", "%"), ("Final loss", "final_loss", ""))),
    "epoch_tradeoff": ("epochs", False, (("Linear probe", "probe_accuracy", "%"), ("Time", "wall_seconds", "s"))),
}
CONCLUSIONS = {"lr_search": conclude_lr, "epoch_tradeoff": conclude_epochs}


def write_results(study: Study, rows: Iterable[Row]) -> tuple[dict[str, Any], str]:
    """results.md and study.html from the rows; returns the conclusion as a JSON object and the Markdown."""
    from jepa_jax import html

    rows = sort_rows(rows)
    result, words = CONCLUSIONS[study.kind](rows)
    text = markdown(study, rows, words)
    x_key, x_log, charts = CHARTS[study.kind]
    groups = group_rows(rows, x_key)
    cards = []
    for title, key, unit in charts:
        means = [(g.value, mean) for g in groups if math.isfinite(mean := g.mean(key))]
        series = [html.Series("mean" if study_has_seeds(rows) else title, *_columns(means), "both")]
        if study_has_seeds(rows):
            series.append(
                html.Series("each seed", *_columns([(g.value, n) for g in groups for n in g.numbers(key)]), "dots")
            )
        untrained = (
            [n for g in groups for n in g.numbers("untrained_probe_accuracy")] if key == "probe_accuracy" else []
        )
        levels = [(f"untrained {statistics.fmean(untrained):.1f} %", statistics.fmean(untrained))] if untrained else []
        cards.append(html.line_chart(title, series, x_label=x_key, y_label=unit, x_log=x_log, levels=levels))
    header, cells = table_cells(rows)
    best = [i for i, row in enumerate(rows) if result.get("best_lr") is not None and row["lr"] == result["best_lr"]]
    sections = [
        html.Section("Findings", html.card("", "".join(f"<p>{html.escape(word)}</p>" for word in words))),
        html.Section("Charts", html.grid(cards)),
        html.Section("Runs", html.card("", html.table(cells, header, best), "The log of a run is <run>/log.txt.")),
    ]
    heading = (
        f"<h1>{html.escape(study.kind)}</h1><p class=sub>{html.escape(' '.join([study.config, *study.overrides]))}</p>"
    )
    write_atomically(study.output_dir / "results.md", text)
    write_atomically(study.output_dir / "study.html", html.page(study.kind, heading, sections))
    return result, text


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in pairs], [y for _, y in pairs]


def study_has_seeds(rows: Iterable[Row]) -> bool:
    return len({row["seed"] for row in rows}) > 1


def write_plot(study: Study, rows: Iterable[Row]) -> pathlib.Path:
    """results.png: the same charts for a document."""
    from matplotlib.figure import Figure

    x_key, x_log, charts = CHARTS[study.kind]
    groups = group_rows(rows, x_key)
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for axes, (title, key, unit) in zip(figure.subplots(1, len(charts)), charts, strict=True):
        axes.plot(
            *_columns([(g.value, mean) for g in groups if math.isfinite(mean := g.mean(key))]), "-", color="#2456c8"
        )
        axes.plot(*_columns([(g.value, n) for g in groups for n in g.numbers(key)]), "o", color="#2456c8", alpha=0.7)
        axes.set(title=title, xlabel=x_key, ylabel=unit, xscale="log" if x_log else "linear")
        axes.set_xticks([g.value for g in groups], [f"{g.value:g}" for g in groups])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    path, temporary = study.output_dir / "results.png", study.output_dir / ".results.png"
    figure.savefig(temporary, format="png", dpi=140)
    os.replace(temporary, path)
    return path


class Terminated(BaseException):
    """SIGTERM, as an exception, so that the run under way is stopped cleanly."""


def conduct(
    study: Study, runs: Sequence[Run], *, timeout: float | None, resume: bool
) -> tuple[int, dict[str, Any], str]:
    """Executes a study with a progress bar on stderr: (exit code, conclusion, Markdown table)."""

    def terminate(*_):
        raise Terminated

    check(study, runs, resume)  # before the bar is drawn
    before = signal.signal(signal.SIGTERM, terminate)
    code = EXIT_OK
    try:
        with Progress(runs) as progress:

            def on_row(row: Row, rows: list[Row]) -> None:
                write_results(study, rows)
                progress.row(row, rows)

            execute(study, runs, timeout=timeout, resume=resume, on_tick=progress.tick, on_row=on_row)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except Terminated:
        code = EXIT_TERMINATED
    finally:
        signal.signal(signal.SIGTERM, before)
    rows = list(load_rows(study).values())
    result, text = write_results(study, rows)
    if rows:
        write_plot(study, rows)
    if code == EXIT_OK and not result["finished"]:
        code = EXIT_NONE_FINISHED
    return code, result | {"results": str(study.output_dir / "results.json"), "exit_code": code}, text


class Progress:
    """A bar in units of epochs, with the time left and the best so far; a line on stderr for every row."""

    def __init__(self, runs: Sequence[Run]):
        import rich.console
        import rich.progress

        columns = ("{task.description}", rich.progress.BarColumn(), "{task.percentage:>3.0f} %", "{task.fields[note]}")
        self.bar = rich.progress.Progress(*columns, console=rich.console.Console(stderr=True), transient=True)
        self.epochs = {run.name: run.values["epochs"] for run in runs}
        self.task = self.bar.add_task("starting", total=sum(self.epochs.values()), note="")
        self.done: dict[str, Row] = {}
        self.best = ""
        self.current = ("", 0.0)  # run, when it began

    def __enter__(self) -> "Progress":
        self.bar.start()
        return self

    def __exit__(self, *_) -> None:
        self.bar.stop()

    def tick(self, run: Run, epoch: float) -> None:
        if self.current[0] != run.name:
            self.current = (run.name, time.monotonic())
        # Runs before this one are done, whether now or in an earlier call.
        names = list(self.epochs)
        before = sum(self.epochs[name] for name in names[: names.index(run.name)])
        epoch = min(epoch, self.epochs[run.name])
        left = time_left(
            self.done.values(), sum(self.epochs.values()) - before, epoch, time.monotonic() - self.current[1]
        )
        note = " · ".join(
            filter(None, [f"epoch {epoch:.1f}/{self.epochs[run.name]}", left and f"{left} left", self.best])
        )
        self.bar.update(self.task, completed=before + epoch, description=run.name, note=note)

    def row(self, row: Row, rows: list[Row]) -> None:
        from jepa_jax import html

        self.done[row["name"]] = row
        measured = [r for r in rows if r["status"] == FINISHED and r["probe_accuracy"] is not None]
        if measured:
            best = max(measured, key=lambda r: r["probe_accuracy"])
            self.best = f"best {best['probe_accuracy']:.1f} % ({best['name']})"
        figures = html.percent(row["probe_accuracy"]) if row["status"] == FINISHED else row["reason"]
        line = f"{row['name']}: {row['status']}, {figures}, {html.duration(row['attempt_seconds'])}"
        self.bar.console.print(line, markup=False, highlight=False, soft_wrap=True)


def time_left(done: Iterable[Row], epochs_left: float, epoch: float, elapsed: float) -> str:
    """Time for the epochs that are left: by the runs of this call, or by the first run while it is under way."""
    from jepa_jax import html

    rates = [row["attempt_seconds"] / row["epochs"] for row in done if row["status"] == FINISHED]
    rate = statistics.median(rates) if rates else elapsed / epoch if epoch > 0 else None
    return html.duration(max(0.0, rate * (epochs_left - epoch))) if rate is not None else ""
