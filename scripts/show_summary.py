"""Print what a finished run reached, beside its baselines.

python scripts/show_summary.py --workdir=runs/quickstart
"""

from absl import flags

from jepa_jax.cli import commands

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run.")
flags.mark_flags_as_required(["workdir"])


def main(argv: list[str]) -> int:
    commands.refuse_arguments(argv)

    def command(console):
        from jepa_jax.base.errors import UserError
        from jepa_jax.program.workdir import Workdir

        folder = Workdir(_WORKDIR.value)
        summary = folder.read_summary()
        if summary is None or summary["status"] != "finished":
            raise UserError(f"{folder.path}: no finished run; train first, or check --workdir")
        rows = {"chance": 100 / summary["num_classes"], **summary["baselines"]}
        rows["untrained encoder, linear probe"] = summary["untrained_probe_accuracy"]
        rows["untrained encoder, k-NN"] = summary.get("untrained_knn_accuracy")
        rows["trained encoder, linear probe"] = summary["probe_accuracy"]
        rows["trained encoder, k-NN"] = summary["knn_accuracy"]
        for name, accuracy in rows.items():
            if accuracy is not None:
                console.line(f"{name:<52} {accuracy:6.1f} %")
        console.line(f"\nreport: {folder.path / 'report.html'}")
        return summary

    return commands.run(command)


if __name__ == "__main__":
    commands.main(main)
