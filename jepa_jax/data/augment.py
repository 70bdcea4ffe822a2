"""Augments images on the device, with torchvision's semantics and random parameters drawn per image.

Order of the operations: crop (with the flip), colour jitter, grayscale, blur, solarize, normalise. The reference flips
last; every operation in between commutes with mirroring, so the flip is folded into the crop for free.

Images have any number of channels, which are treated alike; saturation, hue and grayscale need RGB.

Pixels stay in 0..255 units until they are normalised: whole levels are exact in float32, so is the solarize threshold.
Channels are separate planes [B, h, w], because a short minor axis does not vectorise.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jepa_jax.config.augment import AugmentConfig, JitterConfig, Operations

CROP_TRIES = 10  # as torchvision's RandomResizedCrop, before it falls back to a central crop
GREY_WEIGHTS = (0.2989, 0.587, 0.114)
BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
JITTER_ORDERS = np.array(list(itertools.permutations(range(4))))  # [24, 4]: which operation runs 1st, 2nd, ...
# How many uniform numbers each use takes per image.
DRAWS = {
    "crop_applied": 1,
    "crop": 2 * CROP_TRIES + 2,
    "flip": 1,
    "jitter_applied": 1,
    "jitter": 5,
    "grayscale": 1,
    "blur_applied": 1,
    "blur": 1,
    "solarize": 1,
}

Planes = tuple[Array, ...]  # one [B, h, w] per channel


class Boxes(NamedTuple):
    """Crop boxes in whole pixels, one entry per image."""

    top: Array
    left: Array
    height: Array
    width: Array


class Jitter(NamedTuple):
    """Parameters of the colour jitter, per image."""

    order: Array  # [...] row of JITTER_ORDERS
    factors: Array  # [..., 3] of brightness, contrast, saturation
    hue: Array  # [...] shift in turns


def augment_views(
    key: Array, images: Array, config: AugmentConfig, num_views: int, operations: Operations | None = None
) -> Array:
    """Returns independent normalised views [V, B, h, w, C] in float32.

    Args:
      key: one key for the batch; the draws do not depend on how the batch is laid out over devices.
      images: [B, H, W, C] in uint8, or in floats within 0..1.
      config: an operation of probability 0 is not compiled.
      num_views: V.
      operations: used instead of those of `config`, e.g. for small crops.
    """
    operations = operations or config
    draws = draw(key, (num_views, len(images)))
    rows = jnp.swapaxes(levels(images), 2, 3)  # [B, H, C, W]
    # View after view: memory holds the intermediates of one, and the operations are compiled once for all.
    planes = jax.lax.map(lambda draws: augment_planes(draws, rows, operations), draws)  # C x [V, B, h, w]
    return normalise_levels(jnp.stack(planes, axis=-1), config.mean, config.std)


def augment_crops(key: Array, crops: Array, config: AugmentConfig, operations: Operations | None = None) -> Array:
    """Returns normalised views [V, B, h, w, C] of random crops uint8 [B, V, h, w, C] that a loader has cut.

    The draws are those of `augment_views`, but for the crop, which is done.
    """
    operations = operations or config
    draws = draw(key, (crops.shape[1], len(crops)))

    def one_view(inputs: tuple[dict[str, Array], Array]) -> Planes:
        numbers, view = inputs
        rows = jnp.swapaxes(levels(view), 2, 3)  # [B, h, C, w]
        if operations.flip.probability > 0:
            with jax.named_scope("crop"):
                mirrored = numbers["flip"] < operations.flip.probability
                rows = jnp.where(mirrored[:, None, None, None], rows[..., ::-1], rows)
        return change_planes(numbers, rows, operations)

    planes = jax.lax.map(one_view, (draws, jnp.swapaxes(crops, 0, 1)))
    return normalise_levels(jnp.stack(planes, axis=-1), config.mean, config.std)


def augment_planes(draws: dict[str, Array], rows: Array, config: Operations) -> Planes:
    """Returns one view of each image, made of rows [B, H, C, W] in 0..255 and the numbers drawn for it."""
    _, height, _, width = rows.shape
    crop = config.crop
    out_height, out_width = (crop.size, crop.size) if crop.size else (height, width)
    if crop.probability > 0 or config.flip.probability > 0 or (out_height, out_width) != (height, width):
        with jax.named_scope("crop"):
            boxes = sample_boxes(draws["crop"], height, width, crop.scale, crop.ratio)
            boxes = choose(draws["crop_applied"] < crop.probability, boxes, (0, 0, height, width))
            rows = resize_boxes(rows, boxes, draws["flip"] < config.flip.probability, out_height, out_width)
    return change_planes(draws, rows, config)


def change_planes(draws: dict[str, Array], rows: Array, config: Operations) -> Planes:
    """Applies what follows the crop to rows [B, h, C, w] in 0..255."""
    planes: Planes = tuple(rows[..., channel, :] for channel in range(rows.shape[2]))
    if config.jitter.probability > 0:
        with jax.named_scope("jitter"):
            jitter = sample_jitter(draws["jitter"], config.jitter)
            planes = colour_jitter(planes, only_where(draws["jitter_applied"] < config.jitter.probability, jitter))
    if config.grayscale.probability > 0:
        with jax.named_scope("grayscale"):
            planes = grayscale(planes, draws["grayscale"] < config.grayscale.probability)
    if config.blur.probability > 0:
        with jax.named_scope("blur"):
            low, high = config.blur.sigma
            sigma = low + (high - low) * draws["blur"]
            applied = draws["blur_applied"] < config.blur.probability
            planes = gaussian_blur(planes, sigma, applied, taps=config.blur.taps)
    if config.solarize.probability > 0:
        with jax.named_scope("solarize"):
            applied = draws["solarize"] < config.solarize.probability
            planes = solarize(planes, applied, config.solarize.threshold)
    return planes


def draw(key: Array, shape: tuple[int, ...]) -> dict[str, Array]:
    """Draws uniform numbers in [0, 1) for each use of DRAWS.

    One call draws all of them, because calls cost more to compile and to start than their numbers. Every use has its
    own numbers whether it is enabled or not, so enabling one operation does not change what the others draw.
    """
    numbers = jax.random.uniform(key, (*shape, sum(DRAWS.values())))
    ends = np.cumsum(list(DRAWS.values()))
    parts = jnp.split(numbers, ends[:-1], axis=-1)
    return {
        name: part[..., 0] if count == 1 else part for (name, count), part in zip(DRAWS.items(), parts, strict=True)
    }


def whole_view(images: Array, config: AugmentConfig, size: int | None) -> Array:
    """Returns the normalised images, resized to `size` pixels per side unless it is None."""
    view = normalise(images, config.mean, config.std)
    if size is None or images.shape[1:3] == (size, size):
        return view
    return jax.image.resize(view, (images.shape[0], size, size, images.shape[3]), "linear")


def fixed_boxes(images: Array, config: AugmentConfig, count: int) -> Boxes:
    """Returns `count` crop boxes, the same on every call, of the scale and ratio of `config`."""
    uniform = jax.random.uniform(jax.random.key(0), (count, DRAWS["crop"]))
    return sample_boxes(uniform, images.shape[1], images.shape[2], config.crop.scale, config.crop.ratio)


def cropped_view(images: Array, config: AugmentConfig, box: Boxes, size: int) -> Array:
    """Returns the normalised part of all images that one box covers, at `size` pixels per side."""
    boxes = Boxes(*(jnp.broadcast_to(field, len(images)) for field in box))
    rows = jnp.swapaxes(levels(images), 2, 3)  # [B, H, C, W]
    rows = resize_boxes(rows, boxes, jnp.zeros(len(images), bool), size, size)
    return normalise_levels(jnp.swapaxes(rows, 2, 3), config.mean, config.std)


def normalise(images: Array, mean: tuple[float, ...], std: tuple[float, ...]) -> Array:
    """Returns (x - mean) / std per channel in float32, x in 0..1 (uint8 is divided by 255)."""
    return normalise_levels(levels(images), mean, std)


def levels(images: Array) -> Array:
    """Returns pixels as float32 in 0..255 units, from uint8 or from floats in 0..1."""
    if jnp.issubdtype(images.dtype, jnp.integer):
        return images.astype(jnp.float32)
    return images.astype(jnp.float32) * 255.0


def normalise_levels(pixels: Array, mean: tuple[float, ...], std: tuple[float, ...]) -> Array:
    scale = 255.0 * np.asarray(std, np.float32)
    return (pixels - 255.0 * np.asarray(mean, np.float32)) * (1.0 / scale)


# --- crop ---


def sample_boxes(uniform: Array, height: int, width: int, scale: tuple[float, ...], ratio: tuple[float, ...]) -> Boxes:
    """Returns the boxes of RandomResizedCrop from 22 uniform numbers per image [..., 22].

    The area is uniform in `scale` times the image's and the aspect log-uniform in `ratio`. The first of 10 tries that
    fits is placed at random; if none fits, the box is the central one.
    """
    area = height * width * (scale[0] + (scale[1] - scale[0]) * uniform[..., :CROP_TRIES])
    log_low, log_high = np.log(ratio)
    root_aspect = jnp.exp(0.5 * (log_low + (log_high - log_low) * uniform[..., CROP_TRIES : 2 * CROP_TRIES]))
    root_area = jnp.sqrt(area)
    box_height = jnp.round(root_area / root_aspect)
    box_width = jnp.round(root_area * root_aspect)
    fits = (box_width > 0) & (box_width <= width) & (box_height > 0) & (box_height <= height)
    first = jnp.argmax(fits, axis=-1)
    is_first = jnp.arange(CROP_TRIES) == first[..., None]
    box_height = jnp.sum(jnp.where(is_first, box_height, 0.0), axis=-1)
    box_width = jnp.sum(jnp.where(is_first, box_width, 0.0), axis=-1)
    top = place(uniform[..., -2], height - box_height)
    left = place(uniform[..., -1], width - box_width)
    found = jnp.any(fits, axis=-1)
    fitted = Boxes(top, left, box_height, box_width)
    return choose(found, Boxes(*(x.astype(jnp.int32) for x in fitted)), central_box(height, width, ratio))


def choose(condition: Array, boxes: Boxes, other: tuple[int, int, int, int]) -> Boxes:
    """Returns the boxes where the condition holds, and the one other box elsewhere."""
    return Boxes(*(jnp.where(condition, field, fixed) for field, fixed in zip(boxes, other, strict=True)))


def place(uniform: Array, free: Array) -> Array:
    """Returns a whole number in 0 .. free."""
    return jnp.minimum(jnp.floor(uniform * (free + 1)), free)


def central_box(height: int, width: int, ratio: tuple[float, ...]) -> tuple[int, int, int, int]:
    """Returns the largest central box (top, left, height, width) whose aspect lies within `ratio`."""
    box_height, box_width = height, width
    if width / height < ratio[0]:
        box_height = max(1, round(width / ratio[0]))
    elif width / height > ratio[1]:
        box_width = max(1, round(height * ratio[1]))
    return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width


def resize_boxes(rows: Array, boxes: Boxes, mirrored: Array, out_height: int, out_width: int) -> Array:
    """Resizes the box of each image of rows [B, H, C, W] to [B, h, C, w], mirrored left to right where asked.

    Bilinear resampling is linear and separable, so it takes two small matrix products per image. They are exact in
    float32, since the reduced precision that GPUs use by default would cost a tenth of a level. Weights are normalised
    after their product: before it they look like a softmax, which takes XLA's GPU compiler seconds.
    """
    batch, height, channels, width = rows.shape
    vertical = resize_weights(boxes.top, boxes.height, height, out_height)  # [B, h, H]
    horizontal = resize_weights(boxes.left, boxes.width, width, out_width, mirrored)  # [B, w, W]
    exact = jax.lax.Precision.HIGHEST
    rows = jnp.einsum("bhH,bHx->bhx", vertical, rows.reshape(batch, height, channels * width), precision=exact)
    rows = rows / jnp.sum(vertical, axis=-1)[:, :, None]
    rows = jnp.einsum("bxW,bwW->bxw", rows.reshape(batch, out_height * channels, width), horizontal, precision=exact)
    rows = rows / jnp.sum(horizontal, axis=-1)[:, None, :]
    return rows.reshape(batch, out_height, channels, out_width)


def resize_weights(start: Array, length: Array, in_size: int, out_size: int, mirrored: Array | None = None) -> Array:
    """Returns antialiased bilinear weights [..., out, in] that resize the pixels start .. start + length.

    This is PIL's filter, and torchvision's with `antialias=True`: a triangle around the output pixel's centre, as wide
    as one output pixel when shrinking and one input pixel when enlarging. The box may cut it off, so the caller has to
    normalise the weights by their sum.
    """
    start, length = (x[..., None, None].astype(jnp.float32) for x in (start, length))
    target = jnp.arange(out_size, dtype=jnp.float32)[:, None]
    if mirrored is not None:
        target = jnp.where(mirrored[..., None, None], out_size - 1 - target, target)
    pixel = jnp.arange(in_size, dtype=jnp.float32) + 0.5 - start  # centres, from the box's edge
    step = length / out_size
    distance = jnp.abs(pixel - (target + 0.5) * step) / jnp.maximum(step, 1.0)
    inside = (pixel > 0) & (pixel < length)
    return jnp.where(inside, jnp.maximum(1.0 - distance, 0.0), 0.0)


# --- colour ---


def grey(planes: Planes) -> Array:
    """Returns the luminance of RGB planes, or the mean of any others."""
    if len(planes) != 3:
        return sum(planes[1:], start=planes[0]) / len(planes)
    red, green, blue = planes
    return GREY_WEIGHTS[0] * red + GREY_WEIGHTS[1] * green + GREY_WEIGHTS[2] * blue


def sample_jitter(uniform: Array, config: JitterConfig) -> Jitter:
    """Returns the parameters of ColorJitter from 5 uniform numbers per image [..., 5].

    Factors are uniform in [max(0, 1 - s), 1 + s], the hue in [-h, h], and the order is one of 24.
    """
    strength = np.array([config.brightness, config.contrast, config.saturation], np.float32)
    low, high = np.maximum(0, 1 - strength), 1 + strength
    return Jitter(
        order=(len(JITTER_ORDERS) * uniform[..., 0]).astype(jnp.int32),
        factors=jnp.asarray(low) + (high - low) * uniform[..., 1:4],
        hue=config.hue * (2.0 * uniform[..., 4] - 1.0),
    )


def only_where(apply: Array, jitter: Jitter) -> Jitter:
    """Returns the parameters, replaced by those of the identity where `apply` is false."""
    return Jitter(
        order=jitter.order,
        factors=jnp.where(apply[..., None], jitter.factors, 1.0),
        hue=jnp.where(apply, jitter.hue, 0.0),
    )


def colour_jitter(planes: Planes, jitter: Jitter) -> Planes:
    """Changes brightness, contrast, saturation and hue in each image's own order.

    The first three are one formula, a blend with a base, so a slot can hold any of them. There are 3 slots before the
    hue shift and 3 after; an image uses 3 in all, the others blend with factor 1. So the hue shift is computed once,
    and only for RGB.
    """
    blends, hue_position = (jnp.asarray(table)[jitter.order] for table in blend_orders())  # [B, 3], [B]
    factors = jnp.take_along_axis(jitter.factors, blends, axis=-1)
    before = jnp.arange(3) < hue_position[..., None]

    def slots(planes: Planes, used: Array) -> Planes:
        # A loop rather than three fused slots: XLA would compute the first again in each plane of the last.
        parameters = (jnp.moveaxis(x, -1, 0) for x in (blends, jnp.where(used, factors, 1.0)))
        return jax.lax.scan(lambda planes, slot: (blend(planes, *slot), None), planes, tuple(parameters))[0]

    planes = slots(planes, before)
    if len(planes) == 3:
        planes = shift_hue(planes, jitter.hue)
    return slots(planes, ~before)


def blend_orders() -> tuple[np.ndarray, np.ndarray]:
    """Returns the blends of each jitter order [24, 3] and how many of them come before the hue [24]."""
    blends = np.array([[kind for kind in order if kind != HUE] for order in JITTER_ORDERS])
    return blends, np.array([list(order).index(HUE) for order in JITTER_ORDERS])


def blend(planes: Planes, kind: Array, factor: Array) -> Planes:
    """Returns clip(f x + (1 - f) base), where base is black (brightness), the mean grey (contrast) or the grey."""
    grey_plane = grey(planes)
    mean_grey = jnp.mean(grey_plane, axis=(-2, -1))
    rest = 1.0 - factor
    from_mean = jnp.where(kind == CONTRAST, rest * mean_grey, 0.0)[..., None, None]
    from_grey = jnp.where(kind == SATURATION, rest, 0.0)[..., None, None]
    base = from_mean + from_grey * grey_plane
    return tuple(jnp.clip(factor[..., None, None] * plane + base, 0.0, 255.0) for plane in planes)


def shift_hue(planes: Planes, turns: Array) -> Planes:
    """Rotates the hue of HSV by `turns` (1 is a full circle), keeping saturation and value.

    A channel of the HSV colour (h, s, v) is v - v s clip(min(k, 4 - k), 0, 1) with k = (n + 6 h) mod 6 and n = 5, 3, 1
    for red, green, blue; v s is the largest channel minus the smallest.
    """
    red, green, blue = planes
    value = jnp.maximum(jnp.maximum(red, green), blue)
    chroma = value - jnp.minimum(jnp.minimum(red, green), blue)
    inverse = 1.0 / jnp.where(chroma == 0, 1.0, chroma)
    sextant = jnp.where(
        value == red,
        (green - blue) * inverse,
        jnp.where(value == green, 2.0 + (blue - red) * inverse, 4.0 + (red - green) * inverse),
    )
    sextant = sextant + 6.0 * turns[..., None, None]

    def channel(offset: float) -> Array:
        k = sextant + offset
        k = k - 6.0 * jnp.floor(k * (1.0 / 6.0))
        return value - chroma * jnp.clip(jnp.minimum(k, 4.0 - k), 0.0, 1.0)

    return channel(5.0), channel(3.0), channel(1.0)


def grayscale(planes: Planes, apply: Array) -> Planes:
    """Replaces all channels by the grey value where `apply`."""
    grey_plane, apply = grey(planes), apply[..., None, None]
    return tuple(jnp.where(apply, grey_plane, plane) for plane in planes)


def solarize(planes: Planes, apply: Array, threshold: float) -> Planes:
    """Inverts pixels at or above the threshold (0..255 units) where `apply`."""
    apply = apply[..., None, None]
    return tuple(jnp.where(apply & (plane >= threshold), 255.0 - plane, plane) for plane in planes)


# --- blur ---


def blur_kernel_size(size: int) -> int:
    """Returns about a tenth of the image size, odd, at least 3."""
    return max(3, size // 10 | 1)


def gaussian_blur(planes: Planes, sigma: Array, apply: Array, *, taps: int = 0) -> Planes:
    """Blurs with a separable Gaussian and reflected borders where `apply`; sigma in pixels, 0 taps: by the size."""
    return tuple(blur_axis(blur_axis(plane, sigma, apply, taps, -2), sigma, apply, taps, -1) for plane in planes)


def blur_axis(plane: Array, sigma: Array, apply: Array, taps: int, axis: int) -> Array:
    size = plane.shape[axis]
    taps = taps | 1 if taps else blur_kernel_size(size)
    half = taps // 2
    offsets = jnp.arange(-half, half + 1, dtype=jnp.float32)
    kernel = jax.nn.softmax(-0.5 * jnp.square(offsets / sigma[..., None]), axis=-1)
    kernel = jnp.where(apply[..., None], kernel, offsets == 0)  # [..., taps]
    padding = [(0, 0)] * plane.ndim
    padding[axis] = (half, half)
    padded = jnp.pad(plane, padding, mode="reflect")
    shifted = [jax.lax.slice_in_dim(padded, tap, tap + size, axis=axis) for tap in range(taps)]
    return sum((kernel[..., tap, None, None] * shifted[tap] for tap in range(taps)), start=jnp.zeros_like(plane))
