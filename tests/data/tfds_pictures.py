"""Prepares a tiny set of TFDS without TensorFlow: images are handed over as PNG bytes."""

import io
import pathlib
from collections.abc import Mapping

import numpy as np
from PIL import Image


def prepare(directory: pathlib.Path, images: Mapping[str, np.ndarray]) -> None:
    """Writes tiny_pictures into a data_dir: images uint8 [N, H, W, 3] by split, with labels 0 and 1 in turn."""
    import tensorflow_datasets as tfds

    size = next(iter(images.values())).shape[1]

    class TinyPictures(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {
                "image": tfds.features.Image(shape=(size, size, 3)),
                "label": tfds.features.ClassLabel(names=["a", "b"]),
            }
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

        def _split_generators(self, manager):
            return {split: self._generate_examples(images[split]) for split in images}

        def _generate_examples(self, pictures):
            for i, picture in enumerate(pictures):
                buffer = io.BytesIO()
                Image.fromarray(picture).save(buffer, format="PNG")
                yield i, {"image": buffer.getvalue(), "label": i % 2}

    TinyPictures(data_dir=str(directory), file_format="array_record").download_and_prepare()
