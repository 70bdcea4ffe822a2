"""Crops of full photographs: where they lie, what they show, and that they depend on seed, epoch and index alone."""

import io

import numpy as np
import pytest
from PIL import Image
from scipy import stats

from jepa_jax.config.augment import CropConfig, Crops
from jepa_jax.data.photos.crops import DRAWS, Box, centre_crop, random_crops, resized, sample_box
from jepa_jax.data.photos.decode import Photo

SAMPLES = 4000
SIZES = [(500, 500), (400, 600), (375, 500)]


def boxes(height, width, crop, count=SAMPLES):
    uniform = np.random.default_rng(0).random((count, DRAWS))
    return np.array([sample_box(numbers, height, width, crop) for numbers in uniform]).T


def first_fitting(height, width, crop, count=SAMPLES):
    """Returns areas (parts of the image) and aspects of RandomResizedCrop, by rejection, in continuous numbers.

    The pair (area, aspect) that the procedure ends with is uniform x log-uniform, given that it fits.
    """
    rng = np.random.default_rng(1)
    area, log_aspect = rng.uniform(*crop.scale, 20 * count), rng.uniform(*np.log(crop.ratio), 20 * count)
    across = np.sqrt(area * height * width * np.exp(log_aspect))
    down = np.sqrt(area * height * width / np.exp(log_aspect))
    fits = (across < width + 0.5) & (down < height + 0.5)
    assert fits.mean() > 0.5  # so that 10 tries fail once in a thousand times at most
    return area[fits][:count], log_aspect[fits][:count]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [(0.08, 1.0), (0.2, 1.0), (0.05, 0.3)])
def test_area_and_aspect_have_the_distribution_of_random_resized_crop(size, scale):
    crop = CropConfig(scale=scale)
    top, left, down, across = boxes(*size, crop)
    area, log_aspect = first_fitting(*size, crop)
    # Whole pixels: noise of half a pixel, far below what 4,000 samples can tell.
    assert stats.ks_2samp(down * across / np.prod(size), area).pvalue > 1e-3
    assert stats.ks_2samp(np.log(across / down), log_aspect).pvalue > 1e-3


@pytest.mark.parametrize("size", SIZES)
def test_positions_are_uniform_over_all_places_where_a_box_fits(size):
    top, left, down, across = boxes(*size, CropConfig(scale=(0.05, 0.5)))
    jitter = np.random.default_rng(2).random((2, SAMPLES))  # a uniform whole number plus this is uniform
    for start, length, whole, add in ((top, down, size[0], jitter[0]), (left, across, size[1], jitter[1])):
        assert (start >= 0).all() and (start + length <= whole).all()
        assert stats.kstest((start + add) / (whole - length + 1), "uniform").pvalue > 1e-3
    assert abs(stats.pearsonr(top / (size[0] - down + 1), left / (size[1] - across + 1))[0]) < 0.06


@pytest.mark.parametrize(
    ("size", "expected"), [((100, 1000), Box(0, 433, 100, 133)), ((1000, 100), Box(433, 0, 133, 100))]
)
def test_a_panorama_in_which_no_box_fits_gives_the_central_one(size, expected):
    crop = CropConfig(scale=(0.9, 1.0), ratio=(0.75, 1.3333))
    assert {Box(*box) for box in boxes(*size, crop, 50).T} == {expected}


def test_the_whole_image_is_a_box():
    crop = CropConfig(scale=(1.0, 1.0), ratio=(1.0, 1.0))
    assert sample_box(np.full(DRAWS, 0.999), 64, 64, crop) == Box(0, 0, 64, 64)


def jpeg(height, width, quality=95):
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (12, 12, 3), np.uint8))
    buffer = io.BytesIO()
    coarse.resize((width, height), Image.Resampling.BICUBIC).save(buffer, format="JPEG", quality=quality)
    return buffer.getvalue()


def crops_of(content, seed=0, scale=(0.2, 1.0), **sizes):
    crops = {name: Crops(count, size, CropConfig(scale=scale)) for name, (count, size) in sizes.items()}
    return random_crops(Photo(content, 3), crops, np.random.default_rng(seed))


@pytest.mark.parametrize("side", [30, 64, 100, 128, 160, 250])
def test_resizing_is_pillows_antialiased_bilinear_to_a_level(side):
    pixels = Photo(jpeg(250, 250), 3).pixels()[:side, :side]
    expected = np.asarray(Image.fromarray(pixels).resize((64, 64), Image.Resampling.BILINEAR)).astype(float)
    assert np.abs(resized(pixels, 64) - expected).mean() < 0.8


def test_resizing_removes_what_is_finer_than_a_pixel():
    """A checkerboard shrunk by any factor from 2 on is grey, as a bilinear filter without antialiasing would not be."""
    board = np.uint8(255) * (np.indices((256, 256)).sum(0) % 2).astype(np.uint8)[..., None]
    for size in (128, 100, 60, 32):
        assert np.abs(resized(board, size)[4:-4, 4:-4] - 127.5).max() < 20


def test_crops_of_a_reduced_decode_show_the_same_as_those_of_the_full_image():
    content = jpeg(1200, 1600)
    reduced = crops_of(content, crops=(3, 64))["crops"]
    png = io.BytesIO()
    Image.open(io.BytesIO(content)).save(png, format="PNG", compress_level=0)  # which cannot be reduced
    full = crops_of(png.getvalue(), crops=(3, 64))["crops"]
    assert np.abs(reduced.astype(float) - full).mean() < 1.5


def test_crops_have_their_sizes_and_several_groups_are_independent():
    made = crops_of(jpeg(300, 400), crops=(2, 48), crops_small=(5, 16))
    assert {name: views.shape for name, views in made.items()} == {
        "crops": (2, 48, 48, 3),
        "crops_small": (5, 16, 16, 3),
    }
    assert len({view.tobytes() for view in made["crops_small"]}) == 5


def test_without_cropping_a_view_is_the_central_square():
    crops = {"crops": Crops(1, 32, CropConfig(probability=0.0))}
    view = random_crops(Photo(jpeg(60, 90), 3), crops, np.random.default_rng(0))["crops"][0]
    assert np.abs(view - centre_crop(Photo(jpeg(60, 90), 3), 32).astype(float)).mean() < 1


def test_evaluation_resizes_the_shorter_side_and_crops_the_centre_as_torchvision_does():
    content = jpeg(120, 160)
    resized_image = Image.open(io.BytesIO(content)).resize((64, 48), Image.Resampling.BILINEAR)
    expected = np.asarray(resized_image.crop((12, 4, 52, 44)))
    np.testing.assert_array_equal(centre_crop(Photo(content, 3), 40, 48), expected)
    np.save(array := io.BytesIO(), np.asarray(Image.open(io.BytesIO(content))))
    assert np.abs(centre_crop(Photo(array.getvalue(), 3), 40, 48) - expected.astype(float)).mean() < 1
