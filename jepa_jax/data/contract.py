"""The contract between data sets and everything that reads them."""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.config.augment import Crops
from jepa_jax.config.groups import DataConfig

Spec = Mapping[str, jax.ShapeDtypeStruct]
MAP = "map"  # array of an element: the class of each pixel, [H, W] from 0 on; 255 is unknown


@runtime_checkable
class Source(Protocol):
    """One split of a data set, read by index.

    A source is pickled into worker processes, which open the files themselves: it must not carry its data along. With
    data.worker_threads above 1, threads of a process call `batch` at the same time.

    Attributes:
      spec: shapes and dtypes of one element, e.g. {"image": uint8 [H, W, C], "label": int32 []}.
      classes: names of the classes that "label" counts; () without labels, and then `spec` has no "label".

    A source may have an attribute `caveat`, a sentence that a run shows as a warning when it starts, an attribute
    `labels`, int [N], if it knows them without reading its elements: then classes are checked before training, and an
    attribute `divided`, True if its data come without splits, so that one element in ten is a test element.
    """

    @property
    def spec(self) -> Spec: ...

    @property
    def classes(self) -> tuple[str, ...]: ...

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray) -> dict[str, Any]:
        """Returns arrays [B, ...] with the keys of `spec`, and under "skipped" the names of unreadable files if any."""


@runtime_checkable
class Bucketed(Source, Protocol):
    """A source whose elements differ in size: batches are padded to the size of a bucket, `spec` to the largest one.

    Attributes:
      buckets: the smallest bucket that holds each element, int [N]; higher buckets hold it as well.
    """

    @property
    def buckets(self) -> np.ndarray: ...

    def in_bucket(self, bucket: int) -> Source:
        """Returns the same elements padded to the size of a bucket; those that do not fit must not be asked for."""


@runtime_checkable
class Grouped(Source, Protocol):
    """A source whose elements are not independent: those of one group must not be on both sides of a split.

    Attributes:
      groups: number of the group of each element, int [N], e.g. the recording that a sequence was cut from.
    """

    @property
    def groups(self) -> np.ndarray: ...


class ElementNames(NamedTuple):
    """What the elements of a source and their groups are called, in the plural, for messages."""

    elements: str
    groups: str = ""


@runtime_checkable
class Named(Source, Protocol):
    @property
    def element_names(self) -> ElementNames: ...


def element_names(source: Source) -> ElementNames:
    """Returns what the elements of a source are called: its own names, or else images or elements."""
    return source.element_names if isinstance(source, Named) else ElementNames(words_of(source.spec))


def words_of(spec: Spec) -> str:
    """Returns what to call elements of which nothing but the spec is known, in the plural."""
    return "images" if "image" in spec else "elements"


@runtime_checkable
class Synthetic(Protocol):
    """The class of a source that may generate its elements instead of reading files."""

    synthetic: ClassVar[bool]


@runtime_checkable
class OwnValidation(Protocol):
    """The class of a source whose data set has a validation split, which it opens as "validation"."""

    own_validation: ClassVar[bool]


@runtime_checkable
class ExpectsSpecs(Protocol):
    """The class of a source that knows the shapes of its unlabelled elements without its files."""

    @staticmethod
    def expected_specs(data: DataConfig) -> list[Spec]:
        """Returns the specs that elements are padded to, ascending by size."""


@runtime_checkable
class Cropping(Source, Protocol):
    """A source of photographs of any size, out of which a loader can cut random crops."""

    def cropped(self, crops: Mapping[str, Crops], seed: int, epoch: int) -> Source:
        """Returns the same elements with crops of the full photograph instead of "image".

        The crops of an element depend on (seed, epoch, index) alone, not on who loads it or when.
        """


@runtime_checkable
class Targeted(Source, Protocol):
    """A source with numbers that probes predict from features.

    Attributes:
      targets: names of these arrays in `spec`; each of their numbers is a coordinate.
    """

    @property
    def targets(self) -> tuple[str, ...]: ...


def target_names(source: Source) -> tuple[str, ...]:
    """Returns the arrays of numbers that probes predict: what the source declares, or else "target" if it is float."""
    if isinstance(source, Targeted):
        return source.targets
    one = source.spec.get("target")
    return () if one is None or not np.issubdtype(one.dtype, np.floating) else ("target",)


def image_spec(size: int, channels: int = 3, *, labelled: bool = True) -> dict[str, jax.ShapeDtypeStruct]:
    spec = {"image": jax.ShapeDtypeStruct((size, size, channels), np.uint8)}
    return spec | ({"label": jax.ShapeDtypeStruct((), np.int32)} if labelled else {})


def abstract_batch(spec: Spec, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {key: jax.ShapeDtypeStruct((batch_size, *one.shape), one.dtype) for key, one in spec.items()}


def fixed_order(length: int) -> np.ndarray:
    """Returns the permutation of `length` elements by which every limited part of a data set is drawn."""
    return np.random.default_rng(0).permutation(length)


def sample(length: int, count: int) -> np.ndarray:
    """Returns which `count` of `length` elements to use where a limit applies; all of them, in order, if none does.

    The first elements of a data set are no sample of it: files are often sorted by class.
    """
    return fixed_order(length)[:count] if 0 < count < length else np.arange(length)


def check_arrays(batch: Mapping[str, Any], spec: Spec, count: int) -> None:
    """Raises UserError unless a batch of `count` elements has all arrays that a source declares."""
    for name, one in spec.items():
        declared = f"declared is {one.dtype}{[count, *one.shape]}"
        if name not in batch:
            raise UserError(f"data: a batch has no {name!r}, only {', '.join(batch)}; {declared}")
        array = batch[name]
        if array.shape != (count, *one.shape) or array.dtype != one.dtype:
            raise UserError(f"data: {name!r} of a batch is {array.dtype}{list(array.shape)}; {declared}")


def known_labels(source: Source) -> np.ndarray | None:
    """Returns the labels of a source, int [N], if it has any and knows them without reading its elements."""
    return getattr(source, "labels", None)


def spec_to_json(spec: Spec) -> dict[str, list[Any]]:
    return {name: [str(np.dtype(one.dtype)), *one.shape] for name, one in spec.items()}


def spec_from_json(stored: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the spec that `spec_to_json` stored; raises ValueError or TypeError for anything else."""
    spec = {}
    for name, (dtype, *shape) in stored.items():
        if not isinstance(dtype, str) or not all(isinstance(size, int) and size >= 0 for size in shape):
            raise ValueError(f"{name}: not a dtype and sizes")
        spec[name] = jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtype))
    return spec


def element_bytes(spec: Spec) -> int:
    return sum(one.size * one.dtype.itemsize for one in spec.values())
