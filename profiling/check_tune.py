"""Compares tuning with the full sweep of the same settings, and the speed it promises with that of training.

  python profiling/check_tune.py [--budget=5m] [--output_dir=runs/check_tune] [--config.model.width=32 ...]

1. `jepa-jax tune` searches within the budget. 2. `jepa-jax sweep` measures every combination of the same lists. 3. The
choice of the search and the best of the sweep are measured again, in turn. 4. `jepa-jax train --tuned` trains, in turn
with trials of the choice: the speed of a shared machine changes from minute to minute, so what the search promised is
measured again beside what training reaches (images per second without evaluations). Steps 1 and 2 keep their
measurements, and the same command continues. Exit code 0 if the choice is as fast or faster, the search took at most a
third of the sweep's trials (of combinations with the same program and pipeline one counts), and training is within 10 %
of the trials beside it; otherwise 1.
"""

import dataclasses
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jepa_jax.base.console import Console
from jepa_jax.base.statistics import FASTER, SAME, compare_speeds, speed_interval
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser
from jepa_jax.experiments.rows import SweepRow
from jepa_jax.experiments.settings import Combination, TrialRequest
from jepa_jax.experiments.trial import run_trial

LISTS = {
    "batch_sizes": "32,64,128,256", "num_workers": "0,1", "precisions": "float32,bfloat16", "remats": "none",
    "pipelines": "grain,device",
}  # fmt: skip
TOLERANCE = 0.10
LEAN = (
    "--config.eval.untrained=False", "--config.eval.every_epochs=0", "--config.eval.knn_every_epochs=0",
    "--config.eval.max_images=256", "--config.log.tensorboard=False",
)  # fmt: skip


def add_flags(parser: Parser) -> None:
    parser.add_config("quickstart")
    parser.add_flag("budget", "TIME", "time for the search", "5m")
    parser.add_flag("output_dir", "DIR", "folder of everything", "runs/check_tune")
    parser.add_flag("rounds", "N", "rounds of choice against best, and of training against trial", 5, least=2)
    parser.add_flag("repeats", "N", "repeats of the sweep", 3, least=1)
    parser.add_flag("max_batches", "N", "measured batches of a trial", 16, least=2)
    parser.add_flag("train_seconds", "SECONDS", "length of each training", 20.0, least=5)
    for name, values in LISTS.items():
        parser.add_flag(name, "LIST", "as of jepa-jax sweep", values)


def run(command: str, *flags: str) -> dict[str, Any]:
    """Returns the last line of a command as an object; its messages pass through."""
    ended = subprocess.run([sys.executable, "-m", "jepa_jax", command, *flags], stdout=subprocess.PIPE, text=True)
    if ended.returncode:
        raise SystemExit(f"jepa-jax {command} ended with exit code {ended.returncode}")
    return json.loads(ended.stdout.splitlines()[-1])


def duel(requests: Sequence[TrialRequest], rounds: int, folder: pathlib.Path) -> tuple[dict[str, Any], list[SweepRow]]:
    """Returns the speed of the choice over that of the best, from trials in turn, and their rows."""
    rows = [SweepRow(request.combination) for request in requests]
    for number in range(rounds):
        for index in (0, 1) if number % 2 else (1, 0):
            result = run_trial(folder / "trial", requests[index], time_limit=600.0)
            rows[index] = rows[index].with_repeat(dataclasses.replace(result, round=number))
    return compare_speeds(rows[0], rows[1]).to_dict(), rows


def trainings(
    request: TrialRequest, rounds: int, folder: pathlib.Path, flags: tuple[str, ...]
) -> tuple[list[float], list[float]]:
    """Returns images per second of trials of the choice and of trainings with it, in turn."""
    trials, trained = [], []
    for number in range(rounds):
        workdir = folder / f"train_{number}"
        shutil.rmtree(workdir, ignore_errors=True)
        result = run_trial(folder / "promise" / "trial", request, time_limit=600.0)
        if result.figures is None:
            raise SystemExit(f"a trial of the choice failed: {result.reason}")
        trials.append(result.figures.samples_per_sec)
        steps = f"--config.train.max_steps={request.max_batches}"
        trained.append(run("train", *flags, f"--workdir={workdir}", *LEAN, steps)["images_per_sec"])
        print(f"trial {trials[-1]:.0f}, training {trained[-1]:.0f} images/s", file=sys.stderr)
    return trials, trained


def distinct_executions(rows: list[dict[str, Any]]) -> int:
    """Counts the programs and pipelines that a sweep has measured; a row without figures counts as itself."""
    prints = [(row["program_fingerprint"], row["pipeline_fingerprint"]) for row in rows]
    known = [pair for pair in prints if None not in pair]
    return len(set(known)) + len(prints) - len(known)


def check_tune(arguments: Arguments, console: Console) -> Result:
    from jepa_jax.experiments.tuned_file import read_tuned

    folder, rounds = pathlib.Path(arguments.output_dir), arguments.rounds
    shared = (f"--config={arguments.config}", *arguments.override_flags)
    lists = tuple(f"--{name}={getattr(arguments, name)}" for name in LISTS)
    tuned = run("tune", *shared, *lists, f"--budget={arguments.budget}", f"--output_dir={folder / 'tune'}", "--resume")
    sweep = run(
        "sweep", *shared, *lists, f"--output_json={folder / 'sweep.json'}", "--resume",
        f"--repeats={arguments.repeats}", f"--max_batches={arguments.max_batches}",
    )  # fmt: skip
    given: Mapping[str, Any] = read_tuned(tuned["tuned"])["config"]
    chosen, best = (Combination.from_dict(values) for values in (tuned["chosen"], sweep["best"]))
    requests = [TrialRequest(given, one, max_batches=2 * arguments.max_batches) for one in (chosen, best)]
    ratio, rows = ({"verdict": SAME}, []) if chosen == best else duel(requests, rounds, folder / "duel")
    steps = max(30, round(arguments.train_seconds * tuned["samples_per_sec"] / chosen.batch_size))
    request = TrialRequest(given, chosen, max_batches=steps)
    trials_beside, trained = trainings(request, rounds, folder, (*shared, f"--tuned={tuned['tuned']}"))
    ratios = [training / trial for training, trial in zip(trained, trials_beside, strict=True)]
    reached = statistics.geometric_mean(ratios)
    distinct = distinct_executions(json.loads((folder / "sweep.json").read_text())["rows"])
    trials = distinct * arguments.repeats
    result = {
        "chosen": tuned["chosen"],
        "best": sweep["best"],
        "chosen_over_best": ratio,
        "duel_images_per_sec": [row.samples_per_sec for row in rows],
        "tune_trials": tuned["trials"],
        "tune_combinations": tuned["combinations"],
        "sweep_trials": trials,
        "sweep_combinations": sweep["trials"],
        "sweep_distinct_executions": distinct,
        "tune_seconds": tuned["seconds"],
        "gain": tuned["gain"],
        "promised_images_per_sec": tuned["samples_per_sec"],
        "trials_beside_training_images_per_sec": trials_beside,
        "trained_images_per_sec": trained,
        "trained_over_trials_beside": reached,
        "trained_over_trials_beside_ci95": speed_interval(ratios),
        "trained_over_promised": statistics.geometric_mean(trained) / tuned["samples_per_sec"],
        "trained_steps": steps,
        "not_slower": ratio["verdict"] in (FASTER, SAME),
        "at_most_a_third": tuned["trials"] <= trials / 3,
        "promise_kept": abs(reached - 1) <= TOLERANCE,
    }
    passed = result["not_slower"] and result["at_most_a_third"] and result["promise_kept"]
    return Result([result], f"chosen over best: {ratio}; training over trials: {reached:.3f}", 0 if passed else 1)


if __name__ == "__main__":
    sys.exit(Command("profiling/check_tune.py", __doc__, add_flags, check_tune, program="python").main())
