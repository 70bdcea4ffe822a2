"""What a model starts from instead of random weights: what its method loads, and `model.init_from` for its encoder."""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import user_path
from jepa_jax.config.groups import Config
from jepa_jax.methods.contract import Pretrained
from jepa_jax.models.registry import encoder_kind, encoder_structure
from jepa_jax.program.step import evaluated_variables
from jepa_jax.runtime.mesh import make_mesh
from jepa_jax.weights.fit import fit_encoder
from jepa_jax.weights.load import Geometry, LoadedModel, load_model


def initial_weights(config: Config, of_method: Pretrained, params: Mapping[str, Any]) -> Pretrained:
    """Returns the variables that replace those of a fresh model, with sentences for the user."""
    source = config.init_from
    if not source:
        return of_method
    if "encoder" not in params:
        raise UserError(f"config.model.init_from = {source!r}: {config.method.name} has no encoder; leave it empty")
    saved = saved_encoder(source)
    encoder, notes = fit_encoder(saved, encoder_structure(config.model), config.data.channels, params["encoder"])
    others = [name for name in params if name not in ("encoder", *of_method.params)]
    fresh = [f"Not part of the weights, and random: {', '.join(others)}."] if others else []
    return Pretrained(
        {**of_method.params, "encoder": encoder},
        {**of_method.stats, **({"encoder": saved.stats} if saved.stats else {})},
        (*of_method.notes, f"The encoder starts from {saved.origin} ({saved.encoder_kind}).", *notes, *fresh),
    )


def saved_encoder(source: str) -> LoadedModel:
    """Returns an encoder from a file or folder of weights, from the Hub, or from the folder of a run."""
    folder = user_path(source, "config.init_from")
    is_run = any((folder / part).is_dir() for part in ("checkpoints", "best"))
    return _of_run(source) if is_run else load_model(source)


def _of_run(workdir: str) -> LoadedModel:
    from jepa_jax.program.restore import restore_state, run_config  # which builds programs, and those need this module

    config = run_config(workdir)
    program, state = restore_state(config, workdir, make_mesh(1, 1, jax.local_devices()))
    params, stats = evaluated_variables(state, config.eval.weights)
    if "encoder" not in params:
        raise UserError(f"config.model.init_from = {workdir!r}: a run of {config.method.name} has no encoder to load")
    data, structure = config.data, encoder_structure(config.model)
    return LoadedModel(
        program.factory.merge(params, stats).encoder,
        encoder_kind(structure, config.model.name),
        structure,
        data.view_size,
        data.channels,
        data.augment.mean,
        data.augment.std,
        config.eval.pool,
        pathlib.Path(workdir),
        Geometry(data.view_size, data.image_size, data.shorter_side),
    )
