import pathlib
from typing import Any

import pytest

from jepa_jax.training.run import train
from tests.projects.world_models.rooms import rooms_config
from tests.runs import Silent


@pytest.fixture(scope="session")
def rooms_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, dict[str, Any]]:
    """Returns the folder and the summary of a run of three steps in two rooms."""
    workdir = tmp_path_factory.mktemp("rooms") / "run"
    return workdir, train(rooms_config(), workdir, console=Silent())
