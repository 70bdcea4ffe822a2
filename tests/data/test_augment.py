"""Each operation against a slow numpy version written from torchvision's definition, and the draws against its laws."""

import colorsys
import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from PIL import Image
from scipy import stats

from jepa_jax.config.augment import AugmentConfig, CropConfig, FlipConfig, Operations
from jepa_jax.data import augment

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
OPERATIONS = ("crop", "flip", "jitter", "grayscale", "solarize", "blur")
TOLERANCE = 1e-5  # in 0..1 units


def config_of(**probabilities):
    """The reference augmentation of CIFAR-10 with every operation off but those given a probability."""
    operations = {name: getattr(AugmentConfig(), name) for name in OPERATIONS}
    return AugmentConfig(
        **{name: replace(group, probability=probabilities.get(name, 0.0)) for name, group in operations.items()},
        mean=MEAN,
        std=STD,
    )


def random_images(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def planes_of(images):
    """[B, H, W, C] in 0..1 -> planes in 0..255, as the library holds them."""
    return tuple(jnp.asarray(255 * images[..., channel], jnp.float32) for channel in range(images.shape[-1]))


def images_of(planes):
    return np.stack([np.asarray(plane) for plane in planes], axis=-1) / 255


def views_of(*args, **kwargs):
    """Views before normalisation, in 0..1."""
    make = jax.jit(lambda key, images: augment.augment_views(key, images, *args, **kwargs))
    return np.asarray(make(KEY, IMAGES)) * STD + MEAN


def uniform(seed, *shape):
    return np.random.default_rng(seed).random(shape, np.float32)


KEY = jax.random.key(7)
IMAGES = random_images(64, 8, 8, 3)
UNIT = IMAGES / 255.0
ALL = config_of(crop=0.9, flip=0.5, jitter=0.8, grayscale=0.5, solarize=0.5, blur=0.5)
make_all = jax.jit(lambda key, images: augment.augment_views(key, images, ALL, 2))


# --- the slow reference, one image [H, W, 3] of floats in 0..1 at a time ---


def slow_grey(image):
    return 0.2989 * image[..., 0] + 0.587 * image[..., 1] + 0.114 * image[..., 2]


def slow_blend(image, base, factor):
    return np.clip(factor * image + (1 - factor) * base, 0, 1)


def slow_hue(image, turns):
    out = np.empty_like(image)
    for index in np.ndindex(image.shape[:2]):
        hue, saturation, value = colorsys.rgb_to_hsv(*image[index])
        out[index] = colorsys.hsv_to_rgb((hue + turns) % 1.0, saturation, value)
    return out


def slow_jitter(image, order, factors, turns):
    for operation in order:
        if operation == augment.BRIGHTNESS:
            image = slow_blend(image, 0.0, factors[0])
        elif operation == augment.CONTRAST:
            image = slow_blend(image, slow_grey(image).mean(), factors[1])
        elif operation == augment.SATURATION:
            image = slow_blend(image, slow_grey(image)[..., None], factors[2])
        else:
            image = slow_hue(image, turns)
    return image


def slow_resize_axis(image, out_size):
    """Antialiased bilinear resize of axis 0, the taps of each output pixel found as in PIL's ImagingResample."""
    in_size = image.shape[0]
    scale = in_size / out_size
    support = max(scale, 1.0)
    out = []
    for index in range(out_size):
        centre = (index + 0.5) * scale
        first, last = max(int(centre - support + 0.5), 0), min(int(centre + support + 0.5), in_size)
        weights = [max(0.0, 1 - abs((tap + 0.5 - centre) / support)) for tap in range(first, last)]
        out.append(sum(w * image[tap] for w, tap in zip(weights, range(first, last), strict=True)) / sum(weights))
    return np.stack(out)


def slow_crop(image, top, left, height, width, out_height, out_width):
    box = image[top : top + height, left : left + width]
    return slow_resize_axis(slow_resize_axis(box, out_height).swapaxes(0, 1), out_width).swapaxes(0, 1)


def slow_blur(image, sigma, kernel_height, kernel_width):
    def kernel(size):
        weights = np.exp(-0.5 * (np.arange(-(size // 2), size // 2 + 1) / sigma) ** 2)
        return weights / weights.sum()

    window = np.outer(kernel(kernel_height), kernel(kernel_width))[..., None]
    half_height, half_width = kernel_height // 2, kernel_width // 2
    padded = np.pad(image, ((half_height, half_height), (half_width, half_width), (0, 0)), mode="reflect")
    out = np.empty_like(image)
    for row, column in np.ndindex(image.shape[:2]):
        out[row, column] = (window * padded[row : row + kernel_height, column : column + kernel_width]).sum((0, 1))
    return out


def slow_box(rng, height, width, scale, ratio):
    """torchvision's RandomResizedCrop.get_params."""
    for _ in range(10):
        area = height * width * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        box_width, box_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < box_width <= width and 0 < box_height <= height:
            return rng.integers(height - box_height + 1), rng.integers(width - box_width + 1), box_height, box_width
    if width / height < ratio[0]:
        box_width, box_height = width, round(width / ratio[0])
    elif width / height > ratio[1]:
        box_height, box_width = height, round(height * ratio[1])
    else:
        box_height, box_width = height, width
    return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width


# --- crop ---


def random_boxes(count, height, width, seed):
    rng = np.random.default_rng(seed)
    return [slow_box(rng, height, width, (0.05, 1.0), (0.5, 2.0)) for _ in range(count)]


def fast_crop(images, boxes, mirrored, size):
    """One box per image, out in 0..1."""
    boxes = augment.Boxes(*np.array(boxes).T)
    rows = images.astype(np.float32).swapaxes(2, 3)
    resize = jax.jit(augment.resize_boxes, static_argnums=(3, 4))
    return np.asarray(resize(rows, boxes, mirrored, *size)).swapaxes(2, 3) / 255


@pytest.mark.parametrize("size", [(16, 12), (5, 7), (24, 24)])
def test_crop_equals_the_slow_reference(size):
    images = random_images(12, 16, 12, 3)
    boxes = [*random_boxes(11, 16, 12, seed=1), (0, 0, 16, 12)]
    mirrored = np.arange(12) % 3 == 0
    views = fast_crop(images, boxes, mirrored, size)
    for image, box, flip, view in zip(images / 255.0, boxes, mirrored, views, strict=True):
        expected = slow_crop(image, *box, *size)
        np.testing.assert_allclose(view, expected[:, ::-1] if flip else expected, atol=TOLERANCE)


@pytest.mark.parametrize("size", [8, 32, 48])
def test_crop_equals_pil_up_to_its_rounding(size):
    images = random_images(8, 32, 32, 3, seed=3)
    boxes = random_boxes(8, 32, 32, seed=4)
    views = fast_crop(images, boxes, np.zeros(8, bool), (size, size))
    for image, (top, left, height, width), view in zip(images, boxes, views, strict=True):
        cropped = Image.fromarray(image).crop((left, top, left + width, top + height))
        expected = np.asarray(cropped.resize((size, size), Image.Resampling.BILINEAR), np.float64)
        assert np.abs(255 * view - expected).max() <= 1.01  # PIL rounds to whole levels after each of its two passes


def test_the_whole_image_as_box_is_the_identity():
    views = fast_crop(IMAGES, [(0, 0, 8, 8)] * 64, np.zeros(64, bool), (8, 8))
    np.testing.assert_array_equal((255 * views).round(3), IMAGES)


@pytest.mark.parametrize("height, width, scale", [(32, 32, (0.2, 1.0)), (24, 96, (0.3, 1.0)), (32, 32, (0.05, 0.3))])
def test_boxes_follow_the_law_of_torchvision(height, width, scale):
    ratio, count = (3 / 4, 4 / 3), 4000
    rng = np.random.default_rng(0)
    expected = np.array([slow_box(rng, height, width, scale, ratio) for _ in range(count)]).T
    sample = jax.jit(lambda numbers: augment.sample_boxes(numbers, height, width, scale, ratio))
    drawn = np.array(sample(uniform(1, count, 22)))
    for ours, theirs in zip(drawn, expected, strict=True):
        assert stats.ks_2samp(ours, theirs).pvalue > 1e-3
        np.testing.assert_allclose(ours.mean(), theirs.mean(), atol=5 * theirs.std() * math.sqrt(2 / count) + 1e-9)
    # The joint law too: areas and aspects, and the share of central fallbacks.
    for statistic in (lambda b: b[2] * b[3], lambda b: b[3] / b[2], lambda b: b[0] + b[1]):
        assert stats.ks_2samp(statistic(drawn), statistic(expected)).pvalue > 1e-3


def test_boxes_that_never_fit_fall_back_to_the_centre():
    boxes = augment.sample_boxes(uniform(0, 50, 22), 10, 100, (0.9, 1.0), (3 / 4, 4 / 3))
    for field, expected in zip(boxes, (0, 43, 10, 13), strict=True):
        np.testing.assert_array_equal(field, expected)
    assert augment.central_box(100, 10, (3 / 4, 4 / 3)) == (43, 0, 13, 10)
    assert augment.central_box(30, 32, (3 / 4, 4 / 3)) == (0, 0, 30, 32)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31 - 1),
    size=st.sampled_from([(1, 1), (8, 8), (32, 20), (7, 64)]),
    scale=st.tuples(st.floats(1e-3, 1), st.floats(1e-3, 1)).map(sorted),
    ratio=st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)).map(sorted),
)
def test_boxes_are_inside_the_image(seed, size, scale, ratio):
    height, width = size
    box = augment.Boxes(*map(np.asarray, augment.sample_boxes(uniform(seed, 64, 22), *size, scale, ratio)))
    assert (box.top >= 0).all() and (box.left >= 0).all() and (box.height >= 1).all() and (box.width >= 1).all()
    assert (box.top + box.height <= height).all() and (box.left + box.width <= width).all()


# --- colour ---


def test_jitter_equals_the_slow_reference_in_every_order():
    rng = np.random.default_rng(0)
    orders = np.arange(24)
    factors, turns = rng.uniform(0.3, 1.7, (24, 3)), rng.uniform(-0.5, 0.5, 24)
    images = UNIT[:24]
    jitter = augment.Jitter(orders, factors.astype(np.float32), turns.astype(np.float32))
    out = images_of(jax.jit(augment.colour_jitter)(planes_of(images), jitter))
    for index in orders:
        expected = slow_jitter(images[index], augment.JITTER_ORDERS[index], factors[index], turns[index])
        np.testing.assert_allclose(out[index], expected, atol=TOLERANCE)


jitted_hue = jax.jit(augment.shift_hue)


@settings(max_examples=25)
@given(st.lists(st.tuples(*[st.integers(0, 255)] * 3), min_size=4, max_size=4), st.floats(-0.5, 0.5))
def test_hue_equals_colorsys_on_any_colour(colours, turns):
    image = np.array([[(0, 0, 0), (255, 255, 255), (9, 9, 9), (255, 0, 0), (0, 7, 7), (8, 8, 0), *colours]]) / 255.0
    shifted = images_of(jitted_hue(planes_of(image[None]), np.array([turns], np.float32)))[0]
    np.testing.assert_allclose(shifted, slow_hue(image, turns), atol=TOLERANCE)


def test_grayscale_and_solarize_touch_only_the_chosen_images():
    apply = np.arange(64) % 2 == 0
    grey = images_of(augment.grayscale(planes_of(UNIT), jnp.asarray(apply)))
    solar = images_of(augment.solarize(planes_of(UNIT), jnp.asarray(apply), 128))
    expected_grey = np.repeat(slow_grey(UNIT)[..., None], 3, axis=-1)
    expected_solar = np.where(IMAGES >= 128, 255 - IMAGES, IMAGES) / 255
    np.testing.assert_allclose(grey, np.where(apply[:, None, None, None], expected_grey, UNIT), atol=TOLERANCE)
    np.testing.assert_allclose(solar, np.where(apply[:, None, None, None], expected_solar, UNIT), atol=TOLERANCE)


def test_blur_equals_the_slow_reference():
    images = random_images(3, 32, 54, 3) / 255.0
    sigma = np.array([0.1, 0.8, 2.0])
    applied = np.array([True, True, False])
    for taps, (rows, columns) in ((0, (3, 5)), (9, (9, 9))):
        blur = jax.jit(functools.partial(augment.gaussian_blur, taps=taps))
        out = images_of(blur(planes_of(images), sigma.astype(np.float32), applied))
        for index in range(2):
            np.testing.assert_allclose(
                out[index], slow_blur(images[index], sigma[index], rows, columns), atol=TOLERANCE
            )
        np.testing.assert_allclose(out[2], images[2], atol=1e-7)
    assert [augment.blur_kernel_size(size) for size in (8, 32, 54, 96, 224)] == [3, 3, 5, 9, 23]


def test_jitter_draws_are_uniform_in_range_and_order():
    count = 48000
    jitter = augment.sample_jitter(uniform(2, count, 5), config_of().jitter)
    frequency = np.bincount(np.asarray(jitter.order), minlength=24)
    assert len(frequency) == 24 and stats.chisquare(frequency).pvalue > 1e-3
    assert sorted(map(tuple, augment.JITTER_ORDERS.tolist())) == sorted(set(map(tuple, augment.JITTER_ORDERS.tolist())))
    drawn = np.column_stack([jitter.factors, jitter.hue, jitter.order])
    for values, low, high in zip(drawn.T, (0.6, 0.6, 0.8, -0.1), (1.4, 1.4, 1.2, 0.1), strict=False):
        assert stats.kstest(values, stats.uniform(low, high - low).cdf).pvalue > 1e-3
    assert np.abs(np.corrcoef(drawn.T) - np.eye(5)).max() < 5 / math.sqrt(count)  # drawn independently
    strong = replace(config_of().jitter, brightness=1.5)
    assert augment.sample_jitter(uniform(2, 1000, 5), strong).factors.min() >= 0


# --- views ---


def test_all_off_is_normalise_only():
    views = jax.jit(lambda images: augment.augment_views(KEY, images, config_of(), 2))(IMAGES)
    assert views.shape == (2, *IMAGES.shape) and views.dtype == jnp.float32
    expected = (UNIT - MEAN) / STD
    np.testing.assert_allclose(views, [expected, expected], atol=TOLERANCE)
    np.testing.assert_array_equal(views[0], augment.normalise(IMAGES, MEAN, STD))
    np.testing.assert_array_equal(np.round((np.asarray(views[1]) * STD + MEAN) * 255), IMAGES)
    np.testing.assert_allclose(augment.normalise(UNIT.astype(np.float32), MEAN, STD), expected, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["flip", "grayscale", "solarize", "jitter", "blur", "crop"])
def test_one_operation_alone_is_applied_with_its_probability(name):
    probability, num_views = 0.3, 16
    views = views_of(config_of(**{name: probability}), num_views)
    changed = np.abs(views - UNIT).max(axis=(2, 3, 4)) > 1e-4  # [V, B]
    trials = changed.size
    assert abs(changed.mean() - probability) < 4 * math.sqrt(probability * (1 - probability) / trials) + 0.005
    assert not (changed == changed[0]).all() and not (changed.T == changed.T[0]).all()  # views and images draw alone
    expected = {
        "flip": UNIT[:, :, ::-1],
        "grayscale": np.repeat(slow_grey(UNIT)[..., None], 3, axis=-1),
        "solarize": np.where(IMAGES >= 128, 255 - IMAGES, IMAGES) / 255,
    }
    if name in expected:
        view, image = np.nonzero(changed)
        np.testing.assert_allclose(views[view, image], expected[name][image], atol=TOLERANCE)


def test_a_view_is_the_reference_pipeline_on_the_same_draws():
    views = np.asarray(make_all(KEY, IMAGES)) * STD + MEAN
    draws = augment.draw(KEY, (2, 64))
    boxes = augment.sample_boxes(draws["crop"], 8, 8, ALL.crop.scale, ALL.crop.ratio)
    jitter = jax.tree.map(np.asarray, augment.sample_jitter(draws["jitter"], ALL.jitter))
    draws, boxes = jax.tree.map(np.asarray, (draws, boxes))
    for at in np.ndindex(2, 64):
        image = UNIT[at[1]]
        if draws["crop_applied"][at] < 0.9:
            image = slow_crop(image, *(field[at] for field in boxes), 8, 8)
        if draws["jitter_applied"][at] < 0.8:
            image = slow_jitter(image, augment.JITTER_ORDERS[jitter.order[at]], jitter.factors[at], jitter.hue[at])
        if draws["grayscale"][at] < 0.5:
            image = np.repeat(slow_grey(image)[..., None], 3, axis=-1)
        if draws["blur_applied"][at] < 0.5:
            image = slow_blur(image, 0.1 + 1.9 * draws["blur"][at], 3, 3)
        if draws["solarize"][at] < 0.5:
            image = np.where(image >= 128 / 255, 1 - image, image)
        if draws["flip"][at] < 0.5:  # last in the reference; here it is part of the crop
            image = image[:, ::-1]
        np.testing.assert_allclose(views[at], image, atol=TOLERANCE)


def test_views_are_a_function_of_the_key():
    first = make_all(KEY, IMAGES)
    np.testing.assert_array_equal(first, make_all(KEY, IMAGES))
    assert not np.allclose(first, make_all(jax.random.key(8), IMAGES))
    assert not np.allclose(first[0], first[1])


def test_switching_one_operation_leaves_the_draws_of_the_others():
    with_grey = views_of(config_of(flip=0.5, grayscale=0.5), 1)
    without = views_of(config_of(flip=0.5), 1)
    kept = np.abs(with_grey - without).max(axis=(0, 2, 3, 4)) < 1e-6
    assert 0.25 < kept.mean() < 0.75


def test_crop_override_makes_smaller_views():
    unmirrored = FlipConfig(probability=0.0)
    cropped = Operations(crop=CropConfig(size=4, scale=(0.05, 0.3)), flip=unmirrored)
    small = views_of(config_of(), 3, operations=cropped)
    assert small.shape == (3, 64, 4, 4, 3)
    boxes = augment.sample_boxes(augment.draw(KEY, (3, 64))["crop"], 8, 8, (0.05, 0.3), (3 / 4, 4 / 3))
    expected = slow_crop(UNIT[5], *(int(field[2, 5]) for field in boxes), 4, 4)
    np.testing.assert_allclose(small[2, 5], expected, atol=TOLERANCE)
    resized = Operations(crop=CropConfig(probability=0.0, size=4), flip=unmirrored)  # all of it is resized
    whole = views_of(config_of(), 1, operations=resized)
    np.testing.assert_allclose(whole[0, 5], slow_crop(UNIT[5], 0, 0, 8, 8, 4, 4), atol=TOLERANCE)


def test_eight_devices_make_the_views_of_one_without_moving_images():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    by_batch = NamedSharding(mesh, PartitionSpec("data"))
    alone = make_all(KEY, IMAGES)
    compiled = make_all.lower(KEY, jax.device_put(IMAGES, by_batch)).compile()
    spread = compiled(KEY, jax.device_put(IMAGES, by_batch))
    np.testing.assert_allclose(np.asarray(spread) * STD, np.asarray(alone) * STD, rtol=0, atol=1e-6)
    assert spread.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(None, "data")), spread.ndim)
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert collective not in compiled.as_text()


# --- channels ---


def of_channels(channels, **probabilities):
    """The operations that take any number of channels."""
    return replace(config_of(**probabilities), mean=(0.5,) * channels, std=(0.25,) * channels)


PLAIN = {channels: of_channels(channels, crop=0.9, flip=0.5, blur=0.5, solarize=0.5) for channels in (1, 4)}
make_plain = {
    channels: jax.jit(lambda key, images, config=config: augment.augment_views(key, images, config, 2))
    for channels, config in PLAIN.items()
}


@settings(max_examples=5)
@given(seed=st.integers(0, 2**31 - 1))
def test_crop_flip_blur_and_solarize_treat_channels_alike(seed):
    images = random_images(6, 8, 8, 4, seed=seed)
    together, alone = (make_plain[channels](jax.random.key(seed), images[..., :channels]) for channels in (4, 1))
    assert together.shape == (2, 6, 8, 8, 4)
    np.testing.assert_allclose(together[..., :1], alone, atol=TOLERANCE)
    last = make_plain[1](jax.random.key(seed), images[..., 3:])
    np.testing.assert_allclose(together[..., 3:], last, atol=TOLERANCE)


@pytest.mark.parametrize("channels", [1, 4])
def test_brightness_and_contrast_of_other_channels_than_rgb(channels):
    images = random_images(24, 8, 8, channels) / 255.0
    rng = np.random.default_rng(1)
    factors = np.concatenate([rng.uniform(0.3, 1.7, (24, 2)), np.ones((24, 1))], axis=1)
    jitter = augment.Jitter(np.arange(24), factors.astype(np.float32), np.zeros(24, np.float32))
    out = images_of(augment.colour_jitter(planes_of(images), jitter))
    for image, view, order, (brightness, contrast, _) in zip(images, out, augment.JITTER_ORDERS, factors, strict=True):
        for operation in order:
            if operation == augment.BRIGHTNESS:
                image = slow_blend(image, 0.0, brightness)
            elif operation == augment.CONTRAST:
                image = slow_blend(image, image.mean(), contrast)
        np.testing.assert_allclose(view, image, atol=TOLERANCE)
