"""Which learning rate? Trains briefly at each and compares linear-probe accuracies.

python scripts/lr_search.py --config=configs/quickstart.py --lrs=1e-3,2e-3,4e-3 --epochs=5 --output_dir=runs/lr \\
    [--seeds=0,1] [--timeout=SECONDS] [--config.data.batch_size=64 ...]

Each run is a process of its own; the same command goes on where it stopped. Writes results.json, results.md,
results.png and study.html. The last line of stdout is a JSON object. Exit codes: 0 at least one run finished,
1 none did, 2 bad flags, 130 Ctrl-C, 143 SIGTERM (what was measured is kept).
"""

import pathlib
import sys

from absl import flags

from jepa_jax.base.text import parse_numbers
from jepa_jax.cli import commands
from jepa_jax.studies import study

CONFIG = flags.DEFINE_string(
    "config", None, "Config file; --config.key=value is passed on to every run.", required=True
)
LRS = flags.DEFINE_string("lrs", None, "Learning rates (optim.lr), separated by commas.", required=True)
EPOCHS = flags.DEFINE_integer("epochs", 5, "Epochs of each run (optim.epochs).", lower_bound=1)
SEEDS = flags.DEFINE_string("seeds", "0", "Seeds (train.seed), separated by commas; several show the noise.")
OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Where runs and results go.", required=True)
TIMEOUT = flags.DEFINE_float("timeout", None, "Seconds after which a run is stopped; it becomes a row.", lower_bound=0)
RESUME = flags.DEFINE_bool("resume", True, "Go on in a directory with results; --noresume refuses one.")


def search(argv: list[str], overrides: tuple[str, ...]) -> int:
    commands.refuse_arguments(argv)
    search_study = study.Study(
        kind="lr_search",
        config=CONFIG.value,
        output_dir=pathlib.Path(OUTPUT_DIR.value),
        command=(sys.executable, str(pathlib.Path(__file__).with_name("train.py"))),
        overrides=overrides,
        fixed={"epochs": EPOCHS.value},
    )
    warmup = study.warmup_share(CONFIG.value, overrides)
    lrs = parse_numbers("lrs", LRS.value)
    runs = study.plan_runs(lrs, [EPOCHS.value], parse_numbers("seeds", SEEDS.value, int), warmup)
    return commands.conduct_study(search_study, runs, timeout=TIMEOUT.value, resume=RESUME.value)


if __name__ == "__main__":
    commands.run_with_overrides(search)
