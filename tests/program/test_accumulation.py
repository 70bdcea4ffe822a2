"""A batch in parts has the gradient of the whole batch, in less memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jepa_jax.methods.image_jepa import ImageJepa
from jepa_jax.methods.whole_batch import accumulates_exactly, accumulation_effect
from jepa_jax.program.accumulation import exact_gradient, join, mean_gradient, split
from jepa_jax.program.config import changed_config
from jepa_jax.program.objective import Objective, statistics_of
from jepa_jax.training.setup import norms_of_parts
from tests.stepping import BATCH, STILL, assert_close, build_program, mesh_of
from tests.tiny import DINOV2, RIVALS, dotted, rival_config, tiny_config, tiny_masked_config

VIT = {"model.name": "vit", "model.width": 8, "model.depth": 1, "model.heads": 1, "model.patch_size": 8}
# Views that a loader has cut: they differ, and parts see the same ones as the whole.
LOADED = STILL | {"data.crops": "loader", "data.source": "folder", "eval.calibration_images": 0}
CROPS = BATCH | {"crops": np.random.default_rng(1).integers(0, 256, (16, 2, 16, 16, 3), np.uint8)}
FAST = ("sigreg", "simsiam", "koleo")
CASES = {name: {"method.loss": name} for name in ("vicreg", "sigreg", "bcs", "infonce", "tcr")}
CASES |= {name: {"method.name": name} | dotted(RIVALS[name]) for name in ("barlow_twins", "simsiam", "byol", "simclr")}
CASES["koleo"] = {name: value for name, value in dotted(DINOV2).items() if name != "method.masked_share"}
CASES["koleo"] |= {"method.patches": "none"}
# Each part draws masks of its own, which are equal where everything is hidden; then images are equal too.
CASES["ibot"] = dotted(DINOV2) | {"method.masked_images": 1.0, "method.masked_share": (1.0, 1.0)}
CASES["ibot"] |= {"method.koleo_weight": 0.0}
CASES["joint_views"] = {"method.per_view_statistics": False}


def config_of(case, **changes):
    return changed_config(tiny_config(), LOADED | CASES[case] | VIT | dotted(changes))


def gradients(config, batch, *ways):
    """Returns what each (objective, state, batch, key) -> (gradient, (statistics, metrics)) gives, in one program."""
    program = build_program(config, None, batch)
    objective = Objective(program.method, program.factory)
    state = program.factory.create(0, batch)
    compute = jax.jit(lambda *arguments: [way(objective, *arguments) for way in ways])
    return jax.device_get(compute(state, batch, jax.random.key(3)))


def of_whole(objective, state, batch, key):
    return jax.grad(objective.loss, has_aux=True)(state.params, statistics_of(state), state, batch, key)


def of_parts(objective, state, batch, key, parts=8):
    return exact_gradient(objective, state, batch, key, parts)


def of_mean(objective, state, batch, key):
    return mean_gradient(jax.grad(objective.loss, has_aux=True), state, batch, key, 4)


def deviation(a, b):
    """Returns |a - b| / |b| over all leaves."""
    squares = [sum(float(np.sum(np.square(leaf))) for leaf in jax.tree.leaves(tree)) for tree in (
        jax.tree.map(np.subtract, a, b), b)]  # fmt: skip
    return (squares[0] / squares[1]) ** 0.5


@pytest.mark.parametrize(
    "case", [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_eight_parts_have_the_gradient_of_one(case):
    """Also where heads have batch norm, since they see the whole batch; the mean over parts is another objective."""
    found = gradients(config_of(case), CROPS, of_whole, of_parts, *([of_mean] if case == "sigreg" else []))
    (whole, (stats, metrics)), (parts, (own_stats, own_metrics)) = found[:2]
    assert deviation(parts, whole) < 2e-5  # of float32; up to 1.1e-5 where batch norm divides by small deviations
    assert own_metrics.keys() == metrics.keys()
    for name, value in metrics.items():
        np.testing.assert_allclose(own_metrics[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
    assert_close(own_stats, stats, rtol=1e-5)
    for _, (_, of_means) in found[2:]:
        assert of_means["sigreg"] < 0.6 * metrics["sigreg"]  # it is proportional to the images in a part


@pytest.mark.slow
def test_what_each_element_adds_is_carried_through_parts():
    """H-JEPA predicts tokens of each image and spreads the features of a batch; masks and views differ by part."""
    config = tiny_masked_config("hjepa", **{"method.regulariser": "vicreg"})

    def encoded_apart(objective, state, batch, key):
        def loss(params):
            model, slow = objective.models(params, statistics_of(state), state, key)
            parts = split(batch, 2)
            each = [
                objective.method.encode_batch(
                    model, slow, jax.tree.map(lambda x, i=i: x[i], parts), jax.random.fold_in(key, i), state.step
                )
                for i in range(2)
            ]
            together = join(jax.tree.map(lambda *x: jnp.stack(x), *[one.embeddings for one in each]))
            whole, _ = objective.method.batch_loss(model, slow, together, key, state.step)
            return whole + sum(one.loss for one in each) / 2

        return jax.grad(loss)(state.params)

    wanted, (found, _) = gradients(config, BATCH, encoded_apart, functools.partial(of_parts, parts=2))
    assert deviation(found["model"], wanted["model"]) < 1e-5


def test_a_method_with_a_loss_of_its_own_is_accumulated_by_it():
    class Own(ImageJepa):
        def loss(self, model, target, batch, key, step):
            return super().loss(model, target, batch, key, step)

    config = config_of("vicreg")
    assert accumulates_exactly(ImageJepa(config, 1), config) and not accumulates_exactly(Own(config, 1), config)


@pytest.mark.slow
def test_the_centre_of_a_teacher_moves_once_per_update():
    config = changed_config(rival_config("dino"), LOADED | VIT | {"train.accum_steps": 4})
    whole, parts = (
        jax.device_get(program.train_step(program.factory.create(0, CROPS), CROPS)[0])
        for program in (build_program(changed_config(config, {"train.accum_steps": n}), None, CROPS) for n in (1, 4))
    )
    np.testing.assert_allclose(parts.stats["centre"], whole.stats["centre"], rtol=1e-5, atol=1e-7)
    assert_close(parts.params, whole.params, rtol=1e-4)


@pytest.mark.slow
def test_parts_need_less_memory_and_are_split_over_devices():
    def temporary_bytes(parts, devices):
        config = config_of("vicreg", train__accum_steps=parts, model__width=32, model__patch_size=4)
        program = build_program(config, mesh_of(devices), CROPS)
        batch = {name: jax.ShapeDtypeStruct((512, *x.shape[1:]), x.dtype) for name, x in CROPS.items()}
        return program.train_step.lower(program.factory.abstract, batch).compile().memory_analysis().temp_size_in_bytes

    whole, parts, split_parts = temporary_bytes(1, 1), temporary_bytes(8, 1), temporary_bytes(8, 2)
    assert parts < 0.5 * whole
    assert split_parts < 0.7 * parts


def test_the_advice_knows_what_accumulation_changes():
    assert "loss of all of it" in accumulation_effect(config_of("sigreg"))
    assert "one part at a time" in accumulation_effect(config_of("sigreg", train__accum="mean"))


def test_batch_norms_that_see_a_part_are_named():
    exact = tiny_config(train__accum_steps=2)
    program = build_program(exact)

    def named(config):
        return {name.split("/")[0] for name in norms_of_parts(config, program)}

    assert named(changed_config(exact, {"train.accum": "mean"})) == {"encoder", "projector"}
    assert named(exact) == {"encoder"}
