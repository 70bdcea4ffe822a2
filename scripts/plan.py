"""Say before a run whether it fits a GPU, how large its batch may be and how fast it can be. No GPU is needed.

    python scripts/plan.py --config=configs/rapid.py --gpu=rtx4090
    python scripts/plan.py --config=configs/ijepa_in1k_vitb.py --gpu=a100-80,h100 --topology=1x1x8 [--fsdp]

It compiles the training step of the config for the named GPUs (pip install -e '.[plan]'). Plans are kept, so asking
again is free. Exit codes: 0 it fits every GPU asked for, 2 something to fix, 4 it does not fit; ways out are printed.
"""

import json
import pathlib
import sys

from absl import flags
from ml_collections import config_flags

from jepa_jax.cli import commands
from jepa_jax.runtime import platforms

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file; --config.group.key=value overrides.")
_GPU = flags.DEFINE_multi_string("gpu", ["rtx4090"], "Names from the table, with commas or repeated.")
_TOPOLOGY = flags.DEFINE_string("topology", "1x1x1", "Slices x hosts x GPUs a host.")
_BATCH_SIZES = flags.DEFINE_list("batch_sizes", [], "Other batches to plan as well.")
_FSDP = flags.DEFINE_boolean("fsdp", False, "Also split parameters and optimizer over all devices.")
_VARIANTS = flags.DEFINE_boolean("variants", True, "Also with remat, accumulation and the other precision.")
_LOADER = flags.DEFINE_boolean("loader", True, "Measure this machine's loader for a second.")
_PRICE = flags.DEFINE_float("price_per_hour", 0.0, "Of one GPU, in any currency.", lower_bound=0.0)
_TABLE = flags.DEFINE_string("gpu_table", "", "A TOML file with GPUs of yours; see jepa_jax/runtime/hardware.toml.")
_CHECK = flags.DEFINE_boolean("check", False, "Compare with what can be measured here: operations; on a GPU the peak.")
_JSON = flags.DEFINE_string("json", "", "Also write the plans to this file.")
_HTML = flags.DEFINE_string("html", "", "Also write a page.")
flags.mark_flags_as_required(["config"])


def main(argv: list[str]) -> int:
    commands.refuse_arguments(argv)
    result_code = 0

    def command(console):
        nonlocal result_code
        with platforms.without_driver_remarks():
            import jax

        from jepa_jax.base.errors import EXIT_DOES_NOT_FIT, UserError
        from jepa_jax.base.files import write_atomically, write_json
        from jepa_jax.planning.plan_command import PlanOptions, make_plans, show_plans
        from jepa_jax.reports.plan_report import plans_page

        if not all(size.strip().isdigit() for size in _BATCH_SIZES.value):
            raise UserError(f"--batch_sizes={','.join(_BATCH_SIZES.value)}: write whole numbers, e.g. 512,1024")
        options = PlanOptions(
            gpus=tuple(_GPU.value),
            topology=_TOPOLOGY.value,
            batch_sizes=tuple(int(size) for size in _BATCH_SIZES.value),
            fsdp=_FSDP.value,
            variants=_VARIANTS.value,
            loader=_LOADER.value,
            gpu_table=_TABLE.value,
            price_per_hour=_PRICE.value,
        )
        name = pathlib.Path(flags.FLAGS["config"].config_filename or "config").stem
        plans, about = make_plans(_CONFIG.value, options, console)
        results = show_plans(plans, about, name, console)
        if _HTML.value:
            write_atomically(_HTML.value, plans_page(plans, about, name))
        if _JSON.value:
            write_json(_JSON.value, results)  # before a check, which may run out of memory
        if _CHECK.value:
            from jepa_jax.planning.plan_check import check_flops, check_peak

            on_gpu = jax.local_devices()[0].platform == "gpu"
            check = check_peak(plans[0], about.data) if on_gpu else check_flops(_CONFIG.value, about.data)
            console.line(check.line())
            results[0]["check_error_percent"] = check.error_percent
            if _JSON.value:
                write_json(_JSON.value, results)
        console.line("")
        for result in results[:-1]:  # one object a GPU, a line each
            print(json.dumps(result))
        result_code = 0 if all(plan.estimate.fits for plan in plans) else EXIT_DOES_NOT_FIT
        return results[-1]

    return commands.run(command) or result_code


if __name__ == "__main__":
    if not (any(argument.startswith("--check") for argument in sys.argv) and platforms.has_nvidia_driver()):
        platforms.prepare_to_plan()
    commands.main(main)
