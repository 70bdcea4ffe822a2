"""Update rules and schedules outside the package: trained, killed and resumed, planned, continued, refused."""

import pathlib
import shutil

import jax
import numpy as np
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.planning.estimate import FITS
from jepa_jax.program.restore import restore_state
from jepa_jax.runtime.mesh import make_mesh
from jepa_jax.training.run import train
from tests.planning.line_compiler import planned
from tests.runs import Silent, rows
from tests.tiny import rival_config, tiny_config

EXAMPLES = pathlib.Path(__file__).parents[2] / "docs" / "examples"
QUICK = dict(
    mesh__data=1,
    train__checkpoint_every_steps=3,
    train__checkpoint_keep=9,
)


@pytest.fixture(scope="module", autouse=True)
def _on_the_path():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield


def lion_config(**overrides):
    """BYOL has a slow copy, and a group of parameters with a rate of its own."""
    own = dict(optim__name="lion:make", optim__schedule="wsd_sqrt:make", optim__beta2=0.98, optim__clip_norm=1.0)
    return rival_config("byol", **QUICK | own | overrides)


def killed_at(step: int, whole: pathlib.Path, folder: pathlib.Path) -> None:
    """Makes a folder as a process leaves it that is killed after the checkpoint of a step."""
    shutil.copytree(whole, folder)
    (folder / "summary.json").unlink()
    for checkpoint in (folder / "checkpoints").glob("step_*"):
        if int(checkpoint.name.removeprefix("step_")) > step:
            shutil.rmtree(checkpoint)


@pytest.mark.slow
def test_lion_and_wsd_of_an_outside_file_resume_bit_for_bit(tmp_path):
    config = lion_config()
    whole = train(config, tmp_path / "whole", console=Silent())
    killed_at(6, tmp_path / "whole", tmp_path / "killed")
    resumed = train(config, tmp_path / "killed", resume="must", console=Silent())
    assert whole["status"] == resumed["status"] == "finished" and whole["steps"] == 12
    assert resumed["params_sha256"] == whole["params_sha256"]
    states = [restore_state(config, tmp_path / name, make_mesh(1, 1))[1] for name in ("whole", "killed")]
    jax.tree.map(np.testing.assert_array_equal, *states)
    rates = [row["train/lr"] for row in rows(tmp_path / "whole") if "train/lr" in row]
    peak = config.optim.lr
    assert rates[3:10] == pytest.approx([peak] * 7) and rates[11] == pytest.approx(peak * (1 - 0.5**0.5), rel=1e-5)


def test_lion_is_planned():
    assert planned(lion_config(mesh__data=-1)).estimate.verdict == FITS


@pytest.mark.slow
def test_a_finished_run_continues_to_more_epochs_if_its_schedule_allows_it(tmp_path):
    def config(epochs, schedule="constant"):
        return tiny_config(**QUICK, optim__schedule=schedule, optim__epochs=epochs)

    assert train(config(1.0), tmp_path / "run", console=Silent())["steps"] == 6
    console = Silent()
    longer = train(config(2.0), tmp_path / "run", console=console)
    assert longer["steps"] == 12 and "resumed at step 6 of 12" in "\n".join(console.lines)
    assert longer["params_sha256"] == train(config(2.0), tmp_path / "direct", console=Silent())["params_sha256"]
    with pytest.raises(UserError, match="another config"):
        train(config(1.0), tmp_path / "run")  # shorter
    with pytest.raises(UserError, match="optim.schedule"):
        train(config(3.0, "cosine"), tmp_path / "run")


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("optim__name", "nonsense:X", "no module nonsense.*or choose from larc, adamw, sgd, muon"),
        ("optim__name", "lion:missing", "lion has no class missing.*or choose from larc"),
        ("optim__schedule", "nonsense:X", "no module nonsense.*or choose from cosine, linear, constant, wsd"),
        ("optim__schedule", "step", "not one of cosine, linear, constant, wsd, nor package.module:function"),
    ],
)
def test_what_is_no_rule_is_refused_with_the_choices(key, value, message):
    with pytest.raises(UserError, match=message):
        tiny_config(**{key: value})


def test_the_keys_of_a_rule_are_checked():
    with pytest.raises(UserError, match="config.optim.beta2 = 2: must be at least 0 and at most 1"):
        lion_config(optim__beta2=2)
    with pytest.raises(UserError, match="config.optim.weight_decay_end"):
        lion_config(optim__weight_decay_end=0.1)
    assert lion_config().to_dict()["optim"]["cooldown"] == 0.2
