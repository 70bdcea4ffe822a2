"""One of several processes that compute runs together: run_processes.py FOLDER NAME... [--kill=PROCESS]

Trains each of the configs below in FOLDER/NAME, to the end. The second process is told to stop on the way, and the run
goes on after that; with `--kill` the process of that number is killed instead.
"""

import argparse
import contextlib
import os
import pathlib
import shutil
import signal
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import jepa_jax
from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.base.signals import Interrupted
from jepa_jax.config.groups import Config
from tests.projects.wildfire.tiny import tiny_fire_config
from tests.tiny import tiny_config, tiny_masked_config

# SGD: rules that divide by the size of gradients would make large steps of rounding errors where gradients are zero.
SHORT = dict(
    train__max_steps=20, train__checkpoint_every_steps=8, eval__every_epochs=2, eval__knn_every_epochs=0,
    optim__name="sgd", optim__lr=0.05, optim__warmup_lr=0.05,
)  # fmt: skip
LINE = dict(method__name="tests.sequence_methods:LineMethod", data__source="tests.sequences:SequenceSource")
SLOWER = dict(data__validation=0.25, optim__lr=1e-3, optim__warmup_lr=1e-3, method__lr_temporal=1e-3)
SLOWER |= dict(method__lr_spatial=1e-3)
STOP_AT = 11  # the step near which the second process is told to stop


def configs() -> dict[str, Config]:
    return {
        "batch_norm": tiny_config(**SHORT),
        "vit_ema": tiny_masked_config("ijepa", **SHORT),
        "emberformer": tiny_fire_config(**SHORT | SLOWER),
        "line": tiny_config(**LINE | SHORT),
    }


class Stopping(Console):
    """Sends a signal to the process whose number a file holds, when the bar of training has advanced to STOP_AT."""

    def __init__(self, victim: pathlib.Path, signum: signal.Signals):
        super().__init__()
        self._victim, self._signum, self._steps = victim, signum, 0

    def advance(self, amount: int = 1, note: object = None) -> None:
        self._steps += note is not None
        if self._steps == STOP_AT:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(self._victim.read_text()), self._signum)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--kill", type=int)
    given = parser.parse_args()
    folder, index = given.folder, os.environ["JAX_PROCESS_ID"]
    victim, signum = (1, signal.SIGTERM) if given.kill is None else (given.kill, signal.SIGKILL)
    (folder / f"pid_{index}").write_text(str(os.getpid()))
    for name in given.names:
        try:
            console = Stopping(folder / f"pid_{victim}", signum)
            jepa_jax.train(configs()[name], folder / name, resume="auto", console=console)
        except Interrupted as stop:
            (folder / f"{name}_stopped_{index}").write_text(str(stop.exit_code))
            if index == "0":
                shutil.copytree(folder / name, folder / f"{name}_stopped")
            jepa_jax.train(configs()[name], folder / name, resume="must", console=Console())


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
