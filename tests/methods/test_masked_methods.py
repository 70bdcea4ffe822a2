"""I-JEPA, hierarchical JEPA and MAE: sizes, costs, targets, and what must not change a result."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jepa_jax.compiled.flops import count_flops
from jepa_jax.losses.jepa import prediction_loss, smooth_l1, standardised
from jepa_jax.methods.hjepa import level_side, resample
from jepa_jax.methods.masking import BlockMasks
from jepa_jax.models.pooling import area_weights
from jepa_jax.models.positions import sincos_positions
from jepa_jax.models.tokens import patchify, unpatchify
from jepa_jax.program.config import changed_config, load_config
from jepa_jax.program.describe import describe
from tests.arrays import normal
from tests.stepping import BATCH, IMAGES, STILL, assert_close, build_program, model_of
from tests.tiny import tiny_masked_config

FAST = {"optim__warmup_lr": 1e-2}  # weights move from the first step; one program for all tests that take it


@functools.cache
def described_as(name, token_dropping):
    return describe(load_config(name, {"method.token_dropping": token_dropping}))


@pytest.mark.parametrize(
    "name, total, trainable",
    [
        pytest.param("hjepa_quick_val", 12_051_264, 6_526_848, marks=pytest.mark.slow),
        pytest.param("hjepa_20epoch", 12_940_992, 7_416_576, marks=pytest.mark.slow),
        pytest.param("hjepa_100epoch", 54_573_312, 32_907_648, marks=pytest.mark.slow),
    ],
)
def test_parameters_of_the_published_hierarchies(name, total, trainable):
    described = described_as(name, True)
    assert (described["params_total"], described["params_trainable"]) == (total, trainable)


@pytest.mark.slow
def test_dropping_tokens_saves_two_fifths_of_the_operations():
    dropped, kept = (described_as("hjepa_quick_val", dropping)["flops_per_image"] for dropping in (True, False))
    assert dropped <= 0.6 * kept


@pytest.mark.parametrize(
    "method", [pytest.param("ijepa", marks=pytest.mark.slow), pytest.param("hjepa", marks=pytest.mark.slow), "mae"]
)
def test_the_features_of_an_image_do_not_depend_on_the_others(method):
    program = build_program(tiny_masked_config(method))
    model = model_of(program)

    @nnx.jit
    def read(model, images):
        levels = [program.method.features(model, {"image": images}, level=n) for n in range(program.method.levels)]
        return [*levels, program.method.feature_map(model, {"image": images})]

    some, others = read(model, IMAGES), read(model, np.concatenate([IMAGES[:1], 255 - IMAGES[1:]]))
    assert some[-1].shape == (16, 8, 8, 16)
    for one, other in zip(some, others, strict=True):
        np.testing.assert_allclose(one[0], other[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["ijepa", pytest.param("hjepa", marks=pytest.mark.slow), "mae"])
def test_the_slow_copy_follows_the_updated_weights_and_random_masks_compile_one_step(method):
    program = build_program(tiny_masked_config(method, **FAST))
    state = program.factory.create(0, BATCH)
    copied = {name: state.params["model"][name] for name in program.method.ema.modules}
    jax.tree.map(np.testing.assert_array_equal, state.target, copied)
    before = jax.device_get(state.target)
    after, metrics = program.train_step(state, BATCH)
    momentum = float(metrics["ema_momentum"])
    assert momentum == pytest.approx(0.1 if method == "mae" else program.method.config.ema_start)
    new = {name: after.params["model"][name] for name in after.target}
    expected = jax.tree.map(lambda old, online: momentum * old + (1 - momentum) * online, before, new)
    assert_close(after.target, expected, rtol=1e-5)
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after.target), strict=True))
    for _ in range(10):
        after, metrics = program.train_step(after, BATCH)
    assert program.train_step._cache_size() == 1 and np.isfinite(metrics["loss"])


def test_hidden_patches_are_never_seen_by_the_encoder():
    program = build_program(tiny_masked_config("ijepa"))
    model, keep = model_of(program), jnp.array([[0, 9, 63]])
    image = jnp.asarray(IMAGES[:1], jnp.float32)

    def outputs(x):
        return jnp.sum(model.encoder.encode(model.encoder.embed(x, keep))[:, model.encoder.num_cls :] ** 2)

    seen = jax.jit(jax.grad(outputs))(image)
    touched = np.abs(np.asarray(patchify(seen, 2))[0]).sum(axis=-1) > 0
    assert list(np.flatnonzero(touched)) == [0, 9, 63]


def test_without_dropping_the_same_patches_come_out_and_the_hidden_ones_are_zeros():
    program = build_program(tiny_masked_config("hjepa", method__token_dropping=False))
    model, keep = model_of(program), jnp.array([[5, 1]])
    view = jnp.asarray(IMAGES[:1], jnp.float32) / 255
    changed = view.at[:, 8:].set(0.0)  # patches 32 and on: none of those that are kept
    context = nnx.jit(program.method._context)
    outputs = [context(model.encoder, image, keep) for image in (view, changed)]
    assert outputs[0].shape == (1, 2, 16)
    np.testing.assert_array_equal(outputs[0], outputs[1])


def test_a_level_is_an_area_of_the_image():
    cells = jnp.arange(16.0).reshape(1, 16, 1)  # 4 x 4, row by row
    np.testing.assert_allclose(resample(cells, 4, 2)[0, :, 0], [2.5, 4.5, 10.5, 12.5])
    np.testing.assert_allclose(resample(cells, 4, 1)[0, :, 0], [7.5])
    np.testing.assert_allclose(resample(resample(cells, 4, 2), 2, 4)[0, :, 0].reshape(4, 4)[0], [2.5, 2.5, 4.5, 4.5])
    assert [level_side(14, level) for level in range(4)] == [14, 7, 4, 2]
    weights = area_weights(14, 4)  # intervals of 3.5 patches
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(weights[0, :5] * 3.5, [1, 1, 1, 0.5, 0], atol=1e-6)
    np.testing.assert_allclose(weights, weights[::-1, ::-1], atol=1e-7)


@pytest.mark.slow
def test_the_features_of_a_level_do_not_depend_on_the_basis_of_the_predictor():
    program = build_program(tiny_masked_config("hjepa"))
    model, changed = model_of(program), model_of(program)
    basis = np.eye(16) + 0.5 * np.random.default_rng(0).normal(size=(16, 16))
    out = changed.predictor.out
    out.kernel[...], out.bias[...] = out.kernel[...] @ basis, out.bias[...] @ basis
    for head in changed.hierarchy.heads:
        head.linear.kernel[...] = np.linalg.inv(basis) @ head.linear.kernel[...]

    def read(model, images):
        levels = [program.method.features(model, {"image": images}, level=level) for level in range(3)]
        return program.method.loss(model, model, {"image": images}, jax.random.key(0), jnp.int32(0)).loss, levels

    (loss, features), (changed_loss, changed_features) = (nnx.jit(read)(m, IMAGES) for m in (model, changed))
    assert float(changed_loss) == pytest.approx(float(loss), rel=1e-3)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), changed_features, features)
    # Cells of a level are standardised after they were averaged, which no map of the features below can undo.
    assert not np.allclose(features[1], features[2], atol=1e-2)


@pytest.mark.parametrize("method", ["ijepa", pytest.param("hjepa", marks=pytest.mark.slow)])
def test_several_masks_share_one_pass_of_the_target(method):
    def step(masks):
        program = build_program(tiny_masked_config(method, method__masks_per_image=masks))
        model = nnx.eval_shape(lambda: program.method.init(jax.random.key(0), {"image": jnp.asarray(IMAGES)}))
        graphdef, state = nnx.split(model)

        def loss(state, images):
            model = nnx.merge(graphdef, state)
            return program.method.loss(model, model, {"image": images}, jax.random.key(0), jnp.int32(0)).loss

        def target(state, images):
            return nnx.merge(graphdef, state).encoder.patches(images)

        view = jax.ShapeDtypeStruct(IMAGES.shape, jnp.float32)
        return count_flops(loss, state, jnp.asarray(IMAGES)), count_flops(target, state, view)

    (one, target), (two, _), (three, _) = map(step, (1, 2, 3))
    assert three - two == two - one  # what a mask costs
    assert 0.95 * target < one - (two - one) < 1.6 * target  # what it does not: the target, and making the view


@dataclasses.dataclass(frozen=True)
class RepeatedMasks(BlockMasks):
    """Gives each image the same mask several times."""

    copies: int = 1

    def sample(self, key, batch):
        masks = super().sample(key, batch // self.copies)
        return jax.tree.map(lambda index: jnp.repeat(index, self.copies, axis=0), masks)


@pytest.mark.parametrize("method", ["ijepa", pytest.param("hjepa", marks=pytest.mark.slow)])
def test_equal_masks_of_an_image_give_the_loss_of_one(method):
    def loss(copies):
        program = build_program(tiny_masked_config(method, method__masks_per_image=copies))
        program.method.masks = RepeatedMasks(**vars(program.method.masks), copies=copies)
        step, model = nnx.jit(program.method.loss), model_of(program)
        return float(step(model, model, {"image": IMAGES}, jax.random.key(0), jnp.int32(0)).loss)

    assert loss(3) == pytest.approx(loss(1), rel=1e-5)


@pytest.mark.parametrize("fusion", ["none", "add", "concat"])
def test_fusion_carries_coarse_levels_down(fusion):
    program = build_program(tiny_masked_config("hjepa", method__fusion=fusion))
    hierarchy = model_of(program).hierarchy

    def finest_corner(patches):
        return jnp.sum(hierarchy(patches)[0][:, 0] ** 2)

    gradient = jax.jit(jax.grad(finest_corner))(normal(0, (1, 64, 16)))
    reach = np.abs(np.asarray(gradient)[0]).sum(axis=-1).reshape(8, 8) > 0
    # Three levels: a cell of the coarsest one covers 4 x 4 patches.
    expected = np.zeros((8, 8), bool)
    expected[: 1 if fusion == "none" else 4, : 1 if fusion == "none" else 4] = True
    np.testing.assert_array_equal(reach, expected)


@pytest.mark.slow
def test_the_regulariser_compares_an_image_with_itself():
    # Images of one colour each: two masks of one of them look alike, two of them do not.
    config = changed_config(tiny_masked_config("hjepa", method__regulariser="vicreg"), STILL)
    colours = np.random.default_rng(0).integers(0, 256, (16, 1, 1, 3), np.uint8)
    flat = np.broadcast_to(colours, IMAGES.shape)
    program = build_program(config)
    model = model_of(program)
    output = nnx.jit(program.method.loss)(model, model, {"image": flat}, jax.random.key(0), jnp.int32(0))
    between_images = 2 * jnp.mean(jnp.var(output.features, axis=0))  # what pairs of different images would give
    assert output.terms["invariance"] < 0.1 * between_images


def test_the_loss_of_tokens():
    np.testing.assert_allclose(smooth_l1(jnp.array([0.5, -0.5, 3.0])), [0.125, 0.125, 2.5])
    tokens = standardised(jnp.array([[1.0, 2.0, 3.0], [-5.0, 0.0, 5.0]]))
    np.testing.assert_allclose(tokens[0], np.array([-1, 0, 1]) * np.sqrt(1.5), rtol=1e-5)
    np.testing.assert_allclose(tokens[0], tokens[1], rtol=1e-5)
    predicted, target = jnp.zeros((1, 2, 3)), jnp.stack([jnp.ones(3), 3 * jnp.ones(3)])[None]
    assert prediction_loss(predicted, target) == pytest.approx((0.5 + 2.5) / 2)
    assert prediction_loss(predicted, target, jnp.array([[3.0, 1.0]])) == pytest.approx((3 * 0.5 + 2.5) / 4)


@pytest.mark.parametrize("norm_pix", [False, True])
def test_reconstructions_keep_what_was_visible(norm_pix):
    program = build_program(tiny_masked_config("mae", method__norm_pix=norm_pix, method__mask_ratio=0.75))
    view, masked, painted = nnx.jit(program.method.pictures)(model_of(program), {"image": IMAGES}, jax.random.key(1))
    shown = np.any(np.asarray(patchify(masked, 2)) != 0, axis=-1)  # [B, tokens]
    assert np.all(shown.sum(axis=1) == 16)  # a quarter of 64
    np.testing.assert_array_equal(np.asarray(patchify(view, 2))[shown], np.asarray(patchify(painted, 2))[shown])
    assert not np.allclose(np.asarray(patchify(view, 2))[~shown], np.asarray(patchify(painted, 2))[~shown])


@pytest.mark.slow
def test_the_cls_output_of_an_autoencoder_is_trained():
    program = build_program(tiny_masked_config("mae", model__pool="cls"))
    state = program.factory.create(0, BATCH)
    params = state.params["model"]
    # Without attention in the encoder, the CLS token reaches nothing but its own output.
    mixing = params["encoder"]["blocks"][0]["attention"]["out"]
    mixing.update(kernel=jnp.zeros_like(mixing["kernel"]))

    def loss(params):
        model = program.factory.merge(params, state.stats)
        return program.method.loss(model, None, {"image": jnp.asarray(IMAGES)}, jax.random.key(0), jnp.int32(0)).loss

    gradient = jax.jit(jax.grad(loss))(params)["encoder"]
    assert jnp.any(gradient["cls_token"]) and jnp.any(gradient["position"][:, 0])


@pytest.mark.parametrize(
    "method, options, evaluated",
    [
        ("ijepa", dict(eval__weights="target", eval__pool="grid2"), "target"),
        ("ijepa", dict(eval__weights="online"), None),
        ("ijepa", dict(eval__weights="online", method__target="online"), "model"),
        ("hjepa", dict(eval__weights="target"), "target"),
        ("hjepa", dict(eval__weights="online"), None),
        ("mae", dict(eval__weights="online"), None),
        ("mae", dict(eval__weights="target"), None),
    ],
)
def test_the_online_probe_reads_what_is_evaluated_or_nothing(method, options, evaluated):
    config = changed_config(tiny_masked_config(method, **options), STILL)
    program = build_program(config)
    models = {"model": model_of(program, 0), "target": model_of(program, 1)}

    def read(model, target, images):
        return program.method.loss(model, target, {"image": images}, jax.random.key(0), jnp.int32(0)).features

    if evaluated is None:
        assert nnx.eval_shape(read, models["model"], models["target"], jnp.asarray(IMAGES)) is None
    else:
        features = nnx.jit(program.method.features)(models[evaluated], {"image": IMAGES})
        seen = nnx.jit(read)(models["model"], models["target"], IMAGES)
        np.testing.assert_allclose(seen, features, rtol=1e-4, atol=1e-5)


def test_patches_come_back_in_place_and_positions_are_distinct():
    images = jnp.asarray(IMAGES, jnp.float32)
    np.testing.assert_array_equal(unpatchify(patchify(images, 4), 4), images)
    positions = sincos_positions(8, 16)
    assert positions.shape == (64, 16)
    distances = np.linalg.norm(positions[:, None] - positions[None], axis=-1)
    assert distances[~np.eye(64, dtype=bool)].min() > 0.1
