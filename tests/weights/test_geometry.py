"""How pictures are prepared: what a preprocessor_config.json says, and the same part of a picture at other sizes."""

import pytest

from jepa_jax.weights.load import Geometry, described_geometry

DINOV2 = {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}, "do_center_crop": True}


def test_the_shorter_side_and_the_centre_of_a_preprocessor_are_used():
    assert described_geometry(DINOV2, 518) == Geometry(224, 224, 256)
    assert described_geometry({"size": 256, "crop_size": 224}, 518) == Geometry(224, 224, 256)  # as of old


@pytest.mark.parametrize(
    "other",
    [
        {}, {"size": {"height": 224, "width": 224}}, DINOV2 | {"do_center_crop": False}, DINOV2 | {"do_resize": False},
        DINOV2 | {"crop_size": {"height": 224, "width": 192}}, DINOV2 | {"size": {"shortest_edge": None}},
    ],
)  # fmt: skip
def test_a_preprocessor_that_says_nothing_of_it_leaves_the_size_of_the_model(other):
    assert described_geometry(other, 384) == Geometry(384)


def test_another_size_sees_the_same_part_of_a_picture():
    assert Geometry(224, 224, 256).at(448) == Geometry(448, 448, 512)
    assert Geometry(16, 32, 40).at(16) == Geometry(16, 32, 40)
    assert Geometry(16, 32, 40).at(64) == Geometry(64, 64, 80)
    assert Geometry(0).at(224) == Geometry(224).at(224) == Geometry(224, 224, 224)
