"""Random resized crops of full photographs, which are decoded once for all crops and no larger than they need.

Boxes have the distribution of torchvision's RandomResizedCrop. Crops are resized by an antialiased bilinear filter:
OpenCV's, after a short low-pass filter that makes it as wide as Pillow's. It differs from Pillow's by about half a
level of 255 and takes a third of the time.
"""

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np
from PIL import Image

from jepa_jax.config.augment import CropConfig, Crops
from jepa_jax.config.groups import Config
from jepa_jax.data.augment import CROP_TRIES, central_box
from jepa_jax.data.contract import Spec
from jepa_jax.data.photos.decode import Photo, opencv

MOST_ASPECT = 16  # of what is resized before it is cropped: a strip of 20,000 x 1 pixels would take gigabytes
DRAWS = 2 * CROP_TRIES + 3  # areas, aspects, row, column, whether to crop at all


class Box(NamedTuple):
    top: int
    left: int
    height: int
    width: int


def cropped_spec(spec: Spec, crops: Mapping[str, Crops]) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the spec of elements whose image is replaced by crops: uint8 [count, size, size, C] by name."""
    channels = spec["image"].shape[-1]
    cut = {
        name: jax.ShapeDtypeStruct((one.count, one.size, one.size, channels), np.uint8) for name, one in crops.items()
    }
    return {**cut, **{name: one for name, one in spec.items() if name != "image"}}


def batch_spec(config: Config, spec: Spec) -> Spec:
    """Returns the spec of what training sees of elements with this spec."""
    return cropped_spec(spec, config.loader_crops) if config.loader_crops else spec


def sample_box(uniform: np.ndarray, height: int, width: int, crop: CropConfig) -> Box:
    """Returns a box from DRAWS uniform numbers in [0, 1).

    The area is uniform in `crop.scale` times the image's and the aspect log-uniform in `crop.ratio`. The first of 10
    tries that fits is placed at random; if none fits, the box is the largest central one of an allowed aspect.
    """
    numbers = uniform.tolist()
    areas, aspects, (row, column, _) = numbers[:CROP_TRIES], numbers[CROP_TRIES:-3], numbers[-3:]
    (least, most), (low, high) = crop.scale, map(math.log, crop.ratio)
    for area, aspect in zip(areas, aspects, strict=True):
        root_area = math.sqrt(height * width * (least + (most - least) * area))
        root_aspect = math.exp(0.5 * (low + (high - low) * aspect))
        box_height, box_width = round(root_area / root_aspect), round(root_area * root_aspect)
        if 0 < box_height <= height and 0 < box_width <= width:
            top, left = int(row * (height - box_height + 1)), int(column * (width - box_width + 1))
            return Box(top, left, box_height, box_width)
    return Box(*central_box(height, width, crop.ratio))


def random_crops(photo: Photo, crops: Mapping[str, Crops], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns the crops of one photograph by name, uint8 [count, size, size, C] each."""
    height, width = photo.size
    wanted = []  # name, box and size of every crop
    for name, one in crops.items():
        for uniform in rng.random((one.count, DRAWS)):
            side = min(height, width)
            box = Box((height - side) // 2, (width - side) // 2, side, side)
            if uniform[-1] < one.crop.probability:
                box = sample_box(uniform, height, width, one.crop)
            wanted.append((name, box, one.size))
    pixels = photo.pixels(min(min(box.height, box.width) / size for _, box, size in wanted))
    made = {name: np.empty((one.count, one.size, one.size, pixels.shape[-1]), np.uint8) for name, one in crops.items()}
    places = {name: iter(views) for name, views in made.items()}
    for name, box, size in wanted:
        next(places[name])[...] = resized(part(pixels, box, photo.size), size)
    return made


def part(pixels: np.ndarray, box: Box, full_size: tuple[int, int]) -> np.ndarray:
    """Returns the pixels of a box that is given in pixels of the full size."""
    (height, width), (full_height, full_width) = pixels.shape[:2], full_size
    down, across = height / full_height, width / full_width
    top, left = round(box.top * down), round(box.left * across)
    bottom = min(height, max(top + 1, round((box.top + box.height) * down)))
    right = min(width, max(left + 1, round((box.left + box.width) * across)))
    return pixels[top:bottom, left:right]


def resized(pixels: np.ndarray, size: int) -> np.ndarray:
    """Returns uint8 [size, size, C] by antialiased bilinear resampling of [H, W, C]."""
    cv2, shape = opencv(), (size, size, pixels.shape[-1])
    shrink_rows, shrink_columns = pixels.shape[0] / size, pixels.shape[1] / size
    if max(shrink_rows, shrink_columns) > 1:
        rows, columns = low_pass(shrink_rows), low_pass(shrink_columns)
        pixels = cv2.sepFilter2D(pixels, -1, columns, rows, borderType=cv2.BORDER_REPLICATE)
    return cv2.resize(pixels, (size, size), interpolation=cv2.INTER_LINEAR).reshape(shape)


@functools.lru_cache(maxsize=4096)
def low_pass(shrink: float) -> np.ndarray:
    """Returns the filter that, followed by linear interpolation, is as wide as a triangle of `shrink` pixels.

    A triangle that reaches s pixels to either side has the variance s^2 / 6, linear interpolation 1 / 6. Up to a
    shrink of 2.2 three weights have the variance that is missing; beyond, the triangle is sampled.
    """
    missing = (shrink * shrink - 1) / 6
    if missing <= 0:
        return np.ones(1, np.float32)
    if missing <= 2 / 3:
        return np.array([missing / 2, 1 - missing, missing / 2], np.float32)
    reach = math.ceil(shrink)
    weights = np.maximum(0, 1 - np.abs(np.arange(-reach, reach + 1)) / shrink)
    return (weights / weights.sum()).astype(np.float32)


def centre_crop(photo: Photo, size: int, shorter_side: int = 0) -> np.ndarray:
    """Returns uint8 [size, size, C]: the shorter side resized (Pillow's antialiased bilinear), the centre cropped."""
    shorter_side = shorter_side or size
    height, width = photo.size
    if photo.is_array or max(height, width) > MOST_ASPECT * min(height, width):
        return centre_of(photo.pixels(), size, shorter_side)
    scale = shorter_side / min(height, width)
    height, width = max(shorter_side, round(height * scale)), max(shorter_side, round(width * scale))
    top, left = (height - size) // 2, (width - size) // 2
    image = photo.image(1 / (2 * scale)).resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(image.crop((left, top, left + size, top + size))).reshape(size, size, -1)


def centre_of(pixels: np.ndarray, size: int, shorter_side: int = 0) -> np.ndarray:
    """Returns what `centre_crop` does, of an array [H, W, C] of any number of channels."""
    height, width, _ = pixels.shape
    kept = max(1, round(min(height, width) * size / (shorter_side or size)))
    top, left = (height - kept) // 2, (width - kept) // 2
    return resized(pixels[top : top + kept, left : left + kept], size)
