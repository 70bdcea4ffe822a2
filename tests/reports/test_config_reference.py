"""The reference page of config keys is the one in docs."""

import pathlib

from jepa_jax.config.schema import flatten
from jepa_jax.program.config import load_config
from jepa_jax.reports.config_reference import config_reference

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "reference" / "config.md"


def test_the_page_in_docs_is_current():
    """`jepa-jax reference > docs/reference/config.md` writes it anew."""
    assert PAGE.read_text() == config_reference()


def test_every_key_of_a_recipe_is_listed():
    page = config_reference()
    for recipe in ("rapid", "hjepa_quick_val", "mae_quickstart", "cifar10_cpu"):
        assert [name for name in flatten(load_config(recipe)) if f"`{name}`" not in page] == []
