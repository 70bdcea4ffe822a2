"""Tables of names: layouts, joined tensors, and errors that name every tensor that does not fit."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jepa_jax.base.errors import UserError
from jepa_jax.weights.names import Rule, batch_norm, both, convolution, dense, load_into

TABLE = (
    *both("layer.{i}.query", "layers.{i}.qk", dense),
    *both("layer.{i}.key", "layers.{i}.qk", dense),
    *batch_norm("bn", "norm"),
    Rule("pooler.{i}", None),
)


class Pair(nnx.Module):
    def __init__(self):
        self.qk = nnx.Linear(3, 4, rngs=nnx.Rngs(0))


class Model(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([Pair(), Pair()])
        self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))


def tensors():
    rng = np.random.default_rng(0)
    names = {f"layer.{i}.{part}" for i in range(2) for part in ("query", "key")}
    made = {f"{name}.weight": rng.standard_normal((2, 3), np.float32) for name in sorted(names)}
    made |= {f"{name}.bias": rng.standard_normal(2, np.float32) for name in sorted(names)}
    made |= {f"bn.{part}": rng.random(4, np.float32) for part in ("weight", "bias", "running_mean", "running_var")}
    return {**made, "bn.num_batches_tracked": np.array(3), "pooler.0": np.zeros(5)}


def test_tensors_with_one_target_are_joined_in_the_order_of_the_table():
    model, given = Model(), tensors()
    load_into(model, given, TABLE, "file")
    x = np.arange(3, dtype=np.float32)
    expected = [given[f"layer.1.{part}.weight"] @ x + given[f"layer.1.{part}.bias"] for part in ("query", "key")]
    np.testing.assert_allclose(model.layers[1].qk(jnp.asarray(x)), np.concatenate(expected), rtol=1e-5)
    np.testing.assert_array_equal(model.norm.var[...], given["bn.running_var"])


def test_missing_left_over_and_misshapen_tensors_are_all_named_and_nothing_is_changed():
    model, given = Model(), tensors()
    before = np.asarray(model.norm.scale[...])
    given["layer.0.qeury.weight"] = given.pop("layer.0.query.weight")
    given["layer.1.key.bias"] = np.zeros(7, np.float32)
    with pytest.raises(UserError) as caught:
        load_into(model, given, TABLE, "dir/model.safetensors")
    message = str(caught.value)
    assert message.startswith("dir/model.safetensors: ")
    assert "layer.0.query.weight is missing" in message and "layer.0.qeury.weight is left over" in message
    assert "layer.1.key.bias has shape [7]" in message
    assert "pooler" not in message and "num_batches_tracked" not in message
    np.testing.assert_array_equal(model.norm.scale[...], before)


def test_a_tensor_with_other_axes_than_its_layer_is_named():
    given = {**tensors(), "layer.0.query.weight": np.zeros((2, 3, 4), np.float32)}
    with pytest.raises(UserError, match=r"layer.0.query.weight has shape \[2, 3, 4\]"):
        load_into(Model(), given, TABLE, "file")


def test_layouts_of_pytorch():
    tensor = np.arange(2 * 3 * 5 * 7).reshape(2, 3, 5, 7)
    assert convolution.load(tensor)[4, 6, 1, 0] == tensor[0, 1, 4, 6]
    assert dense.load(tensor[:, :, :1, :1])[2, 1] == tensor[1, 2, 0, 0]
