"""Compares tuning with the full sweep of the same settings, and the speed it promises with that of training.

    python profiling/check_tune.py [--budget=5m] [--output_dir=runs/check_tune] [--config.model.width=32 ...]

1. `jepa-jax tune` searches within the budget. 2. `jepa-jax sweep` measures every combination of the same lists. 3.
The choice of the one and the best of the other are measured again, in turn. 4. jepa-jax train --tuned trains, in turn
with trials of the choice: the speed of a shared machine changes from minute to minute, so what the search promised is
measured again beside what training reaches (images per second without evaluations). What was measured is kept by 1
and 2, and the same command continues. The last line is a JSON object; exit code 0 if the choice is as fast or faster,
the search took at most a third of the sweep's trials (of combinations with the same program and pipeline one counts),
and training is within 10 % of the trials beside it.
"""

import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys
from typing import Any

from absl import app, flags

from jepa_jax.base.runner import Runner
from jepa_jax.studies.study import split_overrides
from jepa_jax.tuning.rows import SweepRow
from jepa_jax.tuning.settings import Combination, TrialRequest
from jepa_jax.tuning.speed_statistics import FASTER, SAME, compare_speeds, geometric_mean, t_interval
from jepa_jax.tuning.trial_process import STOP_SECONDS, run_trial
from jepa_jax.tuning.tuned_file import read_tuned

_CONFIG = flags.DEFINE_string("config", "configs/quickstart.py", "Config file; --config.key=value is passed on.")
_BUDGET = flags.DEFINE_string("budget", "5m", "Of the search.")
_OUTPUT = flags.DEFINE_string("output_dir", "runs/check_tune", "Where everything goes.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Of choice against best, and of training against trial.", lower_bound=2)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Of the sweep.", lower_bound=1)
_BATCHES = flags.DEFINE_integer("max_batches", 16, "Measured batches of a trial.", lower_bound=2)
_TRAIN_SECONDS = flags.DEFINE_float("train_seconds", 20.0, "Of each training.", lower_bound=5.0)
_LISTS = {
    name: flags.DEFINE_string(name, values, "As of scripts/profile_throughput.py.")
    for name, values in {
        "batch_sizes": "32,64,128,256", "num_workers": "0,1", "precisions": "float32,bfloat16", "remats": "none",
        "pipelines": "grain,device",
    }.items()
}  # fmt: skip

ROOT = pathlib.Path(__file__).parents[1]
TOLERANCE = 0.10
LEAN = (
    "--config.eval.untrained=False", "--config.eval.every_epochs=0", "--config.eval.knn_every_epochs=0",
    "--config.eval.max_images=256", "--config.log.tensorboard=False",
)  # fmt: skip


def run(script: str, *arguments: str) -> dict[str, Any]:
    """Returns the last line of a script as an object; its messages pass through."""
    command = [sys.executable, str(ROOT / "scripts" / script), *arguments]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{script} ended with exit code {ended.returncode}")
    return json.loads(ended.stdout.splitlines()[-1])


def duel(
    config: Any, chosen: dict[str, Any], best: dict[str, Any], folder: pathlib.Path
) -> tuple[dict[str, Any], list[SweepRow]]:
    """Returns the speed of the choice over that of the best, from trials in turn, and their rows."""
    runner = Runner(folder, grace=STOP_SECONDS)
    rows = [SweepRow(Combination.from_dict(values)) for values in (chosen, best)]
    for number in range(_ROUNDS.value):
        for index in (0, 1) if number % 2 else (1, 0):
            request = TrialRequest(config, rows[index].combination, max_batches=2 * _BATCHES.value)
            result = run_trial(runner, request, time_limit=600.0)
            rows[index] = rows[index].with_repeat(dataclasses.replace(result, round=number))
    return compare_speeds(*rows).to_dict(), rows


def trainings(
    config: Any, chosen: dict[str, Any], steps: int, folder: pathlib.Path, arguments: tuple[str, ...]
) -> tuple[list[float], list[float]]:
    """Returns images per second of trials of the choice and of trainings with it, in turn."""
    runner = Runner(folder / "promise", grace=STOP_SECONDS)
    request = TrialRequest(config, Combination.from_dict(chosen), max_batches=steps)
    trials, trained = [], []
    for number in range(_ROUNDS.value):
        workdir = folder / f"train_{number}"
        shutil.rmtree(workdir, ignore_errors=True)
        result = run_trial(runner, request, time_limit=600.0)
        if result.figures is None:
            raise SystemExit(f"a trial of the choice failed: {result.reason}")
        trials.append(result.figures.samples_per_sec)
        limits = f"--config.train.max_steps={steps}"
        trained.append(run("train.py", *arguments, f"--workdir={workdir}", *LEAN, limits)["images_per_sec"])
        print(f"trial {trials[-1]:.0f}, training {trained[-1]:.0f} images/s", file=sys.stderr)
    return trials, trained


def distinct_executions(rows: list[dict[str, Any]]) -> int:
    """Counts the programs and pipelines that a sweep has measured; a row without figures counts as itself."""
    prints = [(row["program_fingerprint"], row["pipeline_fingerprint"]) for row in rows]
    known = [pair for pair in prints if None not in pair]
    return len(set(known)) + len(prints) - len(known)


def main(argv: list[str], overrides: tuple[str, ...]) -> int:
    del argv
    folder = pathlib.Path(_OUTPUT.value)
    shared = (f"--config={_CONFIG.value}", *overrides)
    lists = tuple(f"--{name}={flag.value}" for name, flag in _LISTS.items())
    tuned = run("tune.py", *shared, *lists, f"--budget={_BUDGET.value}", f"--output_dir={folder / 'tune'}", "--resume")
    sweep = run(
        "profile_throughput.py", *shared, *lists, f"--output_json={folder / 'sweep.json'}", "--resume",
        f"--repeats={_REPEATS.value}", f"--max_batches={_BATCHES.value}",
    )  # fmt: skip
    chosen, best = tuned["chosen"], sweep["best"]
    given = read_tuned(tuned["tuned"])["config"]
    same = chosen == best
    ratio, rows = ({"verdict": SAME}, []) if same else duel(given, chosen, best, folder / "duel")
    batch = chosen["batch_size"]
    steps = max(30, round(_TRAIN_SECONDS.value * tuned["samples_per_sec"] / batch))
    trials_beside, trained = trainings(given, chosen, steps, folder, (*shared, f"--tuned={tuned['tuned']}"))
    ratios = [training / trial for training, trial in zip(trained, trials_beside, strict=True)]
    reached = geometric_mean(ratios)
    distinct = distinct_executions(json.loads((folder / "sweep.json").read_text())["rows"])
    trials = distinct * _REPEATS.value
    result = {
        "chosen": chosen,
        "best": best,
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
        "trained_over_trials_beside_ci95": t_interval(ratios),
        "trained_over_promised": geometric_mean(trained) / tuned["samples_per_sec"],
        "trained_steps": steps,
        "not_slower": ratio["verdict"] in (FASTER, SAME),
        "at_most_a_third": tuned["trials"] <= trials / 3,
        "promise_kept": abs(reached - 1) <= TOLERANCE,
    }
    print(json.dumps(result))
    return 0 if result["not_slower"] and result["at_most_a_third"] and result["promise_kept"] else 1


if __name__ == "__main__":
    own, passed_on = split_overrides(sys.argv)
    app.run(lambda argv: main(argv, passed_on), argv=own)
