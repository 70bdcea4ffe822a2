"""EmberFormer as a method: groups of parameters, frozen decoder, loaded weights, resume, what is refused."""

import os
import signal

import jax
import numpy as np
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.base.signals import Interrupted
from jepa_jax.config.groups import Config
from jepa_jax.data.sources import open_source
from jepa_jax.experiments.measurement import measure
from jepa_jax.experiments.settings import Combination, TrialRequest
from jepa_jax.methods.contract import Pretrained
from jepa_jax.program import build
from jepa_jax.program.config import changed_config, load_config
from jepa_jax.projects.wildfire.data.panels import HISTORY, IGNITED, PANELS
from jepa_jax.projects.wildfire.method import EmberFormerMethod
from jepa_jax.training.run import train
from tests.runs import Silent, rows
from tests.stepping import mesh_of
from tests.tiny import tiny_config, tiny_fire_config


def program_and_batch(config: Config, devices: int = 1):
    source = open_source(config.data, "train")
    batch = source.batch(np.arange(16))
    program = build.build_program(config, num_train=64, num_classes=0, sample=batch, mesh=mesh_of(devices))
    return program, batch


def moved(before, after):
    """Returns which parameters changed, by the first part of their path."""
    changes = jax.tree.map(lambda a, b: bool((np.asarray(a) != np.asarray(b)).any()), before, after)
    return {name: any(jax.tree.leaves(part)) for name, part in changes.items()}


def test_the_decoder_stays_for_its_frozen_epochs_and_the_rest_learns():
    config = tiny_fire_config(method__frozen_epochs=0.5, optim__epochs=1.0, optim__warmup_lr=1e-3)
    program, batch = program_and_batch(config)
    assert program.length.total_steps == 4
    state = program.factory.create(0, batch)
    seen = []
    for _ in range(4):
        before = jax.device_get(state.params["model"])
        state, _ = program.train_step(state, batch)
        seen.append(moved(before, state.params["model"]) | moved(before["decoder"], state.params["model"]["decoder"]))
    assert [one["unet"] for one in seen] == [False, False, True, True]
    assert all(one["history"] and one["refinement"] and one["classifier"] for one in seen)


def test_the_spatial_part_has_its_own_rate():
    config = tiny_fire_config(method__spatial_lr=0.0, optim__warmup_epochs=0.0)
    program, batch = program_and_batch(config)
    state = program.factory.create(0, batch)
    before = jax.device_get(state.params["model"])
    after, _ = program.train_step(state, batch)
    assert moved(before, after.params["model"]) == {"history": True, "decoder": False, "refinement": False}


def test_what_was_trained_elsewhere_replaces_what_was_drawn(monkeypatch):
    config = tiny_fire_config()
    program, batch = program_and_batch(config)
    drawn = jax.device_get(program.factory.create(0, batch))
    kernel = np.full((8, 1), 3.0, np.float32)
    loaded = Pretrained({"decoder": {"classifier": {"kernel": kernel}}}, notes=("A sentence.",))
    monkeypatch.setattr(EmberFormerMethod, "pretrained", loaded)
    state = jax.device_get(program_and_batch(config)[0].factory.create(0, batch))
    np.testing.assert_array_equal(state.params["model"]["decoder"]["classifier"]["kernel"], kernel)
    state.params["model"]["decoder"]["classifier"]["kernel"] = drawn.params["model"]["decoder"]["classifier"]["kernel"]
    jax.tree.map(np.testing.assert_array_equal, state.params, drawn.params)


def test_unknown_pixels_do_not_reach_the_loss():
    program, batch = program_and_batch(tiny_fire_config())
    batch = {**batch, "known": np.random.default_rng(0).random(batch["known"].shape) < 0.5}
    lied = {**batch, "target": batch["target"] ^ ~batch["known"]}
    metrics = [program.train_step(program.factory.create(0, batch), b)[1] for b in (batch, lied)]
    assert (batch["target"] != lied["target"]).any() and float(metrics[0]["loss"]) == float(metrics[1]["loss"])


def test_a_run_resumes_exactly_is_judged_and_compiles_once_per_bucket(tmp_path):
    config = tiny_fire_config(mesh__data=1, data__frame_buckets=(4,), data__validation=0.25, model__dropout=0.1)
    console = Silent()
    whole = train(config, tmp_path / "whole", console=console)
    assert whole["compilations"] == 2 and not [line for line in console.lines if "compiled again" in line]
    assert 0 < whole["average_precision"] <= 1 and whole["probe_accuracy"] is None
    assert [row for row in rows(tmp_path / "whole") if "eval/validation_f1" in row]

    def interrupt(text):
        if text.startswith("epoch 1"):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        train(config, tmp_path / "cut", console=Silent(interrupt))
    again = train(config, tmp_path / "cut", console=Silent())
    assert again["params_sha256"] == whole["params_sha256"] and again["average_precision"] == whole["average_precision"]


def test_models_and_methods_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="model.name = 'resnet18': reads images"):
        load_config("emberformer_cpu", {"model.name": "resnet18"})
    config = tiny_config(model__name="emberformer", model__patch_size=2)
    with pytest.raises(UserError, match="it reads histories of fires"):
        build.build_program(
            config, num_train=96, num_classes=0, sample={"image": np.zeros((4, 16, 16, 3), np.uint8)}, mesh=mesh_of(1)
        )
    with pytest.raises(UserError, match="needs; use a smaller patch_size"):
        changed_config(load_config("emberformer_small"), {"data.image_size": 96})
    with pytest.raises(UserError, match="16 patches per side cannot be halved that often"):
        load_config("emberformer_cpu", {"model.decoder_widths": (8,) * 6})
    with pytest.raises(UserError, match="batch statistics of emberformer belong to other weights"):
        load_config("emberformer_cpu", {"optim.name": "schedule_free_adamw"})
    with pytest.raises(UserError, match="power of 2"):
        load_config("emberformer_cpu", {"model.patch_size": 3})


def test_data_of_any_number_of_channels_need_no_statistics_of_images():
    config = load_config("emberformer_cpu", {"data.source": "ndws", "data.channels": 11, "data.image_size": 64})
    assert len(config.data.augment.mean) == 3
    with pytest.raises(UserError, match="data.augment.mean = .*: needs data.channels = 11 numbers"):
        tiny_config(data__channels=11)


def test_pictures_show_history_truth_prediction_and_errors():
    program, batch = program_and_batch(tiny_fire_config())
    state = program.factory.create(0, batch)
    model = program.factory.merge(state.params["model"], state.stats)
    drawn = jax.jit(lambda batch: program.method.pictures(model, batch, jax.random.key(0)))(batch)
    assert drawn.shape == (len(PANELS), 16, 16, 16, 3) and drawn.dtype == np.uint8
    ignited = batch["target"][..., 0] & ~batch["fire"][:, -1, ..., 0]
    np.testing.assert_array_equal(np.all(drawn[HISTORY] == np.array(IGNITED), axis=-1), ignited)


def test_a_trial_measures_it_with_all_buckets():
    config = tiny_fire_config(mesh__data=1, data__frame_buckets=(3,))
    request = TrialRequest(config.to_dict(), Combination.of(config), max_batches=3, warmup_batches=1)
    figures = measure(request)
    assert figures.samples_per_sec > 0 and figures.flops_per_batch > 0 and figures.data_source == "wildfire"


@pytest.mark.slow
def test_recomputing_blocks_and_accumulating_give_finite_losses_and_the_same_first_one():
    losses = {}
    for remat in ("none", "full"):
        program, batch = program_and_batch(tiny_fire_config(train__remat=remat, model__decoder="segformer"))
        losses[remat] = float(program.train_step(program.factory.create(0, batch), batch)[1]["loss"])
    assert losses["full"] == pytest.approx(losses["none"], rel=1e-5)
    program, batch = program_and_batch(tiny_fire_config(train__accum_steps=2))
    assert np.isfinite(float(program.train_step(program.factory.create(0, batch), batch)[1]["loss"]))
