"""What features are read from: the whole image at a chosen size, or the mean over fixed crops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jepa_jax.base.errors import UserError
from tests.stepping import IMAGES, build_program
from tests.tiny import tiny_config, tiny_masked_config

SQUARE = dict(data__augment__crop__size=0, data__augment__crop__ratio=(1.0, 1.0))
VIT = dict(model__name="vit", model__width=16, model__depth=1, model__heads=2, model__patch_size=4)


def features_of(config, *asked):
    """Returns the features for each pair of images and options of `features`, from one program."""
    program = build_program(config)
    state = program.factory.create(0, {"image": IMAGES})

    @jax.jit
    def compute(params, stats):
        model = program.factory.merge(params, stats)
        return [program.method.features(model, {"image": jnp.asarray(images)}, **options) for images, options in asked]

    return jax.device_get(compute(state.params["model"], state.stats))


@pytest.mark.parametrize("train", [False, True])
def test_crops_that_are_whole_images_give_the_features_of_the_whole_image(train):
    config = tiny_config(eval__crops=3, data__augment__crop__scale=(1.0, 1.0), **SQUARE)
    whole, crops = features_of(config, *((IMAGES, {"level": level, "train": train}) for level in (0, 1)))
    np.testing.assert_allclose(crops, whole, rtol=1e-3, atol=1e-4)


def test_crops_are_those_of_every_image_whatever_batch_it_is_in():
    config = tiny_config(eval__crops=4, data__augment__crop__scale=(0.25, 0.25), **SQUARE)
    crops = {"level": 1}
    one, other, whole = features_of(config, (IMAGES, crops), (IMAGES[::-1], crops), (IMAGES, {}))
    np.testing.assert_allclose(one, other[::-1], rtol=1e-4, atol=1e-5)
    assert np.abs(one - whole).max() > 1e-2


def test_levels_are_named_after_what_they_read():
    method = build_program(tiny_config(eval__crops=4)).method
    assert method.levels == 2 and method.level_names == ("whole image", "mean of 4 crops")
    assert build_program(tiny_config()).method.level_names == ("level 0",)


@pytest.mark.slow
def test_a_vit_is_evaluated_at_the_size_that_is_asked_for():
    """Enlarged first, the image gives the features that it gives when the evaluation enlarges it."""
    at_32 = tiny_config(eval__image_size=32, **VIT)
    constant = np.broadcast_to(IMAGES[:, :1, :1], IMAGES.shape)  # one colour: enlarging it needs no interpolation
    enlarged = np.broadcast_to(IMAGES[:, :1, :1], (len(IMAGES), 32, 32, 3))
    one, other = features_of(at_32, (constant, {}), (enlarged, {}))
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    (at_16,) = features_of(tiny_config(**VIT), (constant, {}))
    assert np.abs(one - at_16).max() > 1e-4


@pytest.mark.parametrize("key, value", [("eval__crops", 4), ("eval__image_size", 32)])
def test_a_hierarchy_is_evaluated_at_its_levels_alone(key, value):
    with pytest.raises(UserError, match=key.replace("__", ".") + ".*H-JEPA is evaluated at its levels"):
        tiny_masked_config("hjepa", **{key: value})


def test_a_size_without_whole_patches_is_named():
    with pytest.raises(UserError, match=r"eval.image_size = 30: is no multiple of model.patch_size = 4"):
        tiny_config(eval__image_size=30, **VIT)
