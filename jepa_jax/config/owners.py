"""Who declares the keys of a config: the groups of every run, the chosen method and the chosen encoder."""

from collections.abc import Mapping
from typing import Any

from jepa_jax.base.classes import ClassTable, find_class
from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import COMMON, NamedGroup
from jepa_jax.config.schema import Entry, Group, entries, with_variants

METHODS = ClassTable(
    "METHODS",
    {
        "image_jepa": "jepa_jax.methods.image_jepa:ImageJepa",
        "ijepa": "jepa_jax.methods.ijepa:IJepa",
        "hjepa": "jepa_jax.methods.hjepa:HJepa",
        "mae": "jepa_jax.methods.mae:MaskedAutoencoder",
        "byol": "jepa_jax.methods.byol:Byol",
        "simclr": "jepa_jax.methods.simclr:SimClr",
        "simsiam": "jepa_jax.methods.simsiam:SimSiam",
        "barlow_twins": "jepa_jax.methods.barlow_twins:BarlowTwins",
        "dino": "jepa_jax.methods.dino:Dino",
    },
)
MODELS = ClassTable(
    "MODELS",
    {
        **dict.fromkeys(
            ("resnet10", "resnet18", "resnet34", "resnet50", "resnet101", "resnet"), "jepa_jax.models.resnet:ResNet"
        ),
        **dict.fromkeys(("vit_tiny", "vit_small", "vit_base", "vit_large", "vit"), "jepa_jax.models.vit:ViT"),
        "patchnet": "jepa_jax.models.patchnet:PatchNet",
    },
)
TABLES = {"method": METHODS, "model": MODELS}
GROUPS = (*TABLES, *COMMON)


def named_group(group: str, given: Mapping[str, Any]) -> type[NamedGroup]:
    """Returns the keys of the method or encoder that `given` names: by a known name, or "package.module:Class"."""
    name = given.get(f"{group}.name", "")
    if group == "model" and not name and not needs_encoder(given.get("method.name", "")):
        return NamedGroup
    return find_class(f"{group}.name", name, TABLES[group], needs="Keys").Keys


def needs_encoder(method: str) -> bool:
    """Returns whether a method reads an encoder that `model.name` names.

    A method without features, or of other elements than images, may have a model of its own.
    """
    cls = find_class("method.name", method, METHODS)
    return hasattr(cls, "features") and cls.Keys.reads_images


def structure(given: Mapping[str, Any]) -> tuple[dict[str, type[Group]], list[str]]:
    """Returns the class of each group for the choices in `given` (dotted keys), and what could not be found."""
    found: dict[str, type[Group]] = {}
    complaints = []
    for group in GROUPS:
        try:
            base = named_group(group, given) if group in TABLES else COMMON[group]
            prefix = f"{group}."
            choices = {name[len(prefix) :]: value for name, value in given.items() if name.startswith(prefix)}
            found[group] = with_variants(base, choices, f"config.{prefix}")
        except UserError as error:
            complaints.append(str(error))
    return found, complaints


def known_keys(given: Mapping[str, Any]) -> dict[str, Entry]:
    """Returns the keys that the choices in `given` have, by dotted name; none of a group with an unknown choice."""
    return {
        name: entry for group, cls in structure(given)[0].items() for name, entry in entries(cls, f"{group}.").items()
    }


def dropped_keys(given: Mapping[str, Any], changes: Mapping[str, Any]) -> set[str]:
    """Returns the keys in `given` that no longer exist, or that another class declares, after `changes`.

    The rate of a loss that is replaced says nothing about the rate of the next one. Nothing is dropped of a group with
    an unknown choice.
    """
    before, after = known_keys(given), known_keys({**given, **changes})
    groups = {name.split(".")[0] for name in after}
    return {
        name
        for name in before.keys() & given.keys()
        if name.split(".")[0] in groups and before[name].owner is not (after[name].owner if name in after else None)
    }
