"""Trains and evaluates self-supervised vision models in JAX.

    config = jepa_jax.get_config("quickstart", {"train.max_steps": 100})
    summary = jepa_jax.train(config, "runs/quickstart")
    encoder = jepa_jax.load_encoder("runs/quickstart")

Importing this package is cheap and has no side effect: jax is imported by the functions, when they are called.
"""

import pathlib
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

from jepa_jax.base.console import Console
from jepa_jax.base.selection import SELECTION_KEY
from jepa_jax.base.signals import signals_exit

if TYPE_CHECKING:
    from ml_collections import ConfigDict

    from jepa_jax.config.groups import Config
    from jepa_jax.evals.inference import FrozenEncoder

__all__ = ["SELECTION_KEY", "get_config", "load_encoder", "train"]


def get_config(
    reference: "str | Mapping[str, Any] | ConfigDict", overrides: Mapping[str, Any] | None = None, **keywords: Any
) -> "ConfigDict":
    """Returns a complete, checked config.

    Args:
        reference: name of a shipped config or `FILE.py`, either with `:ARGUMENT`; the config.json of a run; or a config
            as a ConfigDict or nested dict, in which keys may be missing.
        overrides: keys to change, e.g. `{"optim.lr": 0.1}`.
        **keywords: the same with "." written "__", e.g. `optim__lr=0.1`.

    Raises:
        UserError: no such config, or keys and values that it cannot have.
    """
    _start_quietly()
    from jepa_jax.config.config_dicts import overridden
    from jepa_jax.config.recipe import read_recipe

    changes = {**(overrides or {}), **{k.replace("__", "."): v for k, v in keywords.items()}}
    _checked(reference, changes)
    recipe = read_recipe(reference) if isinstance(reference, str) else reference
    return overridden(recipe, changes)[0].lock()


def train(
    config: "ConfigDict | Mapping[str, Any] | Config",
    workdir: str | pathlib.Path,
    *,
    resume: str = "auto",
    console: Console | None = None,
) -> dict[str, Any]:
    """Trains as `config` says in the folder `workdir`; returns the content of its summary.json.

    Args:
        config: what `get_config` returns, or any ConfigDict with the keys of a config.
        workdir: folder of the run: config, metrics, checkpoints, report.
        resume: "auto" continues from the newest checkpoint if there is one, "never" refuses a folder that holds a run,
            "must" refuses one without.
        console: where progress is shown; standard error by default.

    Raises:
        UserError: something to fix, such as a key of the config or the data; the message says what.
    """
    with signals_exit():
        _start_quietly()
        from jepa_jax.config.groups import Config
        from jepa_jax.reports.memory_check import check_memory, explain_out_of_memory
        from jepa_jax.reports.run_report import write_report
        from jepa_jax.training.run import train
        from jepa_jax.training.setup import Hooks

    checked = config if isinstance(config, Config) else _checked(config)
    hooks = Hooks(check_memory, explain_out_of_memory, write_report)
    return train(checked, workdir, resume=resume, console=console or Console(), hooks=hooks)


def load_encoder(workdir: str | pathlib.Path, *, batch_size: int = 256) -> "FrozenEncoder":
    """Returns the encoder of a run's newest checkpoint, which maps uint8 images [N, H, W, C] to features [N, F].

    Args:
        workdir: folder of the run.
        batch_size: images per call of the compiled encoder.
    """
    _start_quietly()
    from jepa_jax.evals.inference import load_encoder

    return load_encoder(workdir, batch_size=batch_size)


def _checked(config: "str | Mapping[str, Any] | ConfigDict", changes: Mapping[str, Any] | None = None) -> "Config":
    """Returns a config resolved, with the statistics of its data; UserError says everything that is wrong."""
    from jepa_jax.program.config import load_config, with_set_statistics

    return with_set_statistics(load_config(config, changes), needs_data=True)


def _start_quietly() -> None:
    """Imports jax without remarks about a missing GPU driver."""
    from jepa_jax.runtime.platforms import import_jax

    import_jax()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return metadata.version("jepa_jax")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
