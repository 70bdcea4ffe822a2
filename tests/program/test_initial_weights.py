"""Encoders that start from weights of elsewhere: the first loss, exact resume, other sizes and channels, refusals."""

import os
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jepa_jax.base.errors import UserError
from jepa_jax.base.signals import Interrupted
from jepa_jax.config.groups import Config
from jepa_jax.data.pipeline import train_batches
from jepa_jax.data.sources import open_source
from jepa_jax.methods.contract import build_method
from jepa_jax.program.build import initial_sample
from jepa_jax.program.config import changed_config
from jepa_jax.program.initial_weights import initial_weights, saved_encoder
from jepa_jax.program.objective import Objective, statistics_of
from jepa_jax.program.step import abstract_model, split_model
from jepa_jax.runtime.mesh import batch_sharding, make_mesh
from jepa_jax.training.run import train
from jepa_jax.weights import load_model
from tests.evals.untrained_run import write_run
from tests.runs import Silent, rows
from tests.stepping import build_program
from tests.tiny import tiny_config, tiny_masked_config
from tests.weights.golden import WEIGHTS

VIT = {
    "model.name": "vit", "model.width": 48, "model.depth": 3, "model.heads": 4, "model.mlp_width": 96,
    "model.patch_size": 8, "model.cls_token": False, "model.positions": "learned", "model.norm_eps": 1e-12,
}  # fmt: skip
RESNET = {
    "model.name": "resnet", "model.blocks": (2, 1, 1, 2), "model.widths": (8, 16, 32, 48), "model.width": 64,
    "model.stem": "imagenet",
}  # fmt: skip
SHORT = {
    "mesh.data": 1, "data.image_size": 32, "data.num_train": 32, "data.num_test": 16, "optim.epochs": 2.0,
    "optim.warmup_epochs": 0.0, "optim.warmup_lr": 1e-3, "profile.trace_every_epochs": 0, "eval.untrained": True,
}  # fmt: skip


def ijepa(**changes) -> Config:
    changes = {"model.init_from": str(WEIGHTS / "hf_ijepa"), **changes}
    return changed_config(tiny_masked_config("ijepa"), SHORT | VIT | changes)


def image_jepa(**changes) -> Config:
    changes = {"model.init_from": str(WEIGHTS / "timm_resnet_basic"), **changes}
    return changed_config(tiny_config(), SHORT | RESNET | changes)


def loss_with_library_weights(config: Config) -> float:
    """Returns the loss of the first batch for a model whose encoder is the one that is compared with its library."""
    source, mesh = open_source(config.data, "train"), make_mesh(1, 1)
    method = build_method(config, total_steps=4)
    library = nnx.state(load_model(config.model.init_from).encoder)
    with train_batches(config.data, source, seed=config.train.seed, sharding=batch_sharding(mesh)) as batches:
        batch = next(batches)[0]

    @jax.jit
    def first_loss(sample, batch, library):
        init_key, key = jax.random.split(jax.random.key(config.train.seed))
        model = method.init(init_key, sample)
        nnx.update(model.encoder, library)
        target = nnx.clone(model) if method.ema else None
        return method.loss(model, target, batch, jax.random.fold_in(key, 0), jnp.zeros([], int)).loss

    return float(first_loss(initial_sample(source), batch, library))


def stop_after_first_epoch(text):
    if text.startswith("epoch 1/2"):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_the_first_loss_is_that_of_the_library_weights():
    config = ijepa()
    source, mesh = open_source(config.data, "train"), make_mesh(1, 1)
    sample = initial_sample(source)
    program = build_program(config, batch=sample)
    state = program.factory.create(config.train.seed, sample)
    with train_batches(config.data, source, seed=config.train.seed, sharding=batch_sharding(mesh)) as batches:
        batch = next(batches)[0]
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), 0)
    objective = jax.jit(Objective(program.method, program.factory).loss)
    _, (_, metrics) = objective(state.params, statistics_of(state), state, batch, key)
    assert float(metrics["loss"]) == pytest.approx(loss_with_library_weights(config), rel=1e-5)


def check_run(config, tmp_path):
    """Compares the first loss with that of the library's weights, and a resumed run with a whole one."""
    whole, cut, console = tmp_path / "whole", tmp_path / "cut", Silent()
    summary = train(config, whole, console=console)
    first = next(row["train/loss"] for row in rows(whole) if "train/loss" in row)
    assert first == pytest.approx(loss_with_library_weights(config), rel=1e-5)
    assert any("The encoder starts from" in line for line in console.lines)
    assert any(line.startswith("as loaded:") for line in console.lines)
    with pytest.raises(Interrupted):
        train(config, cut, console=Silent(stop_after_first_epoch))
    resumed = train(config, cut, resume="must", console=Silent())
    same = ("status", "steps", "params_sha256", "probe_accuracy", "untrained_probe_accuracy", "knn_accuracy")
    assert [resumed[name] for name in same] == [summary[name] for name in same]


@pytest.mark.slow
def test_ijepa_continues_from_weights_of_transformers_and_resumes_exactly(tmp_path):
    check_run(ijepa(), tmp_path)


@pytest.mark.slow
def test_image_jepa_continues_from_weights_of_timm_and_resumes_exactly(tmp_path):
    check_run(image_jepa(), tmp_path)


def test_a_resnet_starts_with_the_variables_of_timm_batch_statistics_included():
    batch = {"image": np.zeros((16, 32, 32, 3), np.uint8)}
    program = build_program(image_jepa(), batch=batch)
    state, library = program.factory.create(0, batch), load_model(WEIGHTS / "timm_resnet_basic").encoder
    model = program.factory.merge(state.params["model"], state.stats)
    assert nnx.to_pure_dict(nnx.state(library, nnx.BatchStat))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model.encoder), nnx.state(library))


def loaded(config):
    batch = {"image": np.zeros((2, config.data.image_size, config.data.image_size, config.data.channels), np.uint8)}
    method = build_method(config, total_steps=1)
    shapes = split_model(abstract_model(method, batch))[1]
    return initial_weights(config, method.pretrained, shapes), shapes


def test_positions_are_interpolated_and_the_first_layer_adapted_and_both_are_said():
    gray = {"data.channels": 1, "data.augment.mean": (0.5,), "data.augment.std": (0.2,), "data.image_size": 64}
    colour = {f"data.augment.{name}": 0.0 for name in ("jitter.probability", "grayscale.probability")}
    result, shapes = loaded(ijepa(**gray, **colour))
    own = result.params["encoder"]
    assert jax.tree.map(np.shape, own) == jax.tree.map(np.shape, shapes["encoder"])
    saved = saved_encoder(str(WEIGHTS / "hf_ijepa")).params
    of_gray = saved["patch_embed"]["kernel"].reshape(64, 3, 48).sum(axis=1)  # what equal channels see
    np.testing.assert_allclose(own["patch_embed"]["kernel"], of_gray, atol=1e-6)
    np.testing.assert_allclose(own["position"].mean(1), saved["position"].mean(1), atol=2e-2)
    assert any("from 4 x 4 to 8 x 8 patches" in note for note in result.notes)
    assert any("from 3 to 1 channels" in note for note in result.notes)
    assert any("random: predictor" in note for note in result.notes)


def test_a_cls_token_that_the_encoder_does_not_have_is_left_out():
    result, _ = loaded(ijepa(**{"model.init_from": str(WEIGHTS / "hf_vit")}))
    saved = saved_encoder(str(WEIGHTS / "hf_vit")).params
    assert "cls_token" not in result.params["encoder"]
    np.testing.assert_array_equal(result.params["encoder"]["position"], saved["position"][:, 1:])
    assert any("CLS token was left out" in note for note in result.notes)


def test_the_encoder_of_a_run_is_a_start_too(tmp_path):
    config, folder = tiny_config(train__seed=3), tmp_path / "run"
    state = write_run(config, folder)
    result, _ = loaded(changed_config(config, {"model.init_from": str(folder)}))
    jax.tree.map(np.testing.assert_array_equal, result.params["encoder"], state.params["model"]["encoder"])
    jax.tree.map(np.testing.assert_array_equal, result.stats["encoder"], state.stats["encoder"])
    other = changed_config(config, {"model.init_from": str(folder), "model.widths": (8, 8)})
    with pytest.raises(UserError, match=r"widths = \(8, 8\) instead of \(8, 16\)\); set --config.model.widths=8,16"):
        loaded(other)
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(UserError, match="model.safetensors: not found"):
        loaded(changed_config(config, {"model.init_from": str(folder)}))


@pytest.mark.parametrize(
    "config, message",
    [
        (
            changed_config(ijepa(), {"model.name": "vit_tiny"}),
            "width = 192 instead of 48.*set --config.model.name=vit --config.model.width=48 --config.model.depth=3 "
            "--config.model.heads=4 --config.model.mlp_width=96$",
        ),
        (ijepa(**{"model.embedding": "whitened"}), "set --config.model.embedding=linear$"),
        (ijepa(**{"model.norm_eps": 1e-6}), "norm_eps = 1e-06 instead of 1e-12.*set --config.model.norm_eps=1e-12$"),
        (
            ijepa(**{"model.init_from": str(WEIGHTS / "timm_resnet_basic")}),
            "another kind of encoder .resnet.; set --config.model.name=resnet --config.model.blocks=2,1,1,2",
        ),
        (image_jepa(**{"model.stem": "cifar"}), "stem = cifar instead of imagenet.*set --config.model.stem=imagenet$"),
        (
            changed_config(image_jepa(), {"model.name": "resnet18"}),
            "set --config.model.name=resnet --config.model.blocks=2,1,1,2 --config.model.widths=8,16,32,48 "
            "--config.model.bottleneck=False --config.model.width=64$",
        ),
        (ijepa(**{"model.init_from": str(WEIGHTS / "hf_segformer")}), "logits per pixel, not features"),
        (ijepa(**{"model.init_from": "nowhere"}), "nowhere: no such file or folder"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused_with_the_flags_that_fit(config, message):
    with pytest.raises(UserError, match=message):
        loaded(config)
