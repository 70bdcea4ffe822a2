"""Files of weights: what is read, and the one error that each damaged or foreign file gives."""

import json
import pickle

import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.weights.reader import read_tensors
from tests.weights.golden import SEGFORMER


def test_a_directory_and_its_file_hold_the_same_tensors():
    of_directory, of_file = read_tensors(SEGFORMER), read_tensors(SEGFORMER / "model.safetensors")
    assert of_directory.keys() == of_file.keys()
    assert of_directory["decode_head.linear_fuse.weight"].shape == (24, 96, 1, 1)


def test_a_truncated_file_is_refused(tmp_path):
    content = (SEGFORMER / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match="model.safetensors: not a complete safetensors file"):
        read_tensors(tmp_path)


def test_a_pickle_is_never_loaded_whatever_its_name(tmp_path):
    class Trap:
        def __reduce__(self):
            return (tmp_path / "loaded").touch, ()

    for name, message in (("model.safetensors", "not a complete"), ("pytorch_model.bin", "loading a pickle can run")):
        (tmp_path / name).write_bytes(pickle.dumps(Trap()))
        with pytest.raises(UserError, match=message):
            read_tensors(tmp_path / name)
    assert not (tmp_path / "loaded").exists()


def test_missing_files_are_named(tmp_path):
    with pytest.raises(UserError, match="model.safetensors: not found"):
        read_tensors(tmp_path)


@pytest.mark.parametrize(
    "index, message",
    [
        ({"weight_map": {"a": "../b.safetensors"}}, "a lies in '../b.safetensors', which is no .safetensors file"),
        ({"weight_map": {"a": 3}}, "a lies in 3, which is no .safetensors file beside the index"),
        ({"weight_map": {"a": ".."}}, "a lies in '..', which is no"),
        ({"weight_map": {"a": "weights.bin"}}, "a lies in 'weights.bin', which is no"),
        ({"weight_map": {"a": "absent.safetensors"}}, "absent.safetensors: not found"),
        ({"weight_map": None}, "has no weight_map"),
    ],
)
def test_an_index_of_anything_but_files_beside_it_is_refused(index, message, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=message):
        read_tensors(tmp_path)
