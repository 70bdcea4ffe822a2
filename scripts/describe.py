"""Print what a config describes: parameters, operations an image, steps. Nothing is trained.

python scripts/describe.py --config=configs/rapid.py
"""

from absl import flags
from ml_collections import config_flags

from jepa_jax.cli import commands

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file; --config.group.key=value overrides.")
flags.mark_flags_as_required(["config"])


def main(argv: list[str]) -> int:
    commands.refuse_arguments(argv)

    def command(console):
        from jepa_jax.program.describe import describe

        result = describe(_CONFIG.value)
        assumed = "" if result["data_found"] else " (assumed: the data is not there)"
        for name, size in result["params_by_module"].items():
            console.line(f"{name:<32} {size:>12,}")
        console.line(f"{'total':<32} {result['params_total']:>12,}   trainable {result['params_trainable']:,}")
        console.line(
            f"\nfeatures: {result['feature_dim']} numbers\n"
            f"training: {result['flops_per_image'] / 1e9:,.2f} GFLOP an image (forward and backward, all views)\n"
            f"length: {result['steps_total']:,} steps, {result['steps_per_epoch']:,} an epoch "
            f"of {result['images_per_epoch']:,} images{assumed}\n"
        )
        return result

    return commands.run(command)


if __name__ == "__main__":
    commands.main(main)
