"""Find the fastest settings for this machine, within a budget of time, and write them for training.

    python scripts/tune.py --config=configs/quickstart.py --budget=10m [--output_dir=runs/tune] [--config.key=value ...]
    python scripts/train.py --config=configs/quickstart.py --workdir=runs/a --tuned=runs/tune/tuned.json

Trials are processes: one that runs out of memory, crashes or hangs is a row with its reason. Writes tuned.json,
tune.json and tune.html. Exit codes: 0 found, 1 nothing could be measured, 2 something to fix, 130 Ctrl-C, 143 SIGTERM
(what was measured is kept, --resume goes on).
"""

import pathlib

from absl import flags
from ml_collections import config_flags

from jepa_jax.cli import commands

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file; --config.group.key=value overrides.")
_BUDGET = flags.DEFINE_string("budget", "10m", "Time for everything: 90s, 10m, 1.5h.")
_OUTPUT_DIR = flags.DEFINE_string("output_dir", "runs/tune", "Where results go.")
_FIXED = flags.DEFINE_string(
    "fixed_effective_batch",
    "",
    "Images an update that must stay: a number, or config for the config's own; empty: any.",
)
_MARGIN = flags.DEFINE_float("margin", 0.08, "Share of the memory that stays free.", lower_bound=0.0, upper_bound=0.9)
_MEMORY = flags.DEFINE_float(
    "memory_limit_gb", None, "GiB a run may take; else the GPU's pool, or 80 % of the free memory.", lower_bound=0.0
)
_DUMMY = flags.DEFINE_boolean("use_dummy_data", False, "Images drawn by the loader instead of the config's data.")
_GPU = flags.DEFINE_integer("gpu_index", None, "The GPU to use.", lower_bound=0)
_RESUME = flags.DEFINE_boolean("resume", False, "Go on with a search that was interrupted.")
_LISTS = {
    name: flags.DEFINE_string(name, None, f"{what}, separated by commas; else {default}.")
    for name, what, default in (
        ("batch_sizes", "Batches to choose from", "any"),
        ("num_workers", "Numbers of workers to try", "by the cores of the machine"),
        ("grad_accum", "Accumulation steps to try", "the config's own"),
        ("precisions", "Precisions to try", "both"),
        ("remats", "Values of train.remat to try", "both"),
        ("pipelines", "Pipelines to try", "both, for data that fits in memory"),
    )
}
flags.mark_flags_as_required(["config"])


def main(argv: list[str]) -> int:
    commands.refuse_arguments(argv)
    code = 0

    def command(console):
        nonlocal code
        from jepa_jax.reports.page import write_page
        from jepa_jax.reports.sweep_page import sweep_page
        from jepa_jax.tuning.tune import TuneOptions, tune

        options = TuneOptions(
            output_dir=pathlib.Path(_OUTPUT_DIR.value).expanduser(),
            budget=_BUDGET.value,
            values={name: flag.value for name, flag in _LISTS.items()},
            fixed_effective_batch=_FIXED.value,
            margin=_MARGIN.value,
            memory_limit_gb=_MEMORY.value,
            use_dummy_data=_DUMMY.value,
            gpu_index=_GPU.value,
            resume=_RESUME.value,
            config_name=pathlib.Path(flags.FLAGS["config"].config_filename or "config").stem,
        )
        code, result, document = tune(_CONFIG.value, options, console)
        write_page(result["html"], sweep_page(document))
        return result

    return commands.run(command) or code


if __name__ == "__main__":
    commands.main(main)
