"""Trains and evaluates self-supervised vision models in JAX.

    config = jepa_jax.get_config("quickstart", {"train.max_steps": 100})
    summary = jepa_jax.train(config, "runs/quickstart")
    encoder = jepa_jax.load_encoder("runs/quickstart")

Importing this package is cheap and has no side effect: jax is imported by the functions, when they are called.
"""

import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

from jepa_jax.base.classes import ClassTable, load_object, trust_files
from jepa_jax.base.console import Console
from jepa_jax.base.files import user_path
from jepa_jax.base.selection import SELECTION_KEY
from jepa_jax.base.signals import signals_exit

if TYPE_CHECKING:
    import grain
    from ml_collections import ConfigDict

    from jepa_jax.config.groups import Config
    from jepa_jax.evals.inference import FrozenEncoder
    from jepa_jax.profiling.own_loop import LoopProfiler

__all__ = [
    "SELECTION_KEY", "dataset", "get_config", "load_encoder", "profile_loop", "train", "trust_files", "tune_step",
]  # fmt: skip


def get_config(
    reference: "str | os.PathLike[str] | Mapping[str, Any] | ConfigDict",
    overrides: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> "ConfigDict":
    """Returns a complete, checked config.

    Args:
        reference: name of a shipped config or `FILE.py`, either with `:ARGUMENT`; the folder of a run or its
            config.json; or a config as a ConfigDict or nested dict, in which keys may be missing.
        overrides: keys to change, e.g. `{"optim.lr": 0.1}`.
        **keywords: the same with "." written "__", e.g. `optim__lr=0.1`.

    Raises:
        UserError: no such config, or keys and values that it cannot have.
    """
    _start_quietly()
    from jepa_jax.config.config_dicts import overridden
    from jepa_jax.config.recipe import read_recipe

    changes = {**(overrides or {}), **{k.replace("__", "."): v for k, v in keywords.items()}}
    recipe = read_recipe(os.fspath(reference)) if isinstance(reference, str | os.PathLike) else reference
    _checked(recipe, changes)
    return overridden(recipe, changes)[0].lock()


def train(
    config: "ConfigDict | Mapping[str, Any] | Config",
    workdir: str | pathlib.Path,
    *,
    data: Mapping[str, Any] | None = None,
    resume: str = "auto",
    allow_changed: Sequence[str] = (),
    console: Console | None = None,
) -> dict[str, Any]:
    """Trains as `config` says in the folder `workdir`; returns the content of its summary.json.

    Args:
        config: what `get_config` returns, or any ConfigDict with the keys of a config.
        workdir: folder of the run: config, metrics, checkpoints, report.
        data: the splits "train" and "test", instead of what the config names: dicts of arrays, Grain datasets,
            `tfds.data_source`, Hugging Face `datasets`, or anything with `len` and `[i]` that returns dicts or
            (image, label). A run that is continued needs it again.
        resume: "auto" continues from the newest checkpoint if there is one, "never" refuses a folder that holds a run,
            "must" refuses one without.
        allow_changed: parts in which a continued run may differ from the one that made its checkpoints: "config",
            "data" or "code" (this package, your own classes, versions of others). By default it is refused.
        console: where progress is shown; standard error by default.

    Raises:
        UserError: something to fix, such as a key of the config or the data; the message says what.
    """
    with signals_exit():
        _start_quietly()
        from jepa_jax.config.groups import Config
        from jepa_jax.program.config import changed_config
        from jepa_jax.reports.memory_check import explain_out_of_memory
        from jepa_jax.reports.run_report import write_report
        from jepa_jax.training.run import train
        from jepa_jax.training.setup import Hooks

    checked = config if isinstance(config, Config) else _checked(config)
    if data is not None:
        checked = changed_config(checked, {"data.source": "python"})
    hooks = Hooks(explain_out_of_memory, write_report)
    return train(
        checked, workdir, resume=resume, allow_changed=allow_changed, console=console or Console(), hooks=hooks,
        data=data,
    )  # fmt: skip


def dataset(config: "ConfigDict | Mapping[str, Any] | Config", split: str = "train") -> "grain.MapDataset":
    """Returns the batches of a run as a Grain dataset: element n is what step n sees (of this process).

    Args:
        config: what `train` takes.
        split: "train", or "test" or "validation" for their batches in the same kind of order.
    """
    _start_quietly()
    from jepa_jax.data import dataset

    return dataset(config, split)


def load_encoder(workdir: str | pathlib.Path, *, batch_size: int = 256) -> "FrozenEncoder":
    """Returns the encoder of a run's newest checkpoint, which maps uint8 images [N, H, W, C] to features [N, F].

    A run whose config names classes of modules that this program has not imported is loaded inside
    `with jepa_jax.trust_files():`.

    Args:
        workdir: folder of the run.
        batch_size: images per call of the compiled encoder.
    """
    _start_quietly()
    from jepa_jax.evals.inference import load_encoder

    return load_encoder(workdir, batch_size=batch_size)


def profile_loop(
    step: Callable[..., Any],
    folder: str | pathlib.Path,
    *,
    batch_size: int,
    steps_per_epoch: int = 100,
    precision: str = "float32",
    trace_steps: str = "",
) -> "LoopProfiler":
    """Returns the profiler of runs for a training loop of your own.

        with jepa_jax.profile_loop(train_step, "profiles/mine", batch_size=64) as profiler:
            for batch in profiler.batches(loader):
                state, loss = profiler.step(state, batch)
        print(profiler.summary())

    The folder gets profile.json, profile.html and, with `trace_steps`, a trace for TensorBoard. They hold what the
    profile of a run holds: time by section, forward and backward pass by `jax.named_scope`, throughput, MFU, memory and
    bottlenecks.

    Args:
        step: jitted function of (state, batch); the last array that it returns, such as the loss, is waited for and
            must not be donated to the next step.
        folder: where to write.
        batch_size: examples per step.
        steps_per_epoch: steps of which an account is made together.
        precision: type of the matrix products, which the peak of a GPU depends on.
        trace_steps: steps A to B to record, as "A:B".
    """
    _start_quietly()
    from jepa_jax.profiling.own_loop import LoopProfiler
    from jepa_jax.reports.profile_section import write_profile

    options: dict[str, Any] = {"steps_per_epoch": steps_per_epoch, "precision": precision, "trace_steps": trace_steps}
    return LoopProfiler(step, pathlib.Path(folder), batch_size=batch_size, write_page=write_profile, **options)


def tune_step(
    make: Callable[..., Any] | str,
    *,
    batch: int,
    batch_sizes: Sequence[int] = (),
    precisions: Sequence[str] = ("float32",),
    workers: Sequence[int] = (0,),
    budget: str = "10m",
    output_dir: str | pathlib.Path = "runs/tune",
    console: Console | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Finds the fastest settings of a training step of your own, without a config; writes tune.json and tune.html.

    Each trial is a process that imports `make`, so call this below `if __name__ == "__main__"`, before anything is
    computed: this process must not hold the memory of the GPU.

        result = jepa_jax.tune_step(make, batch=64, precisions=("float32", "bfloat16"), workers=(0, 2), budget="5m")
        step, batches = make(**result["chosen"])

    Args:
        make: function `make(batch, precision, workers)` at the top of a module, or "module:function". It returns `step`
            and `batches`, an endless iterable; `step(batch)` takes one of its elements and returns the loss as a scalar
            array.
        batch: examples per step to begin with; without `batch_sizes` any others are tried.
        batch_sizes: the only batch sizes to try.
        precisions: values for `make`, the one in use first.
        workers: values for `make`, the one in use first.
        budget: time for the whole search, e.g. "90s", "10m", "1.5h".
        output_dir: folder of the results.
        console: where progress is shown; standard error by default.
        **options: resume, margin, memory_limit_gb, memory_fraction, gpu_index, as the flags of `jepa-jax tune`.

    Returns:
        The object that `jepa-jax tune` prints; `chosen` holds the arguments for `make`, or None.
    """
    _start_quietly()
    from jepa_jax.experiments.tune import TuneOptions, tune_own_step
    from jepa_jax.reports.experiment_page import sweep_page
    from jepa_jax.reports.page import write_page

    console = console or Console()
    settings = TuneOptions(user_path(output_dir, "output_dir"), budget, **options)
    _, result, document = tune_own_step(make, batch, batch_sizes, precisions, workers, settings, console)
    write_page(result["html"], sweep_page(document))
    for line in (*document["conclusion"]["text"], f"page: {result['html']}"):
        console.line(line)
    return result


def _checked(config: "Mapping[str, Any] | ConfigDict", changes: Mapping[str, Any] | None = None) -> "Config":
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
    functions = ClassTable("FUNCTIONS", {})  # those that projects add to this package
    if name in functions:
        return load_object(functions[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
