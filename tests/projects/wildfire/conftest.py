"""A run on a few simulated fires that several tests read."""

import pytest

from jepa_jax.reports.run_report import write_report
from jepa_jax.training.run import train
from jepa_jax.training.setup import Hooks
from tests.projects.wildfire.tiny import tiny_fire_config
from tests.runs import Silent

TRAINED = tiny_fire_config(
    mesh__data=1, data__frame_buckets=(4,), data__validation=0.25, model__dropout=0.1, log__pictures_every_epochs=1
)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Returns the folder of a finished run with its report, its summary and what it said."""
    folder, console = tmp_path_factory.mktemp("wildfire") / "run", Silent()
    summary = train(TRAINED, folder, console=console, hooks=Hooks(write_report=write_report))
    return folder, summary, console
