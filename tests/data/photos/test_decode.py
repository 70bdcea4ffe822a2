"""Every kind of image file gives the pixels that a viewer shows."""

import io

import numpy as np
import pytest
from PIL import Image

from jepa_jax.data.photos.decode import Photo

RAMP = np.tile(np.arange(0, 256, 4, dtype=np.uint8), (48, 1))  # [48, 64]


def saved(image, form="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, format=form, **options)
    return buffer.getvalue()


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def test_sixteen_bits_keep_their_upper_eight():
    wide = Image.fromarray(RAMP.astype(np.uint16) * 257)
    for form in ("PNG", "TIFF"):
        np.testing.assert_array_equal(Photo(saved(wide, form), 1).pixels()[..., 0], RAMP)
        np.testing.assert_array_equal(Photo(saved(wide, form), 3).pixels(), np.stack([RAMP] * 3, -1))


def test_floats_in_a_tiff_are_in_0_to_1():
    np.testing.assert_array_equal(
        Photo(saved(Image.fromarray(RAMP.astype(np.float32) / 255), "TIFF"), 1).pixels()[..., 0], RAMP
    )
    with pytest.raises(ValueError, match="floats from 0 to 252; scale them to 0..1"):
        Photo(saved(Image.fromarray(RAMP.astype(np.float32)), "TIFF"), 1).pixels()


def test_cmyk_palette_grey_and_one_bit_become_rgb():
    colours = Image.new("RGB", (64, 48), (200, 40, 90))
    assert np.abs(Photo(saved(colours.convert("CMYK"), "JPEG", quality=95), 3).pixels() - [200.0, 40, 90]).max() < 4
    np.testing.assert_array_equal(Photo(saved(colours.quantize(4)), 3).pixels()[5, 5], [200, 40, 90])
    np.testing.assert_array_equal(Photo(saved(Image.fromarray(RAMP)), 3).pixels(), np.stack([RAMP] * 3, -1))
    assert set(np.unique(Photo(saved(Image.fromarray(RAMP > 100)), 3).pixels())) == {0, 255}


def test_transparent_pixels_are_white():
    image = Image.new("RGBA", (8, 8), (10, 20, 30, 0))
    image.putpixel((0, 0), (10, 20, 30, 255))
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    for content in (saved(image), saved(palette, transparency=1), saved(image.convert("LA"))):
        np.testing.assert_array_equal(Photo(content, 3).pixels()[4, 4], [255, 255, 255])
    np.testing.assert_array_equal(Photo(saved(image), 3).pixels()[0, 0], [10, 20, 30])
    np.testing.assert_array_equal(Photo(saved(image), 4).pixels()[4, 4, 3], 0)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_rotation_that_exif_asks_for_is_carried_out(orientation):
    """The stored image is what a camera held in that way writes of the upright one."""
    upright = np.zeros((32, 48, 3), np.uint8)
    upright[:8, :16] = 255  # upper left
    written = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.swapaxes(0, 1),
        6: np.rot90(upright),
        7: upright[::-1, ::-1].swapaxes(0, 1),
        8: np.rot90(upright, -1),
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = Image.fromarray(np.ascontiguousarray(written[orientation]))
    photo = Photo(saved(stored, exif=exif), 3)
    assert photo.size == (32, 48)
    np.testing.assert_array_equal(photo.pixels(), upright)


def test_jpeg_is_decoded_at_a_fraction_of_its_size_where_that_suffices():
    content = saved(Image.fromarray(RAMP).convert("RGB").resize((640, 480)), "JPEG", quality=95)
    full = Photo(content, 3).pixels()
    for most, factor in ((1.9, 1), (2.0, 2), (3.9, 2), (4, 4), (100, 8)):
        small = Photo(content, 3).pixels(most)
        assert small.shape == (480 // factor, 640 // factor, 3)
        means = full.reshape(480 // factor, factor, 640 // factor, factor, 3).mean(axis=(1, 3))
        assert np.abs(small - means).mean() < 1
    assert Photo(saved(Image.fromarray(RAMP)), 3).pixels(8).shape == (48, 64, 3)  # PNG cannot


def test_a_truncated_file_is_an_error_and_not_a_grey_picture():
    content = saved(Image.fromarray(RAMP).convert("RGB").resize((640, 480)), "JPEG")
    with pytest.raises(OSError, match="truncated"):
        Photo(content[: len(content) // 2], 3).pixels()


def test_arrays_have_any_number_of_channels():
    bands = np.random.default_rng(0).integers(0, 256, (20, 30, 6), np.uint8)
    np.testing.assert_array_equal(Photo(npy(bands), 6).pixels(), bands)
    np.testing.assert_array_equal(Photo(npy(bands.astype(np.uint16) * 256), 6).pixels(), bands)
    np.testing.assert_array_equal(Photo(npy(bands.astype(np.int64)), 6).pixels(), bands)
    np.testing.assert_array_equal(Photo(npy(bands / 255), 6).pixels(), bands)
    np.testing.assert_array_equal(Photo(npy(RAMP), 3).pixels(), np.stack([RAMP] * 3, -1))
    for wrong, message in (
        (npy(bands), "6 channels; set data.channels = 6"),
        (npy(bands)[:-1], "claims 3,600 bytes, which the file does not hold"),
        (npy(np.array([{}])), "an array holds Python objects"),
        (npy(bands[..., :5].astype(np.int32) - 5), "int32 from -5"),
        (npy(np.full((4, 4, 5), np.nan)), "floats from nan"),
    ):
        with pytest.raises(ValueError, match=message):
            Photo(wrong, 5)


@pytest.mark.parametrize("planar", ["contig", "separate"])
def test_tiff_files_have_any_number_of_bands(planar):
    tifffile = pytest.importorskip("tifffile")
    bands = np.random.default_rng(0).integers(0, 65536, (20, 30, 5), np.uint16)
    buffer = io.BytesIO()
    stored = bands if planar == "contig" else np.moveaxis(bands, -1, 0)
    tifffile.imwrite(buffer, stored, planarconfig=planar, photometric="minisblack")
    np.testing.assert_array_equal(Photo(buffer.getvalue(), 5).pixels(), bands >> 8)


def test_the_fast_decoder_gives_the_pixels_of_pillow():
    rng = np.random.default_rng(0)
    picture = Image.fromarray(rng.integers(0, 256, (30, 40, 3), np.uint8)).resize((321, 243), Image.Resampling.BICUBIC)
    for options in ({}, {"progressive": True}, {"subsampling": 0}, {"quality": 30}):
        photo = Photo(saved(picture, "JPEG", **options), 3)
        assert photo._plain_jpeg() is not None
        np.testing.assert_array_equal(photo.pixels(), np.asarray(photo.image()))
