"""Pictures of episodes, energies and predictions, as files."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from jepa_jax.data.pictures import png

SIDE = 224  # pixels per side that frames are enlarged to
GAP, HEADER = 10, 24
PAPER, INK = (255, 255, 255), (32, 32, 32)
PATH, PLANNED, START, GOAL = (31, 119, 180), (230, 120, 20), (44, 140, 60), (200, 40, 40)
LEGEND = {START: "start", GOAL: "goal", PATH: "executed path", PLANNED: "first plan, as predicted"}
LOW_COLOUR, HIGH_COLOUR = np.array([253, 245, 200.0]), np.array([40, 50, 110.0])  # of energies
MILLISECONDS, LAST_MILLISECONDS = 350, 1500
Exhibits = Mapping[str, np.ndarray]


def shown(frame: np.ndarray) -> np.ndarray:
    """Returns a frame uint8 [H, W, C] as RGB on white; of two channels the first is red, the second grey."""
    if frame.shape[-1] == 2:
        ink, walls = (frame[..., i : i + 1] / 255.0 for i in range(2))
        ground = 255 * (1 - 0.6 * walls)
        return (ground * (1 - ink) + ink * np.array(GOAL)).astype(np.uint8)
    return np.repeat(frame, 3, -1)[..., :3] if frame.shape[-1] == 1 else frame[..., :3]


def enlarged(picture: np.ndarray) -> Image.Image:
    """Returns a square RGB picture of SIDE pixels, with sharp pixels."""
    return Image.fromarray(picture).resize((SIDE, SIDE), Image.Resampling.NEAREST)


def episode_picture(exhibits: Exhibits, index: int) -> bytes:
    """Returns the executed path of an episode, its first plan, start and goal, as a PNG file."""
    walls = exhibits["frames"][index].copy()
    if walls.shape[-1] == 2:
        walls[..., 0] = 0  # the start is marked instead
    canvas = enlarged(shown(walls))
    draw, place = ImageDraw.Draw(canvas), _placing(exhibits, walls.shape[0])
    if "planned" in exhibits:
        first = exhibits["paths"][index][:1]
        draw.line(place(np.concatenate([first, exhibits["planned"][index]])), PLANNED, 2)
    draw.line(place(exhibits["paths"][index]), PATH, 3, joint="curve")
    _mark(draw, place(exhibits["paths"][index][:1])[0], START)
    _mark(draw, place(exhibits["goals"][index][None])[0], GOAL)
    return png(np.asarray(canvas))


def energy_picture(exhibits: Exhibits, index: int) -> bytes:
    """Returns the energy of all positions of a task as colours, with walls, goal and executed path, as a PNG file."""
    energy, frame = exhibits["energies"][index], exhibits["frames"][index]
    size = frame.shape[0]
    low, high = exhibits["extent"]
    least, greatest = exhibits["bounds"]
    axis = np.linspace(least, greatest, len(energy))
    units = np.linspace(low, high, SIDE)
    nearest = np.abs(units[:, None] - axis).argmin(1)
    level = (energy - energy.min()) / max(float(np.ptp(energy)), 1e-12)
    colours = LOW_COLOUR + np.sqrt(level)[..., None] * (HIGH_COLOUR - LOW_COLOUR)
    picture = colours[nearest][:, nearest]
    outside = (units < axis[0]) | (units > axis[-1])
    picture[outside], picture[:, outside] = 255, 255
    if frame.shape[-1] == 2:
        solid = np.asarray(Image.fromarray(frame[..., 1]).resize((SIDE, SIDE), Image.Resampling.NEAREST)) > 0
        picture[solid] = 0.25 * picture[solid] + 0.75 * 110
    canvas = Image.fromarray(picture.astype(np.uint8))
    draw, place = ImageDraw.Draw(canvas), _placing(exhibits, size)
    draw.line(place(exhibits["paths"][index]), (255, 255, 255), 2, joint="curve")
    _mark(draw, place(exhibits["paths"][index][:1])[0], START)
    _mark(draw, place(exhibits["goals"][index][None])[0], GOAL)
    return png(np.asarray(canvas))


def rollout_gif(frames: np.ndarray, predicted: np.ndarray, encoded: np.ndarray) -> bytes:
    """Returns an animation of sequences: the truth, and below it frames decoded from true and from predicted latents.

    Args:
      frames: [n, T, H, W, C].
      predicted, encoded: [n, T - 1, H, W, C], of all frames after the first.
    """
    rows = {"truth": frames[:, 1:], "decoded, seen": encoded, "decoded, predicted from the first frame": predicted}
    pictures = [
        _strip(f"{time + 1} steps ahead", {k: v[:, time] for k, v in rows.items()})
        for time in range(len(frames[0]) - 1)
    ]
    first, *others = [picture.quantize(128, dither=Image.Dither.NONE) for picture in pictures]
    content, durations = io.BytesIO(), [MILLISECONDS] * len(others) + [LAST_MILLISECONDS]
    first.save(content, "GIF", save_all=True, append_images=others, duration=durations, loop=0, disposal=1)
    return content.getvalue()


def _strip(title: str, rows: Mapping[str, np.ndarray]) -> Image.Image:
    side, count = 120, len(next(iter(rows.values())))
    canvas = Image.new("RGB", (count * (side + GAP) + GAP, len(rows) * (side + HEADER) + GAP), PAPER)
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(13)
    for row, (name, frames) in enumerate(rows.items()):
        top = row * (side + HEADER)
        draw.text((GAP, top + HEADER / 2), f"{name} ({title})" if row == 0 else name, INK, font, anchor="lm")
        for column, frame in enumerate(frames):
            tile = Image.fromarray(shown(frame)).resize((side, side), Image.Resampling.NEAREST)
            canvas.paste(tile, (GAP + column * (side + GAP), top + HEADER))
    return canvas


def _placing(exhibits: Exhibits, pixels: int) -> Any:
    """Returns the function from positions [n, 2] to pixels of an enlarged frame of `pixels` per side."""
    low, high = exhibits["extent"]

    def place(positions: np.ndarray) -> list[tuple[float, float]]:
        centres = (positions - low) / (high - low) * (pixels - 1) + 0.5
        return [(float(x), float(y)) for x, y in centres * SIDE / pixels]

    return place


def _mark(draw: ImageDraw.ImageDraw, centre: Sequence[float], colour: tuple[int, int, int]) -> None:
    x, y = centre
    draw.ellipse((x - 5, y - 5, x + 5, y + 5), colour, PAPER)
