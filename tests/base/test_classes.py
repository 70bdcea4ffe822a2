"""Classes by name: only the user's own command line or recipe names them, unless files are trusted."""

import json

import pytest

from jepa_jax.base.classes import references, refuse_untrusted, trust_files
from jepa_jax.base.errors import UserError
from jepa_jax.config.recipe import read_recipe
from jepa_jax.program.identity import config_differences
from jepa_jax.weights import load_model
from tests.tiny import tiny_config
from tests.weights.golden import WEIGHTS


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """Returns a function that tells whether the code of a module named evil_class has run."""
    (tmp_path / "evil_class.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    return lambda: (tmp_path / "ran").exists()


def stored(**changes):
    config = tiny_config().to_dict()
    for name, value in changes.items():
        group, _, key = name.partition("__")
        config[group][key] = value
    return config


KEYS = {
    "method__name": "evil_class:Evil",
    "model__name": "evil_class:Evil",
    "optim__name": "evil_class:Evil",
    "optim__schedule": "evil_class:Evil",
    "data__source": "evil_class:Evil",
    "data__transforms": ["evil_class:evil"],
}


@pytest.mark.parametrize("key", KEYS)
def test_a_config_of_a_run_imports_no_class_that_it_names(tmp_path, evil, key):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(stored(**{key: KEYS[key]})))
    name = key.replace("__", ".")
    with pytest.raises(UserError, match=rf"config.{name} = 'evil_class:\w+': is named by a file.*--trust"):
        read_recipe(str(path))
    with pytest.raises(UserError, match="is named by a file"):
        config_differences(json.loads(path.read_text()), tiny_config().to_dict())
    assert not evil()


def test_exported_weights_import_no_class_that_they_name(tmp_path, evil):
    config = {"format": "jepa_jax", "version": 1, "model": {"name": "evil_class:Evil"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(WEIGHTS / "hf_vit" / "model.safetensors")
    with pytest.raises(UserError, match="config.model.name = 'evil_class:Evil': is named by a file"):
        load_model(tmp_path)
    assert not evil()


def test_files_that_are_trusted_may_name_classes(tmp_path, evil):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(stored(method__name="evil_class:Evil")))
    with trust_files(), pytest.raises(UserError, match="evil_class has no class Evil"):
        read_recipe(str(path))
    assert evil()


def test_a_class_that_the_command_names_may_be_named_in_the_file_too():
    refuse_untrusted({"method.name": "mine:Own"}, {"mine:Own"})
    with pytest.raises(UserError):
        refuse_untrusted({"method.name": "mine:Other"}, {"mine:Own"})


def test_names_of_sets_steps_and_places_are_no_classes():
    values = ["tfds:cifar10", "100:200", "hub:facebook/dino", "/data:x", "byol", 3, None, ("a:b", ["c.d:e"])]
    assert list(references(values)) == ["a:b", "c.d:e"]


def test_a_file_may_name_what_the_program_has_imported_but_not_pythons_own():
    refuse_untrusted({"method.name": f"{__name__}:Own"})
    with pytest.raises(UserError, match="os:system"):
        refuse_untrusted({"data.source": "os:system"})
