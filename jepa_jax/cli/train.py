"""Trains as a config says, from the newest checkpoint of the workdir if there is one.

  jepa-jax train --config=quickstart --workdir=runs/quickstart [--config.optim.lr=0.1 ...] [--gpu=0]

Several processes compute one run under SLURM, with --coordinator, --num_processes and --process_id, or started by
`jepa-jax launch`.

Exit codes: 0 finished, 2 something to fix (the message says what), 3 the loss diverged or the features collapsed,
5 another process is gone, 130 Ctrl-C, 143 SIGTERM; after 5, 130 and 143 the same command continues from the newest
checkpoint.
"""

import os

import jepa_jax
from jepa_jax.base.companions import PLACE_VARIABLES
from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.base.machine import has_nvidia_driver
from jepa_jax.base.signals import signals_exit
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser, config_from, given_keys
from jepa_jax.cli.runs import next_commands, summary_text


def add_flags(parser: Parser) -> None:
    parser.add_config()
    parser.add_flag("workdir", "DIR", "folder of the run: config, metrics, checkpoints, report", required=True)
    parser.add_choice(
        "resume",
        ("auto", "never", "must"),
        "auto: continue from the newest checkpoint if there is one; never: refuse a folder that holds a run; must: "
        "refuse a folder without one",
        default="auto",
    )
    parser.add_flag(
        "allow_changed",
        "LIST",
        "parts in which a continued run may differ from the one that made its checkpoints: config,data,code",
        "",
    )
    parser.add_flag(
        "tuned", "FILE", "tuned.json of jepa-jax tune: settings for this machine; --config.key=VALUE beside it wins"
    )
    add_gpu_flag(parser)
    parser.add_flag("coordinator", "HOST:PORT", "address of process 0, where several processes compute one run")
    parser.add_flag("num_processes", "N", "how many they are", kind=int, least=1)
    parser.add_flag("process_id", "I", "number of this one, from 0", kind=int, least=0)


def add_gpu_flag(parser: Parser) -> None:
    parser.add_flag("gpu", "N", "the only GPU to use, as nvidia-smi numbers them", kind=int, least=0)


def use_gpu(index: int | None) -> None:
    """Hides all GPUs but one from JAX, which must not have started, and from the processes that this one starts."""
    if index is None:
        return
    if not has_nvidia_driver():
        raise UserError(f"--gpu={index}: this machine has no NVIDIA driver; leave it out to train on the CPU")
    if PLACE_VARIABLES[0] in os.environ:
        raise UserError(f"--gpu={index}: each process of a run of several has its own GPUs; leave it out")
    from jepa_jax.runtime.gpus import only_gpu

    os.environ.update(only_gpu(index, flag="--gpu"))


def set_place(arguments: Arguments) -> None:
    """Copies --coordinator, --num_processes and --process_id into the environment."""
    flags = ("coordinator", "num_processes", "process_id")
    given = {flag: getattr(arguments, flag) for flag in flags if getattr(arguments, flag) is not None}
    if given and len(given) < len(flags):
        missing = " and ".join(f"--{flag}" for flag in flags if flag not in given)
        raise UserError(f"--{next(iter(given))} is given without {missing}; give all three")
    if given:
        os.environ.update({name: str(value) for name, value in zip(PLACE_VARIABLES, given.values(), strict=True)})


def run_train(arguments: Arguments, console: Console) -> Result:
    set_place(arguments)
    use_gpu(arguments.gpu)
    with signals_exit():
        config = config_from(arguments, needs_data=True)
    if arguments.tuned:
        from jepa_jax.experiments.tuned_file import use_tuned

        config = use_tuned(config, arguments.tuned, given_keys(arguments), console)
    allowed = tuple(filter(None, arguments.allow_changed.split(",")))
    summary = jepa_jax.train(config, arguments.workdir, resume=arguments.resume, allow_changed=allowed, console=console)
    from jepa_jax.runtime.peers import is_first

    if not is_first():
        return Result([], "")
    text = summary_text(summary, arguments.workdir)
    return Result([summary], text, next=next_commands(summary, arguments.workdir))


TRAIN = Command("train", __doc__, add_flags, run_train, shows_start=True)
