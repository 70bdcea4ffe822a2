"""A spread as an animated GIF: what a model predicts for each next frame, and what then happened."""

import io
from collections.abc import Mapping

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from jepa_jax.projects.wildfire.data.panels import as_pixels, error_map, ground, probability_map

SIDE = 256  # pixels per side that small maps are enlarged to
GAP, HEADER = 12, 40
PAPER, INK = (255, 255, 255), (32, 32, 32)
LEVELS = 16  # of terrain and probability: few colours compress well
MILLISECONDS, LAST_MILLISECONDS = 900, 2500


def spread_gif(exhibits: Mapping[str, np.ndarray]) -> bytes:
    """Returns the content of a GIF file with one frame per prediction; see `spread_exhibit` for the arrays."""
    frames = [_frame(exhibits, index) for index in range(len(exhibits["spread_probability"]))]
    first, *others = [frame.quantize(256, dither=Image.Dither.NONE) for frame in frames]
    content = io.BytesIO()
    durations = [MILLISECONDS] * len(others) + [LAST_MILLISECONDS]
    first.save(content, "GIF", save_all=True, append_images=others, duration=durations, loop=0, disposal=1)
    return content.getvalue()


def _frame(exhibits: Mapping[str, np.ndarray], index: int) -> Image.Image:
    """Returns two maps side by side, with their titles and the wind above."""
    masks, known = exhibits["spread_masks"], exhibits["spread_known"]
    probability = exhibits["spread_probability"][index].astype(np.float32)
    terrain = ground(np.round(exhibits["spread_static"] * LEVELS) / LEVELS)
    now, after = masks[index], masks[index + 1]
    predicted = probability >= exhibits["threshold"]
    maps = (
        probability_map(terrain, now, np.where(now, 1, np.round(probability * LEVELS) / LEVELS)),
        error_map(terrain, now, after, known, predicted),
    )
    side = max(1, SIDE // len(now)) * len(now)
    canvas = Image.new("RGB", (2 * side + 3 * GAP, HEADER + side + GAP), PAPER)
    titles = (f"frame {index + 1}: predicted next", f"frame {index + 2}: what ignited")
    draw = ImageDraw.Draw(canvas)
    for i, (title, picture) in enumerate(zip(titles, maps, strict=True)):
        left = GAP + i * (side + GAP)
        draw.text((left, HEADER / 2), title, INK, ImageFont.load_default(14), anchor="lm")
        enlarged = Image.fromarray(as_pixels(picture)).resize((side, side), Image.Resampling.NEAREST)
        canvas.paste(enlarged, (left, HEADER))
    _draw_wind(draw, exhibits["spread_wind"][index], (GAP + side - 18, HEADER // 2))
    return canvas


def _draw_wind(draw: ImageDraw.ImageDraw, wind: np.ndarray, centre: tuple[int, int]) -> None:
    """Draws an arrow that flies with the wind, the longer the faster."""
    speed, comes_from = float(wind[0]), 2 * np.pi * float(wind[1])
    way = np.array([-np.sin(comes_from), np.cos(comes_from)])  # to the right and down
    side = np.array([-way[1], way[0]])
    reach = 6 + 10 * min(1.0, speed)
    tail, tip = centre - way * reach, centre + way * reach
    neck = tip - way * 8
    draw.text((centre[0] - 22, centre[1]), "wind", INK, ImageFont.load_default(12), anchor="rm")
    draw.line([tuple(tail), tuple(neck)], INK, 2)
    draw.polygon([tuple(tip), tuple(neck + side * 5), tuple(neck - side * 5)], INK)
