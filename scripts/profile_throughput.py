"""Which batch, how many workers, accumulation or not, which precision? Measures every combination on this machine.

    python scripts/profile_throughput.py --config=configs/quickstart.py --batch_sizes=64,128,256 --num_workers=0,1 \\
        --output_json=runs/sweep.json [--use_dummy_data] [--resume] [--config.model.width=32 ...]
    python scripts/profile_throughput.py --study=profiling/sweeps/a6000.toml --gpu_index=0 --output_json=runs/a6000.json

Each repeat is a process of its own: one that runs out of memory, crashes or hangs becomes a row with its reason.
Results are on disk after each repeat; after Ctrl-C or kill -9 the same command with --resume goes on. Beside the JSON
file it leaves a page (.html) and a table (.md). The last line of stdout is a JSON object. Exit codes: 0 at least one
combination was measured, 1 none was, 2 something to fix, 130 Ctrl-C, 143 SIGTERM (what was measured is kept).
"""

import pathlib
import sys

from absl import flags
from ml_collections import config_flags

from jepa_jax.base.errors import UserError
from jepa_jax.cli import commands
from jepa_jax.tuning.settings import FLAGS, grid_values, with_study

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file; --config.group.key=value overrides.")
_OUTPUT = flags.DEFINE_string("output_json", None, "Where the results go, a JSON file.")
flags.DEFINE_string("study", None, "A TOML file with values of these flags; those on the command line win.")
flags.DEFINE_string("batch_sizes", None, "Images of an optimizer step, with commas; default: the config's own.")
flags.DEFINE_string("num_workers", None, "Processes that load batches; default: the config's own.")
flags.DEFINE_string("grad_accum", None, "Parts that a batch is computed in; default: the config's own.")
flags.DEFINE_string("precisions", None, "bfloat16, float32 or both; default: the config's own.")
flags.DEFINE_string("remats", None, "none, full or both; default: the config's own.")
flags.DEFINE_string("pipelines", None, "grain, device or both; default: the config's own.")
_MAX_BATCHES = flags.DEFINE_integer("max_batches", 32, "Measured batches of each repeat.", lower_bound=2)
_WARMUP = flags.DEFINE_integer(
    "warmup_batches",
    4,
    "Batches before them, after those that the loader had ready.",
    lower_bound=1,
)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Times that each combination is measured.", lower_bound=1)
_GPU = flags.DEFINE_integer("gpu_index", None, "The only GPU to use; default: all.", lower_bound=0)
_DUMMY = flags.DEFINE_boolean("use_dummy_data", False, "Draw images in the loader's workers; needs no data.")
_RESUME = flags.DEFINE_boolean("resume", False, "Go on with the results in --output_json.")
_TIME_LIMIT = flags.DEFINE_float("time_limit", 600.0, "Seconds after which a trial is killed.", lower_bound=1.0)
_RETRY = flags.DEFINE_boolean("retry_failed", False, "As --resume, and measures again what failed or was skipped.")
_EFFECTIVE = flags.DEFINE_integer(
    "fixed_effective_batch", None, "Choose among combinations of this batch size alone.", lower_bound=2
)
flags.mark_flags_as_required(["config", "output_json"])


def main(argv: list[str]) -> int:
    commands.refuse_arguments(argv)
    code = 0

    def command(console):
        nonlocal code
        from jepa_jax.config.schema import validate
        from jepa_jax.reports.sweep_page import write_sweep
        from jepa_jax.tuning.sweep import Sweep, run_sweep, summarise

        validate(_CONFIG.value)
        values = grid_values(_CONFIG.value, {flag: flags.FLAGS[flag].value for flag in FLAGS})
        sweep = Sweep(
            config=_CONFIG.value,
            config_name=pathlib.Path(flags.FLAGS["config"].config_filename or "config").stem,
            values=values,
            output=pathlib.Path(_OUTPUT.value),
            max_batches=_MAX_BATCHES.value,
            warmup_batches=_WARMUP.value,
            repeats=_REPEATS.value,
            use_dummy_data=_DUMMY.value,
            gpu_index=_GPU.value,
        )
        code, document = run_sweep(
            sweep,
            time_limit=_TIME_LIMIT.value,
            resume=_RESUME.value,
            retry_failed=_RETRY.value,
            fixed_batch=_EFFECTIVE.value,
        )
        table = write_sweep(document, sweep.output)
        print("\n".join([table, *document["conclusion"]["text"]]))
        return summarise(sweep, document, code)

    return commands.run(command) or code


if __name__ == "__main__":
    try:
        sys.argv = with_study(sys.argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    commands.main(main)
