"""ResNets as torchvision and timm name their tensors, and as transformers (`ResNetModel`) does."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.models.resnet import BOTTLENECK_EXPANSION, ResNet
from jepa_jax.models.rngs import init_rngs
from jepa_jax.weights.family import Family, needed, settings, shape_of, timm_arguments
from jepa_jax.weights.names import Rule, Table, batch_norm, convolution, unneeded

# Names of timm without a letter for another stem, another way to halve maps, or other blocks.
_TIMM_NAMES = r"((tv|gluon|ssl|swsl)_)?resnet\d+(_v1b)?"
_TIMM_FIXED = {"act_layer": "relu", "aa_layer": "", "avg_down": False, "output_stride": 32}


def torchvision_table(blocks: Sequence[int]) -> Table:
    """Returns the names of torchvision and timm; our blocks are numbered through all stages."""
    rules = [*_conv_norm("conv1", "bn1", "stem"), *unneeded("fc.weight", "fc.bias")]
    for number, (stage, index) in enumerate(_places(blocks)):
        theirs, ours = f"layer{stage + 1}.{index}", f"blocks.{number}"
        for i in range(3):
            rules += _conv_norm(f"{theirs}.conv{i + 1}", f"{theirs}.bn{i + 1}", f"{ours}.layers.{i}")
        rules += _conv_norm(f"{theirs}.downsample.0", f"{theirs}.downsample.1", f"{ours}.shortcut")
    return tuple(rules)


def hf_table(blocks: Sequence[int], prefix: str = "") -> Table:
    """Returns the names of transformers' `ResNetModel`."""

    def layer(theirs: str, ours: str) -> list[Rule]:
        return _conv_norm(f"{prefix}{theirs}.convolution", f"{prefix}{theirs}.normalization", ours)

    rules = [*layer("embedder.embedder", "stem"), *unneeded("classifier.1.weight", "classifier.1.bias")]
    for number, (stage, index) in enumerate(_places(blocks)):
        theirs, ours = f"encoder.stages.{stage}.layers.{index}", f"blocks.{number}"
        rules += [rule for i in range(3) for rule in layer(f"{theirs}.layer.{i}", f"{ours}.layers.{i}")]
        rules += layer(f"{theirs}.shortcut", f"{ours}.shortcut")
    return tuple(rules)


def _conv_norm(conv: str, bn: str, ours: str) -> list[Rule]:
    return [Rule(f"{conv}.weight", f"{ours}.conv.kernel", convolution), *batch_norm(bn, f"{ours}.norm")]


def _places(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Returns stage and index of every block."""
    return [(stage, index) for stage, count in enumerate(blocks) for index in range(count)]


def torchvision_resnet(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], origin: object) -> Family:
    """Returns what a ResNet is, from its tensors; where config.json has timm's arguments, they count."""
    arguments = timm_arguments(config, _TIMM_FIXED, _TIMM_NAMES, origin)
    if "conv1.0.weight" in tensors:
        raise UserError(f"{origin}: a ResNet with a first layer of three convolutions is not supported; use another")
    places = {(int(found[1]), int(found[2])) for name in tensors if (found := re.match(r"layer(\d)\.(\d+)\.", name))}
    stages = sorted({stage for stage, _ in places})
    counted = [1 + max(index for stage, index in places if stage == wanted) for wanted in stages]
    blocks = tuple(arguments.get("layers", counted))
    bottleneck = any(".conv3." in name for name in tensors)
    if "block" in arguments:
        bottleneck = arguments["block"] == "Bottleneck"
    widths = arguments.get("channels") or [shape_of(tensors, f"layer{i}.0.bn1.weight", 1, origin)[0] for i in stages]
    stem, first = shape_of(tensors, "bn1.weight", 1, origin), shape_of(tensors, "conv1.weight", 4, origin)
    facts = {
        "blocks": blocks, "widths": tuple(widths), "bottleneck": bottleneck,
        "stem": "cifar" if first[-1] == 3 else "imagenet", "width": stem[0],
    }  # fmt: skip
    return Family("resnet", facts, lambda: resnet_module(facts, first[1]), torchvision_table(blocks), 0, first[1])


def hf_resnet(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], origin: object) -> Family:
    """Returns what the config.json of a ResNet of transformers describes."""
    del tensors
    fixed = {"hidden_act": "relu", "downsample_in_first_stage": False, "downsample_in_bottleneck": False}
    settings(config, fixed, origin)
    blocks, outputs = tuple(needed(config, "depths", origin)), needed(config, "hidden_sizes", origin)
    bottleneck = needed(config, "layer_type", origin) == "bottleneck"
    facts = {
        "blocks": blocks, "widths": tuple(width // (BOTTLENECK_EXPANSION if bottleneck else 1) for width in outputs),
        "bottleneck": bottleneck, "stem": "imagenet", "width": needed(config, "embedding_size", origin),
    }  # fmt: skip
    channels = config.get("num_channels", 3)
    prefix = "resnet." if config["architectures"][0] == "ResNetForImageClassification" else ""
    return Family("resnet", facts, lambda: resnet_module(facts, channels), hf_table(blocks, prefix), 0, channels)


def resnet_module(facts: Mapping[str, Any], channels: int) -> ResNet:
    """Returns the ResNet that `ResNet.structure` facts describe, to be filled with weights."""
    return ResNet(**facts, channels=channels, rngs=init_rngs(0))
