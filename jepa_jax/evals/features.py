"""Features of whole splits, kept on disk or in memory, and facts about their labels."""

import copy
import hashlib
import io
import json
import operator
import pathlib
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import write_atomically
from jepa_jax.base.statistics import accuracy_interval
from jepa_jax.base.text import first_of
from jepa_jax.data.contract import Source, sample, spec_to_json
from jepa_jax.data.subset import Reader, Subset, subset

HELD_OUT = 0.1
FINGERPRINTED_ELEMENTS = 64
MOST_NAMED = 10  # classes in a message

OnCount = Callable[[int], None]  # called with the amount of work done; may raise to interrupt it
Item = TypeVar("Item")


def ignore(count: int) -> None:
    """Default callback; does nothing."""


class Split(NamedTuple):
    """Features [N, F] in float32, labels [N] and numeric targets [N, K]; of those that the data lacks, none ([0])."""

    features: np.ndarray
    labels: np.ndarray
    targets: np.ndarray = np.zeros(0, np.float32)

    def part(self, chosen: np.ndarray) -> "Split":
        return Split(*(array[chosen] if len(array) else array for array in self))


def part_of(source: Source, count: int, reader: Reader = operator.call) -> Subset:
    """Returns a sample of `count` elements of a source (0 = all), whose batches are read by `reader`."""
    return subset(source, sample(len(source), count), reader)


def labels_differ(*splits: Split) -> bool:
    """Returns whether the images of these splits are of two classes or more; else any encoder is always right."""
    return len(np.unique(np.concatenate([split.labels for split in splits]))) > 1


def chance(train: Split, test: Split, num_classes: int) -> float:
    """Returns the test accuracy, in percent, of guessing or of always answering the commonest train class: the better.

    The two are equal where classes are equally common.
    """
    commonest = np.argmax(np.bincount(train.labels, minlength=num_classes))
    return max(100 / num_classes, 100 * float(np.mean(test.labels == commonest)))


def accuracy_figures(accuracy: float, train: Split, test: Split, num_classes: int) -> dict[str, Any]:
    """Returns what eval.json holds of every accuracy in percent: its interval, chance, and numbers of images."""
    return {
        "accuracy": accuracy,
        "interval_95": accuracy_interval(accuracy, len(test.labels)),
        "chance": chance(train, test, num_classes),
        "train_images": len(train.labels),
        "test_images": len(test.labels),
    }


def held_out_split(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices of training images to fit on, and those of a fixed random tenth to choose by."""
    order = np.random.default_rng(0).permutation(count)
    held_out = max(1, round(HELD_OUT * count))
    return order[held_out:], order[:held_out]


def check_classes(train: np.ndarray, test: np.ndarray, classes: Sequence[str]) -> None:
    """Raises UserError if test images show classes that no training image shows: no probe can name those."""
    missing = np.setdiff1d(test, train)
    if len(missing):
        names = first_of([classes[label] for label in missing], MOST_NAMED)
        raise UserError(
            f"linear probe: the {len(train)} training images show none of {len(missing)} classes of the test "
            f"images ({names}); use more of them (data.num_train, eval.max_images), or give both splits the same "
            "classes"
        )


def class_notes(train: Split, test: Split, classes: Sequence[str]) -> list[str]:
    """Returns sentences about classes that the train or the test images lack."""
    if not labels_differ(train, test):
        return [f"All images are of one class, {classes[train.labels[0]]}: no accuracy is measured."]
    notes = []
    for name, split in (("train", train), ("test", test)):
        present = np.unique(split.labels)
        missing = [label for index, label in enumerate(classes) if index not in present]
        if missing:
            some = f"{len(present)} of {len(classes)} classes (missing: {first_of(missing, MOST_NAMED)})"
            notes.append(f"The {name} images have {some}: accuracies say nothing about the others.")
    return notes


def delayed_by_one(items: Iterable[Item]) -> Iterator[Item]:
    """Yields each item after the next one was made, so that a batch is read while the next one computes."""
    made: list[Item] = []
    for item in items:
        yield from made
        made = [item]
    yield from made


class FeatureMemory:
    """Splits that are computed once and stay in memory."""

    def __init__(self) -> None:
        self.known: dict[str, Split] = {}  # those in memory
        self.hits = 0  # how often features were there already

    def get(self, name: str, compute: Callable[[], Split]) -> Split:
        """Returns the split of this name; computes it if it is not there."""
        if name in self.known:
            self.hits += 1
        else:
            self.known[name] = compute()
        return self.known[name]


class FeatureCache(FeatureMemory):
    """Splits in a folder instead of memory, all of one encoder on one data set; removes those of any other."""

    def __init__(self, folder: pathlib.Path, identity: Any):
        super().__init__()
        text = json.dumps(identity, sort_keys=True, default=str)
        self._folder, self._prefix = folder, hashlib.sha256(text.encode()).hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.npz"):
            if not path.name.startswith(self._prefix):
                path.unlink(missing_ok=True)

    def renamed(self, prefix: str) -> Self:
        """Returns the cache of a variant of the encoder: the same folder, names that begin with `prefix`."""
        variant = copy.copy(self)
        variant._prefix, variant.hits = f"{self._prefix}_{prefix}", 0
        return variant

    def get(self, name: str, compute: Callable[[], Split]) -> Split:
        path = self._folder / f"{self._prefix}_{name}.npz"
        try:
            with np.load(path) as stored:
                split = Split(*(stored[name] for name in Split._fields))
        except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile):
            split = compute()
            buffer = io.BytesIO()
            np.savez(buffer, **split._asdict())
            write_atomically(path, buffer.getvalue())
        else:
            self.hits += 1
        return split


def fingerprint(source: Source) -> dict[str, Any]:
    """Returns what distinguishes a data set from others: its size, its shapes and a digest of some elements.

    The digest is "" if an element differs each time it is read, as where the source itself augments.
    """
    chosen = np.unique(np.linspace(0, len(source) - 1, FINGERPRINTED_ELEMENTS).astype(int))  # files may be sorted
    batch, first = source.batch(chosen), source.batch(chosen[:1])
    same = all(batch[name][:1].tobytes() == first[name].tobytes() for name in source.spec)
    digest = hashlib.sha256(b"".join(batch[name].tobytes() for name in source.spec))
    shapes = spec_to_json(source.spec)
    return {"images": len(source), "shapes": shapes, "sha256": digest.hexdigest()[:16] if same else ""}
