"""Models with fixed weights: of a run's checkpoint, called with arrays or applied to whole data sources."""

import dataclasses
import functools
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, TypeVar

import jax
import numpy as np
from flax import nnx

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import disk_error
from jepa_jax.config.groups import Config
from jepa_jax.data.contract import Source, Spec, abstract_batch, fixed_order, sample, target_names
from jepa_jax.data.pipeline import DeviceBatch, abstract_on, eval_batches
from jepa_jax.data.sources import open_splits
from jepa_jax.evals.features import (
    FeatureCache,
    FeatureMemory,
    OnCount,
    Split,
    delayed_by_one,
    fingerprint,
    ignore,
    part_of,
)
from jepa_jax.methods.contract import (
    AttentionMethod,
    Batch,
    EncoderMethod,
    LayerMethod,
    PatchMethod,
    build_method,
)
from jepa_jax.program.build import Program, initial_sample
from jepa_jax.program.checkpoint import params_sha256
from jepa_jax.program.config import changed_config
from jepa_jax.program.restore import restore_state, run_config
from jepa_jax.program.step import (
    TrainState,
    evaluated_forward,
    evaluated_variables,
    make_feature_step,
    make_statistics_step,
    pooled_statistics,
    reads_statistics,
)
from jepa_jax.program.variables import with_variables
from jepa_jax.program.workdir import Workdir
from jepa_jax.runtime.allocator import prepare_allocators
from jepa_jax.runtime.mesh import batch_sharding, make_mesh, replicated, whole_array

QUALITY_IMAGES = 4096  # test images whose features are looked at without labels
Function = Callable[[Any, Any, Batch], jax.Array]  # (params, stats, batch) -> outputs [B, ...]
Elements = np.ndarray | Mapping[str, np.ndarray]  # arrays [N, ...], or the only one
Made = TypeVar("Made")


@dataclasses.dataclass(frozen=True)
class FrozenModel:
    """The model of a program with fixed weights; copies with other weights share its compiled functions."""

    config: Config
    program: Program
    params: Any
    stats: Any
    compiled: dict[Any, Any] = dataclasses.field(default_factory=dict)  # functions, and facts about them

    @property
    def image_size(self) -> int:
        """Pixels per side of the images that it takes."""
        return self.config.data.image_size

    @property
    def channels(self) -> int:
        """Channels of the images that it takes."""
        return self.config.data.channels

    def once(self, name: Any, make: Callable[[], Made]) -> Made:
        """Returns what `make` made the first time that it was called under this name."""
        if name not in self.compiled:
            self.compiled[name] = make()
        return self.compiled[name]

    def outputs(
        self, function: Function, source: Source, on_elements: OnCount = ignore
    ) -> Iterator[tuple[np.ndarray, DeviceBatch, int]]:
        """Yields the outputs of each batch of a source, the batch, and how many of its elements count.

        A batch is read while the next one computes.
        """
        batches = eval_batches(source, self.config.eval.batch_size, batch_sharding(self.program.mesh))
        made = ((function(self.params, self.stats, batch), batch, valid) for batch, valid in batches)
        for outputs, batch, valid in delayed_by_one(made):
            yield np.asarray(outputs)[:valid], batch, valid
            on_elements(valid)

    def in_batches(self, function: Function, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Applies a function to any number of elements, in batches of one size; returns float32 [N, ...]."""
        size, results = self.config.eval.batch_size, []
        for start in range(0, max(len(next(iter(arrays.values()))), 1), size):
            parts = {name: array[start : start + size] for name, array in arrays.items()}
            valid = len(next(iter(parts.values())))
            padded = {
                name: np.pad(part, ((0, size - valid), *[(0, 0)] * (part.ndim - 1))) for name, part in parts.items()
            }
            results.append(np.asarray(function(self.params, self.stats, padded), np.float32)[:valid])
        return np.concatenate(results)

    def with_weights(self, params: Any, stats: Any) -> Self:
        """Returns the model with other weights."""
        return dataclasses.replace(self, params=params, stats=stats)

    def calibrated(self, source: Source, num_images: int, on_images: OnCount = ignore) -> Self:
        """Returns the model with batch statistics of unaugmented elements of a source; 0 changes nothing.

        An encoder that is trained on small crops has running statistics of crops, but it is used on whole images.
        """
        mesh, forward = self.program.mesh, evaluated_forward(self.program.method)
        size = min(self.config.eval.batch_size, len(source)) // mesh.size * mesh.size
        if num_images == 0 or size == 0 or forward is None:
            return self
        model = nnx.eval_shape(self.program.factory.merge, self.params, self.stats)
        shapes = {name: jax.ShapeDtypeStruct((size, *one.shape), one.dtype) for name, one in source.spec.items()}
        if not self.once("reads statistics", lambda: reads_statistics(self.program.method, mesh, model, shapes)):
            return self
        statistics = self.once(
            "statistics", lambda: make_statistics_step(self.program.method, self.program.factory, mesh)
        )
        order, seen, sharding = fixed_order(len(source)), [], batch_sharding(mesh)
        for start in range(0, min(num_images, len(source)), size):
            indices = order[np.arange(start, start + size) % len(source)]
            own = source.batch(np.split(indices, jax.process_count())[jax.process_index()])
            batch = {name: jax.make_array_from_process_local_data(sharding, own[name]) for name in source.spec}
            # One at a time: CPU devices that wait for each other in many programs at once can starve.
            seen.append(jax.block_until_ready(statistics(self.params, self.stats, batch)))
            on_images(size)
        everywhere = replicated(mesh)
        pooled = jax.tree.map(
            lambda leaf: jax.make_array_from_callback(leaf.shape, everywhere, lambda index: leaf[index]),
            pooled_statistics(jax.device_get(seen)),
        )
        return self.with_weights(self.params, with_variables(self.stats, pooled))


@dataclasses.dataclass(frozen=True)
class FrozenEncoder(FrozenModel):
    """An encoder with fixed weights.

    Call it with the arrays that its `inputs` name, or with the array alone if that is one, to get features
    [N, feature_dim] in float32: an encoder of images takes uint8 [N, image_size, image_size, channels]. Given the
    splits that it is evaluated on, it also has their features, which `store` keeps.
    """

    splits: tuple[Source, ...] = ()  # train and test
    store: FeatureMemory = dataclasses.field(default_factory=FeatureMemory)

    @property
    def feature_dim(self) -> int:
        """How many numbers per element it returns."""
        return jax.eval_shape(self._features(0, True), self.params, self.stats, self._abstract_batch()).shape[-1]

    @property
    def has_patches(self) -> bool:
        """Whether it has features of patches."""
        return jax.eval_shape(self.tokens, self.params, self.stats, self._abstract_batch()) is not None

    @property
    def module(self) -> Any:
        """The encoder's own nnx module, with its weights."""
        return self.program.factory.merge(self.params, self.stats).encoder

    @property
    def inputs(self) -> Spec:
        """The arrays of one element that its features depend on."""
        return self.once("inputs", self._inputs)

    def __call__(self, elements: Elements) -> np.ndarray:
        return self.in_batches(self._features(0, True), self._checked(elements))

    def patch_tokens(self, images: np.ndarray) -> np.ndarray:
        """Returns features of each patch of uint8 images: [N, rows, columns, F] in float32."""
        if not self.has_patches:
            raise UserError("patch_tokens: this encoder has no grid of patches; use a ViT, or call the encoder itself")
        return self.in_batches(self.once("patches", lambda: jax.jit(self.tokens)), self._checked(images))

    def attention_maps(self, images: np.ndarray) -> np.ndarray:
        """Returns how much of each patch the heads of the last block read: [N, heads, rows, columns] in float32.

        The weights are those of the CLS token where there is one, else the mean over all patches. They sum to 1 over
        the patches, but for the weight that the CLS token gives to itself.
        """
        if jax.eval_shape(self._attention, self.params, self.stats, self._abstract_batch()) is None:
            name = self.config.model.name
            raise UserError(f"attention: model.name = {name} has no attention to patches; use a run with a ViT")
        return self.in_batches(self.once("attention", lambda: jax.jit(self._attention)), self._checked(images))

    def with_weights(self, params: Any, stats: Any) -> Self:
        """Returns the encoder with other weights, without any features yet."""
        return dataclasses.replace(self, params=params, stats=stats, store=FeatureMemory())

    def extract(
        self,
        source: Source,
        level: int = 0,
        normalised: bool = True,
        on_images: OnCount = ignore,
        function: Function | None = None,
    ) -> Split:
        """Returns the features of a whole source, or what another `function` makes of its elements.

        Not `normalised`, they are read before the encoder's last layer norm.
        """
        features, labels, targets = [], [np.zeros(0, np.int32)], []
        names = target_names(source)
        for encoded, batch, valid in self.outputs(function or self._features(level, normalised), source, on_images):
            features.append(encoded)
            if "label" in batch:
                labels.append(whole_array(batch["label"])[:valid])
            if names:
                arrays = (whole_array(batch[name])[:valid].reshape(valid, -1) for name in names)
                targets.append(np.concatenate(list(arrays), axis=1).astype(np.float32))
        return Split(np.concatenate(features), np.concatenate(labels), *map(np.concatenate, [targets] if names else ()))

    @property
    def train(self) -> Source:
        """The train split that it is evaluated on."""
        return self.splits[0]

    @property
    def test(self) -> Source:
        """The test split that it is evaluated on."""
        return self.splits[1]

    def train_features(self, level: int = 0, on_images: OnCount = ignore) -> Split:
        """Returns the features of the train split."""
        return self.store.get(f"level{level}_train", lambda: self.extract(self.train, level, True, on_images))

    def test_features(self, level: int = 0, on_images: OnCount = ignore) -> Split:
        """Returns the features of the test split."""
        return self.store.get(f"level{level}_test", lambda: self.extract(self.test, level, True, on_images))

    def features(self, level: int = 0, on_images: OnCount = ignore) -> tuple[Split, Split]:
        """Returns the features of both splits."""
        return self.train_features(level, on_images), self.test_features(level, on_images)

    def layer_features(self, count: int, on_images: OnCount = ignore) -> tuple[Split, Split]:
        """Returns the features of both splits of the last `count` layers side by side, for an encoder that has them."""
        function = self.once(("layers", count), lambda: jax.jit(functools.partial(self.of_layers, count=count)))

        def of(name: str, source: Source) -> Split:
            return self.store.get(
                f"layers{count}_{name}", lambda: self.extract(source, on_images=on_images, function=function)
            )

        return of("train", self.train), of("test", self.test)

    @property
    def has_layers(self) -> bool:
        """Whether it has features of its last layers."""
        function = functools.partial(self.of_layers, count=1)
        return jax.eval_shape(function, self.params, self.stats, self._abstract_batch()) is not None

    def of_layers(self, params: Any, stats: Any, batch: Batch, *, count: int) -> jax.Array | None:
        """Returns the features of the last `count` layers for given weights; None for an encoder without them."""
        method = self.program.method
        if not isinstance(method, LayerMethod):
            return None
        return method.layer_features(self.program.factory.merge(params, stats), batch, count)

    def raw_features(
        self, level: int = 0, images: int = QUALITY_IMAGES, on_images: OnCount = ignore, *, split: str = "test"
    ) -> Split:
        """Returns features before the encoder's last normalisation, of a sample of images of a split."""
        source, name = (self.train if split == "train" else self.test), f"level{level}_{split}"
        known = self.store.known.get(name)
        if known is not None and not self.normalises(source, level):
            chosen = sample(len(source), images)
            on_images(len(chosen))
            return known.part(chosen)
        part = part_of(source, images)
        return self.store.get(f"{name}_raw_{images}", lambda: self.extract(part, level, False, on_images))

    def normalises(self, source: Source, level: int = 0) -> bool:
        """Returns whether `normalised=False` gives other features: whether it lowers to a different program."""

        def differ() -> bool:
            batch = abstract_on(self.program.mesh, source.spec, self.config.eval.batch_size)
            steps: list[Any] = [self._features(level, normalised) for normalised in (True, False)]
            return len({step.lower(self.params, self.stats, batch).as_text() for step in steps}) > 1  # with constants

        return self.once(("normalises", level), differ)

    def tokens(self, params: Any, stats: Any, batch: Batch) -> jax.Array | None:
        """Returns the function of `patch_tokens` for given weights; None for an encoder without a grid of patches."""
        method = self.program.method
        if not isinstance(method, PatchMethod):
            return None
        return method.feature_map(self.program.factory.merge(params, stats), batch)

    def _attention(self, params: Any, stats: Any, batch: Batch) -> jax.Array | None:
        method = self.program.method
        if not isinstance(method, AttentionMethod):
            return None
        return method.attention_maps(self.program.factory.merge(params, stats), batch)

    def _features(self, level: int, normalised: bool) -> Function:
        program = self.program
        return self.once(
            (level, normalised),
            lambda: make_feature_step(
                program.encoder_method, program.factory, program.mesh, level=level, normalised=normalised
            ),
        )

    def _abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        return abstract_batch(self.inputs, self.config.eval.batch_size)

    def _inputs(self) -> Spec:
        spec = self.program.spec
        batch = abstract_batch(spec, self.config.eval.batch_size)
        traced = self._features(0, True).trace(self.params, self.stats, batch).jaxpr.jaxpr  # type: ignore[attr-defined]
        read = {id(variable) for equation in traced.eqns for variable in equation.invars}
        arrays = zip(sorted(batch), traced.invars[-len(batch) :], strict=True)  # the last inputs of the program
        used = {name for name, variable in arrays if id(variable) in read}
        return {name: one for name, one in spec.items() if name in used}

    def _checked(self, elements: Elements) -> dict[str, np.ndarray]:
        inputs = self.inputs
        if isinstance(elements, Mapping):
            given = {name: np.asarray(elements[name]) for name in inputs if name in elements}
        else:
            given = {next(iter(inputs)): np.asarray(elements)} if len(inputs) == 1 else {}
        if missing := ", ".join(sorted(inputs.keys() - given.keys())):
            raise UserError(f"{missing}: not given; this encoder takes a dict of {', '.join(inputs)}")
        for name, array in given.items():
            one = inputs[name]
            if array.dtype != one.dtype or array.shape[1:] != one.shape:
                takes = f"{one.dtype} [{', '.join(map(str, ('N', *one.shape)))}]"
                called = f"{name}s" if name == "image" else name
                values = " with values 0..255" if one.dtype == np.uint8 else ""
                raise UserError(f"{called}: {array.dtype} {array.shape}; this encoder takes {takes}{values}")
        return given


def load_encoder(workdir: str | pathlib.Path, *, batch_size: int = 256) -> FrozenEncoder:
    """Returns the encoder of a run: of its best checkpoint if `train.keep_best` is set, or else of its newest."""
    config = changed_config(encoder_config(workdir), {"eval.batch_size": batch_size})
    program, state = restore_state(config, workdir, make_mesh(1, 1, jax.local_devices()))
    return FrozenEncoder(config, program, *evaluated_variables(state, config.eval.weights))


def encoder_config(workdir: str | pathlib.Path) -> Config:
    """Returns the config of a run that has a checkpoint; raises UserError if its method learns no encoder."""
    config, folder = run_config(workdir), Workdir(workdir)
    method = build_method(config, total_steps=1)
    if not isinstance(method, EncoderMethod):
        fix = f"; {method.loader} loads its model" if method.loader else ""
        raise UserError(
            f"{folder.path}: config.method.name = {config.method.name!r} learns no encoder with features to evaluate; "
            f"its own figures are in {folder.summary} and {folder.report}{fix}"
        )
    return config


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """The checkpoint of a run together with its data."""

    encoder: FrozenEncoder  # keeps its features in `cache`
    cache: FeatureCache
    state: TrainState
    results: pathlib.Path  # folder of what is measured
    data: Mapping[str, Any]  # what distinguishes its splits from others
    initial_state: Callable[[], TrainState]  # before the first step
    trained_on: str  # the source of the data that it was trained on


def load_run(
    workdir: str | pathlib.Path,
    *,
    data_dir: str | None = None,
    pool: str | None = None,
    data_source: str | None = None,
) -> TrainedRun:
    """Returns the encoder of a run with its data, of its best checkpoint if it keeps one, or else of its newest.

    Args:
      data_dir: new place of data that moved, or place of another data set.
      pool: what features are made of instead of the run's `eval.pool`.
      data_source: data set to evaluate on instead of the run's own.
    """
    prepare_allocators(os.environ)
    config, mesh, folder = encoder_config(workdir), make_mesh(-1, 1), Workdir(workdir).path
    trained_on = config.data.source
    changes: dict[str, Any] = {"eval.batch_size": config.eval.batch_size + -config.eval.batch_size % mesh.size}
    changes |= {} if data_dir is None else {"data.dir": data_dir}
    suffix = ""  # what was measured on the run's own data, and of its own features, stays
    if data_source and data_source != config.data.source:
        suffix = "_" + re.sub(r"\W+", "_", data_source)
        changes |= {"data.source": data_source, "data.num_train": 0, "data.num_test": 0, "data.validation": 0.0}
        changes |= {"data.transforms": (), "data.crops": "device"}
    config = changed_config(config, changes)
    sources = open_splits(config.data)
    train, test = (part_of(source, config.eval.max_images) for source in sources)
    program, state = restore_state(config, workdir, mesh, None if suffix else train.spec)
    first = initial_sample(sources[0])
    if pool is not None and pool != config.eval.pool:
        suffix += f"_{pool}"
        config = changed_config(config, {"eval.pool": pool})
        method = build_method(config, total_steps=program.length.total_steps)
        nnx.eval_shape(method.init, jax.random.key(0), first)  # refuses what cannot be pooled so
        program = dataclasses.replace(program, method=method)
    results = folder / f"eval{suffix}"
    params, stats = evaluated_variables(state, config.eval.weights)
    data = {"train": fingerprint(train), "test": fingerprint(test)}
    encoder_digest = params_sha256({"params": params, "stats": stats})
    identity = [int(state.step), encoder_digest, data, config.eval.pool, config.to_dict()["data"]["augment"]]
    try:
        cache = FeatureCache(results / "features", identity)
    except OSError as error:
        raise disk_error(error, folder) from error
    encoder = FrozenEncoder(config, program, params, stats, splits=(train, test), store=cache)

    def initial_state() -> TrainState:
        return program.factory.create(config.train.seed, {name: first[name] for name in program.spec if name in first})

    return TrainedRun(encoder, cache, state, results, data, initial_state, trained_on)
