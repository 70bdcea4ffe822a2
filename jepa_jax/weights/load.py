"""Models with weights from elsewhere: transformers, timm, torchvision, or exported by `jepa-jax export`."""

import dataclasses
import functools
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from jepa_jax.base.classes import ClassTable, find_class, load_object, refuse_untrusted
from jepa_jax.base.errors import UserError
from jepa_jax.config.owners import MODELS, named_group
from jepa_jax.config.schema import flatten, nested, with_variants
from jepa_jax.models.pooling import PoolingEncoder, pooled
from jepa_jax.models.registry import DTYPES, encoder_kind, encoder_structure
from jepa_jax.models.rngs import init_rngs
from jepa_jax.models.vit import ViT
from jepa_jax.weights.family import Family, check_sizes, describing, needed, section
from jepa_jax.weights.names import load_into
from jepa_jax.weights.reader import check_card, located, read_optional, read_tensors, tensor_file
from jepa_jax.weights.resnet import torchvision_resnet
from jepa_jax.weights.vit import DINOV2, timm_vit

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
PREPROCESSOR = "preprocessor_config.json"
FORMAT, VERSION = "jepa_jax", 1  # of encoders that `jepa-jax export` writes
# Functions of config.json, tensors and their place, by the architecture that transformers writes into config.json.
FAMILIES = ClassTable(
    "FAMILIES",
    {
        **dict.fromkeys(
            ("ViTModel", "ViTForImageClassification", "IJepaModel", *DINOV2, "ViTMAEForPreTraining"),
            "jepa_jax.weights.vit:hf_vit",
        ),
        "DINOv3ViTModel": "jepa_jax.weights.vit:hf_dinov3",
        **dict.fromkeys(("ResNetModel", "ResNetForImageClassification"), "jepa_jax.weights.resnet:hf_resnet"),
    },
)


class Geometry(NamedTuple):
    """How a picture becomes the square that enters a model; in pixels."""

    size: int  # per side of the square; 0 if any
    crop_size: int = 0  # per side of the centre that is cropped, and then resized to `size`; 0 = `size`
    shorter_side: int = 0  # that the shorter side is resized to before the crop; 0 = `crop_size`

    def at(self, size: int) -> "Geometry":
        """Returns the geometry for squares of another size; the same part of a picture is seen."""
        if size == self.size:
            return Geometry(size, self.crop_size or size, self.shorter_side or self.crop_size or size)
        own = self.crop_size or self.size
        return Geometry(size, size, max(size, round(size * self.shorter_side / own)) if self.shorter_side else size)


def described_geometry(preprocessor: Mapping[str, Any], image_size: int) -> Geometry:
    """Returns what a preprocessor_config.json says if it crops the centre; else squares of `image_size` pixels."""
    sizes = preprocessor.get("size"), preprocessor.get("crop_size")
    shorter, crop = _side(sizes[0], "shortest_edge"), _side(sizes[1], "height", "width")
    if not crop or not shorter or not all(preprocessor.get(key, True) for key in ("do_resize", "do_center_crop")):
        return Geometry(image_size)
    return Geometry(crop, crop, max(crop, shorter))


def _side(value: Any, *names: str) -> int:
    """Returns pixels that are given as a number, or equal under all these names; 0 if they are not."""
    found = {value.get(name) for name in names} if isinstance(value, Mapping) else {value}
    side = found.pop() if len(found) == 1 else 0
    return side if isinstance(side, int) and side > 0 else 0


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model with weights from a file; see `Family` for kind, structure, image_size, channels and no_features."""

    module: Any  # the nnx module
    kind: str
    structure: Mapping[str, Any]
    image_size: int
    channels: int
    mean: tuple[float, ...]  # of each channel, in 0..1, that images are normalised with
    std: tuple[float, ...]
    pool: str  # what `features` makes of the outputs: "cls", "mean" or "grid2"
    origin: pathlib.Path  # where the weights lie
    geometry: Geometry  # how pictures are resized and cropped before they are normalised
    no_features: str = ""

    @property
    def encoder(self) -> Any:
        """The part that gives features; raises UserError for a model that has none."""
        if self.no_features:
            raise UserError(f"{self.origin}: {self.no_features}; use a ViT or ResNet")
        return self.module.encoder if self.kind == "mae" else self.module

    @property
    def encoder_kind(self) -> str:
        """What to call the encoder: "vit", "resnet" or the `model.name` of another one."""
        return encoder_kind(self.structure, self.kind)

    @property
    def params(self) -> dict[str, Any]:
        """Trained variables of the encoder, nested by attribute, on the host."""
        return _on_host(self.encoder, nnx.Param)

    @property
    def stats(self) -> dict[str, Any]:
        """Other variables of the encoder but random state, nested by attribute, on the host."""
        return _on_host(self.encoder, nnx.All(nnx.Not(nnx.Param), nnx.Not(nnx.RngState)))

    def apply(self, pixel_values: Any, noise: Any = None) -> Any:
        """Returns what the library that saved the model returns, in float32.

        Args:
            pixel_values: normalised float32 images [B, H, W, C].
            noise: [B, patches], which decides the mask of a masked autoencoder; drawn from seed 0 if not given.

        Returns:
            Tokens [B, T, D] of a ViT, after its last norm and with that of CLS first where there is one; the last map
            [B, h, w, C] of a ResNet; `MaeOutputs` of a masked autoencoder; of another model what it returns.
        """
        images = self._checked(pixel_values)
        if self.kind != "mae":
            return self._run("outputs", images)
        if noise is None:
            noise = np.random.default_rng(0).random((len(images), self.module.encoder.grid**2), np.float32)
        return self._run("outputs", images, np.asarray(noise, np.float32))

    def features(self, pixel_values: Any) -> jax.Array:
        """Returns one vector per image [B, F], in float32: the outputs pooled as `pool` says."""
        assert self.encoder is not None
        return self._run("features", self._checked(pixel_values))

    def _checked(self, pixel_values: Any) -> Any:
        images = np.asarray(pixel_values) if not isinstance(pixel_values, jax.Array) else pixel_values
        if images.ndim != 4 or images.shape[-1] != self.channels or images.dtype != np.float32:
            takes = f"normalised float32 [B, height, width, {self.channels}]"
            raise UserError(f"pixel_values: {images.dtype} {list(images.shape)}; this model takes {takes}")
        patch = self.structure.get("patch_size", 1) if self.kind in ("vit", "mae") else 1
        height, width = images.shape[1:3]
        if patch > 1 and (height != width or height % patch):
            fix = f"this ViT takes square images of a multiple of {patch} pixels"
            raise UserError(f"pixel_values: images of {height} x {width} pixels; {fix}")
        if self.kind == "mae" and height != self.image_size:
            raise UserError(f"pixel_values: images of {height} pixels; this autoencoder takes {self.image_size}")
        return images

    def _run(self, function: str, *arrays: Any) -> Any:
        """Calls a compiled function, multiplying in full float32 also where a device would round."""
        compiled, state = self._compiled
        with jax.default_matmul_precision("float32"):
            return compiled[function](state, *arrays)

    @functools.cached_property
    def _compiled(self) -> tuple[dict[str, Callable[..., Any]], Any]:
        graph, state = nnx.split(self.module)

        def outputs(state: Any, images: jax.Array, *noise: jax.Array) -> Any:
            module = nnx.merge(graph, state)
            if isinstance(module, ViT):
                return module.tokens(images).astype(np.float32)
            if isinstance(module, PoolingEncoder):
                return module.outputs(images).cells.astype(np.float32)
            return module(images, *noise)

        def features(state: Any, images: jax.Array) -> jax.Array:
            module = nnx.merge(graph, state)
            encoder = module.encoder if self.kind == "mae" else module
            if not isinstance(encoder, PoolingEncoder):
                return encoder(images).astype(np.float32)
            return pooled(encoder.outputs(images), self.pool)

        return {"outputs": jax.jit(outputs), "features": jax.jit(features)}, state


def load_model(source: str | os.PathLike[str]) -> LoadedModel:
    """See `jepa_jax.weights.load_model`."""
    path = located(source)
    config, tensors, origin = read_optional(path), read_tensors(path), tensor_file(path)
    preprocessor = read_optional(path, PREPROCESSOR)
    check_card(origin)
    with describing(origin):
        check_sizes(config, tensors, origin)
        check_sizes(preprocessor, tensors, origin)
        if config.get("format") == FORMAT:
            return _exported(config, tensors, origin)
        return _public(config, preprocessor, tensors, origin)


def _public(
    config: Mapping[str, Any], preprocessor: Mapping[str, Any], tensors: Mapping[str, np.ndarray], origin: pathlib.Path
) -> LoadedModel:
    """Returns a model of another library."""
    mean, std = normalisation(config, preprocessor, origin)
    family = _family(config, tensors, origin)
    module = nnx.eval_shape(family.build)
    for old, new in family.renamed.items():
        tensors = {new + name.removeprefix(old) if name.startswith(old) else name: t for name, t in tensors.items()}
    load_into(module, tensors, family.table, origin)
    if len(mean) != family.channels:
        mean, std = (0.5,) * family.channels, (0.5,) * family.channels
    pool = "cls" if family.structure.get("cls_token") else "mean"
    geometry = described_geometry(preprocessor, family.image_size)
    return LoadedModel(
        module, family.kind, family.structure, family.image_size, family.channels, mean, std, pool, origin, geometry,
        family.no_features,
    )  # fmt: skip


def _family(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], origin: pathlib.Path) -> Family:
    architectures = config.get("architectures")
    if architectures:
        if architectures[0] not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise UserError(f"{origin.parent}/config.json: architectures = {architectures}; supported are {known}")
        return load_object(FAMILIES[architectures[0]])(config, tensors, origin)
    if any(name.startswith("blocks.") for name in tensors):
        return timm_vit(config, tensors, origin)
    if any(name.startswith("layer1.") for name in tensors):
        return torchvision_resnet(config, tensors, origin)
    first = ", ".join(sorted(tensors)[:3])
    raise UserError(
        f"{origin}: a model of unknown names ({first}, ...); put the config.json of transformers beside it, or use "
        "a ViT or ResNet of timm or torchvision"
    )


def _exported(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], origin: pathlib.Path) -> LoadedModel:
    """Returns the encoder that the config.json of `jepa-jax export` describes; it has no dropout, as it is used."""
    if config.get("version") != VERSION:
        raise UserError(f"{origin}: format version {config.get('version')}; this version of jepa_jax reads {VERSION}")
    values = flatten(needed(config, "model", origin))
    refuse_untrusted({f"model.{name}": value for name, value in values.items()})
    if "drop_path" in values:
        values["drop_path"] = 0.0
    group: Any = with_variants(named_group("model", {"model.name": values["name"]}), values)(**nested(values))
    view_size, channels = needed(config, "view_size", origin), needed(config, "channels", origin)
    cls, dtype = find_class("model.name", group.name, MODELS), DTYPES[config.get("precision", "float32")]

    def make(images: jax.Array) -> Any:
        return cls.from_config(group, images, view_size=view_size, dtype=dtype, remat="none", rngs=init_rngs(0))

    encoder = nnx.eval_shape(make, jax.ShapeDtypeStruct((64, view_size, view_size, channels), np.float32))
    load_into(encoder, tensors, None, origin, "export it again")
    structure, size = encoder_structure(group), config["image_size"]
    mean, std = checked_statistics(config["mean"], config["std"])
    if config["pool"] not in getattr(cls, "pools", (config["pool"],)):
        raise ValueError(f"pool = {config['pool']!r} is not one of {cls.pools}")
    kind = encoder_kind(structure, group.name)
    geometry = Geometry(size, config.get("crop_size", 0), config.get("shorter_side", 0))
    return LoadedModel(encoder, kind, structure, size, channels, mean, std, config["pool"], origin, geometry)


def normalisation(
    config: Mapping[str, Any], preprocessor: Mapping[str, Any], origin: object
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns mean and deviation per channel that images are normalised with; those of ImageNet if no file says so."""
    timm = section(config, "pretrained_cfg", origin)
    for values, names in ((preprocessor, ("image_mean", "image_std")), (timm, ("mean", "std"))):
        if all(values.get(name) is not None for name in names):
            return checked_statistics(*(values[name] for name in names))
    return IMAGENET


def checked_statistics(mean: Any, std: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns mean and deviation per channel; raises ValueError if images cannot be normalised with them."""
    mean, std = tuple(map(float, mean)), tuple(map(float, std))
    if len(mean) != len(std) or not all(map(math.isfinite, mean)) or not all(0 < one < math.inf for one in std):
        raise ValueError(f"mean {mean} and std {std} do not normalise images")
    return mean, std


def _on_host(module: nnx.Module, kept: Any) -> dict[str, Any]:
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(module, kept)))
