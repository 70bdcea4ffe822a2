"""Grain datasets: a function of the config group `data` and of the split that returns one element per example.

    export PYTHONPATH=docs/examples
    jepa-jax train --config=quickstart --config.data.source=grain_dataset:dataset --workdir=runs/grain
    jepa-jax train --config=quickstart --config.data.source=grain_dataset:stream --workdir=runs/stream

`dataset` has random access: the run shuffles, repeats and batches it. `stream` has none: the run reads it in its own
order, its position is part of every checkpoint, and `data.num_train` elements count as an epoch. `darker` is a
transform of batches: --config.data.transforms=grain_dataset:darker
"""

import grain
import numpy as np

PERIODS = (1, 2, 4, 8)


class Waves:
    """A grain.sources.RandomAccessDataSource: pictures of waves, to be recognised by their length."""

    def __init__(self, count, size):
        self._count, self._size = count, size

    def __len__(self):
        return self._count

    def __getitem__(self, index):
        return {"label": index % len(PERIODS), "phase": index / self._count, "size": self._size}


def draw(wave):
    """Returns an element: a uint8 image [H, W, C] and its label."""
    x = np.arange(wave["size"]) / wave["size"]
    row = np.sin(2 * np.pi * (PERIODS[wave["label"]] * x + wave["phase"]))
    image = np.broadcast_to(128 + 100 * row[:, None], (wave["size"], wave["size"], 3))
    return {"image": image.astype(np.uint8), "label": wave["label"]}


def dataset(data, split):
    count = data.num_train if split == "train" else data.num_test
    return grain.MapDataset.source(Waves(count, data.image_size)).map(draw)


def stream(data, split):
    elements = dataset(data, split).to_iter_dataset()
    return grain.experimental.WindowShuffleIterDataset(elements, window_size=100, seed=data.seed)


def darker(batch):
    return {**batch, "image": batch["image"] // 2}
