"""Evaluates the newest checkpoint of a run: linear probe, k-NN, feature quality, fine-tuning and few-shot.

Numeric targets get a ridge probe, maps of classes a segmentation probe, elements without any feature quality alone.

  jepa-jax evaluate --workdir=runs/quickstart [--protocols=linear_probe,knn] [--levels=0] [--attention]

Writes eval/eval.json, eval.md, eval.html and figures into the workdir, and keeps the extracted features there (with
--pool, in a folder of its own such as eval_grid2/). The same command continues an evaluation that was interrupted.
"""

import shlex

from jepa_jax.base.console import Console
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser
from jepa_jax.cli.runs import embed_command


def add_flags(parser: Parser) -> None:
    parser.add_flag("workdir", "DIR", "folder of a run", required=True)
    parser.add_flag(
        "protocols",
        "LIST",
        "all (but attentive_probe), or some of linear_probe,last_layers,attentive_probe,segmentation_probe,"
        "ridge_probe,knn,feature_quality,fine_tune,few_shot",
        "all",
    )
    parser.add_flag("levels", "LIST", "all, or numbers such as 0,1; 0 is the finest", "all")
    parser.add_flag("pool", "KIND", "mean, grid2 or cls: what features are made of, instead of the run's eval.pool")
    parser.add_flag("data_dir", "DIR", "folder of the data, if it has moved since training")
    parser.add_flag("data_source", "NAME", "another data set to evaluate on, as data.source; in the folder --data_dir")
    parser.add_flag("fine_tune_epochs", "N", "most epochs of fine-tuning", 8, least=1)
    parser.add_flag(
        "fine_tune_images", "N", "train images used for fine-tuning and probes of patches; 0 = all", 10_000, least=0
    )
    parser.add_trust()
    parser.add_switch("attention", "also show what the last block of a ViT attends to, beside PCA of its patches")
    parser.add_switch("untrained", "also measure the encoder as it was before its first step", default=True)


def run_evaluate(arguments: Arguments, console: Console) -> Result:
    from jepa_jax.evals.evaluate import evaluate, without_large_parts
    from jepa_jax.evals.evaluators import Limits
    from jepa_jax.reports.evaluation_page import evaluation_text, write_evaluation

    evaluation = evaluate(
        arguments.workdir,
        protocols=arguments.protocols,
        levels=arguments.levels,
        data_dir=arguments.data_dir,
        pool=arguments.pool,
        data_source=arguments.data_source,
        limits=Limits(
            fine_tune_epochs=arguments.fine_tune_epochs,
            fine_tune_images=arguments.fine_tune_images,
            untrained=arguments.untrained,
        ),
        attention=arguments.attention,
        console=console,
    )
    console.start("pictures and page", None)
    write_evaluation(evaluation)
    record = evaluation.record
    text = f"{evaluation_text(record)}\n{record['seconds']:.0f} s; page: {evaluation.folder}/eval.html"
    own = shlex.quote(arguments.workdir)
    following = [f"compare {own} ANOTHER_RUN", embed_command(arguments.workdir)]
    return Result([without_large_parts(record)], text, next=following)


EVALUATE = Command("evaluate", __doc__, add_flags, run_evaluate, shows_start=True)
