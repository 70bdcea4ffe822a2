"""Methods by the name that `method.name` gives them."""

from jepa_jax.base.classes import ClassTable, find_class
from jepa_jax.config.groups import Config, NamedGroup
from jepa_jax.methods.contract import Method

METHODS = ClassTable(
    "METHODS",
    {
        "image_jepa": "jepa_jax.methods.image_jepa:ImageJepa",
        "ijepa": "jepa_jax.methods.ijepa:IJepa",
        "hjepa": "jepa_jax.methods.hjepa:HJepa",
        "mae": "jepa_jax.methods.mae:MaskedAutoencoder",
        "byol": "jepa_jax.methods.byol:Byol",
        "simsiam": "jepa_jax.methods.simsiam:SimSiam",
        "barlow_twins": "jepa_jax.methods.barlow_twins:BarlowTwins",
        "dino": "jepa_jax.methods.dino:Dino",
    },
)


def method_config(name: str) -> type[NamedGroup]:
    """Returns the config group of a method: a known name, or "package.module:Class"."""
    return find_class("method.name", name, METHODS, needs="Keys").Keys


def build_method(config: Config, *, total_steps: int) -> Method:
    """Returns the method that `config.method.name` names; `total_steps` is the length of its schedules."""
    return find_class("method.name", config.method.name, METHODS)(config, total_steps)
