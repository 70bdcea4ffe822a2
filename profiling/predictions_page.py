"""The page of predictions against published measurements, from the document that check_predictions.py makes."""

from typing import Any

from check_predictions import BARS, STANDS_FOR_XLA

COMMAND = "python profiling/check_predictions.py --measurements=timm.csv --json=predictions.json"
KINDS = ("convolution", "matmul", "attention", "traffic")
INTRODUCTION = """\
No GPU took part on our side. timm publishes images per second of its PyTorch models on an RTX 3090, 4090 and 5090
(`results/benchmark-*.csv`; mixed precision). For each of its rows our encoder of the same name was compiled by XLA for
that card; `train` is a supervised step with SGD, `infer` a forward pass. The prediction is the sum over kernels of the
longer of its products and its traffic, and 3 us per launch. Products and traffic run at a share of the card's
advertised rates, which is fitted. Machine that compiled: 2 shared virtual AMD EPYC cores; 2026-11-17."""
ERRORS = """\
Of the logarithm of predicted over measured speed. *Unseen*: fitted without any row of the same model, image size and
mode, on any card and in any version. *Model unseen*: without any row of the model in that mode."""
MEANING = """\
The measurements are of PyTorch, not of XLA. For inference `torch.compile` stands for XLA: it fuses as XLA does.
Training was published in eager mode only, on one card; its channels-last rows stand for XLA, which fuses more, so
that predictions of training are rather too slow than too fast. Training on other architectures takes the ratio
between cards from inference. Traffic is what XLA's program moves; software that moves more has a smaller share.
Shares are of the rates that the measured GeForce cards sustain, of which the fastest kind of work is taken to reach
90 %: they run above their advertised clocks, and hold in their caches what counts as traffic here. Cards of the same
architecture that are no GeForce get the same shares of their advertised rates. The row of the A100 is that of Ampere
with the share of convolutions at which NVIDIA's own figure of ResNet-50 training is met; V100, H100 and B200 use it.
Attention in training was not fused in the published version (1.12): our kernel may be faster. Errors are
doubled for everything but training on GeForce cards of Ampere and inference on those of Ada and Blackwell, where the
software that stands for XLA was measured."""


def page(document: dict[str, Any]) -> str:
    """Returns the page."""
    lines = [
        "# Predicted speed against published measurements",
        "",
        "```",
        COMMAND,
        "```",
        "",
        INTRODUCTION,
        "",
        *error_section(document),
        *share_section(document["shares"], document["sustained"]),
        *check_section(document),
        *row_section(document),
    ]
    return "\n".join(lines)


def error_section(document: dict[str, Any]) -> list[str]:
    lines = [
        "## Errors",
        "",
        ERRORS,
        "",
        "| rows | number | fitted, median | unseen, median | nine of ten | model unseen, median | nine of ten |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    medians, ninths = document["median_abs_error"], document["p90_abs_error"]
    for name in medians["fitted"]:
        count = sum(name in (row["mode"], f"{row['mode']} {engine(row)}") for row in document["rows"])
        cells = [medians["fitted"][name], medians["left_out"][name], ninths["left_out"][name]]
        cells += [medians["model_left_out"][name], ninths["model_left_out"][name]]
        lines.append(f"| {name} | {count} | " + " | ".join(f"{100 * cell:.1f} %" for cell in cells) + " |")
    bars = ", ".join(f"{name} {100 * a:.0f} % and {100 * b:.0f} %" for name, (a, b) in BARS.items())
    verdict = "met" if document.get("passed", True) else "missed"
    return [*lines, "", f"Wanted of unseen rows (median, nine of ten): {bars}: {verdict}.", ""]


def engine(row: dict[str, Any]) -> str:
    return row["engine"] if row["engine"] != "eager" else f"eager {row['layout']}"


def share_section(shares_by_mode: dict[str, Any], sustained: dict[str, Any]) -> list[str]:
    """Returns the shares that plans use, and what they mean."""
    lines = [
        "## Shares that plans use",
        "",
        "| mode (software) | architecture | " + " | ".join(KINDS) + " |",
        "|---|---|" + "---:|" * len(KINDS),
    ]
    for mode, architectures in shares_by_mode.items():
        for name, shares in architectures.items():
            cells = " | ".join(f"{shares[kind]:.2f}" for kind in KINDS)
            lines.append(f"| {mode} (PyTorch {' '.join(STANDS_FOR_XLA[mode])}) | {name} | {cells} |")
    rates = (f"{name} {one['products']:.2f} and {one['traffic']:.2f}" for name, one in sustained.items())
    return [
        *lines,
        "",
        "Sustained over advertised rates of products and traffic:",
        f"{', '.join(rates)}.",
        "",
        MEANING,
        "",
    ]


def check_section(document: dict[str, Any]) -> list[str]:
    scaling, outside = document["scaling"], document["outside"]
    off = scaling["from_256"] / scaling["compiled_at_1024"] - 1
    trained = [row for row in document["rows"] if "memory" in row]
    fitting = sum(row["memory"]["fits"] for row in trained)
    error = outside["predicted"] / outside["measured"] - 1
    return [
        "## Checks",
        "",
        f"- Memory: {fitting} of {len(trained)} published training batches are said to fit the RTX 3090 they ran on "
        f"({', '.join(sorted({memory_text(row) for row in trained}))}).",
        f"- Forward passes were compiled at batch 256 and scaled: {scaling['case']}, 1,024 images: {100 * off:+.2f} %",
        "  off the program compiled at that batch.",
        f"- A card and a source that the fit has not seen: {outside['case']} (NVIDIA's own figure, mixed precision):",
        f"  {outside['measured']:,.0f} measured, {outside['predicted']:,.0f} predicted with the shares of Ampere",
        f"  ({100 * error:+.0f} %); the row of the A100 has {outside['convolution']:.2f} for convolutions instead.",
        "",
    ]


def memory_text(row: dict[str, Any]) -> str:
    gib = row["memory"]["needed_bytes"] / 2**30
    again = ", XLA recomputes" if row["memory"]["recomputed_kernels"] else ""
    return f"{row['model']} at {row['batch_size']}: {gib:.1f} GiB{again}"


def row_section(document: dict[str, Any]) -> list[str]:
    """Returns every row of the modes that plans rest on."""
    lines = [
        "## Rows",
        "",
        "Training, and inference with `torch.compile`; images/s.",
        "",
        "| card | mode | model | size | batch | software | measured | predicted unseen | off | fitted, off |",
        "|---|---|---|---:|---:|---|---:|---:|---:|---:|",
    ]
    for row in document["rows"]:
        if row["mode"] != "train" and row["engine"] != "torch.compile":
            continue
        off = [f"{100 * row['error'][how]:+.1f} %" for how in ("left_out", "fitted")]
        cells = [row["gpu"], row["mode"], row["model"], row["image_size"], row["batch_size"]]
        cells += [f"{engine(row)} {row['torch']}", f"{row['samples_per_sec']:,.0f}"]
        lines.append("| " + " | ".join([*cells, f"{row['predicted']['left_out']:,.0f}", *off]) + " |")
    return [*lines, ""]
