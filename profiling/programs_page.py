"""The page of programs for GPUs, as Markdown, from what profiling/make_gpu_programs.py has compiled."""

from typing import Any

CARDS = ("t4", "v100-16", "rtx3090", "rtx4090", "rtx5090", "a6000", "a100-80", "h100", "l4")
SAME_CODE = {"a6000": "rtx3090", "l4": "rtx4090"}  # cards of one compute capability run the same kernels
ONE = "1x1x1"
MISSING, FAILS = "-", "does not compile"
FIGURES = (
    ("GB moved", "gigabytes", ",.1f"), ("peak, GiB", "peak_gib", ".2f"), ("kernels", "kernels", ",d"),
    ("of the update", "update_kernels", ",d"), ("transposes, %", "transposed_percent", ".2f"),
    ("per second", "images_per_sec", ",.0f"),
)  # fmt: skip
MEANING = """\
Predicted elements (images, clips) per second where the step fits the 90 % of the memory that JAX takes; else *no*,
and what it needs. Batches are those of the recipes. Compiled, not measured: no GPU took part. Speeds are predicted
([how well](predictions.md)).

*Figures* are of whole steps as XLA optimizes, schedules and places them in memory. A program without a limit of memory
stands for several cards of like multiprocessors, if it fits them: that of a T4 for the V100, that of an RTX 3090 for
the 4090, 5090, A6000 and L4, that of an A100 for the H100. A need marked + is that of the program of another card, or
of one without a limit: XLA could recompute more of it. -: not compiled yet.

*Code*: upright cells were compiled to the end, assembler included, for this compute capability (A6000 as RTX 3090, L4
as RTX 4090): as the step itself (commit d48a6ee), or with one block, eight images and all else as in the recipe.
Slanted cells were not. What has failed on some cards alone are kernels of attention, by their shared memory: the line
below the table says for which cards they were compiled to the end, with gradients."""

Row = dict[str, Any]  # what is known of a recipe on a card


def key_of(name: str, card: str, topology: str = ONE) -> str:
    """Returns the key of a cell."""
    return f"{name} {card} {topology}"


def page(names: list[str], found: dict[str, dict[str, Row]], compared: Row) -> str:
    """Returns the page; `compared` has the rows of an earlier commit and, as "now", those of the newest."""
    return "\n".join([*matrix(names, found), "", *comparison(compared), ""])


def matrix(names: list[str], found: dict[str, dict[str, Row]]) -> list[str]:
    """Returns the table of every recipe on every card, and how much of it is compiled."""
    from jepa_jax.runtime.hardware import load_table

    table = load_table()
    titles = [table[card].name.removeprefix("NVIDIA ").removeprefix("GeForce ") for card in CARDS]
    cells = [[cell_text(name, card, found) for card in CARDS] for name in names]
    every = [cell for row in cells for cell in row]
    counts = {
        "have figures": sum(cell.strip("*") != MISSING for cell in every),
        "are compiled to the end": sum(cell[0] != "*" and cell != MISSING for cell in every),
        "failed": sum(FAILS in cell for cell in every),
    }
    rows = [row for part in found.values() for row in part.values()]
    attention = {key.split()[1]: row for key, row in found["code"].items() if key.startswith("attention ")}
    fails = [f"{card}: {row['error']}" for card, row in attention.items() if "error" in row]
    heads = max((len(row["heads"]) for row in attention.values()), default=0)
    commits = sorted({row["commit"] for row in rows if row.get("commit")})
    return [
        "# Programs for GPUs",
        "",
        "```",
        "python profiling/make_gpu_programs.py",
        "```",
        "",
        "## Every recipe on nine cards",
        "",
        MEANING,
        "",
        f"| recipe | {' | '.join(titles)} |",
        "|---|" + "---:|" * len(CARDS),
        *(f"| `{name}` | {' | '.join(row)} |" for name, row in zip(names, cells, strict=True)),
        "",
        f"Of {len(every)} cells {', '.join(f'{count} {what}' for what, count in counts.items())} "
        f"(commits: {', '.join(commits)}).",
        "",
        f"Attention of {heads} shapes, with gradients, compiles to the end for "
        f"{', '.join(attention) or 'none'}{'; it fails for ' + '; '.join(fails) if fails else ''}.",
    ]


def cell_text(name: str, card: str, found: dict[str, dict[str, Row]]) -> str:
    row, code = found["figures"].get(key_of(name, card)), found["code"].get(f"{name} {SAME_CODE.get(card, card)}", {})
    if "error" in code or "error" in (row or {}):
        return f"**{FAILS}**"
    if row is None:
        text = "compiles" if code else MISSING
    elif row["verdict"] == "does not fit":
        text = f"no ({row['peak_gib']:.1f}{'+' if 'unlimited' in row else ''} GiB)"
    else:
        text = f"{row['images_per_sec']:,.0f}" + (" (tight)" if row["verdict"] == "tight" else "")
    return text if code or row is None else f"*{text}*"


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
        lines.append(comparison_row(key, old, compared.get("now", {}).get(key, {"error": ""})))
    if again := compared.get("same_pool", {}):
        lines += ["", "Where XLA recomputes, within the 80 % of the card that plans took at the earlier commit:", ""]
        lines += lines[5:7] + [comparison_row(key, compared["rows"][key], row) for key, row in again.items()]
    return lines


def comparison_row(key: str, old: Row, new: Row) -> str:
    name, card, topology = key.split()
    cells = [
        f"{old[figure]:{form}} -> " + (MISSING if "error" in new else f"{new[figure]:{form}}")
        for _, figure, form in FIGURES
    ]
    return f"| `{name}` | {card}{'' if topology == ONE else f' {topology}'} | {' | '.join(cells)} |"
