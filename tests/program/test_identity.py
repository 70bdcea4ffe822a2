"""What a checkpoint was made with: a run with another config, other data or other code does not continue it."""

import json

import numpy as np
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.data.in_memory import InMemorySource
from jepa_jax.evals.features import fingerprint
from jepa_jax.program.checksums import METADATA
from jepa_jax.program.identity import check_identities, check_parts
from jepa_jax.runtime.provenance import code_version
from tests.tiny import tiny_config

IDENTITY = {
    "config": tiny_config().to_dict(),
    "data": {"train": {"images": 96, "shapes": {"image": ["uint8", 16, 16, 3]}, "sha256": "ab"}},
    "code": {"jepa_jax": "12", "jax": "0.10.2"},
}


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "step_3"
    folder.mkdir()
    (folder / METADATA).write_text(json.dumps({"custom_metadata": IDENTITY | {"step": 3}}))
    return folder


def with_data(**changes):
    return IDENTITY | {"data": {"train": IDENTITY["data"]["train"] | changes}}


CHANGES = {
    "seed": (IDENTITY | {"config": tiny_config(train__seed=5).to_dict()}, "config", r"config.train.seed: 0 -> 5"),
    "images": (with_data(sha256="cd"), "data", "data.train.sha256: ab -> cd"),
    "number of images": (with_data(images=90), "data", "data.train.images: 96 -> 90"),
    "source code": (IDENTITY | {"code": {"jepa_jax": "34", "jax": "0.10.2"}}, "code", "code.jepa_jax: 12 -> 34"),
    "own class": (IDENTITY | {"code": IDENTITY["code"] | {"mine": "1"}}, "code", r"code.mine: \(absent\) -> 1"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_checkpoint_made_with_something_else_is_refused_unless_allowed(checkpoint, what):
    identity, part, line = CHANGES[what]
    with pytest.raises(UserError, match=rf"step_3: was made with other {part}; .*--allow_changed={part}:\n  {line}"):
        check_identities([checkpoint], identity, [name for name in ("config", "data", "code") if name != part])
    [note] = check_identities([checkpoint], identity, [part])
    assert "as allowed" in note


@pytest.mark.parametrize(
    "config",
    [
        tiny_config(),
        tiny_config(data__dir="elsewhere", log__every_steps=7, train__checkpoint_keep=2),
    ],
    ids=["same", "keys that no result depends on"],
)
def test_a_checkpoint_of_the_same_run_is_accepted_in_silence(checkpoint, config):
    assert not check_identities([checkpoint], IDENTITY | {"config": config.to_dict()})


def test_data_that_differ_at_each_reading_are_not_compared(checkpoint):
    assert not check_identities([checkpoint], with_data(sha256=""))


def test_a_checkpoint_of_an_earlier_version_is_accepted_with_one_line(checkpoint):
    (checkpoint / METADATA).write_text(json.dumps({"custom_metadata": {"checksums": "checksums.json"}}))
    [note] = check_identities([checkpoint], IDENTITY)
    assert "does not say what it was made with (of an earlier version)" in note


def test_an_unknown_part_is_refused():
    with pytest.raises(UserError, match="--allow_changed=code,date: 'date' is not one of config, data, code"):
        check_parts(["code", "date"])


def test_the_fingerprint_of_data_tells_other_images_and_another_number_of_them():
    images = np.random.default_rng(0).integers(0, 256, (96, 4, 4, 3), np.uint8)
    changed = images.copy()
    changed[-1] += 1

    def of(images):
        return fingerprint(InMemorySource(lambda: {"image": images}))

    assert of(images) == of(images.copy()) != of(changed)
    assert of(images)["images"] == 96 != of(images[:90])["images"]


def test_the_code_of_a_users_own_class_is_part_of_the_version_of_the_code(tmp_path, monkeypatch):
    (tmp_path / "own_rate.py").write_text("def schedule(*arguments): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = tiny_config(optim__schedule="own_rate:schedule")
    before = code_version(config)
    (tmp_path / "own_rate.py").write_text("def schedule(*arguments): pass\n")
    after = code_version(config)
    assert before.keys() == after.keys() and before["jepa_jax"] == after["jepa_jax"]
    assert [name for name in before if before[name] != after[name]] == ["own_rate"]
