"""The commands about speed: `sweep` measures every combination of settings, `tune` searches for the fastest."""

import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.base.files import read_toml, user_path
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser, config_from, config_name, fields_from
from jepa_jax.experiments.settings import KNOBS

if TYPE_CHECKING:
    from jepa_jax.experiments.sweep import Sweep

ABOUT_SWEEP = """Measures the training speed of every combination of settings on this machine.

  jepa-jax sweep --config=quickstart --batch_sizes=64,128,256 --num_workers=0,1 --output_json=runs/sweep.json
  jepa-jax sweep --config=rapid --batch-sizes 768 896 --amp-options on off --num-workers 4 6 8 --grad-accum 1 2 3 \\
    --output-json runs/sweep.json
  jepa-jax sweep --study=profiling/sweeps/a6000.toml --gpu_index=0 --output_json=runs/a6000.json
  jepa-jax sweep --study=profiling/sweeps/a6000.toml --gpus=all --output_json=runs/a6000.json
  jepa-jax sweep --study=profiling/sweeps/a6000.toml --slurm_array --output_json=runs/a6000.json

Each repeat is a process of its own: one that runs out of memory, crashes or hangs is listed with its reason. Results
are on disk after each repeat; after Ctrl-C or kill -9 the same command with --resume continues. A page (.html) and a
table (.md) are written beside the JSON file. --gpus runs one trial on each GPU of this host at a time; --slurm_array
submits them to SLURM instead, and the same command with --collect reads what its tasks have measured.

Exit codes: 0 at least one combination was measured, 1 none was, 2 something to fix, 130 Ctrl-C, 143 SIGTERM (what was
measured is kept).
"""
ABOUT_TUNE = """Finds the fastest settings for this machine within a budget of time, and writes them for training.

  jepa-jax tune --config=quickstart --budget=10m [--output_dir=runs/tune] [--config.key=value ...]
  jepa-jax train --config=quickstart --workdir=runs/a --tuned=runs/tune/tuned.json

Each trial is a process: one that runs out of memory, crashes or hangs is listed with its reason. Writes tuned.json,
tune.json and tune.html. Exit codes: 0 found, 1 nothing could be measured, 2 something to fix, 130 Ctrl-C, 143 SIGTERM
(what was measured is kept, --resume continues).
"""
LISTS = {knob.flag: knob.help for knob in KNOBS.values()} | {"amp_options": "--precisions as on, off or both"}
PRECISIONS = {"on": "bfloat16", "off": "float32"}  # of --amp_options


def add_sweep_flags(parser: Parser) -> None:
    parser.add_config()
    parser.add_flag("output_json", "FILE", "file of the results", required=True)
    parser.add_flag("study", "FILE", "TOML file with values of these flags; the command line wins")
    add_lists(parser, default="the config's own")
    parser.add_flag(
        "fixed_effective_batch", "N", "choose among combinations of this batch size only", kind=int, least=2
    )
    parser.add_flag("max_batches", "N", "measured batches of each repeat", 32, least=2)
    parser.add_flag("warmup_batches", "N", "batches before them, after those that the loader had ready", 4, least=1)
    parser.add_flag("repeats", "N", "times that each combination is measured", 3, least=1)
    parser.add_flag("time_limit", "SECONDS", "kill a trial after this time", 600.0, least=1)
    parser.add_flag("gpu_index", "N", "the only GPU to use", kind=int, least=0)
    parser.add_flag(
        "memory_fraction", "SHARE", "share of a GPU's memory that JAX takes, as in the training to come; by default "
        "that of XLA_CLIENT_MEM_FRACTION, or 0.9", kind=float, least=0.05, most=1,
    )  # fmt: skip
    parser.add_flag("gpus", "LIST", "GPUs of this host to run trials on at once, e.g. 0,1,3; all for all of them")
    parser.add_switch("slurm_array", "submit a SLURM task per repeat, and measure nothing here")
    parser.add_flag(
        "slurm_options", "FLAGS", "flags of sbatch, separated by spaces, which win over --gres=gpu:1 and --time", "",
    )  # fmt: skip
    parser.add_switch("collect", "read what the tasks of --slurm_array have measured, and conclude")
    parser.add_switch("use_dummy_data", "use random images instead of the config's data")
    parser.add_switch("resume", "continue with the results in --output_json")
    parser.add_switch("retry_failed", "as --resume, and measure again what failed or was skipped")


def add_lists(parser: Parser, default: str) -> None:
    """Adds a flag with a list of values for each setting that is measured."""
    for name, help in LISTS.items():
        parser.add_flag(name, "LIST", f"{help}, separated by commas or spaces; by default {default}")


def join_lists(argv: Sequence[str]) -> list[str]:
    """Returns `--batch-sizes 768 896` as `--batch_sizes=768,896`, and so for all LISTS."""
    joined: list[str] = []
    for argument in argv:
        last = joined[-1] if joined else ""
        is_list = last.partition("=")[0].removeprefix("--").replace("-", "_") in LISTS
        if is_list and not argument.startswith("-"):
            joined[-1] += f"{',' if '=' in last else '='}{argument}"
        else:
            joined.append(argument)
    return joined


def expand_study(parser: Parser, argv: Sequence[str]) -> list[str]:
    """Replaces --study=FILE by the flags of that file, in front, so that those on the command line win."""
    studies = [argument for argument in argv if argument.startswith("--study=")]
    rest = [argument for argument in argv if argument not in studies]
    return [flag for study in studies for flag in study_flags(parser, study.partition("=")[2])] + rest


def study_flags(parser: Parser, path: str) -> list[str]:
    """Returns the entries of a study file as flags."""
    entries = read_toml(pathlib.Path(path), f"--study={path}", "see profiling/sweeps/")
    for key in entries:
        if not (parser.has_flag(key) or key.startswith("config.")):
            raise UserError(f"--study={path}: {key} is neither a flag of {parser.program} nor config.group.key")
    return [f"--{key}={','.join(map(str, value)) if isinstance(value, list) else value}"
            for key, value in entries.items()]  # fmt: skip


def lists_from(arguments: Arguments) -> dict[str, str | None]:
    """Returns the text of each list; --amp_options as --precisions."""
    texts = {name: getattr(arguments, name) for name in LISTS}
    amp = texts.pop("amp_options")
    if amp is None:
        return texts
    if texts["precisions"] is not None:
        raise UserError("--precisions and --amp_options say the same in two ways; give one of them")
    options = [part.strip() for part in amp.split(",")]
    if wrong := [option for option in options if option not in PRECISIONS]:
        raise UserError(f"--amp_options={amp}: {wrong[0]!r} is not one of on, off")
    return texts | {"precisions": ",".join(PRECISIONS[option] for option in options)}


def sweep_from(arguments: Arguments) -> "Sweep":
    from jepa_jax.experiments.settings import grid_values
    from jepa_jax.experiments.sweep import Sweep
    from jepa_jax.experiments.trial import device_options
    from jepa_jax.runtime.provenance import describe_hardware

    config, gpus = config_from(arguments), gpus_from(arguments)
    options = device_options(describe_hardware(gpus[0] if gpus else arguments.gpu_index), arguments.memory_fraction)
    if arguments.slurm_array or arguments.collect:  # the tasks run on other machines, whose GPUs are not known here
        options["compile_anew"] = True
    others = {
        "config": config,
        "config_name": config_name(arguments),
        "values": grid_values(config, lists_from(arguments)),
        "output": pathlib.Path(arguments.output_json),
        "gpus": gpus,
    }
    return Sweep(**fields_from(arguments, Sweep) | others | options)


def gpus_from(arguments: Arguments) -> tuple[int, ...] | None:
    """Returns the GPUs that --gpus names; rejects flags that contradict each other."""
    from jepa_jax.base.text import parse_numbers
    from jepa_jax.runtime.gpus import list_gpus

    places = [f"--{name}" for name in ("gpu_index", "gpus", "slurm_array", "collect")
              if getattr(arguments, name) not in (None, False)]  # fmt: skip
    if len(places) > 1:
        raise UserError(f"{' and '.join(places)} contradict each other; give one of them")
    if arguments.gpus is None:
        return None
    found = len(list_gpus())
    if arguments.gpus == "all" and not found:
        raise UserError("--gpus=all: NVML finds no GPU here; nvidia-smi has to list them, or give their numbers")
    gpus = range(found) if arguments.gpus == "all" else parse_numbers("gpus", arguments.gpus, int, 0)
    if found and max(gpus) >= found:
        raise UserError(f"--gpus={arguments.gpus}: there are {found} GPUs here, numbered from 0; use some of them")
    return tuple(gpus)


def measure_grid(arguments: Arguments, console: Console) -> Result:
    from jepa_jax.experiments.sweep import collect, run_sweep, submit_array, summarise
    from jepa_jax.reports.experiment_page import write_sweep

    sweep, again = sweep_from(arguments), arguments.resume or arguments.retry_failed
    limit, batch, missing = arguments.time_limit, arguments.fixed_effective_batch, 0
    if arguments.slurm_array:
        submitted = submit_array(sweep, time_limit=limit, resume=again, slurm_options=arguments.slurm_options)
        text = (
            f"{submitted['tasks']} tasks were submitted as job {submitted['job']}.\n"
            "When they have ended, or while they run: the same command with --collect instead of --slurm_array."
        )
        return Result([submitted], text)
    if arguments.collect:
        code, document, missing = collect(sweep, fixed_batch=batch)
    else:
        code, document = run_sweep(
            sweep,
            time_limit=limit,
            resume=arguments.resume,
            retry_failed=arguments.retry_failed,
            fixed_batch=batch,
        )
    table = write_sweep(document, sweep.output)
    still = [f"{missing} repeats have not been measured yet."] if missing else []
    text = "\n".join([table, *document["conclusion"]["text"], *still])
    return Result([summarise(sweep, document, code) | ({"missing": missing} if arguments.collect else {})], text, code)


def add_tune_flags(parser: Parser) -> None:
    parser.add_config()
    parser.add_flag("budget", "TIME", "time for the whole search: 90s, 10m, 1.5h", "10m")
    parser.add_flag("output_dir", "DIR", "folder of the results", "runs/tune")
    parser.add_flag(
        "fixed_effective_batch", "N", "keep this number of images per update; config: the config's own", default=""
    )
    parser.add_flag("margin", "SHARE", "share of the memory that stays free", 0.08, least=0, most=0.9)
    parser.add_flag(
        "memory_limit_gb", "GIB", "memory of a run; by default the GPU's pool, or 80 % of the free memory",
        kind=float, least=0,
    )  # fmt: skip
    parser.add_flag(
        "memory_fraction", "SHARE", "share of a GPU's memory that JAX takes in trials and, by tuned.json, in training; "
        "by default that of XLA_CLIENT_MEM_FRACTION, or 0.9", kind=float, least=0.05, most=1,
    )  # fmt: skip
    parser.add_flag("gpu_index", "N", "the only GPU to use", kind=int, least=0)
    add_lists(parser, default="what is worth a try on this machine")
    parser.add_switch("use_dummy_data", "use random images instead of the config's data")
    parser.add_switch("resume", "continue a search that was interrupted")


def run_tune(arguments: Arguments, console: Console) -> Result:
    from jepa_jax.experiments.tune import TuneOptions, tune
    from jepa_jax.reports.experiment_page import sweep_page
    from jepa_jax.reports.page import write_page

    others = {
        "output_dir": user_path(arguments.output_dir, "--output_dir"),
        "values": lists_from(arguments),
        "config_name": config_name(arguments),
    }
    options = TuneOptions(**fields_from(arguments, TuneOptions) | others)
    code, result, document = tune(config_from(arguments), options, console)
    write_page(result["html"], sweep_page(document))
    lines = list(document["conclusion"]["text"])
    if result["tuned"]:
        same = " ".join([f"--config={arguments.config}", *arguments.override_flags])
        lines.append(f"Train with: jepa-jax train {same} --workdir=DIR --tuned={result['tuned']}")
    return Result([result], "\n".join(lines), code)


SWEEP = Command(
    "sweep", ABOUT_SWEEP, add_sweep_flags, measure_grid, lambda parser, argv: join_lists(expand_study(parser, argv))
)
TUNE = Command("tune", ABOUT_TUNE, add_tune_flags, run_tune, lambda parser, argv: join_lists(argv))
