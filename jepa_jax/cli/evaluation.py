"""The evaluate command: measures a run's newest checkpoint and writes the results into `eval/` of its workdir."""

from typing import Any

from jepa_jax.base.console import Console
from jepa_jax.evals.evaluate import evaluate
from jepa_jax.reports.evaluation_page import write_evaluation


def evaluate_run(workdir: str, *, console: Console, **options: Any) -> dict[str, Any]:
    """Evaluates a run (options as of `evals.evaluate.evaluate`), writes its pages, and returns what eval.json holds."""
    evaluation = evaluate(workdir, console=console, **options)
    console.start("figures", 1)
    write_evaluation(evaluation)
    console.stop()
    return evaluation.record
