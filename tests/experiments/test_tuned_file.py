"""tuned.json: what wins over what, what training says, and what is refused."""

import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.experiments import tuned_file
from jepa_jax.experiments.settings import Combination
from tests.tiny import tiny_config


def write(path, **facts):
    combination = Combination(256, 2, 1, "bfloat16", "none", "device")
    config = tiny_config().to_dict()
    facts = {"samples_per_sec": 1234.0, "hardware": {"cpu": "x", "cores": 2}, "config": config} | facts
    tuned_file.write_tuned(path, combination, **facts)
    return tuned_file.read_tuned(path)


def test_the_command_line_wins_over_the_file_and_the_file_over_the_config(tmp_path):
    given = tiny_config(data__num_workers=1)
    tuned = write(tmp_path / "tuned.json")
    config, lines = tuned_file.apply_tuned(given, tuned, explicit=("data.num_workers",))
    assert config.data.num_workers == 1 and given.data.batch_size == 16  # the given config stays as it is
    assert (config.data.batch_size, config.data.pipeline) == (256, "device")
    assert config.train.precision == "bfloat16"
    assert any("as on the command line" in line for line in lines)


@pytest.mark.parametrize(
    "scaling, words",
    [
        ("none", "none does not change the rate by itself"),
        ("linear", "0.004 by the linear rule (optim.lr=0.002)"),
        ("sqrt", "0.00283 by the square-root rule (optim.lr=0.002)"),
    ],
)
def test_says_what_another_batch_makes_of_the_rate(tmp_path, scaling, words):
    config = tiny_config(
        data__batch_size=128, optim__lr=0.002, optim__batch_scaling=scaling, optim__reference_batch=128
    )
    _, lines = tuned_file.apply_tuned(config, write(tmp_path / "tuned.json"))
    assert words in lines[-1] and "128 -> 256 images per step" in lines[-1]


def test_drawn_images_are_a_doubt_where_real_ones_are_loaded(tmp_path):
    found = write(tmp_path / "tuned.json", data_source="dummy")
    machine = {"cpu": "x", "cores": 2, "gpu_name": None}
    assert tuned_file.doubts(tiny_config(), found, machine) == []  # shapes are drawn too
    config = tiny_config(data__source="cifar10")
    (doubt,) = tuned_file.doubts(config, found | {"config": config.to_dict()}, machine)
    assert "--use_dummy_data" in doubt


def test_another_machine_and_another_model_are_doubts(tmp_path):
    found = write(tmp_path / "tuned.json", confirmed=True)
    same = {"cpu": "x", "cores": 2, "gpu_name": None}
    assert tuned_file.doubts(tiny_config(optim__lr=9.0, data__batch_size=64), found, same) == []
    (machine,) = tuned_file.doubts(tiny_config(), found, same | {"cores": 64})
    assert "cores 2 there, 64 here" in machine
    (model,) = tuned_file.doubts(tiny_config(method__views=3), found, same)
    assert "method.views" in model
    assert tuned_file.doubts(tiny_config(), found | {"confirmed": False}, same)


def test_training_takes_the_memory_fraction_of_the_trials_unless_the_environment_says_else(tmp_path):
    tuned = write(tmp_path / "tuned.json", memory_fraction=0.92)
    environment = {}
    assert "takes 0.92 of the GPU's memory" in tuned_file.use_memory_fraction(tuned["memory_fraction"], environment)
    assert environment == {"XLA_CLIENT_MEM_FRACTION": "0.92"}
    assert tuned_file.use_memory_fraction(0.92, environment) == ""  # as it is
    given = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}
    assert "0.5 of the GPU's memory as the environment says, not 0.92" in tuned_file.use_memory_fraction(0.92, given)
    assert given == {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}
    assert tuned_file.use_memory_fraction(None, {}) == ""  # a file of a CPU, or of an earlier version


@pytest.mark.parametrize(
    "content",
    [
        "not json", "[]", "{}", '{"kind": "jepa_jax.tuned", "version": 9, "overrides": {}}',
        '{"kind": "jepa_jax.tuned", "version": 1, "overrides": {"optim.lr": 1}}',
        '{"kind": "jepa_jax.tuned", "version": 1, "overrides": {"data.batch_size": "many"}}',
    ],
)  # fmt: skip
def test_what_is_no_such_file_is_refused_with_the_fix(tmp_path, content):
    path = tmp_path / "f.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"f\.json.*jepa-jax tune"):
        tuned_file.read_tuned(path)
    with pytest.raises(UserError, match="absent.json: not found; give the tuned.json"):
        tuned_file.read_tuned(tmp_path / "absent.json")


@pytest.mark.parametrize(
    "key, value",
    [
        ("samples_per_sec", "fast"), ("samples_per_sec", [1]), ("samples_per_sec", 10**400), ("memory_fraction", "x"),
        ("memory_fraction", 7), ("memory_fraction", {}), ("hardware", [1]), ("hardware", "GPU"), ("config", 3),
    ],
)  # fmt: skip
def test_facts_that_cannot_be_are_refused(tmp_path, key, value):
    with pytest.raises(UserError, match=f"--tuned=.*: {key} = .* cannot be"):
        write(tmp_path / "tuned.json", **{key: value})
