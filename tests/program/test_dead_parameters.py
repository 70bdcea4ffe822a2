"""Parameters that training cannot change are found before it starts; the shipped methods have none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jepa_jax.config.owners import METHODS
from jepa_jax.config.recipe import shipped_recipes
from jepa_jax.data.contract import image_spec
from jepa_jax.data.facts import data_facts
from jepa_jax.data.pipeline import abstract_on
from jepa_jax.methods.contract import Method, Output, ParamGroup
from jepa_jax.program.build import build_program as build
from jepa_jax.program.config import changed_config, load_config
from jepa_jax.program.dead_parameters import DeadParameter, dead_parameters, in_words, note_gradients
from jepa_jax.program.describe import describe
from tests.runs import Silent, run
from tests.stepping import BATCH, build_program, mesh_of
from tests.tiny import RIVALS, SHIPPED, rival_config, tiny_config, tiny_masked_config

SHAPES = abstract_on(mesh_of(1), image_spec(16), 16)
LOSS, LEFT_OUT = "the loss does not depend on it", "the optimizer leaves it out"


class Parts(nnx.Module):
    def __init__(self, rngs):
        self.used, self.unused, self.detached, self.frozen, self.looped, self.chosen = (
            nnx.Linear(3, 3, use_bias=False, rngs=rngs) for _ in range(6)
        )


class Careless(Method):
    """Trains one of its layers; another is only looped over by a scan behind a stop_gradient."""

    param_groups = (ParamGroup("^frozen/", frozen_steps=-1),)
    traces = 0

    def init(self, key, sample):
        return Parts(nnx.Rngs(params=key))

    def loss(self, model, target, batch, key, step):
        Careless.traces += 1
        x = batch["image"].mean((1, 2)) / 255
        y = model.frozen(model.used(x)) + jax.lax.stop_gradient(model.detached(x))
        x, _ = jax.lax.scan(lambda carry, _: (carry + jax.lax.stop_gradient(model.looped(carry)), None), x, length=3)
        z = jnp.where(jnp.argmax(model.chosen(x)) > 0, y, -y)  # a choice has no gradient
        return Output(jnp.mean(jnp.square(z)) + jnp.mean(y), {})


class Unmoved(Careless):
    """Gives the layer that it could train a rate of 0."""

    param_groups = (ParamGroup("^used/", lr=0.0),)


CARELESS = dict(method__name=f"{__name__}:Careless")
EXPECTED = {
    "unused/kernel": LOSS,
    "detached/kernel": LOSS,
    "looped/kernel": LOSS,
    "chosen/kernel": LOSS,
    "frozen/kernel": "frozen by ParamGroup('^frozen/')",
}


def small_config(method):
    if method in SHIPPED:
        return tiny_masked_config(method)
    return rival_config(method) if method in RIVALS else tiny_config()


@pytest.mark.parametrize("method", [name for name, place in METHODS.items() if "projects" not in place])
def test_every_parameter_of_the_shipped_methods_is_trained(method):
    config = small_config(method)
    spec = data_facts(config.data).spec
    batch = abstract_on(mesh_of(1), spec, config.data.batch_size)
    assert dead_parameters(build_program(config, batch=batch), batch) == []


@pytest.mark.parametrize("change", [{}, {"train.accum_steps": 2}, {"optim.name": "schedule_free_adamw"}])
def test_parameters_without_a_gradient_or_an_update_are_named(change):
    program = build_program(changed_config(tiny_config(**CARELESS), change))
    assert dict(dead_parameters(program, SHAPES)) == EXPECTED


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "larc"])
def test_a_rate_of_zero_is_found(optimizer):
    config = tiny_config(method__name=f"{__name__}:Unmoved", optim__name=optimizer, optim__clip_norm=1.0)
    dead = dict(dead_parameters(build_program(config), SHAPES))
    assert dead["used/kernel"] == LEFT_OUT and "frozen/kernel" not in dead


def test_the_gradients_of_what_is_found_are_zero_and_those_of_the_rest_are_not():
    config = tiny_config(**CARELESS, optim__name="sgd", optim__weight_decay=0.0, optim__warmup_lr=0.1)
    program = build_program(config)
    before = program.factory.create(0, BATCH)
    start = jax.device_get(before.params["model"])
    after, _ = program.train_step(before, BATCH)
    layers = after.params["model"].items()
    moved = {name: bool(np.any(layer["kernel"] != start[name]["kernel"])) for name, layer in layers}
    assert moved == {name: f"{name}/kernel" not in EXPECTED for name in start}


def test_a_group_that_is_frozen_for_the_whole_run_is_named():
    short = rival_config("dino", method__frozen_last_layer=1.0)
    dead = dict(dead_parameters(build_program(short), SHAPES))
    assert set(dead.values()) == {"frozen by ParamGroup('^head/last/')"} and all("last" in path for path in dead)


def test_gradients_are_followed_through_calls_branches_loops_and_remat():
    def loss(params, x):
        p = note_gradients(params, reached)
        block = jax.checkpoint(lambda used, unused, x: used @ x)(p["remat"], p["no_remat"], x)
        call = jax.jit(lambda used, unused, x: used @ x)(p["call"], p["no_call"], x)
        loop, _ = jax.lax.scan(lambda carry, _: (p["loop"] @ carry, None), x, length=3)
        no_loop, _ = jax.lax.scan(lambda carry, _: (jax.lax.stop_gradient(p["no_loop"]) @ carry, None), x, length=3)
        branch = jax.lax.cond(x[0] > 0, lambda: x, lambda: p["branch"] @ x)
        no_branch = jax.lax.cond(x[0] > 0, lambda: x, lambda: jax.lax.stop_gradient(p["no_branch"]) @ x)
        return jnp.sum(block + call + loop + no_loop + branch + no_branch)

    reached, names = set(), ("remat", "call", "loop", "branch")
    params = {prefix + name: jnp.ones((2, 2)) for name in names for prefix in ("", "no_")}
    gradient = jax.eval_shape(jax.grad(loss), params, jnp.ones(2))
    assert gradient.keys() == params.keys() and reached == set(names)


def test_a_run_warns_once_and_describe_lists_them(tmp_path):
    console, before = Silent(), Careless.traces
    run(tmp_path, console, **CARELESS, train__max_steps=1, log__every_steps=1)
    assert Careless.traces == before + 1  # the check costs no trace of its own
    (warning,) = [line for line in console.lines if "will not be trained" in line]
    assert warning == in_words([DeadParameter(*item) for item in sorted(EXPECTED.items(), key=lambda i: order(i[0]))])
    assert warning.startswith("5 parameters will not be trained: ") and "(frozen by ParamGroup('^frozen/'))" in warning
    listed = describe(tiny_config(**CARELESS))["params_dead"]
    assert {one["path"]: one["reason"] for one in listed} == EXPECTED
    assert describe(tiny_config())["params_dead"] == []


def order(path):
    return sorted(EXPECTED).index(path)


def test_many_names_are_cut():
    text = in_words([DeadParameter(f"layer{i}", LEFT_OUT) for i in range(7)])
    assert text.endswith("layer4 and 2 more (the optimizer leaves it out)") and text.startswith("7 parameters")


@pytest.mark.slow
@pytest.mark.parametrize("name", shipped_recipes())
def test_every_parameter_of_the_shipped_recipes_is_trained(name):
    config = load_config(name)
    # Blocks are all alike, and so are the sizes of a decoder but for their number and width.
    least = {"model.depth": 2, "method.predictor_depth": 2, "model.decoder_size": "b0"}
    groups = {"model": config.model, "method": config.method}
    few = {key: value for key, value in least.items() if hasattr(groups[key.split(".")[0]], key.split(".")[1])}
    config = changed_config(config, few)
    spec = data_facts(config.data, assume=True).spec
    batch = abstract_on(mesh_of(1), spec, config.data.batch_size)
    program = build(config, num_train=10**6, num_classes=10, sample=batch, mesh=mesh_of(1))
    assert dead_parameters(program, batch) == []
