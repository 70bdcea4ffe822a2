"""Shows what sizes of a config a GPU holds, and what to change when memory runs out. Needs no GPU.

  jepa-jax scale-guide --config=rapid --gpu=rtx4090 [--output_dir=runs/guide]

Compiles the training step of every rung of a ladder for the GPU (pip install 'jepa_jax[plan]'): the LADDER of the
config's file, or else its batch doubled until it no longer fits. Prints memory by parts, operations, predicted speed,
changes that save memory, rules of thumb for the rate, and the effect of the longest element where the data has several
sizes. Plans are cached, so asking again is free. Exit codes: 0 the config fits, 2 something to fix, 4 it does not fit.
"""

import argparse
import pathlib

from jepa_jax.base.console import Console
from jepa_jax.base.errors import EXIT_DOES_NOT_FIT, EXIT_OK
from jepa_jax.base.files import make_folder
from jepa_jax.cli.command import PROGRAM, Command, Result
from jepa_jax.cli.flags import Parser, config_from, config_name, fields_from, override_flags
from jepa_jax.runtime import platforms


def add_flags(parser: Parser) -> None:
    parser.add_config()
    parser.add_flag("gpu", "NAME", "a name from the table of GPUs", "rtx4090")
    parser.add_flag("topology", "AxBxC", "slices x hosts x GPUs per host", "1x1x1")
    parser.add_flag("gpu_table", "FILE", "TOML file with more GPUs; see jepa_jax/runtime/hardware.toml", default="")
    parser.add_flag("output_dir", "DIR", "folder for scale_guide.md and scale_guide.png")
    parser.add_flag(
        "sizes_of", "LIST", "rungs to plan at every size of batches, or all; default: first and largest", ""
    )


def run_scale_guide(arguments: argparse.Namespace, console: Console) -> Result:
    platforms.prepare_to_plan()

    from jepa_jax.config.recipe import as_on_gpus, read_ladder
    from jepa_jax.planning.scale_guide import GuideOptions, make_guide
    from jepa_jax.reports.scale_page import guide_json, guide_text, write_guide

    with as_on_gpus():
        config, ladder = config_from(arguments), read_ladder(arguments.config)
    name = config_name(arguments)
    options = GuideOptions(**fields_from(arguments, GuideOptions))
    if arguments.output_dir:
        folder = pathlib.Path(arguments.output_dir)
        make_folder(folder)  # before anything is compiled
    guide = make_guide(config, ladder, options, console)
    if arguments.output_dir:
        given = [f"--config={arguments.config}", *override_flags(arguments), f"--gpu={arguments.gpu}"]
        given += [f"--topology={arguments.topology}"] if arguments.topology != "1x1x1" else []
        given += [f"--sizes_of={arguments.sizes_of}"] if arguments.sizes_of else []
        write_guide(folder, guide, name, " ".join([PROGRAM, "scale-guide", *given]))
    fits = guide.configured.estimate.fits
    return Result(guide_json(guide), guide_text(guide, name), EXIT_OK if fits else EXIT_DOES_NOT_FIT)


SCALE_GUIDE = Command("scale-guide", __doc__, add_flags, run_scale_guide)
main = SCALE_GUIDE.main
