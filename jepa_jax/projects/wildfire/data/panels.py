"""Maps of fires as RGB pictures.

They are drawn with operators alone, so that arrays of numpy and traced arrays of jax are drawn by the same code. Masks
and probabilities have the shape [..., H, W], pictures [..., H, W, 3] in 0..255. The colours can be told apart with any
kind of colour vision (Okabe and Ito's palette).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

HISTORY = 3  # frames that panels show of a history
EVEN_ODDS = 0.5
BURNT = (64, 64, 64)
IGNITED = (213, 94, 0)
PREDICTED = (0, 114, 178)
FALSE_ALARM = (240, 228, 66)
UNKNOWN = (204, 121, 167)
LEGEND = {  # what each colour means
    BURNT: "burning already; among the errors: and predicted to go on",
    IGNITED: "newly burning; among the errors: burning, but not predicted (miss)",
    PREDICTED: "predicted to ignite, the darker the more probable; among the errors: predicted and ignited (hit)",
    FALSE_ALARM: "predicted, but not burning (false alarm)",
    UNKNOWN: "not known",
}
PANELS = (*(f"{HISTORY - 1 - i} before" for i in range(HISTORY - 1)), "last frame", "next: true", "predicted", "errors")


def element_panels(batch: Mapping[str, Any], probability: Any, threshold: float = EVEN_ODDS) -> list[Any]:
    """Returns the pictures named by PANELS, each uint8 [B, H, W, 3]; frames before the first valid one are white.

    Args:
      batch: elements with the arrays of `fire_spec`.
      probability: predicted for the next masks [B, H, W].
      threshold: probability from which a pixel is predicted to burn.
    """
    fire, valid, terrain = batch["fire"][..., 0], batch["valid"], ground(batch["static"])
    target, known, last = batch["target"][..., 0], batch["known"][..., 0], fire[:, -1]
    missing = max(0, HISTORY - fire.shape[1])
    pictures = [terrain * 0 + 255] * missing
    for frame in range(fire.shape[1] - HISTORY + missing, fire.shape[1]):
        shown = valid[:, frame, None, None]
        burning = fire[:, frame]
        before = fire[:, frame - 1] | ~valid[:, frame - 1, None, None] if frame else burning
        picture = frame_map(terrain, burning & before, burning)
        pictures.append(painted(picture, ~shown, (255, 255, 255)))
    pictures.append(painted(frame_map(terrain, last, target), ~known, UNKNOWN))
    pictures.append(probability_map(terrain, last, probability))
    pictures.append(error_map(terrain, last, target, known, probability >= threshold))
    return [as_pixels(picture) for picture in pictures]


def ground(static: Any) -> Any:
    """Returns the first static channel, in 0..1, as faint grey."""
    return (248 - 56 * static[..., :1]) + np.zeros(3, np.float32)


def painted(picture: Any, where: Any, colour: tuple[int, int, int]) -> Any:
    """Returns a picture with a colour where a mask is true, or as opaque as `where` says in 0..1."""
    return picture + where[..., None] * (np.asarray(colour, np.float32) - picture)


def frame_map(terrain: Any, before: Any, burning: Any) -> Any:
    """Returns what burns, told apart by whether it did in the frame before."""
    return painted(painted(terrain, burning & before, BURNT), burning & ~before, IGNITED)


def probability_map(terrain: Any, before: Any, probability: Any) -> Any:
    """Returns predicted probabilities as opacity, of what burns already and of what would ignite."""
    return painted(painted(terrain, probability * before, BURNT), probability * ~before, PREDICTED)


def error_map(terrain: Any, before: Any, target: Any, known: Any, predicted: Any) -> Any:
    """Returns hits, misses and false alarms among the known pixels; hits that burned before look like in frames."""
    hit = predicted & target
    picture = painted(painted(terrain, hit & before, BURNT), hit & ~before, PREDICTED)
    picture = painted(painted(picture, target & ~predicted, IGNITED), predicted & ~target, FALSE_ALARM)
    return painted(picture, ~known, UNKNOWN)


def as_pixels(picture: Any) -> Any:
    """Returns a picture in uint8."""
    return (picture + 0.5).astype(np.uint8)
