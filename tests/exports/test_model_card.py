"""What a model card says of a run: nothing that only its machine knows."""

import json
import types

import pytest

from jepa_jax.exports.model_card import model_card
from tests.tiny import tiny_config

EXPORTED = types.SimpleNamespace(
    format="safetensors", feature_dim=16, image_size=16, channels=3, sha256={"model.safetensors": "ab"}
)


def card(folder, command, **changes):
    (folder / "environment.json").write_text(json.dumps({"command": command}))
    config = tiny_config(model__name="resnet", **changes)
    return model_card(folder, config, EXPORTED)


@pytest.mark.parametrize(
    ("recorded", "shown"),
    [
        ("python3 /home/ann/bin/jepa-jax train --config=tiny", "jepa-jax train --config=tiny"),
        ("python /opt/jepa_jax/__main__.py train --workdir=r", "jepa-jax train --workdir=r"),
        ("python /home/ann/study.py --all", "python study.py --all"),
        ("", "(the command was not recorded)"),
    ],
)
def test_the_command_is_one_that_works_on_every_machine(recorded, shown, tmp_path):
    assert f"```\n{shown}\n```" in card(tmp_path, recorded)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("/home/ann/weights/resnet50", "resnet50"),
        ("~/resnet50", "resnet50"),
        ("weights/resnet50", "weights/resnet50"),
        ("hub:microsoft/resnet-50", "hub:microsoft/resnet-50"),
    ],
)
def test_the_first_weights_have_the_name_that_others_can_use(given, shown, tmp_path):
    assert f"Started from `{shown}`." in card(tmp_path, "", model__init_from=given)
