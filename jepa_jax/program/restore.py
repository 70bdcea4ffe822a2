"""The trained state of a run, from its folder alone."""

import pathlib

from jax.sharding import Mesh

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import Config
from jepa_jax.config.resolve import resolve_stored
from jepa_jax.data.contract import Spec, abstract_batch, image_spec
from jepa_jax.program.build import Program, build_program
from jepa_jax.program.checkpoint import open_whole
from jepa_jax.program.identity import config_differences
from jepa_jax.program.step import TrainState, with_evaluated_statistics
from jepa_jax.program.workdir import Workdir
from jepa_jax.runtime.start import start_compile_cache


def run_config(workdir: str | pathlib.Path) -> Config:
    folder = Workdir(workdir)
    if not folder.path.is_dir():
        raise UserError(f"{folder.path}: there is no such folder; give the folder of a run")
    values = folder.read_config()
    if "method" not in values and values.keys() & {"format", "architectures", "architecture"}:
        # Of `jepa-jax export`, transformers or timm.
        fix = "give the folder of the run; weights are read with --weights or jepa_jax.weights.load_model"
        raise UserError(f"{folder.path}: holds exported or public weights, not a run; {fix}")
    config = resolve_stored(values)
    if not folder.has_checkpoint():
        raise UserError(f"{folder.path}: holds no checkpoint yet; train first, or check the path")
    return config


def restore_state(
    config: Config, workdir: str | pathlib.Path, mesh: Mesh, spec: Spec | None = None
) -> tuple[Program, TrainState]:
    """Returns the program of a run and its best state, or else its newest, with the statistics that evaluations read.

    Args:
      spec: of one element of its data; without it the data need not be there: the run knows it, and runs of earlier
        versions are of images.
    """
    start_compile_cache()
    folder = Workdir(workdir)
    with open_whole(folder.checkpoint_folders()) as checkpoints:
        if stored := checkpoints.manifest().get("config"):
            own = resolve_stored(folder.read_config(), config.to_dict()).to_dict()
            found = config_differences(stored, own)
            if differing := [line for line in found if not line.startswith("config.eval.")]:
                lines = "\n  ".join(differing)
                raise UserError(f"{folder.config}: is not of these checkpoints; put back the one that is:\n  {lines}")
        probe, size = checkpoints.shape("params/probe/bias"), config.data.batch_size
        known = folder.read_spec()
        images = image_spec(config.data.image_size, config.data.channels, labelled=probe is not None)
        spec = spec or known or images
        classes = probe[0] if probe else 0
        program = build_program(
            config, num_train=size, num_classes=classes, sample=abstract_batch(spec, size), mesh=mesh
        )
        state, _ = checkpoints.restore(program.factory.abstract)
        stats = checkpoints.evaluated_stats(program.factory.abstract.stats)
    return program, state if stats is None else with_evaluated_statistics(state, config.eval.weights, stats)
