"""The files of docs/examples, used as an outside package: what the page "Extend" promises of each."""

import math
import pathlib

import numpy as np
import pytest

from jepa_jax.program.config import load_config
from jepa_jax.training.run import train
from tests.runs import Silent, rows, run

EXAMPLES = pathlib.Path(__file__).parents[1] / "docs" / "examples"
SHORT = dict(train__max_steps=3, optim__warmup_epochs=0.0, train__keep_best="")
# By file: the overrides of a tiny run that uses it.
RUNS = {
    "spectral": dict(method__name="spectral:Spectral", method__projector=(16, 8), method__radius=0.5),
    "grain_dataset": dict(data__source="grain_dataset:dataset", data__transforms=("grain_dataset:darker",)),
    "grain_stream": dict(data__source="grain_dataset:stream"),
    "stored_maps": dict(data__source="stored_maps:StoredMaps", data__num_workers=1),
    "convnext": dict(model__name="convnext:ConvNeXt", model__width=8, model__depth=1, train__remat="full"),
}


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_examples_are_short_and_linked():
    pages = "".join(page.read_text() for page in (EXAMPLES.parent / "guides").glob("*.md"))
    for file in EXAMPLES.glob("*.py"):
        assert len(file.read_text().splitlines()) <= 60, f"{file.name}: more than 60 lines"
        assert f"examples/{file.name}" in pages, f"{file.name}: not in docs/guides"


FAST = ("spectral", "grain_dataset")


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
)
def test_an_example_trains(name, tmp_path):
    console, keys = Silent(), SHORT | RUNS[name]
    if name == "stored_maps":
        for split, count in (("train", 96), ("test", 32)):
            images = np.random.default_rng(0).integers(0, 256, (count, 16, 16, 3), np.uint8)
            np.save(tmp_path / f"{split}.npy", images)
        keys |= {"data__dir": str(tmp_path)}
    summary = run(tmp_path / "run", console, **keys)
    assert (summary["status"], summary["steps"]) == ("finished", 3)
    losses = [row["train/loss"] for row in rows(tmp_path / "run") if "train/loss" in row]
    assert len(losses) == 3 and all(map(math.isfinite, losses))
    assert not [line for line in console.lines if "remat" in line or "will not be trained" in line]
    if name == "spectral":
        assert -2 * 0.5**2 <= losses[0] <= 2 * 0.5**2 + 0.5**4


@pytest.mark.usefixtures("quick_workers")
def test_a_plain_program_loads_the_same_batches_with_any_workers():
    import load_own_data

    assert load_own_data.main(workers=0) == load_own_data.main(workers=1)


@pytest.mark.slow
def test_an_environment_of_ones_own_is_planned_in(tmp_path):
    import own_environment

    tiny = {
        "data.num_train": 64, "data.num_test": 32, "data.batch_size": 16, "data.validation": 0.25, "train.max_steps": 3,
        "optim.warmup_epochs": 0.0, "method.latent_width": 8, "method.control.episodes": 4, "method.control.horizon": 3,
        "method.control.samples": 8, "method.control.iterations": 2, "mesh.data": 1, "profile.enabled": False,
    }  # fmt: skip
    summary = train(load_config(own_environment.get_config(), tiny), tmp_path / "run", console=Silent())
    assert summary["failed_evaluators"] == {} and summary["episodes"] == 4
    assert "straight_success_rate" not in summary  # it has no positions
