"""Adapts the first layer of a public model to images with another number of channels."""

import numpy as np


def adapt_channels(kernel: np.ndarray, channels: int) -> tuple[np.ndarray, str]:
    """Returns a first-layer kernel [h, w, I, O] for `channels` inputs, and a sentence that says what was done.

    Every new channel gets the mean over the old ones, times old / new: an image whose channels are all equal gives the
    same outputs as before, and the scale of the outputs stays.
    """
    old = kernel.shape[2]
    if channels == old:
        return kernel, f"The input layer reads {old} channels, as it was saved."
    mean = kernel.mean(axis=2, keepdims=True) * (old / channels)
    sentence = (
        f"The input layer was adapted from {old} to {channels} channels: "
        f"each gets the mean over the {old} saved ones times {old}/{channels}."
    )
    return np.repeat(mean, channels, axis=2), sentence
