"""Keys of random views: the operations that make one of an image."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from jepa_jax.config.schema import PROBABILITY, Group, Problem, key, subgroup

if TYPE_CHECKING:
    from jepa_jax.config.groups import Config


@dataclasses.dataclass(frozen=True)
class CropConfig(Group):
    probability: float = key(1.0, "share of views cut by a random resized crop", **PROBABILITY)
    scale: tuple[float, ...] = key(
        (0.2, 1.0), "smallest and largest part of the area", least=1e-6, most=1, length=2, increasing=True
    )
    ratio: tuple[float, ...] = key(
        (0.75, 1.3333), "smallest and largest width over height", least=1e-6, length=2, increasing=True
    )
    size: int = key(0, "pixels per side of a view; 0 = data.image_size", least=0)


@dataclasses.dataclass(frozen=True)
class JitterConfig(Group):
    probability: float = key(0.0, "share of views with jittered colours", **PROBABILITY)
    brightness: float = key(0.4, "largest relative change", least=0)
    contrast: float = key(0.4, "largest relative change", least=0)
    saturation: float = key(0.2, "largest relative change; needs RGB", least=0)
    hue: float = key(0.1, "largest turn of the colour wheel; needs RGB", least=0, most=0.5)


@dataclasses.dataclass(frozen=True)
class BlurConfig(Group):
    probability: float = key(0.0, "share of blurred views", **PROBABILITY)
    sigma: tuple[float, ...] = key(
        (0.1, 2.0), "smallest and largest sigma in pixels", least=1e-6, length=2, increasing=True
    )
    taps: int = key(
        0,
        "pixels of the kernel, one more if even; auto: a tenth of the view",
        least=0,
        words={"auto": 0},
    )


@dataclasses.dataclass(frozen=True)
class SolarizeConfig(Group):
    probability: float = key(0.0, "share of views with bright pixels inverted", **PROBABILITY)
    threshold: float = key(128.0, "level of 0..255 from which pixels are inverted", least=0, most=256)


@dataclasses.dataclass(frozen=True)
class FlipConfig(Group):
    probability: float = key(0.5, "share of views mirrored left to right", **PROBABILITY)


@dataclasses.dataclass(frozen=True)
class GrayscaleConfig(Group):
    probability: float = key(0.0, "share of views without colour; needs RGB", **PROBABILITY)


@dataclasses.dataclass(frozen=True)
class Operations(Group):
    """How a view is made of an image; an operation with probability 0 is not compiled."""

    crop: CropConfig = subgroup(CropConfig)
    flip: FlipConfig = subgroup(FlipConfig)
    jitter: JitterConfig = subgroup(JitterConfig)
    grayscale: GrayscaleConfig = subgroup(GrayscaleConfig)
    blur: BlurConfig = subgroup(BlurConfig)
    solarize: SolarizeConfig = subgroup(SolarizeConfig)

    @property
    def is_random(self) -> bool:
        """Whether two views of an image can differ."""
        operations = (self.crop, self.flip, self.jitter, self.grayscale, self.blur, self.solarize)
        return any(operation.probability > 0 for operation in operations)

    def colour_problems(self, channels: int, where: str) -> Iterator[Problem]:
        """Yields the operations that need RGB and have other channels."""
        if channels == 3:
            return
        colour = self.jitter.probability > 0
        for name, used in (
            ("jitter.saturation", colour and self.jitter.saturation > 0),
            ("jitter.hue", colour and self.jitter.hue > 0),
            ("grayscale.probability", self.grayscale.probability > 0),
        ):
            if used:
                yield Problem(f"{where}.{name}", f"needs RGB and data.channels is {channels}; set it to 0")


@dataclasses.dataclass(frozen=True)
class AugmentConfig(Operations):
    """Random, normalised views of an image."""

    mean: tuple[float, ...] = key((0.4914, 0.4822, 0.4465), "mean of each channel, in 0..1")
    std: tuple[float, ...] = key((0.2023, 0.1994, 0.2010), "standard deviation of each channel, in 0..1", least=1e-6)

    def problems(self, config: "Config") -> Iterator[Problem]:
        if not config.method.reads_images:
            return
        channels = config.data.channels
        for name in ("mean", "std"):
            if len(getattr(self, name)) != channels and config.data.statistics == "config":
                yield Problem(f"data.augment.{name}", f"needs data.channels = {channels} numbers, one per channel")
        yield from self.colour_problems(channels, "data.augment")
        for name, group in config.view_groups.items():
            yield from group.colour_problems(channels, f"method.{name}")


@dataclasses.dataclass(frozen=True)
class ViewGroup(Operations):
    """Views of each image that are made in another way than `data.augment` says: one, like those of it in all else."""

    count: ClassVar[int] = 1
    role: ClassVar[str] = "both"


@dataclasses.dataclass(frozen=True)
class FurtherViews(ViewGroup):
    """Any number of such views, of which a loss may ask less."""

    count: int = key(1, "views per image of this group", least=1)  # type: ignore[misc]
    role: str = key(  # type: ignore[misc]
        "context",
        "these views are predicted from (context), to (target: every context is to agree with them), or both",
        choices=("context", "target", "both"),
    )


@dataclasses.dataclass(frozen=True)
class Crops:
    """Random crops of one size that the loader cuts out of each photograph."""

    count: int
    size: int  # pixels per side
    crop: CropConfig
