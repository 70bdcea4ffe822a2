"""The card of an exported encoder: what it is, what it was trained on and how, what it is worth, how it is used."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from jepa_jax.base.files import read_json_or_empty
from jepa_jax.base.text import number, percent
from jepa_jax.config.groups import Config

USES = {
    "safetensors": """import jepa_jax.weights

model = jepa_jax.weights.load_model("FOLDER")
pixel_values = (images / 255 - model.mean) / model.std  # float32 [B, {size}, {size}, {channels}]
features = model.features(pixel_values)""",
    "hf": """import transformers

model = transformers.AutoModel.from_pretrained("FOLDER")
outputs = model(pixel_values)  # float32 [B, {channels}, {size}, {size}], see preprocessor_config.json""",
    "stablehlo": """import jax.export

with open("FOLDER/encoder.stablehlo", "rb") as file:
    encoder = jax.export.deserialize(bytearray(file.read()))
features = encoder.call(images)  # uint8 [B, {stored}, {stored}, {channels}] -> float32 [B, {features}]""",
}
PROGRAMS = ("jepa-jax", "__main__.py")


@dataclasses.dataclass(frozen=True)
class Exported:
    """What was written: the folder, its files with their sizes, and the facts that a user needs."""

    folder: pathlib.Path
    format: str
    files: Mapping[str, int]
    feature_dim: int
    image_size: int
    channels: int


def model_card(workdir: pathlib.Path, config: Config, exported: Exported) -> str:
    """Returns the card as Markdown; what the run did not measure is said to be missing."""
    summary, environment = (read_json_or_empty(workdir / name) for name in ("summary.json", "environment.json"))
    size = {"size": exported.image_size, "channels": exported.channels, "features": exported.feature_dim}
    use = USES[exported.format].format(**size, stored=config.data.image_size)
    return f"""---
library_name: jepa_jax
tags: [self-supervised, image-feature-extraction]
---

# {config.model.name} trained with {config.method.name} on {config.data.source}

An image encoder that gives {exported.feature_dim} numbers per image (pooled: {config.eval.pool}).

## Use

```python
{use}
```

## Data

{_data(config, summary)}

## Recipe

{_recipe(config, summary)}

```
{_command(environment)}
```

## Accuracy

{_accuracies(config, summary)}
"""


def _command(environment: Mapping[str, Any]) -> str:
    """Returns the command of the run without the places of Python and of the program on its machine."""
    words = str(environment.get("command") or "").split(" ")
    program = next((i for i, word in enumerate(words) if pathlib.PurePath(word).name in PROGRAMS), None)
    known = [*map(_as_given, words[:2]), *words[2:]] if program is None else ["jepa-jax", *words[program + 1 :]]
    return " ".join(known) or "(the command was not recorded)"


def _data(config: Config, summary: Mapping[str, Any]) -> str:
    augment, data = config.data.augment, config.data
    splits = (summary.get("data_identity") or {}).items()
    sets = [f"{split['images']:,} {name} images (SHA-256 of a sample: {split['sha256']})" for name, split in splits]
    known = f" {' and '.join(sets)}." if sets else ""
    side = f" The shorter side of a picture is resized to {data.shorter_side} pixels, then the centre is cropped."
    seen = side if data.shorter_side else ""
    return (
        f"`{data.source}`, images of {data.image_size} x {data.image_size} pixels and {data.channels} channels, "
        f"normalised with mean {list(augment.mean)} and deviation {list(augment.std)} of pixels in 0..1.{known}{seen}"
    )


def _recipe(config: Config, summary: Mapping[str, Any]) -> str:
    optim, steps = config.optim, number(summary.get("steps"))
    length = f"{steps:,.0f} steps" if steps else "an unknown number of steps"
    images = ((summary.get("data_identity") or {}).get("train") or {}).get("images")
    epochs = f", {summary.get('epochs', 0):.4g} epochs" + (f" of {images:,} images" if images else "") if steps else ""
    start = _as_given(config.init_from)
    lines = [
        f"- Method `{config.method.name}`, encoder `{config.model.name}`, {length} of {config.data.batch_size} images"
        f"{epochs}.",
        f"- `{optim.name}`, peak rate {optim.lr:g}, weight decay {optim.weight_decay:g}, {config.train.precision}, "
        f"seed {config.train.seed}.",
        f"- Weights: {'the slow copy (EMA)' if config.eval.weights == 'target' else 'as trained'}.",
        f"- Started from `{start}`." if start else "- Started from random weights.",
        f"- SHA-256 of the parameters: {summary.get('params_sha256') or 'not recorded'}.",
    ]
    return "\n".join(lines)


def _as_given(source: str) -> str:
    """Returns where weights came from; of a place on one machine only its name, which is all that others can use."""
    path = pathlib.PurePath(source)
    return path.name if path.is_absolute() or source.startswith("~") else source


def _accuracies(config: Config, summary: Mapping[str, Any]) -> str:
    before = "as loaded" if config.init_from else "untrained"
    rows = {
        "Linear probe": "probe_accuracy",
        f"Linear probe, encoder {before}": "untrained_probe_accuracy",
        "k-NN": "knn_accuracy",
        f"k-NN, encoder {before}": "untrained_knn_accuracy",
        "Chance": "chance_accuracy",
    }
    values = {label: number(summary.get(key)) for label, key in rows.items()}
    baselines = summary.get("baselines")
    values |= {f"{name} (baseline)": number(value) for name, value in baselines.items()} if baselines else {}
    known = [f"| {label} | {percent(value)} |" for label, value in values.items() if value is not None]
    if not known:
        return "Not measured: the run has no labels, or has not finished."
    images = number(summary.get("probe_test_images"))
    tested = f"Top-1 on {images:,.0f} test images.\n\n" if images else ""
    return "\n".join([f"{tested}| | test accuracy |", "|---|---|", *known])
