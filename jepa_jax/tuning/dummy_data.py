"""Images for measurements without data: drawn anew for every batch, in whichever process loads it."""

from typing import Any

import numpy as np

from jepa_jax.data.synthetic import CLASSES, render_shapes

SMALLEST = 8  # pixels a side that shapes can be drawn at


class DummySource:
    """As many images of the size and with the number of classes of a data set; a loader has to work for them."""

    def __init__(self, count: int, *, image_size: int, num_classes: int, split: str):
        self.image_shape = (image_size, image_size, 3)
        self.classes = tuple(str(i) for i in range(num_classes))
        self._count, self._split = count, split

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: np.ndarray) -> dict[str, Any]:
        size = self.image_shape[0]
        images, labels = render_shapes(indices, size=max(size, SMALLEST), seed=0, split=self._split)
        return {"image": np.ascontiguousarray(images[:, :size, :size]), "label": labels % len(self.classes)}


def open_dummy(data_config: Any, split: str) -> DummySource:
    """In place of `open_source`; the files of the data set need not be there."""
    count, num_classes = data_config.num_train, len(CLASSES)
    if data_config.source != "shapes":
        from jepa_jax.planning.plan_inputs import planned_data

        size = planned_data(data_config)
        count, num_classes = size.num_train, size.num_classes
    if split == "test":
        count = data_config.num_test or max(1, count // 5)
    return DummySource(count, image_size=data_config.image_size, num_classes=num_classes, split=split)
