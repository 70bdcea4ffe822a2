"""How long to train? Accuracy and time against the number of epochs, a whole schedule each.

python scripts/epoch_tradeoff.py --config=configs/quickstart.py --epochs=5,10,15,25,40 --output_dir=runs/epochs \\
    [--seeds=0,1] [--timeout=SECONDS] [--config.data.batch_size=64 ...]

Each run is a process of its own; the same command goes on where it stopped. Times that cannot be right (an epoch
more than twice off the median, more epochs in less time) are flagged. Writes results.json, results.md, results.png
and study.html. The last line of stdout is a JSON object. Exit codes: 0 at least one run finished, 1 none did,
2 bad flags, 130 Ctrl-C, 143 SIGTERM (what was measured is kept).
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
EPOCHS = flags.DEFINE_string("epochs", "5,10,15,25,40", "Numbers of epochs (optim.epochs), separated by commas.")
SEEDS = flags.DEFINE_string("seeds", "0", "Seeds (train.seed), separated by commas; several show the noise.")
OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Where runs and results go.", required=True)
TIMEOUT = flags.DEFINE_float("timeout", None, "Seconds after which a run is stopped; it becomes a row.", lower_bound=0)
RESUME = flags.DEFINE_bool("resume", True, "Go on in a directory with results; --noresume refuses one.")


def compare(argv: list[str], overrides: tuple[str, ...]) -> int:
    commands.refuse_arguments(argv)
    tradeoff_study = study.Study(
        kind="epoch_tradeoff",
        config=CONFIG.value,
        output_dir=pathlib.Path(OUTPUT_DIR.value),
        command=(sys.executable, str(pathlib.Path(__file__).with_name("train.py"))),
        overrides=overrides,
    )
    epochs = parse_numbers("epochs", EPOCHS.value, int, smallest=1)
    warmup = study.warmup_share(CONFIG.value, overrides)
    runs = study.plan_runs([None], epochs, parse_numbers("seeds", SEEDS.value, int), warmup)
    return commands.conduct_study(tradeoff_study, runs, timeout=TIMEOUT.value, resume=RESUME.value)


if __name__ == "__main__":
    commands.run_with_overrides(compare)
