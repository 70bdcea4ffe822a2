"""What a search leaves behind: tune.json after every trial, from which it goes on, and its conclusion in words."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import write_json
from jepa_jax.runtime.provenance import base_header, differences
from jepa_jax.tuning import choice
from jepa_jax.tuning.noise import Comparison, compare, fit
from jepa_jax.tuning.sweep_rows import with_compile_seconds
from jepa_jax.tuning.trial import OK, Combination, combination_of
from jepa_jax.tuning.tuner import Outcome, Search
from jepa_jax.tuning.tuner_trials import Limits, Trial


def make_header(
    config: Any, name: str, limits: Limits, hardware: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """`settings`: what must be the same for a search to go on."""
    return {
        **base_header(config, name, hardware),
        "kind": "tune",
        "memory_limit_bytes": limits.memory_bytes,
        "budget_seconds": limits.budget_seconds,
        "settings": json.loads(json.dumps({**settings, "margin": limits.margin})),
    }


class Store:
    """tune.json: the document of a sweep, and the trials in order, from which a search goes on."""

    def __init__(self, folder: pathlib.Path, header: dict[str, Any]):
        self.folder, self.header = folder, header
        self.path = folder / "tune.json"

    def open(self, resume: bool) -> list[Trial]:
        """Trials to go on from; refuses to write over results."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--output_dir = {self.folder}: cannot be made ({error.strerror})") from error
        if not self.path.exists():
            return []
        if not resume:
            raise UserError(f"--output_dir = {self.folder}: holds a search already; --resume goes on, or use another")
        try:
            found = json.loads(self.path.read_text())
            header, trials = found["header"], list(found["trials"])
            differ = differences(header, self.header)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{self.path}: not the results of a search; use another --output_dir") from None
        if differ:
            raise UserError(
                f"--output_dir = {self.folder}: holds a search with other settings ({'; '.join(differ)}); "
                "give the same ones to --resume, or use another"
            )
        self.header = {**header, "budget_seconds": self.header["budget_seconds"]}
        return trials

    def save(self, search: Search, conclusion: Mapping[str, Any] | None = None) -> dict[str, Any]:
        rows = with_compile_seconds(list(search.rows().values()))
        trials = [*search.trials, *search.unused(), *search.cut]
        self.header = {**self.header, "memory_limit_bytes": search.limits.memory_bytes}  # once read, no longer a guess
        document = {"header": self.header, "rows": rows, "conclusion": conclusion, "trials": trials}
        write_json(self.path, document)
        return document


def best_so_far(search: Search) -> Outcome:
    """Of a search that was interrupted."""
    ranked = search.ranked()
    words = "Interrupted: this is the best so far, not confirmed; tuned.json was not written, --resume goes on."
    return Outcome(ranked[0] if ranked else None, False, (), (), (*search.notes, words))


def conclude(config: Any, search: Search, outcome: Outcome) -> dict[str, Any]:
    """The conclusion of a sweep over the rows, with the choice of the search and its reasons."""
    rows = search.rows()
    found = choice.conclude(list(rows.values()), config=config, memory_limit_bytes=search.limits.memory_bytes)
    chosen = outcome.chosen
    if chosen is None or chosen not in rows:
        return found | {"best": None, "text": ["Nothing to recommend.", *outcome.notes]}
    row, reference = rows[chosen], rows.get(search.reference)
    gain = None
    if reference is not None and reference["status"] == OK and chosen != search.reference:
        gain = compare(row, reference, fit(list(rows.values())))
    advice = choice.learning_rate_advice(config, chosen.batch_size)
    text = [
        f"Use {chosen.label}: {choice.rate(row)}.",
        gain_sentence(chosen, search, gain),
        *(["Confirmed by a longer run with a validation pass and a checkpoint."] if outcome.confirmed else []),
        choice.what_limits(row, search.limits.memory_bytes),
        *outcome.notes,
        *untried_sentences(outcome.untried),
        *([advice["text"]] if advice else []),
        *choice.accumulation_sentences(config, chosen.as_dict()),
    ]
    return found | {
        "best": chosen.as_dict(),
        "samples_per_sec": row["samples_per_sec"],
        "samples_per_sec_ci95": row["samples_per_sec_ci95"],
        "gain": gain.as_dict() if gain else None,
        "tied": [c.as_dict() for c in outcome.finalists if c != chosen],
        "learning_rate_advice": advice,
        "text": text,
    }


def gain_sentence(chosen: Combination, search: Search, gain: Comparison | None) -> str:
    reference = search.reference
    given = "the config as given"
    if reference != combination_of(search.config):  # --fixed_effective_batch asks for another batch
        given = f"the config with its batch made {reference.batch_size:,}"
    if chosen == reference:
        return f"That is {given}: nothing that was tried is faster."
    if gain is None:
        why = search.why_not(reference)
        return f"{given[0].upper()}{given[1:]} ({reference.label}) does not work here: {why}."
    same = ": the trials that there was time for do not tell it from noise" if gain.verdict == choice.SAME else ""
    return f"That is {gain} the speed of {given} ({reference.label}){same}."


def untried_sentences(untried: Sequence[Combination]) -> list[str]:
    if not untried:
        return []
    named = "; ".join(combination.label for combination in untried[:4])
    more = f"; and {len(untried) - 4} more" if len(untried) > 4 else ""
    return [f"Not tried for lack of time: {named}{more}."]
