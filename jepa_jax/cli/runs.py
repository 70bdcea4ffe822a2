"""Commands that read runs: what they reached, their pages, how they compare, and whether their files are whole."""

import pathlib
import shlex
import shutil
import time
from collections.abc import Mapping
from typing import Any

from jepa_jax.base.console import Console
from jepa_jax.base.errors import EXIT_OK, EXIT_USER_ERROR, UserError
from jepa_jax.base.files import read_json_or_empty
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser

ABOUT_RUNS = """Lists all runs below a folder: recipe, status, accuracy beside untrained, speed, age, size, differences.

  jepa-jax runs [runs] [--sort=accuracy] [--html=runs.html]
"""
ABOUT_REPORT = """Writes the page of a run again, report.html; with --watch for as long as the run is under way.

  jepa-jax report runs/quickstart [--watch] [--every=10]

With --watch the page loads itself again in the browser: no server is needed.
"""
ABOUT_SUMMARY = """Prints what a finished run reached: accuracies beside those of its baselines, feature quality, speed.

jepa-jax show-summary --workdir=runs/quickstart
"""
ABOUT_COMPARE = """Compares runs on one HTML page: accuracies, evaluations, curves and the config keys that differ.

jepa-jax compare runs/a runs/b [runs/c ...] [--output=comparison.html]
"""
ABOUT_PROFILES = """Compares the profiles of two runs, section by section, with confidence intervals.

jepa-jax compare-profiles runs/a runs/b
"""
ABOUT_CHECKPOINT = """Compares every file of a run's checkpoints with its checksum; changes nothing.

  jepa-jax checkpoint verify runs/quickstart

Prints a JSON object per checkpoint and one for all. Exit codes: 0 all are whole, 2 one is damaged or there is none.
"""

# Names of figures in summary.json -> what the terminal calls them.
QUOTED = {"probe_accuracy": "linear probe (the figure to quote)", "knn_accuracy": "k-NN"}
BESIDES_ACCURACY = {
    "effective_rank": "effective rank of the features",
    "lidar": "LiDAR",
    "images_per_sec": "{} per second",
}


def add_runs_flags(parser: Parser) -> None:
    parser.add_words("folder", "where the runs are; by default `runs`", least=0, most=1)
    parser.add_flag("sort", "COLUMN", "column to sort by, such as accuracy, age, size or run", "age")
    parser.add_flag("html", "FILE", "also write a page with all columns, sortable by a click", "")


def list_runs(arguments: Arguments, console: Console) -> Result:
    from jepa_jax.reports.runs_table import find_runs, runs_text, sorted_rows, write_runs

    folder = arguments.folder or "runs"
    rows = sorted_rows(find_runs(folder), arguments.sort)
    if arguments.html:
        write_runs(arguments.html, rows, folder)
    text = runs_text(rows, shutil.get_terminal_size().columns)
    return Result(rows, text + (f"\n\npage: {arguments.html}" if arguments.html else ""))


def add_report_flags(parser: Parser) -> None:
    parser.add_words("workdir", "folder of a run")
    parser.add_switch("watch", "write it again while the run is under way")
    parser.add_flag("every", "SECONDS", "time between two pages of --watch", 10, least=1)


def write_page_again(arguments: Arguments, console: Console) -> Result:
    from jepa_jax.reports.run_files import read_run
    from jepa_jax.reports.run_report import write_report

    workdir = pathlib.Path(arguments.workdir).expanduser()
    refresh = arguments.every if arguments.watch else 0
    path = write_report(workdir, refresh=refresh)
    if arguments.watch:
        console.line(f"{path}: written again every {refresh} s until the run ends; Ctrl-C ends the watch")
    while arguments.watch and not read_run(workdir).summary:
        time.sleep(refresh)
        write_report(workdir, refresh=refresh)
    return Result([{"report": str(path)}], f"report: {path}")


def add_workdir(parser: Parser) -> None:
    parser.add_flag("workdir", "DIR", "folder of a run", required=True)


def show_summary(arguments: Arguments, console: Console) -> Result:
    from jepa_jax.program.workdir import Workdir

    folder = Workdir(arguments.workdir)
    summary = folder.read_summary()
    if summary is None or summary["status"] != "finished":
        raise UserError(f"{folder.path}: no finished run; train first, or check --workdir")
    return Result([summary], summary_text(summary, folder.path), next=next_commands(summary, folder.path))


def next_commands(summary: Mapping[str, Any], workdir: str | pathlib.Path) -> list[str]:
    """Returns what can be done with the encoder of a finished run; nothing for a model of another kind."""
    if summary.get("status") != "finished" or not summary.get("feature_dim"):
        return []
    own = shlex.quote(str(workdir))
    name = shlex.quote(pathlib.Path(workdir).resolve().name)
    exported = f"export --workdir={own} --format=safetensors --output=exports/{name}"
    return [f"evaluate --workdir={own}", embed_command(workdir), exported]


def embed_command(workdir: str | pathlib.Path) -> str:
    """Returns the command that embeds a folder of images: the one that a run was trained on, if there is one."""
    folder = pathlib.Path(workdir)
    data = read_json_or_empty(folder / "config.json").get("data", {})
    given = data.get("dir") if data.get("source") == "folder" else ""
    images = shlex.quote(given) if given else "FOLDER_OF_IMAGES"
    name = shlex.quote(folder.resolve().name)
    return f"embed --workdir={shlex.quote(str(workdir))} --input={images} --output={name}.npz --neighbours=sample"


def result_lines(summary: Mapping[str, Any], elements: str) -> list[str]:
    """Returns a table of a run's figures, the one to quote first; what was not measured is left out."""
    from jepa_jax.base.statistics import accuracy_interval
    from jepa_jax.base.text import percent
    from jepa_jax.reports.tables import text_table

    floors = {"chance": summary.get("chance_accuracy"), **(summary.get("baselines") or {})}
    rows = [(label, *(summary.get(f"{start}{key}") for start in ("", "untrained_"))) for key, label in QUOTED.items()]
    rows += [(name, None, value) for name, value in floors.items()]
    cells = [[str(name), *("" if value is None else percent(value) for value in values)] for name, *values in rows]
    measured = [row for row in cells if any(row[1:])]
    known = {label.format(elements): summary.get(key) for key, label in BESIDES_ACCURACY.items()}
    others = [[name, f"{value:,.1f}", ""] for name, value in known.items() if value is not None]
    header = ["", "trained", "as loaded" if summary.get("init_from") else "untrained"]
    table = [header, *measured, *others] if measured else [row[:2] for row in others]
    lines = [line.rstrip() for line in text_table(table, widest=60).splitlines()] if table else []
    accuracy, tested = summary.get("probe_accuracy"), summary.get("probe_test_images")
    if accuracy is not None and tested:
        low, high = accuracy_interval(accuracy, tested)
        lines.append(f"Linear probe on {tested:,} test {elements}: {low:.1f} to {high:.1f} % with 95 % confidence.")
    return lines


def summary_text(summary: Mapping[str, Any], workdir: str | pathlib.Path) -> str:
    """Returns what a run reached as a table, notes, and where its page is."""
    from jepa_jax.reports.run_files import project_results

    shapes = (summary.get("data_identity") or {}).get("train", {}).get("shapes", {"image": []})
    lines = result_lines(summary, "images" if "image" in shapes else "elements")
    if note := summary.get("evaluation_note"):
        lines.append(note)
    if summary.get("num_classes") == 0:
        lines.insert(0, "The data has no labels: accuracies are not measured, the report shows what else is known.")
    if summary.get("num_classes") == 1:
        lines.insert(0, "All images are of one class: no accuracy is measured.")
    own = [line for results in project_results() for line in results.summary_lines(summary)]
    return "\n".join([*own, *([""] if own else []), *lines, "", f"report: {pathlib.Path(workdir) / 'report.html'}"])


def add_compare_flags(parser: Parser) -> None:
    parser.add_words("workdirs", "folders of two or more runs", least=0, most=None)
    parser.add_flag("output", "FILE", "page to write; by default comparison.html beside the first run")


def compare_runs(arguments: Arguments, console: Console) -> Result:
    from jepa_jax.reports.comparison_page import comparison_text, write_comparison

    result = write_comparison(arguments.workdirs, arguments.output)
    differing = ", ".join(result["differing_keys"]) or "nothing"
    for text in result["warnings"]:
        console.warn(text)
    return Result([result], f"{comparison_text(result['runs'])}\n\ndiffer in: {differing}\npage: {result['output']}")


def add_profile_flags(parser: Parser) -> None:
    parser.add_words("workdirs", "folders of two runs, or their profile.json", least=0, most=None)


def run_compare_profiles(arguments: Arguments, console: Console) -> Result:
    from jepa_jax.profiling.profile_changes import changes_json, compare_profiles, read_profile
    from jepa_jax.reports.profile_section import changes_table

    if len(arguments.workdirs) != 2:
        raise UserError(f"{len(arguments.workdirs)} arguments: give the folders of two runs, A and B")
    changes = compare_profiles(*(read_profile(path) for path in arguments.workdirs))
    return Result([changes_json(changes)], "\n".join(changes_table(changes)))


def add_checkpoint_flags(parser: Parser) -> None:
    parser.add_words("action", "what to do", choices=["verify"])
    parser.add_words("workdir", "folder of a run")


def verify_checkpoints(arguments: Arguments, console: Console) -> Result:
    from jepa_jax.program.checksums import verify
    from jepa_jax.program.workdir import Workdir

    folder = Workdir(arguments.workdir)
    found = folder.every_checkpoint()
    if not found:
        raise UserError(f"{folder.path}: holds no checkpoint; train first, or check the path")
    rows, lines = [], []
    for path in found:
        verdict, name = verify(path), path.relative_to(folder.path).as_posix()
        state = ("whole" if verdict.verified else "no checksums") if verdict.whole else "damaged"
        rows.append({"checkpoint": name, "step": verdict.step, "state": state, "damage": list(verdict.damage)})
        lines += [f"{name:<28} {state:<14} {damage}" for damage in verdict.damage or ("",)]
    whole = all(row["state"] != "damaged" for row in rows)
    total = {"checkpoints": len(rows), "damaged": sum(row["state"] == "damaged" for row in rows), "whole": whole}
    return Result([*rows, total], "\n".join(map(str.rstrip, lines)), EXIT_OK if whole else EXIT_USER_ERROR)


RUNS = Command("runs", ABOUT_RUNS, add_runs_flags, list_runs, uses_jax=False)
REPORT = Command("report", ABOUT_REPORT, add_report_flags, write_page_again)
SHOW_SUMMARY = Command("show-summary", ABOUT_SUMMARY, add_workdir, show_summary, uses_jax=False)
COMPARE = Command("compare", ABOUT_COMPARE, add_compare_flags, compare_runs)
COMPARE_PROFILES = Command("compare-profiles", ABOUT_PROFILES, add_profile_flags, run_compare_profiles, uses_jax=False)
VERIFY_CHECKPOINT = Command("checkpoint", ABOUT_CHECKPOINT, add_checkpoint_flags, verify_checkpoints)
