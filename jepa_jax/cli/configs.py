"""Commands about configs: `configs` lists the shipped ones, `describe` measures one, `reference` explains every key."""

from collections.abc import Mapping
from typing import Any

from jepa_jax.base.console import Console
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser, config_from

ABOUT_CONFIGS = """Lists the configs that come with the package, with the first line of their documentation.

  jepa-jax configs
"""
ABOUT_DESCRIBE = """Prints what a config describes: every key, parameters, FLOPs per element and steps. Trains nothing.

jepa-jax describe --config=rapid [--config.model.name=resnet34]
"""
ABOUT_REFERENCE = """Prints a Markdown page with every config key: default, meaning and limits.

  jepa-jax reference > docs/reference/config.md
"""


def list_configs(arguments: Arguments, console: Console) -> Result:
    from jepa_jax.config.recipe import shipped_recipes, summary_of

    summaries = {name: summary_of(path) for name, path in shipped_recipes().items()}
    width = max(map(len, summaries))
    lines = [f"{name:<{width}}  {summary}" for name, summary in summaries.items()]
    return Result([{"configs": summaries}], "\n".join(lines))


def run_describe(arguments: Arguments, console: Console) -> Result:
    from jepa_jax.config.schema import flatten
    from jepa_jax.program.describe import describe

    config = config_from(arguments)
    facts = describe(config)
    keys = "\n".join(f"{key} = {value!r}" for key, value in flatten(config).items())
    return Result([{**facts, "config": config.to_dict()}], f"{keys}\n\n{facts_text(facts)}")


def facts_text(facts: Mapping[str, Any]) -> str:
    assumed = "" if facts["data_found"] else " (assumed: the data is not there)"
    elements, features = facts["elements"], []
    one = elements.removesuffix("s")
    if facts["feature_dim"]:
        features = [
            f"features: {facts['feature_dim']} numbers",
            f"encoder: {facts['encoder_macs_per_image'] / 1e9:,.3f} GMACs per {one} "
            "(as usually published: forward, with padding)",
        ]
    return "\n".join(
        [
            *(f"{name:<32} {size:>12,}" for name, size in facts["params_by_module"].items()),
            f"{'total':<32} {facts['params_total']:>12,}   trainable {facts['params_trainable']:,}",
            *(f"not trained: {one['path']} ({one['reason']})" for one in facts["params_dead"]),
            "",
            *features,
            f"training: {facts['flops_per_image'] / 1e9:,.4g} GFLOP per {one} "
            "(2 per multiply-add: forward and backward, all views, without padding and recomputation)",
            f"length: {facts['steps_total']:,} steps, {facts['steps_per_epoch']:,} per epoch "
            f"of {facts['images_per_epoch']:,} {elements}{assumed}",
        ]
    )


def print_reference(arguments: Arguments, console: Console) -> Result:
    from jepa_jax.reports.config_reference import config_reference

    return Result([], config_reference())


CONFIGS = Command("configs", ABOUT_CONFIGS, lambda parser: None, list_configs, uses_jax=False)
REFERENCE = Command("reference", ABOUT_REFERENCE, lambda parser: None, print_reference)
DESCRIBE = Command("describe", ABOUT_DESCRIBE, Parser.add_config, run_describe)
