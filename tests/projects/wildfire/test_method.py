"""EmberFormer as a method: groups of parameters, frozen decoder, loaded weights, resume, what is refused."""

import os
import signal

import jax
import numpy as np
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.base.signals import Interrupted
from jepa_jax.config.groups import Config
from jepa_jax.data.facts import data_facts
from jepa_jax.data.pipeline import abstract_on
from jepa_jax.data.sources import open_source
from jepa_jax.experiments.measurement import measure
from jepa_jax.experiments.settings import Combination, TrialRequest
from jepa_jax.program import build, step
from jepa_jax.program.config import changed_config, load_config
from jepa_jax.program.dead_parameters import dead_parameters
from jepa_jax.projects.wildfire.data.panels import HISTORY, IGNITED, PANELS
from jepa_jax.training.run import train
from tests.program.test_devices import check_devices
from tests.projects.wildfire.conftest import TRAINED
from tests.projects.wildfire.tiny import tiny_fire_config
from tests.runs import Silent, rows
from tests.stepping import mesh_of
from tests.tiny import tiny_config


def program_and_batch(config: Config, devices: int = 1):
    source = open_source(config.data, "train")
    batch = source.batch(np.arange(16))
    program = build.build_program(config, num_train=64, num_classes=0, sample=batch, mesh=mesh_of(devices))
    return program, batch


def moved(before, after):
    """Returns which parameters changed, by the first part of their path."""
    changes = jax.tree.map(lambda a, b: bool((np.asarray(a) != np.asarray(b)).any()), before, after)
    return {name: any(jax.tree.leaves(part)) for name, part in changes.items()}


@pytest.fixture(scope="module")
def frozen():
    """A program whose decoder is frozen for two of four steps, and a batch for it."""
    rates = dict(optim__lr=5e-4, optim__warmup_lr=5e-4, method__lr_temporal=1e-3, method__lr_spatial=1e-4)
    return program_and_batch(tiny_fire_config(method__frozen_epochs=0.5, optim__epochs=1.0, **rates))


def test_rates_follow_the_optimizer_and_their_former_name():
    stored = load_config("emberformer_cpu").to_dict()  # as a run of an earlier version wrote it
    del stored["method"]["lr_temporal"], stored["method"]["lr_spatial"]
    stored["method"]["spatial_lr"], stored["optim"]["lr"] = 0.25, 0.5
    method = load_config(stored).method
    assert (method.lr_temporal, method.lr_spatial) == (0.5, 0.25)


def test_the_decoder_stays_for_its_frozen_epochs_and_both_parts_have_their_own_rate(frozen):
    program, batch = frozen
    assert program.length.total_steps == 4
    state = program.factory.create(0, batch)
    seen, rates = [], {}
    for _ in range(4):
        before = jax.device_get(state.params["model"])
        state, _ = program.train_step(state, batch)
        seen.append(moved(before, state.params["model"]) | moved(before["decoder"], state.params["model"]["decoder"]))
        rates = rates or largest_changes(before, state.params["model"])
    assert [one["unet"] for one in seen] == [False, False, True, True]
    assert all(one["history"] and one["refinement"] and one["classifier"] for one in seen)
    # The first update of Adam has the length of the rate in every parameter.
    assert rates["refinement"] == pytest.approx(0.1 * rates["history"], rel=0.05)
    assert rates["history"] == pytest.approx(1e-3, rel=0.05)


def largest_changes(before, after):
    """Returns the largest change of a parameter, by the first part of its path."""
    changes = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(), before, after)
    return {name: max(jax.tree.leaves(part)) for name, part in changes.items()}


def test_unknown_pixels_do_not_reach_the_loss(frozen):
    program, batch = frozen
    batch = {**batch, "known": np.random.default_rng(0).random(batch["known"].shape) < 0.5}
    lied = {**batch, "target": batch["target"] ^ ~batch["known"]}
    metrics = [program.train_step(program.factory.create(0, batch), b)[1] for b in (batch, lied)]
    assert (batch["target"] != lied["target"]).any() and float(metrics[0]["loss"]) == float(metrics[1]["loss"])


@pytest.mark.slow
def test_a_run_resumes_exactly_is_judged_and_compiles_once_per_bucket(tmp_path, trained):
    folder, whole, console = trained
    assert whole["compilations"] == 2 and not [line for line in console.lines if "compiled again" in line]
    assert 0 < whole["average_precision"] <= 1 and whole["probe_accuracy"] is None
    assert [row for row in rows(folder) if "eval/validation_f1" in row]

    def interrupt(text):
        if text.startswith("epoch 1"):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        train(TRAINED, tmp_path / "cut", console=Silent(interrupt))
    again = train(TRAINED, tmp_path / "cut", console=Silent())
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


def test_pictures_show_history_truth_prediction_and_errors(frozen):
    program, batch = frozen
    state = program.factory.create(0, batch)
    model = program.factory.merge(state.params["model"], state.stats)
    drawn = jax.jit(lambda batch: program.method.pictures(model, batch, jax.random.key(0)))(batch)
    assert drawn.shape == (len(PANELS), 16, 16, 16, 3) and drawn.dtype == np.uint8
    ignited = batch["target"][..., 0] & ~batch["fire"][:, -1, ..., 0]
    np.testing.assert_array_equal(np.all(drawn[HISTORY] == np.array(IGNITED), axis=-1), ignited)


@pytest.mark.slow
def test_eight_devices_give_the_loss_and_gradients_of_one(monkeypatch):
    monkeypatch.setattr(step, "FSDP_SMALLEST_SIZE", 64)  # tiny models have no large arrays
    config = tiny_fire_config()
    check_devices(config, open_source(config.data, "train").batch(np.arange(16)), 0, 2, 4)


def test_every_parameter_is_trained():
    config = tiny_fire_config()
    program, batch = program_and_batch(config)
    assert dead_parameters(program, abstract_on(mesh_of(1), data_facts(config.data).spec, len(batch["valid"]))) == []


@pytest.mark.slow
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


def test_a_former_name_beside_the_key_of_a_recipe_is_refused():
    load_config("emberformer", {"method.spatial_lr": 0.5})
    with pytest.raises(UserError, match="method.spatial_lr = 0.5: is not read, as config.method.lr_spatial is set"):
        load_config("emberformer_cpu", {"method.spatial_lr": 0.5})
    with pytest.raises(UserError, match="config.method.spatial_lr = 0.5: is not read"):
        load_config("emberformer", {"method.spatial_lr": 0.5, "method.lr_spatial": 0.1})
