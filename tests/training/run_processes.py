"""One of several processes that compute runs together: run_processes.py FOLDER NAME...

Trains each of the configs below in FOLDER/NAME, to the end; where it is killed or told to stop, so be it.
"""

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
SLOWER = dict(data__validation=0.25, optim__lr=1e-3, optim__warmup_lr=1e-3, method__lr_temporal=1e-3)
SLOWER |= dict(method__lr_spatial=1e-3)
STOP_AT = 11  # the step near which the second process is told to stop


def configs() -> dict[str, Config]:
    return {
        "batch_norm": tiny_config(**SHORT),
        "vit_ema": tiny_masked_config("ijepa", **SHORT),
        "emberformer": tiny_fire_config(**SHORT | SLOWER),
    }


class Stopping(Console):
    """Tells the second process to stop when the bar of training has advanced to STOP_AT."""

    def __init__(self, victim: pathlib.Path):
        super().__init__()
        self._victim, self._steps = victim, 0

    def advance(self, amount: int = 1, note: object = None) -> None:
        self._steps += note is not None
        if self._steps == STOP_AT:
            os.kill(int(self._victim.read_text()), signal.SIGTERM)


def main() -> None:
    folder, names = pathlib.Path(sys.argv[1]), sys.argv[2:]
    index = os.environ["JAX_PROCESS_ID"]
    (folder / f"pid_{index}").write_text(str(os.getpid()))
    for name in names:
        try:
            jepa_jax.train(configs()[name], folder / name, resume="auto", console=Stopping(folder / "pid_1"))
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
