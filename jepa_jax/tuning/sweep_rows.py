"""The rows of a sweep's results: one for each combination, with its repeats and what they say together."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jepa_jax.tuning.noise import t_interval, typical
from jepa_jax.tuning.trial import OK, OUT_OF_MEMORY, PENDING, SKIPPED, Combination

Row = dict[str, Any]

# How the figures of repeats become that of a row.
MEANS = (
    "step_time_p50", "step_time_p95", "cpu_percent", "system_cpu_percent", "gpu_sm_util",
    "gpu_mem_util", "data_wait_fraction", "mfu",
)  # fmt: skip
SUMS = ("samples_processed", "measured_batches", "elapsed_seconds")
LARGEST = ("peak_memory_bytes", "process_memory_bytes")
# What all repeats of a combination have in common.
FACTS = ("data_source", "program_fingerprint", "pipeline_fingerprint", "platform", "device_limit_bytes")


def new_row(combination: Combination) -> Row:
    return summarised({"combination": combination.as_dict(), "status": PENDING, "reason": "", "repeats": []})


def is_open(row: Row, repeats: int) -> bool:
    """Whether more repeats of it are to be measured."""
    return row["status"] in (PENDING, OK) and len(row["repeats"]) < repeats


def with_repeat(row: Row, number: int, measurement: Mapping[str, Any]) -> Row:
    """The row with another repeat, that of round `number`; a repeat that failed decides for the whole row."""
    repeats = [*row["repeats"], {"round": number, **measurement}]
    status, reason = measurement["status"], measurement["reason"]
    if status != OK and number > 0:
        reason = f"repeat {number + 1}: {reason}"
    return summarised({**row, "status": status, "reason": reason, "repeats": repeats})


def without_failures(row: Row) -> Row:
    """The row as if those of its repeats that failed had not been run, nor it been skipped for the sake of another."""
    good = [repeat for repeat in row["repeats"] if repeat["status"] == OK]
    return summarised({**row, "status": OK if good else PENDING, "reason": "", "repeats": good})


def skipped(row: Row, reason: str) -> Row:
    return {**row, "status": SKIPPED, "reason": reason}


def summarised(row: Row) -> Row:
    """The row with its figures as its repeats have them; None where none has."""
    good = [repeat for repeat in row["repeats"] if repeat["status"] == OK]

    def known(name: str) -> list[Any]:
        return [repeat[name] for repeat in good if repeat.get(name) is not None]

    speeds, slopes, leaks = known("samples_per_sec"), known("memory_slope_bytes_per_step"), known("leak")
    interval = t_interval(speeds)
    speed, batch_size = typical(speeds) if speeds else None, row["combination"]["batch_size"]
    figures = {
        "samples_per_sec": speed,
        "samples_per_sec_ci95": list(interval) if interval else None,
        "batches_per_sec": speed / batch_size if speed else None,
        "avg_step_time": batch_size / speed if speed else None,
        **{name: statistics.fmean(values) if (values := known(name)) else None for name in MEANS},
        "compile_seconds": next((r["compile_seconds"] for r in good if not r.get("compile_cached")), None),
        **{name: sum(values) if (values := known(name)) else None for name in SUMS},
        **{name: max(known(name), default=None) for name in LARGEST},
        "memory_slope_bytes_per_step": statistics.median(slopes) if slopes else None,
        "leak": 2 * sum(leaks) >= len(leaks) > 0,
        "finite": all(known("finite")),
        **{name: next(iter(known(name)), None) for name in FACTS},
        "notes": list(dict.fromkeys(note for repeat in good for note in repeat.get("notes", ()))),
    }
    first = {name: row[name] for name in ("combination", "status", "reason")}
    return {**first, **figures, "repeats": row["repeats"]}


def with_compile_seconds(rows: Sequence[Row]) -> list[Row]:
    """Rows whose program was compiled for another one have the seconds of that compilation."""
    cold = {
        repeat["program_fingerprint"]: repeat["compile_seconds"]
        for row in rows
        for repeat in row["repeats"]
        if repeat["status"] == OK and not repeat.get("compile_cached")
    }
    return [{**row, "compile_seconds": row["compile_seconds"] or cold.get(row["program_fingerprint"])} for row in rows]


def larger_than(rows: Sequence[Row], index: int) -> list[int]:
    """Rows without a repeat that differ from row `index` in a larger batch alone."""
    small = rows[index]["combination"]
    return [
        i
        for i, row in enumerate(rows)
        if row["status"] == PENDING
        and row["combination"]["batch_size"] > small["batch_size"]
        and {**row["combination"], "batch_size": None} == {**small, "batch_size": None}
    ]


def skip_larger(rows: list[Row], index: int) -> list[Row]:
    """Rows after row `index` was measured: if it ran out of memory, so would larger batches, all else equal."""
    if rows[index]["status"] != OUT_OF_MEMORY:
        return rows
    label = Combination.from_dict(rows[index]["combination"]).label
    reason = f"larger than a trial that ran out of memory: {label}"
    larger = larger_than(rows, index)
    return [skipped(row, reason) if i in larger else row for i, row in enumerate(rows)]
