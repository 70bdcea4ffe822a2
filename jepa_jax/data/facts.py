"""Facts about a data set that a program depends on, also for sets whose files are not there."""

import dataclasses

import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.contract import Bucketed, ExpectsSpecs, Source, Spec, image_spec
from jepa_jax.data.pipeline import bucket_specs
from jepa_jax.data.sources import find_opener, num_held_out, open_source

KNOWN_SIZES = {  # train images and classes
    "cifar10": (50_000, 10),
    "tfds:cifar10": (50_000, 10),
    "tfds:cifar100": (50_000, 100),
    "tfds:stl10": (5_000, 10),
    "tfds:imagenet2012": (1_281_167, 1000),
}
ASSUMED_SIZE = (50_000, 10)  # of a set about which nothing is known


@dataclasses.dataclass(frozen=True)
class DataFacts:
    """What is known of a data set: the size of what is trained on, its classes (0 without labels) and its elements."""

    num_train: int
    num_classes: int
    spec: Spec
    found: bool = True  # False if the files are not there

    @classmethod
    def of(cls, train: Source) -> "DataFacts":
        return cls(len(train), len(train.classes), train.spec)


@dataclasses.dataclass(frozen=True)
class BucketFacts:
    """One size of a data set whose elements differ in size; `share` of them need it, None if that is unknown."""

    spec: Spec
    share: float | None


def data_facts(data: DataConfig, *, assume: bool = False) -> DataFacts:
    """Returns the facts of the data set of a config, of its files if they are there.

    Args:
      assume: return ASSUMED_SIZE for a set that is neither there nor known, instead of raising UserError.
    """
    find_opener(data)  # a name that nobody knows is a mistake, not a set that is not there
    try:
        return DataFacts.of(open_source(data, "train"))
    except UserError:
        if data.source not in KNOWN_SIZES and not assume:
            raise
    samples, classes = KNOWN_SIZES.get(data.source, ASSUMED_SIZE)
    samples = data.num_train or samples
    samples -= num_held_out(samples, data.validation)
    if specs := _expected_specs(data):
        return DataFacts(samples, 0, specs[-1], found=False)
    return DataFacts(samples, classes, image_spec(data.image_size, data.channels), found=False)


def bucket_facts(data: DataConfig) -> list[BucketFacts]:
    """Returns the sizes of batches that training sees, ascending; empty if all batches have the same size."""
    if data.pipeline == "device":
        return []  # a set that stays on the device has one size
    try:
        train = open_source(data, "train")
    except UserError:
        specs = _expected_specs(data)
        return [BucketFacts(spec, None) for spec in specs] if len(specs) > 1 else []
    specs = bucket_specs(data, train)
    if len(specs) < 2 or not isinstance(train, Bucketed):
        return []
    counts = np.unique(train.buckets, return_counts=True)[1].tolist()
    return [BucketFacts(spec, count / len(train)) for spec, count in zip(specs, counts, strict=True)]


def _expected_specs(data: DataConfig) -> list[Spec]:
    """Returns the sizes of unlabelled elements that are no images, if the source knows them without its files."""
    opener = find_opener(data)
    return opener.expected_specs(data) if isinstance(opener, ExpectsSpecs) else []
