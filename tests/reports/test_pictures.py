"""Pictures without vocabulary: every image of a map at its place, cut out of the right part of one sheet."""

import base64
import io
import re

import numpy as np
import PIL.Image

from jepa_jax.reports.page import render
from jepa_jax.reports.parts import Page, Section
from jepa_jax.reports.pictures import feature_maps


def test_a_map_has_each_image_at_its_place_and_in_the_colour_of_its_class():
    shades = np.linspace(0, 250, 7).astype(np.uint8)
    images = np.broadcast_to(shades[:, None, None, None], (7, 8, 8, 3))
    coordinates = np.stack([np.arange(7.0), np.arange(7.0) ** 2], axis=1)
    part = feature_maps(images, {"PCA": coordinates, "t-SNE": -coordinates}, np.arange(7) % 2, ["cat", "<dog>"])
    places = part.maps["PCA"]
    assert [number for *_, number in places] == [0, 1, 0, 1, 0, 1, 0]
    assert places[0][:2] == (3.0, 97.0) and places[6][:2] == (97.0, 3.0)  # y grows upwards
    assert part.maps["t-SNE"][0][:2] == (97.0, 3.0)

    sheet = np.asarray(PIL.Image.open(io.BytesIO(base64.b64decode(part.sheet.partition(",")[2]))))
    page = render(Page("t", [Section("", [part])]))
    tiles = [(int(x), int(y)) for x, y in re.findall(r"--x:(\d+);--y:(\d+)", page)]
    assert len(tiles) == 14 and tiles[:7] == tiles[7:]
    found = [sheet[8 * y : 8 * y + 8, 8 * x : 8 * x + 8].mean() for x, y in tiles[:7]]
    np.testing.assert_allclose(found, shades, atol=3)  # JPEG
    assert 'title="&lt;dog&gt;"' in page and page.count("--sheet:url(data:image/jpeg") == 1


def test_points_in_one_place_and_many_classes_are_drawn_too():
    images = np.zeros((5, 4, 4, 3), np.uint8)
    part = feature_maps(images, {"PCA": np.zeros((5, 2))}, np.arange(5), [str(i) for i in range(11)])
    assert {place for place in part.maps["PCA"]} == {(3.0, 97.0, -1)} and part.classes == ()
