"""What else `fuzz.py` damages: the JSON files of runs, and those that commands are given or keep."""

import pathlib
import shutil
from collections.abc import Callable
from typing import Any

from profiling.fuzz_cases import IMAGES, SIZE, Target, void

Read = Callable[[pathlib.Path], None]


def json_files(run: pathlib.Path) -> dict[str, Target]:
    """Returns the JSON files of a finished run, and others, by name."""
    return of_runs(run) | of_commands(run)


def of_runs(run: pathlib.Path) -> dict[str, Target]:
    """Returns the files of two copies of a run, a and b."""
    from jepa_jax.config.recipe import read_recipe
    from jepa_jax.profiling.profile_changes import compare_profiles, read_profile
    from jepa_jax.profiling.profiler import epochs_until
    from jepa_jax.program.checksums import step_folders, verify
    from jepa_jax.program.restore import run_config
    from jepa_jax.program.workdir import Workdir
    from jepa_jax.reports.comparison_page import write_comparison
    from jepa_jax.reports.run_report import write_report
    from jepa_jax.reports.runs_table import find_runs, runs_text
    from jepa_jax.training.sinks import MetricsFile

    def copy(folder: pathlib.Path) -> None:
        for name in ("a", "b"):
            shutil.copytree(run, folder / name)

    def read_config(folder: pathlib.Path) -> None:
        read_recipe(str(folder / "a"))
        run_config(folder / "a")

    def verify_all(folder: pathlib.Path) -> None:
        for _, path in step_folders(folder / "a" / "checkpoints"):
            verify(path)

    def profiles(folder: pathlib.Path) -> None:
        compare_profiles(read_profile(folder / "a"), read_profile(folder / "b"))
        for name in ("a", "b"):
            earlier = epochs_until(folder / name / "profile.json", 12)
            void({one["name"] for row in earlier for one in row["bottlenecks"]})  # as a run that continues does

    def copy_small_files(folder: pathlib.Path) -> None:
        shutil.copytree(run, folder / "a", ignore=shutil.ignore_patterns("checkpoints", "exhibits"))

    def pages(folder: pathlib.Path) -> None:
        write_report(folder / "a")
        runs_text(find_runs(folder), 80)

    def read_elements(folder: pathlib.Path) -> None:
        for name in ("a", "b"):
            Workdir(folder / name).read_spec()

    return {
        "config.json": Target(copy, read_config, "config.json"),
        "summary.json": Target(copy, lambda f: void(write_comparison([f / "a", f / "b"])), "summary.json"),
        "profile.json": Target(copy, profiles, "profile.json"),
        "metrics.jsonl": Target(copy, lambda f: MetricsFile(f / "a/metrics.jsonl", 6, print).close(), "metrics.jsonl"),
        "checksums.json": Target(copy, verify_all, "checksums.json"),
        "elements.json": Target(copy, read_elements, "elements.json"),
        "pages of a run": Target(copy_small_files, pages, "*.json*"),
    }


def of_commands(run: pathlib.Path) -> dict[str, Target]:
    """Returns files that commands are given, or keep for the next time."""
    from jepa_jax.base.files import write_json
    from jepa_jax.data.statistics import Statistics, keep_statistics, kept_statistics
    from jepa_jax.experiments.study import Study, load_rows, plan_runs, save_rows
    from jepa_jax.experiments.tuned_file import KIND, VERSION, read_tuned
    from jepa_jax.exports.export import export_encoder
    from jepa_jax.planning.step_compiler import read_facts, write_facts
    from jepa_jax.weights.load import load_model

    identity = {"source": "folder", "image_size": SIZE, "channels": 3, "images": IMAGES}

    def write_tuned(folder: pathlib.Path) -> None:
        overrides = {"data.batch_size": 64}
        tuned = {"kind": KIND, "version": VERSION, "overrides": overrides, "hardware": {}, "text": ""}
        write_json(folder / "tuned.json", tuned)

    def study(folder: pathlib.Path) -> Study:
        return Study("seeds", "quickstart", folder, ("python",))

    def write_statistics(folder: pathlib.Path) -> None:
        keep_statistics(folder / "statistics.json", Statistics((0.5,) * 3, (0.2,) * 3, IMAGES), identity)

    def read_plan(folder: pathlib.Path) -> None:
        facts = read_facts(folder / "plan.json")
        assert facts is None or facts == some_facts(), "altered facts are used"

    return {
        "tuned.json": Target(write_tuned, lambda folder: void(read_tuned(folder / "tuned.json"))),
        "exported config.json": Target(
            lambda folder: void(export_encoder(run, "safetensors", folder)),
            lambda folder: void(load_model(str(folder))),
            "config.json",
        ),
        "statistics.json": Target(
            write_statistics, lambda folder: void(kept_statistics(folder / "statistics.json", identity))
        ),
        "results of a study": Target(
            lambda folder: save_rows(study(folder), plan_runs([0.1], [1, 2], [0, 1])),
            lambda folder: void(load_rows(study(folder))),
        ),
        "plan cache": Target(lambda folder: write_facts(folder / "plan.json", some_facts()), read_plan),
    }


def some_facts() -> Any:
    """Returns facts of a step that was never compiled."""
    from jepa_jax.compiled.kernels import Kernel
    from jepa_jax.planning.step_compiler import StepFacts

    kernel = Kernel("matmul", "f32", 1000, 2000, 3, "")
    return StepFacts(*range(1, 12), [kernel], {"all-reduce": [1, 2]}, 5, 6, ["dot"], ["call"], 0.5)
