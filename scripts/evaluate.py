"""Measure a run's newest checkpoint: linear probe, k-NN, feature quality, fine-tuning, few-shot, at every level.

    python scripts/evaluate.py --workdir=runs/quickstart [--protocols=linear_probe,knn] [--levels=0]

Writes eval/eval.json, eval.md, eval.html and figures into the workdir. Features are computed once and kept there.
"""

from absl import flags

from jepa_jax.cli import commands

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run.")
_PROTOCOLS = flags.DEFINE_string(
    "protocols", "all", "all, or some of linear_probe,knn,feature_quality,fine_tune,few_shot."
)
_LEVELS = flags.DEFINE_string("levels", "all", "all, or numbers such as 0,1; 0 is the finest.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Where the data lies, if not where the run's config says.")
_EPOCHS = flags.DEFINE_integer("fine_tune_epochs", 8, "Epochs of fine-tuning to choose from.")
_IMAGES = flags.DEFINE_integer("fine_tune_images", 10_000, "Train images that fine-tuning uses; 0 = all.")
flags.mark_flags_as_required(["workdir"])


def main(argv: list[str]) -> int:
    commands.refuse_arguments(argv)

    def command(console):
        from jepa_jax.cli.evaluation import evaluate_run
        from jepa_jax.evals.evaluate import without_large_parts
        from jepa_jax.evals.protocols import Limits
        from jepa_jax.reports.evaluation_page import evaluation_markdown

        limits = Limits(fine_tune_epochs=_EPOCHS.value, fine_tune_images=_IMAGES.value)
        record = evaluate_run(
            _WORKDIR.value,
            protocols=_PROTOCOLS.value,
            levels=_LEVELS.value,
            data_dir=_DATA_DIR.value,
            limits=limits,
            console=console,
        )
        page = f"{_WORKDIR.value}/eval/eval.html"
        console.line(f"\n{evaluation_markdown(record)}\n{record['seconds']:.0f} s; page: {page}")
        return without_large_parts(record)

    return commands.run(command)


if __name__ == "__main__":
    commands.main(main)
