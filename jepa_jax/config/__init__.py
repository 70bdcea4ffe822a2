"""Configs: what a run is. Recipes start from `default_config`, or from another recipe."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jepa_jax.config.config_dicts import default_config, with_choices

__all__ = ["default_config", "with_choices"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from jepa_jax.config import config_dicts  # imports ml_collections, which --help can do without

        return getattr(config_dicts, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
