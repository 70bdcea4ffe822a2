"""Sequences of frames as an animated GIF: rows of true and of decoded frames, side by side for several sequences."""

import io
from collections.abc import Mapping

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIDE = 96  # pixels per side that small frames are enlarged to
GAP, MARGIN, HEADER = 6, 84, 22
PAPER, INK = (255, 255, 255), (32, 32, 32)
MILLISECONDS, LAST_MILLISECONDS = 450, 1500


def rollout_gif(rows: Mapping[str, np.ndarray], known: int) -> bytes:
    """Returns the content of a GIF file.

    Args:
      rows: uint8 frames [n, T, H, W, C] by the title of their row.
      known: frames at the start that the predictions know.
    """
    times = min(frames.shape[1] for frames in rows.values())
    pictures = [_picture(rows, time, known) for time in range(times)]
    first, *others = [picture.quantize(256, dither=Image.Dither.NONE) for picture in pictures]
    content = io.BytesIO()
    durations = [MILLISECONDS] * len(others) + [LAST_MILLISECONDS]
    first.save(content, "GIF", save_all=True, append_images=others, duration=durations, loop=0, disposal=1)
    return content.getvalue()


def _picture(rows: Mapping[str, np.ndarray], time: int, known: int) -> Image.Image:
    """Returns the frames of one time in all rows, with the titles of the rows beside them."""
    count, _, height, width, _ = next(iter(rows.values())).shape
    scale = max(1, SIDE // max(height, width))
    height, width = scale * height, scale * width
    canvas = Image.new("RGB", (MARGIN + count * (width + GAP), HEADER + len(rows) * (height + GAP)), PAPER)
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(12)
    ahead = f"frame {time + 1}: " + ("known" if time < known else f"{time + 1 - known} ahead")
    draw.text((MARGIN, HEADER / 2), ahead, INK, font, anchor="lm")
    for row, (title, frames) in enumerate(rows.items()):
        top = HEADER + row * (height + GAP)
        draw.text((4, top + height / 2), title, INK, font, anchor="lm")
        for column, frame in enumerate(frames[:, time]):
            picture = Image.fromarray(as_rgb(frame)).resize((width, height), Image.Resampling.NEAREST)
            canvas.paste(picture, (MARGIN + column * (width + GAP), top))
    return canvas


def as_rgb(frame: np.ndarray) -> np.ndarray:
    """Returns a frame [H, W, C] as RGB; of other numbers of channels than 3, the first ones are red, green and blue."""
    channels = frame.shape[-1]
    if channels == 1:
        return np.repeat(frame, 3, axis=-1)
    return np.pad(frame[..., :3], ((0, 0), (0, 0), (0, max(0, 3 - channels))))
