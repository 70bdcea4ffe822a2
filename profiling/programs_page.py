"""The page of programs for GPUs, as Markdown, from what profiling/make_gpu_programs.py has compiled."""

import collections
import textwrap
from typing import Any

CARDS = ("t4", "v100-16", "rtx3090", "rtx4090", "rtx5090", "a6000", "a100-80", "h100", "l4")
ONE = "1x1x1"
MISSING, FAILS = "-", "does not compile"
FIGURES = (
    ("GB moved", "gigabytes", ",.1f"), ("peak, GiB", "peak_gib", ".2f"), ("kernels", "kernels", ",d"),
    ("of the update", "update_kernels", ",d"), ("transposes, %", "transposed_percent", ".2f"),
    ("per second", "images_per_sec", ",.0f"),
)  # fmt: skip

Row = dict[str, Any]  # what the page says of a recipe on a card


def key_of(name: str, card: str, topology: str = ONE) -> str:
    """Returns the key of a cell."""
    return f"{name} {card} {topology}"


def page(names: list[str], rows: dict[str, Row], compared: Row) -> str:
    """Returns the page; `compared` has the rows of an earlier commit and, as "now", those of the newest."""
    return "\n".join([*matrix(names, rows), "", *comparison(compared), ""])


def matrix(names: list[str], rows: dict[str, Row]) -> list[str]:
    """Returns the table of every recipe on every card, and which cells are not compiled."""
    from jepa_jax.runtime.hardware import load_table

    table = load_table()
    titles = [table[card].name.removeprefix("NVIDIA ").removeprefix("GeForce ") for card in CARDS]
    missing = {name: [c for c in CARDS if "from" in rows.get(key_of(name, c), {"from": ""})] for name in names}
    compiled = len(names) * len(CARDS) - sum(map(len, missing.values()))
    commits = collections.Counter(row["commit"] for row in rows.values() if "commit" in row and "from" not in row)
    lines = [
        "# Programs for GPUs",
        "",
        "```",
        "python profiling/make_gpu_programs.py",
        "```",
        "",
        "Compiled, not measured: no GPU took part. Speeds are predicted ([how well](predictions.md)).",
        "",
        "## Every recipe on nine cards",
        "",
        "Predicted elements (images, clips) per second where the step fits the 90 % of the memory that JAX takes;",
        "else **no**, and what it needs at least. Batches are those of the recipes. *Slanted*: not compiled for this",
        "card yet, predicted from the program of a card with like multiprocessors. -: not compiled yet.",
        "",
        f"| recipe | {' | '.join(titles)} |",
        "|---|" + "---:|" * len(CARDS),
        *(f"| `{name}` | {' | '.join(cell_text(rows.get(key_of(name, card))) for card in CARDS)} |" for name in names),
        "",
        f"{compiled} of {len(names) * len(CARDS)} cells are compiled, "
        f"{sum('error' in row for row in rows.values())} of them failed (commits: {', '.join(sorted(commits))}).",
    ]
    if any(missing.values()):
        absent = [f"{card} {sum(card in cards for cards in missing.values())}" for card in CARDS]
        lines += ["", *textwrap.wrap(f"Not compiled yet, by card: {', '.join(absent)}.", 120)]
    return lines


def cell_text(row: Row | None) -> str:
    if row is None:
        return MISSING
    if "error" in row:
        return f"**{FAILS}**"
    if row["verdict"] == "does not fit":
        return "*no*" if "from" in row else f"**no** ({row['peak_gib']:.1f} GiB)"
    text = f"{row['images_per_sec']:,.0f}" + (" (tight)" if row["verdict"] == "tight" else "")
    return f"*{text}*" if "from" in row else text


def comparison(compared: Row) -> list[str]:
    """Returns the figures of some recipes at an earlier commit and now; speeds of both by the factors of now."""
    lines = [
        f"## Against {compared['commit']}",
        "",
        "Per device and step, before -> now. *Of the update*: kernels of the optimizer and of slow copies.",
        "*Transposes*: bytes moved only to change the order of axes. Speeds are predicted with the same factors.",
        "",
        "| recipe | card | " + " | ".join(title for title, _, _ in FIGURES) + " |",
        "|---|---|" + "---:|" * len(FIGURES),
    ]
    for key, old in compared["rows"].items():
        name, card, topology = key.split()
        new = compared.get("now", {}).get(key, {"error": ""})
        cells = [
            f"{old[figure]:{form}} -> " + (MISSING if "error" in new else f"{new[figure]:{form}}")
            for _, figure, form in FIGURES
        ]
        lines.append(f"| `{name}` | {card}{'' if topology == ONE else f' {topology}'} | {' | '.join(cells)} |")
    return lines
