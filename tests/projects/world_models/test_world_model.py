"""What a run of a world model leaves, and what its loaded model does."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jepa_jax
from jepa_jax.base.errors import UserError
from jepa_jax.methods.contract import build_method
from jepa_jax.projects.world_models.networks.causal import CausalPredictor
from jepa_jax.projects.world_models.sources.two_rooms import TwoRooms
from jepa_jax.reports.run_report import write_report
from jepa_jax.training.run import train
from tests.arrays import create
from tests.program.test_devices import check_devices
from tests.projects.world_models.rooms import rooms_config, rooms_data
from tests.runs import Killed, KillNine, Silent

ROOT = pathlib.Path(__file__).parents[3]
BASELINES = ("random", "straight", "true_dynamics", "shuffled", "untrained")


def test_a_run_states_success_beside_all_baselines(rooms_run):
    _, summary = rooms_run
    assert summary["failed_evaluators"] == {} and summary["episodes"] == 4
    assert all(0 <= summary[f"{name}success_rate"] <= 100 for name in ("", *(f"{one}_" for one in BASELINES)))
    low, high = summary["success_interval"]
    assert low <= summary["success_rate"] <= high
    for name in ("model", "encoded", "copy_last", "other_actions", "untrained"):
        assert len(summary[f"{name}_position_errors"]) == 4


def test_the_report_shows_paths_energies_and_predictions(rooms_run):
    workdir, _ = rooms_run
    write_report(workdir)
    page = (workdir / "report.html").read_text()
    titles = ("Success on held-out tasks", "Error of positions", "Success by length", "Energy of all positions",
              "Best episodes", "Worst episodes", "Decoded predictions", "first plan")  # fmt: skip
    assert [title for title in titles if title not in page] == []
    assert "cannot be shown" not in page
    assert (workdir / "exhibits" / "predicted_states.gif").read_bytes()[:4] == b"GIF8"


def test_the_lines_of_the_readme_run(rooms_run, monkeypatch):
    workdir, _ = rooms_run
    readme = (ROOT / "README.md").read_text()
    (block,) = (text for text in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "load_world_model" in text)
    names: dict = {}
    exec(block.replace("runs/two_rooms_cpu", str(workdir)), names)
    assert names["plan"].actions.shape == (8, 3, 2) and names["latents"].shape == (8, 8)
    assert (names["model"].energy(names["plan"].latents, names["goal"]) >= 0).all()


def test_the_lines_of_the_guide_run(rooms_run, monkeypatch, tmp_path):
    workdir, _ = rooms_run
    monkeypatch.chdir(tmp_path)
    guide = (ROOT / "docs" / "guides" / "world_models.md").read_text()
    block, _ = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    batch = TwoRooms(rooms_data(), "test").batch(np.arange(4))
    names = {"jepa_jax": jepa_jax, "frames": batch["frames"][:, 0], "goals": batch["frames"][:, -1]}
    names["actions"] = batch["actions"][:, :3]
    exec(block.replace("runs/two_rooms_cpu", str(workdir)), names)
    assert names["energies"].shape == (4,) and len(list((tmp_path / "exported").iterdir())) >= 2


def test_rollouts_are_repeated_predictions_and_exported_ones_are_the_same(rooms_run, tmp_path):
    workdir, _ = rooms_run
    model = jepa_jax.load_world_model(workdir)
    batch = TwoRooms(rooms_data(), "test").batch(np.arange(5))
    latents, actions = model.encode(batch["frames"][:, 0]), batch["actions"][:, :3]
    together, one = model.rollout(latents, actions), latents
    for t in range(3):
        one = model.rollout(one, actions[:, t : t + 1])[:, 0]
        np.testing.assert_allclose(one, together[:, t], atol=1e-5)
    files = {path.stem: jax.export.deserialize(bytearray(path.read_bytes())) for path in model.export(tmp_path)}
    np.testing.assert_allclose(files["encode"].call(batch["frames"][:, 0]), latents, atol=1e-5)
    np.testing.assert_allclose(files["rollout"].call(latents[:, None], actions), together, atol=1e-5)


def test_what_does_not_fit_is_named(rooms_run):
    model = jepa_jax.load_world_model(rooms_run[0])
    with pytest.raises(UserError, match=r"frames: .*\[N, 33, 33, 2\]"):
        model.encode(np.zeros((1, 65, 65, 2), np.uint8))
    with pytest.raises(UserError, match="actions"):
        model.rollout(np.zeros((1, 8)), np.zeros((1, 3, 5)))


def loss_of(**changes):
    """Returns the terms of the loss of a batch, and the gradient."""
    method = build_method(rooms_config(**changes), total_steps=10)
    batch = {name: jnp.asarray(array) for name, array in TwoRooms(rooms_data(), "train").batch(np.arange(8)).items()}
    graph, params, rest = nnx.split(method.init(jax.random.key(0), batch), nnx.Param, ...)

    def loss(params):
        output = method.loss(nnx.merge(graph, params, rest, copy=True), None, batch, jax.random.key(1), jnp.int32(0))
        return output.loss, output.terms

    (value, terms), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return float(value), {name: float(term) for name, term in terms.items()}, nnx.to_pure_dict(gradient)


WEIGHTS = {"prediction": 1.0, "variance": 16.0, "covariance": 8.0, "similarity": 12.0, "inverse_dynamics": 1.0}


def test_the_loss_is_the_weighted_sum_of_its_terms_and_a_weight_of_zero_removes_one():
    given = {f"method__loss__{name}": weight for name, weight in WEIGHTS.items()}
    value, terms, _ = loss_of(**given)
    assert terms.keys() == WEIGHTS.keys()
    assert value == pytest.approx(sum(WEIGHTS[name] * term for name, term in terms.items()), rel=1e-5)
    gone = {f"method__loss__{name}": 0.0 for name in WEIGHTS if name != "prediction"}
    value, terms, gradient = loss_of(
        **gone | {"method__loss__prediction": 1.0, "method__loss__sigreg": 0.09, "method__loss__slices": 32}
    )
    assert terms.keys() == {"prediction", "sigreg"} and "inverse" not in gradient
    assert value == pytest.approx(terms["prediction"] + 0.09 * terms["sigreg"], rel=1e-5)


@pytest.mark.parametrize("memory", [1, 3])
def test_a_causal_prediction_depends_on_no_later_latent_or_action(memory):
    sizes = dict(memory=memory, depth=2, heads=2, head_width=4, mlp_width=16)
    predictor = create(lambda: CausalPredictor(8, 2, **sizes, rngs=nnx.Rngs(params=0)))
    for block in predictor.blocks:  # which start as the identity
        block.modulation.kernel[...] = jax.random.normal(jax.random.key(1), block.modulation.kernel.shape)
    latents, actions = jax.random.normal(jax.random.key(2), (2, memory, 8)), jnp.ones((2, memory, 2))
    predict = nnx.jit(lambda predictor, latents, actions: predictor(latents, actions))
    whole = predict(predictor, latents, actions)
    for t in range(memory):
        part = predict(predictor, latents[:, : t + 1], actions[:, : t + 1])
        np.testing.assert_allclose(part, whole[:, : t + 1], atol=1e-5)
    changed = predict(predictor, latents, actions.at[:, -1].set(-1))
    assert jnp.abs(changed - whole)[:, -1].max() > 1e-3 and jnp.abs(changed - whole)[:, :-1].max(initial=0) < 1e-6


def test_a_rollout_of_a_causal_predictor_sees_its_own_last_outputs():
    config = rooms_config(
        method__predictor="causal", method__memory=2, method__depth=1, method__heads=2, method__head_width=4,
        method__mlp_width=16, method__dropout=0.0, method__unroll=0,
    )  # fmt: skip
    method = build_method(config, total_steps=10)
    batch = TwoRooms(rooms_data(), "train").batch(np.arange(4))
    model = create(lambda: method.init(jax.random.key(0), batch))
    model.predictor.blocks[0].modulation.kernel[...] += 0.1

    @nnx.jit
    def rolled(model, actions):
        known = latents = model.encode(method.scaled(batch["frames"]))[:, :1]
        for t in range(4):
            window = slice(max(0, t - 1), t + 1)
            known = jnp.concatenate([known, model.predict(known[:, window], actions[:, window])[:, -1:]], axis=1)
        return model.rollout(latents, actions[:, :4]), known[:, 1:]

    np.testing.assert_allclose(*rolled(model, jnp.asarray(batch["actions"])), atol=1e-5)


@pytest.mark.slow
def test_eight_devices_give_the_loss_and_gradients_of_one():
    # Without strips: batch norm divides the rounding of those that a small batch has all alike by nearly nothing.
    config = rooms_config(data__batch_size=16, model__strips=0, method__loss__sigreg=0.1, method__loss__slices=16)
    check_devices(config, TwoRooms(config.data, "train").batch(np.arange(16)), 0, 2, 4)


@pytest.mark.slow
def test_a_run_resumes_exactly(tmp_path):
    config = rooms_config(
        train__max_steps=0, optim__epochs=2.0, train__checkpoint_every_steps=2, method__control__environment="",
        eval__untrained=False,
    )  # fmt: skip
    whole = train(config, tmp_path / "whole", console=Silent())
    with pytest.raises(KillNine):
        train(config, tmp_path / "cut", console=Killed(5))
    assert train(config, tmp_path / "cut", console=Silent())["params_sha256"] == whole["params_sha256"]
