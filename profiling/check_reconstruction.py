"""Measures the reconstruction error of a masked autoencoder on held-out images, relative to the mean visible colour.

  jepa-jax train --config=mae_quickstart --workdir=runs/mae_quickstart
  python profiling/check_reconstruction.py --workdir=runs/mae_quickstart

A ratio below 1 means that the model guesses hidden patches better than each image's mean visible colour does.
"""

import argparse
import sys

from jepa_jax.base.console import Console
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Parser


def add_flags(parser: Parser) -> None:
    parser.add_flag("workdir", "DIR", "folder of a run of method mae", required=True)


def check(arguments: argparse.Namespace, console: Console) -> Result:
    from jepa_jax.evals.reconstruction import held_out_reconstruction
    from jepa_jax.evals.trained_encoder import load

    result = held_out_reconstruction(load(arguments.workdir))
    errors = f"error {result['error']:.4f}, of the visible mean {result['visible_mean_error']:.4f}"
    ratio = f"ratio {result['ratio']:.3f} over {result['images']:,} held-out images"
    return Result([result], f"{errors}, {ratio}")


if __name__ == "__main__":
    sys.exit(Command("profiling/check_reconstruction.py", __doc__, add_flags, check, program="python").main())
