"""Which part of a picture a model sees, and at how many pixels: as its run or its library prepares images."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Geometry(NamedTuple):
    """How a picture becomes the square that enters a model.

    Attributes:
        size: pixels per side of the square; 0 if any.
        crop_size: pixels per side of the centre that is cropped, and then resized to `size`; 0 = `size`.
        shorter_side: pixels that the shorter side is resized to before the crop; 0 = `crop_size`.
    """

    size: int
    crop_size: int = 0
    shorter_side: int = 0

    def at(self, size: int) -> "Geometry":
        """Returns the geometry for squares of another size; the same part of a picture is seen."""
        if size == self.size:
            return Geometry(size, self.crop_size or size, self.shorter_side or self.crop_size or size)
        own = self.crop_size or self.size
        return Geometry(size, size, max(size, round(size * self.shorter_side / own)) if self.shorter_side else size)


def described_geometry(preprocessor: Mapping[str, Any], image_size: int) -> Geometry:
    """Returns what a preprocessor_config.json says if it resizes the shorter side and crops the centre.

    Args:
        image_size: pixels per side that the model was made for; the square has as many if the file says nothing else.
    """
    sizes = preprocessor.get("size"), preprocessor.get("crop_size")
    shorter, crop = _side(sizes[0], "shortest_edge"), _side(sizes[1], "height", "width")
    if not crop or not shorter or not all(preprocessor.get(key, True) for key in ("do_resize", "do_center_crop")):
        return Geometry(image_size)
    return Geometry(crop, crop, max(crop, shorter))


def _side(value: Any, *names: str) -> int:
    """Returns pixels that are given as a number, or equal under all these names; 0 if they are not."""
    found = {value.get(name) for name in names} if isinstance(value, Mapping) else {value}
    side = found.pop() if len(found) == 1 else 0
    return side if isinstance(side, int) and side > 0 else 0
