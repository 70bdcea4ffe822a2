"""Data sets in the interfaces of other libraries, in a module of their own because worker processes import it."""

import grain
import numpy as np
from PIL import Image

from tests.data.tfds_pictures import prepare

SIZE = 16


def arrays(split):
    """Returns images that show their class by their colour, uint8 [N, 16, 16, 3], and labels."""
    rng = np.random.default_rng(len(split))
    labels = np.arange(96 if split == "train" else 32) % 4
    images = rng.integers(0, 128, (len(labels), SIZE, SIZE, 3), np.uint8)
    images[..., 0] += (labels * 30).astype(np.uint8)[:, None, None]
    return {"image": images, "label": labels}


class TorchStyle:
    """As torchvision's: (PIL image, int)."""

    classes = ["a", "b", "c", "d"]

    def __init__(self, split):
        self._split = split

    def __len__(self):
        return len(arrays(self._split)["label"])

    def __getitem__(self, index):
        data = arrays(self._split)
        return Image.fromarray(data["image"][index]), int(data["label"][index])


class ClassLabel:
    """A feature of Hugging Face and of TFDS."""

    names = ["a", "b", "c", "d"]


class HuggingFaceStyle(TorchStyle):
    """As `datasets.Dataset`: dicts with images of PIL, numbers of Python and texts, and `features`."""

    classes = None
    features = {"img": None, "label": ClassLabel(), "file": None}

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return {"img": image, "label": label, "file": f"{index}.png"}


class TfdsStyle(HuggingFaceStyle):
    """As `tfds.data_source`: dicts of arrays, and `dataset_info`."""

    features = None

    @property
    def dataset_info(self):
        return type("Info", (), {"features": HuggingFaceStyle.features})

    def __getitem__(self, index):
        image, label = TorchStyle.__getitem__(self, index)
        return {"id": b"1", "image": np.asarray(image), "label": np.int64(label)}


def map_dataset(data, split):
    """Returns a Grain dataset with random access; also the function of a config (`data.source`)."""
    return grain.MapDataset.source(TorchStyle(split)).map(lambda pair: {"image": np.asarray(pair[0]), "label": pair[1]})


def stream(data, split):
    """Returns a Grain dataset without random access."""
    elements = map_dataset(data, split).to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
    return grain.experimental.WindowShuffleIterDataset(elements, window_size=7, seed=0)


def darker(batch):
    """A transform of a recipe."""
    return {**batch, "image": batch["image"] // 2}


KINDS = {
    "arrays": arrays,
    "torch": TorchStyle,
    "hugging_face": HuggingFaceStyle,
    "tfds": TfdsStyle,
    "map": lambda split: map_dataset(None, split),
    "stream": lambda split: stream(None, split),
}


def of_tfds(folder):
    """Returns both splits of a prepared set, as `tfds.data_source` opens them."""
    import tensorflow_datasets as tfds

    with tfds.core.registered.skip_registration():  # it may be known already
        prepare(folder, {split: arrays(split)["image"] for split in ("train", "test")})
    return tfds.builder("tiny_pictures", data_dir=str(folder)).as_data_source()


def of_hugging_face(folder):
    """Returns both splits as `datasets.Dataset`."""
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=TorchStyle.classes)})
    return {
        split: datasets.Dataset.from_dict(
            {**arrays(split), "image": list(map(Image.fromarray, arrays(split)["image"]))}, features
        )
        for split in ("train", "test")
    }


LIBRARIES = {"tensorflow_datasets": of_tfds, "datasets": of_hugging_face}
