"""The reference page of all config keys, written from their declarations."""

from collections.abc import Iterator

from jepa_jax.config.groups import COMMON
from jepa_jax.config.owners import TABLES, named_group
from jepa_jax.config.schema import Group, Key, declarations

HEADER = """# Config keys

Written by `jepa-jax reference`. A recipe in `configs/` sets what it changes; everything else has the default below.
`--config.group.key=value` overrides both. `jepa-jax describe --config=NAME` prints the whole config.
"""


def config_reference() -> str:
    """Returns a Markdown page with every key of every group, method, encoder and variant."""
    parts = [HEADER]
    for group, cls in COMMON.items():
        parts += section(f"## `{group}`", f"{group}.", cls)
    for group, known in TABLES.items():
        by_class: dict[type[Group], list[str]] = {}
        for name in known:
            by_class.setdefault(named_group(group, {f"{group}.name": name}), []).append(name)
        for cls, names in by_class.items():
            parts += section(f"## `{group}.name` = {', '.join(f'`{name}`' for name in names)}", f"{group}.", cls)
    return "\n".join(parts) + "\n"


def section(title: str, prefix: str, group: type[Group]) -> list[str]:
    """Returns the lines of a group: its keys, then those of each variant."""
    lines = [title, "", *table(prefix, group)]
    for name, declared, _ in declarations(group):
        for choice, variant in declared.variants.items() if isinstance(declared, Key) else ():
            if variant is not None:
                lines += [f"With `{prefix}{name} = {choice}`:", "", *table(prefix, variant)]
        if isinstance(declared, Key) and declared.members is not None:
            lines += [f"For each NAME in `{prefix}{name}`:", "", *table(f"{prefix}NAME.", declared.members)]
    return lines


def table(prefix: str, group: type[Group]) -> list[str]:
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for name, key in leaves(prefix, group):
        default = f"that of `{key.default_from}`" if key.default_from else f"`{key.default!r}`"
        lines.append(f"| `{name}` | {default} | {meaning(key)} |")
    return [*lines, ""]


def leaves(prefix: str, group: type[Group]) -> Iterator[tuple[str, Key]]:
    """Yields the keys of a group and of the groups inside it."""
    for name, declared, _ in declarations(group):
        if isinstance(declared, Key):
            yield prefix + name, declared
        else:
            yield from leaves(f"{prefix}{name}.", declared)


def meaning(key: Key) -> str:
    text = key.meaning.replace("|", "\\|").replace("<", "&lt;")
    if key.choices:
        return f"{text}: {', '.join(f'`{choice}`' for choice in key.choices)}"
    limits = {"at least": key.least, "at most": key.most}
    given = [f"{word} {value:g}" for word, value in limits.items() if value is not None]
    return f"{text} ({', '.join(given)})" if given else text
