"""`load_predictor`: the probabilities that evaluations read, from histories of any padding, without the data."""

import json

import jax
import numpy as np
import pytest
import scipy.special

from jepa_jax import load_encoder
from jepa_jax.base.errors import UserError
from jepa_jax.data.sources import open_source
from jepa_jax.program.checkpoint import Checkpoints
from jepa_jax.program.restore import restore_state
from jepa_jax.program.step import evaluated_variables
from jepa_jax.projects.wildfire import load_predictor
from jepa_jax.projects.wildfire.evals.predictor import FrozenPredictor
from jepa_jax.runtime.mesh import make_mesh
from tests.evals.untrained_run import write_run
from tests.projects.wildfire.evals.pixel_method import Pixels, context_of, fire_config
from tests.projects.wildfire.tiny import tiny_fire_config
from tests.stepping import mesh_of
from tests.tiny import tiny_config

CONFIG = tiny_fire_config(data__frame_buckets=(3,), data__num_test=11, eval__batch_size=8, train__keep_best="")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that never ended and whose data are gone: there is a checkpoint and no summary."""
    folder = tmp_path_factory.mktemp("predictor") / "run"
    write_run(CONFIG, folder)
    config = json.loads((folder / "config.json").read_text())
    config["data"] |= {"source": "fire_sequences", "dir": str(folder / "absent")}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def predictor(run):
    return load_predictor(run, batch_size=8)


@pytest.fixture(scope="module")
def histories():
    return open_source(CONFIG.data, "test").batch(np.arange(11))


@pytest.fixture(scope="module")
def expected(run):
    test = open_source(CONFIG.data, "test")
    program, state = restore_state(CONFIG, run, make_mesh(1, 1), test.spec)
    scores = FrozenPredictor(CONFIG, program, *evaluated_variables(state, CONFIG.eval.weights)).scores(test)
    return scipy.special.expit(scores)


def test_probabilities_are_those_that_evaluations_read(predictor, histories, expected):
    assert (predictor.image_size, predictor.channels, predictor.max_frames) == (16, 3, 5)
    found = predictor(histories)
    assert found.shape == (11, 16, 16) and found.dtype == np.float32 and found.std() > 0
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert predictor({name: array[:0] for name, array in histories.items()}).shape == (0, 16, 16)


def test_padding_does_not_matter(predictor, histories, expected):
    for index in (0, 5):
        one = {name: array[index : index + 1] for name, array in histories.items()}
        valid = one["valid"][0]
        short = one | {"fire": one["fire"][:, valid], "wind": one["wind"][:, valid]}
        del short["valid"]  # nothing is padding
        longer = {name: np.pad(one[name], ((0, 0), (4, 0), *[(0, 0)] * (one[name].ndim - 2))) for name in ("fire",)}
        longer |= {"wind": np.pad(one["wind"], ((0, 0), (4, 0), (0, 0)), constant_values=0.5)}
        longer |= {"valid": np.pad(one["valid"], ((0, 0), (4, 0))), "static": one["static"]}
        for given in (short, longer):
            np.testing.assert_allclose(predictor(given), expected[index : index + 1], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_best_state_and_its_evaluated_statistics_are_used(tmp_path):
    config = tiny_fire_config(data__validation=0.25, train__keep_best="validation_loss")
    state = write_run(config, tmp_path / "run")
    with Checkpoints(tmp_path / "run" / "best") as best:
        half = jax.tree.map(lambda a: a / 2, state.params)
        best.save(3, type(state)(**vars(state) | {"params": half}), {}, jax.tree.map(lambda a: a + 1, state.stats))
    loaded = load_predictor(tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, loaded.params, half["model"])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b + 1), loaded.stats, state.stats)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fire": np.zeros((11, 5, 8, 8, 1))}, r"fire: has shape .*takes \(11, 5, 16, 16, 1\)"),
        ({"wind": np.full((11, 5, 2), np.nan)}, "wind: has values outside"),
        ({"valid": np.array([[1, 1, 1, 0, 0]] * 11)}, "padding comes first"),
        ({"fire": np.zeros((11, 6, 16, 16, 1)), "wind": np.zeros((11, 6, 2)), "valid": np.ones((11, 6))}, "last 5"),
    ],
)
def test_histories_that_it_cannot_read_are_refused(predictor, histories, change, message):
    with pytest.raises(UserError, match=message):
        predictor(histories | change)


def test_a_missing_array_is_named(predictor, histories):
    with pytest.raises(UserError, match="add an array named wind"):
        predictor({"fire": histories["fire"]})


def test_each_kind_of_run_names_the_loader_that_fits(run, tmp_path):
    with pytest.raises(UserError, match="'emberformer' learns no encoder.*jepa_jax.projects.wildfire.load_predictor"):
        load_encoder(run)
    write_run(tiny_config(), tmp_path / "images")
    with pytest.raises(UserError, match="'image_jepa' predicts no masks; use jepa_jax.load_encoder"):
        load_predictor(tmp_path / "images")


class Padded:
    """A source without its buckets: every history is padded to the longest."""

    classes = ()

    def __init__(self, source):
        self._source, self.spec, self.batch = source, source.spec, source.batch

    def __len__(self):
        return len(self._source)


@pytest.fixture(scope="module")
def built():
    return context_of(fire_config())


def frozen(context, state):
    encoder = context.encoder(state, 0)
    return FrozenPredictor(context.config, context.program, encoder.params, encoder.stats)


def test_buckets_change_no_prediction_and_cost_one_compilation_each(built):
    context, state = built
    predict, traces = frozen(context, state), len(Pixels.traced)
    assert set(context.test.buckets) == {0, 1}
    in_buckets = predict.scores(context.test)
    predict.scores(context.validation)
    assert sorted(Pixels.traced[traces:]) == [4, 12]  # frames
    padded = predict.scores(Padded(context.test))
    np.testing.assert_allclose(in_buckets, padded, rtol=1e-5, atol=1e-6)
    assert len(np.unique(padded.reshape(len(padded), -1), axis=0)) > 20  # an order is there to get wrong


def test_each_element_is_predicted_once(built):
    context, state = built
    seen, counted = [], []

    def note(indices, part):
        seen.extend(indices.tolist())
        return part

    scores = frozen(context, state).scores(context.test, change=note, on_elements=counted.append)
    assert scores.shape == (24, 16, 16) and scores.dtype == np.float32
    assert sorted(seen) == list(range(24)) == list(range(sum(counted)))


def test_one_and_eight_devices_predict_the_same(built):
    context, state = built
    one = frozen(context, state).scores(context.test)
    context, state = context_of(fire_config(), mesh_of(8))
    eight = frozen(context, state).scores(context.test)
    np.testing.assert_allclose(one, eight, rtol=1e-5, atol=1e-6)


def test_a_method_without_masks_is_refused():
    config = tiny_config()
    context, _ = context_of(config)
    with pytest.raises(UserError, match="method.name = 'image_jepa'.*predict"):
        FrozenPredictor(config, context.program, None, None)
