"""Reconstruction error of a masked autoencoder on held-out images, against each image's mean visible colour.

jepa-jax train --config=mae_quickstart --workdir=runs/mae_quickstart
python profiling/check_reconstruction.py --workdir=runs/mae_quickstart
"""

from absl import flags

from jepa_jax.cli import commands

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run of method mae.")
flags.mark_flags_as_required(["workdir"])


def main(argv):
    commands.refuse_arguments(argv)

    def command(console):
        from jepa_jax.evals.reconstruction import held_out_reconstruction
        from jepa_jax.evals.trained_encoder import load

        result = held_out_reconstruction(load(_WORKDIR.value))
        console.line(
            f"error {result['error']:.4f}, of the visible mean {result['visible_mean_error']:.4f}, "
            f"ratio {result['ratio']:.3f} over {result['images']:,} held-out images"
        )
        return result

    return commands.run(command)


if __name__ == "__main__":
    commands.main(main)
