"""The card of an exported encoder: what it is, what it was trained on and how, what it is worth, how it is used."""

import dataclasses
import pathlib
from collections.abc import Mapping

import jinja2

from jepa_jax.base.files import read_json_or_empty
from jepa_jax.base.text import number, percent
from jepa_jax.config.groups import Config

TEMPLATE = pathlib.Path(__file__).with_name("model_card.md")
PROGRAMS = ("jepa-jax", "__main__.py")


@dataclasses.dataclass(frozen=True)
class Exported:
    """What was written: the folder, its files with their sizes, and the facts that a user needs."""

    folder: pathlib.Path
    format: str
    files: Mapping[str, int]
    sha256: Mapping[str, str]  # of the files with weights
    feature_dim: int
    image_size: int  # 0 for an encoder of other elements
    channels: int
    inputs: Mapping[str, str]  # dtype and shape of each array of a batch


def model_card(workdir: pathlib.Path, config: Config, exported: Exported) -> str:
    """Returns the card as Markdown; what the run did not measure is said to be missing."""
    summary, environment = (read_json_or_empty(workdir / name) for name in ("summary.json", "environment.json"))
    words = str(environment.get("command") or "").split(" ")
    program = next((i for i, word in enumerate(words) if pathlib.PurePath(word).name in PROGRAMS), None)
    command = [*map(_as_given, words[:2]), *words[2:]] if program is None else ["jepa-jax", *words[program + 1 :]]
    before = "as loaded" if config.init_from else "untrained"
    accuracies = {
        "Linear probe": summary.get("probe_accuracy"),
        f"Linear probe, encoder {before}": summary.get("untrained_probe_accuracy"),
        "k-NN": summary.get("knn_accuracy"),
        f"k-NN, encoder {before}": summary.get("untrained_knn_accuracy"),
        "Chance": summary.get("chance_accuracy"),
        **{f"{name} (baseline)": value for name, value in (summary.get("baselines") or {}).items()},
    }
    return jinja2.Template(TEMPLATE.read_text(), keep_trailing_newline=True).render(
        config=config,
        data=config.data,
        elements="images" if exported.image_size else "elements",
        made=exported,
        summary=summary,
        splits=summary.get("data_identity") or {},
        start=_as_given(config.init_from),
        command=" ".join(command),
        accuracies={label: percent(value) for label, value in accuracies.items() if number(value) is not None},
    )


def _as_given(source: str) -> str:
    """Returns where weights came from; of a place on one machine only its name, which is all that others can use."""
    path = pathlib.PurePath(source)
    return path.name if path.is_absolute() or source.startswith("~") else source
