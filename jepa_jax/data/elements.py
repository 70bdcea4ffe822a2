"""Data sets of other makers as sources: dicts of arrays, Grain datasets, and anything with `len` and `[i]`.

Elements are dicts of arrays, (image, label), or images alone; `tfds.data_source`, Hugging Face `datasets` and data sets
in the style of PyTorch have such elements. Entries that are text are left out.
"""

import copy
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import grain
import jax
import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.data.contract import Source, Spec, sample
from jepa_jax.data.in_memory import Arrays, InMemorySource, SharedArrays, numbered_classes

OTHER_NAMES = {"img": "image", "fine_label": "label", "labels": "label"}
MOST_ELEMENTS = 2**32  # that Grain can shuffle
COUNTED = 1000  # elements whose labels are looked at where classes have no names
REFUSED_TYPES = {"float64": "float32", "int64": "int32", "uint64": "uint32", "complex128": "complex64"}


def window_shuffled(stream: grain.IterDataset, window: int, seed: int) -> grain.IterDataset:
    """Returns a stream whose elements are shuffled within windows of so many; fewer than two change nothing."""
    if window < 2:
        return stream
    return grain.experimental.WindowShuffleIterDataset(stream, window_size=window, seed=seed % 2**32)


def as_source(given: Any, *, split: str = "train", count: int = 0) -> Source:
    """Returns anything that holds a data set as a source; raises UserError if it is none of what is known."""
    if isinstance(given, Source):
        return given
    if isinstance(given, Mapping):
        arrays = element_arrays(given)
        lengths = {key: len(array) for key, array in arrays.items() if array.ndim}
        if len(lengths) < len(arrays) or len(set(lengths.values())) != 1 or not all(lengths.values()):
            raise UserError(f"{split} data: arrays of lengths {lengths}; give all of them one row per element")
        return InMemorySource(SharedArrays(arrays))
    if isinstance(given, grain.IterDataset):
        if not count:
            raise UserError(
                f"config.data.num_{split} = 0: a stream has no length; say how many elements to keep in memory for "
                "evaluation (those of train also count as an epoch)"
            )
        return StreamSource(given, ElementSource, count)
    if isinstance(given, grain.MapDataset) and len(given) > MOST_ELEMENTS:
        raise UserError(f"{split} data: a dataset without end; leave out `repeat`: the run counts the epochs")
    if hasattr(given, "__len__") and hasattr(given, "__getitem__"):
        return ElementSource(given)
    raise UserError(
        f"{split} data: {type(given).__name__} is no data set; give a dict of arrays, a Grain dataset, or what has "
        "len and [i] that returns dicts or (image, label)"
    )


def element_arrays(element: Any) -> Arrays:
    if not isinstance(element, Mapping):
        parts = element if isinstance(element, tuple | list) else (element,)
        if not 1 <= len(parts) <= 2:
            raise UserError(f"data: an element has {len(parts)} parts; give (image, label), or a dict of arrays")
        element = dict(zip(("image", "label"), parts, strict=len(parts) > 1))
    return {
        OTHER_NAMES.get(name, name): _array(OTHER_NAMES.get(name, name), value)
        for name, value in element.items()
        if not isinstance(value, str | bytes)
    }


def _array(name: str, value: Any) -> np.ndarray:
    array = np.asarray(value)
    if name == "label" and array.dtype.kind in "iu":
        return array.astype(np.int32)
    if isinstance(value, int | float) and not isinstance(value, np.generic):  # has no type of its own
        return array.astype(np.float32 if isinstance(value, float) else np.int32)
    if array.dtype.kind not in "biufcV":
        raise UserError(f"data: {name!r} holds {array.dtype}, which is no number; leave it out, or convert it")
    if wanted := REFUSED_TYPES.get(array.dtype.name):
        raise UserError(f"data: {name!r} is {array.dtype}, which would lose precision; convert it to {wanted}")
    return array[..., None] if name == "image" and array.ndim == 2 else array


class Kind(NamedTuple):
    spec: Spec
    classes: tuple[str, ...]


class ElementSource:
    """Elements that are read one by one; their spec is that of the first.

    Classes have the names that the data set gives them (`classes`, or `features["label"].names`), or else numbers, as
    many as its first labels show.
    """

    def __init__(self, elements: Any, kind: Kind | None = None):
        self._elements = elements
        if not len(elements):
            raise UserError("data: holds no element")
        if kind is None:
            first = self._element(0)
            spec = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in first.items()}
            kind = Kind(spec, self._class_names() if "label" in spec else ())
        self.spec, self.classes = kind

    def __len__(self) -> int:
        return len(self._elements)

    def batch(self, indices: np.ndarray) -> Arrays:
        read = [self._element(int(index)) for index in indices]
        expected = {name: (one.shape, one.dtype) for name, one in self.spec.items()}
        for index, element in zip(indices, read, strict=True):
            found = {name: (array.shape, array.dtype) for name, array in element.items()}
            if found != expected:
                name = min(key for key in {**found, **expected} if found.get(key) != expected.get(key))
                raise UserError(
                    f"data: {name!r} of element {index} is {_words(found.get(name))}, and of the first one "
                    f"{_words(expected.get(name))}; give all elements the same arrays"
                )
        batch = {name: np.stack([element[name] for element in read]) for name in expected}
        if self.classes and not 0 <= batch["label"].min() <= batch["label"].max() < len(self.classes):
            raise UserError(
                f"data: 'label' is outside 0..{len(self.classes) - 1}; give the data set an attribute `classes` with "
                "the names of all classes"
            )
        return batch

    def _element(self, index: int) -> Arrays:
        element = self._elements[index]
        if element is None:
            raise UserError(f"data: element {index} was filtered out; filter what the dataset is made of instead")
        return element_arrays(element)

    def _class_names(self) -> tuple[str, ...]:
        info = getattr(self._elements, "dataset_info", self._elements)  # of TFDS
        features = getattr(info, "features", None) or {}
        labels = [features[name] for name in ("label", "labels", "fine_label") if name in features]
        names = getattr(self._elements, "classes", None) or (labels and getattr(labels[0], "names", None))
        if names:
            return tuple(map(str, names))
        highest = max(int(self._element(int(index))["label"]) for index in sample(len(self), COUNTED))
        return numbered_classes(highest)


def _words(found: tuple[tuple[int, ...], np.dtype] | None) -> str:
    return "absent" if found is None else f"{found[1]}{list(found[0])}"


class StreamSource:
    """A stream of elements to train on, and the first of them in memory for everything that needs random access.

    Attributes:
      stream: what a run trains on, again from its start when it ends.
      made: returns a source of some elements of the stream.
    """

    def __init__(self, stream: grain.IterDataset, make: Callable[..., Source], count: int | None):
        """Takes what makes a source of a list of elements and their Kind, and how many to keep; None = all."""
        self.stream = stream
        iterator = iter(stream)
        head = list(itertools.islice(iterator, count))
        iterator.close()
        if len(head) < (count or 1):
            raise UserError(f"data: the stream ends after {len(head)} elements; {count or 'some'} are asked for")
        self._head = make(head)
        self.spec, self.classes = self._head.spec, self._head.classes
        self.made: Callable[[Sequence[Any]], Source] = functools.partial(make, kind=Kind(self.spec, self.classes))

    def __len__(self) -> int:
        return len(self._head)

    def batch(self, indices: np.ndarray) -> dict[str, Any]:
        return self._head.batch(indices)

    def shuffled(self, window: int, seed: int) -> "StreamSource":
        """Returns the stream without end, shuffled within windows anew; windows of fewer than two change nothing."""
        if window < 2:
            return self
        other = copy.copy(self)
        other.stream = window_shuffled(grain.experimental.RepeatIterDataset(self.stream), window, seed)
        return other

    def changed(self, change: Callable[[Source], Source]) -> "StreamSource":
        """Returns the stream with `change` applied to the sources that are made of its elements."""
        other, made = copy.copy(self), self.made
        other._head, other.made = change(self._head), lambda elements: change(made(elements))
        other.spec = other._head.spec
        return other
