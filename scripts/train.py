"""Train as a config says.

    python scripts/train.py --config=configs/quickstart.py --workdir=runs/quickstart [--config.optim.lr=0.1 ...]

--tuned=FILE takes the settings that scripts/tune.py found for this machine; --config.key=value beside it wins.
Exit codes: 0 finished, 2 something to fix (the message says what), 3 the loss diverged, 130 Ctrl-C, 143 SIGTERM; after
130 and 143 the same command goes on from the checkpoint that was written.
"""

from absl import flags
from ml_collections import config_flags

from jepa_jax.cli import commands

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file; --config.group.key=value overrides.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run: config, metrics, checkpoints, report.")
_RESUME = flags.DEFINE_enum(
    "resume", "auto", ["auto", "never", "must"],
    "auto: from the newest checkpoint if there is one; never: refuse a folder with a run; must: refuse one without.",
)  # fmt: skip
_TUNED = flags.DEFINE_string("tuned", "", "tuned.json of scripts/tune.py: settings for this machine.")
flags.mark_flags_as_required(["config", "workdir"])


def main(argv: list[str]) -> int:
    commands.refuse_arguments(argv)

    def command(console):
        from jepa_jax.train.loop import train

        config = _CONFIG.value
        if _TUNED.value:
            from jepa_jax.tuning.tuned_file import use_tuned

            explicit = config_flags.get_override_values(flags.FLAGS["config"])
            config = use_tuned(config, _TUNED.value, explicit, console)
        return train(config, _WORKDIR.value, resume=_RESUME.value, console=console)

    return commands.run(command)


if __name__ == "__main__":
    commands.main(main)
