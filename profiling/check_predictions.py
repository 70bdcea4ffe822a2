"""Compares predicted speeds with published measurements of real GPUs, and fits the factors that predictions use.

    python profiling/check_predictions.py --measurements=CSV [--json=FILE] [--page=FILE] [--factors=FILE]

The file has the columns gpu, mode, model, image_size, batch_size, precision, layout, engine, torch, samples_per_sec.
For every row our encoder of that name is compiled for that card; nothing is run. Errors are logarithms of predicted
over measured speed: as fitted, with all rows of the same model, image size and mode left out of the fit (on all cards,
in all versions), and with all rows of the model and mode left out. Compilations are kept; the fit takes a minute.
"""

import csv
import math
import pathlib
import sys
from typing import Any

from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.base.files import write_atomically, write_json
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser
from jepa_jax.runtime import platforms

INFER_BATCH = 256  # that forward passes are compiled at: their kernels scale with the batch, see `scaling`
STANDS_FOR_XLA = {"train": ("eager nhwc", "1.12"), "infer": ("torch.compile", "2.91")}
BARS = {"train": (0.12, 0.25), "infer torch.compile": (0.12, 0.25)}  # of unseen rows: median and ninth tenth
OUTSIDE = ("a100-80", "resnet50", 224, 256, 2470.0)  # NVIDIA's own figure of training, mixed precision
MOST = 0.9  # share of a rate that is sustained
COLUMNS = "gpu mode model image_size batch_size precision layout engine torch samples_per_sec".split()
SOURCE = "published measurements of timm's models (results/benchmark-*.csv), RTX 3090, 4090 and 5090, mixed precision"


def add_flags(parser: Parser) -> None:
    parser.add_flag("measurements", "CSV", "measured speeds", required=True)
    parser.add_flag("json", "FILE", "file of all rows and errors to write", "")
    parser.add_flag("page", "FILE", "Markdown page to write, e.g. docs/results/predictions.md")
    parser.add_flag("factors", "FILE", "factors to write, e.g. jepa_jax/planning/factors.json")


def read_measurements(path: str) -> list[dict[str, str]]:
    """Returns the rows of a file; raises UserError for one of another form."""
    try:
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise UserError(f"--measurements={path}: {error.strerror}; name a CSV file") from error
    if not rows or set(COLUMNS) - set(rows[0]):
        raise UserError(f"--measurements={path}: columns must be {', '.join(COLUMNS)}")
    return rows


def engine_of(row: dict[str, str]) -> str:
    """Returns the software of a row: the engine, and for eager execution its memory layout."""
    return row["engine"] if row["engine"] != "eager" else f"eager {row['layout']}"


def check_predictions(arguments: Arguments, console: Console) -> Result:
    platforms.prepare_to_plan()
    from fit_speed import effect_names, fit, left_out_errors

    rows = read_measurements(arguments.measurements)
    compiled = Compiled(console)
    measurements = [compiled.measurement(row) for row in rows]
    whole = fit(measurements, effect_names(measurements))
    errors = {
        "fitted": [whole.error(one) for one in measurements],
        "left_out": left_out_errors(measurements, whole),
        "model_left_out": left_out_errors(measurements, whole, lambda one: (one.group[0], one.group[2])),
    }
    table = [
        {
            **row,
            "samples_per_sec": one.samples_per_sec,
            "predicted": {how: one.samples_per_sec * math.exp(each[i]) for how, each in errors.items()},
            "error": {how: each[i] for how, each in errors.items()},
            **({"memory": compiled.memory(row)} if row["mode"] == "train" else {}),
        }
        for i, (row, one) in enumerate(zip(rows, measurements, strict=True))
    ]
    document: dict[str, Any] = {"rows": table, **summaries(rows, errors), **compiled.extra_checks(whole)}
    document["shares"], document["sustained"] = sustained_shares(planning_shares(whole))
    for mode, own in a100_shares(document["shares"], document["outside"]["convolution"]).items():
        document["shares"][mode]["a100"] = own
    passed = document["passed"] = within_bars(document)
    if arguments.factors:
        write_json(arguments.factors, factors_document(document))
    if arguments.json:
        write_json(arguments.json, document)
    if arguments.page:
        from predictions_page import page

        write_atomically(arguments.page, page(document))
    lines = [
        f"{name}: unseen rows off by {document['median_abs_error']['left_out'][name]:.3f} (median), "
        f"{error:.3f} (nine of ten); fitted {document['median_abs_error']['fitted'][name]:.3f}"
        for name, error in document["p90_abs_error"]["left_out"].items()
    ]
    lines += [f"memory: {sum(r['memory']['fits'] for r in table if 'memory' in r)} of "
              f"{sum('memory' in r for r in table)} published training batches fit"]  # fmt: skip
    result = {key: document[key] for key in ("median_abs_error", "p90_abs_error", "passed")}
    return Result([result], "\n".join(lines), 0 if passed else 1)


def summaries(rows: list[dict[str, str]], errors: dict[str, list[float]]) -> dict[str, Any]:
    """Returns the errors by mode and by mode and engine, for each way of fitting."""
    from fit_speed import error_summary

    labels = [{row["mode"], f"{row['mode']} {engine_of(row)}"} for row in rows]
    names = sorted(set().union(*labels))
    found = {
        how: {name: error_summary([e for e, own in zip(each, labels, strict=True) if name in own]) for name in names}
        for how, each in errors.items()
    }
    return {
        key: {how: {name: values[key] for name, values in each.items()} for how, each in found.items()}
        for key in ("median_abs_error", "p90_abs_error")
    }


def within_bars(document: dict[str, Any]) -> bool:
    """Returns whether unseen rows are predicted well enough and every published training batch fits."""
    good = all(
        document["median_abs_error"]["left_out"].get(name, 0) <= median
        and document["p90_abs_error"]["left_out"].get(name, 0) <= ninth
        for name, (median, ninth) in BARS.items()
    )
    return good and all(row["memory"]["fits"] for row in document["rows"] if "memory" in row)


class Compiled:
    """Compiles the programs of rows, each once."""

    def __init__(self, console: Console):
        from jepa_jax.runtime.hardware import load_table

        self.console, self.table = console, load_table()

    def facts(self, row: dict[str, str], batch_size: int) -> Any:
        from reference_programs import Case, case_facts

        case = Case(row["model"], int(row["image_size"]), batch_size, row["mode"])
        return case_facts(case, self.gpu(row["gpu"]), self.console.line)

    def gpu(self, name: str) -> Any:
        from jepa_jax.planning.factors import ARCHITECTURES
        from jepa_jax.runtime.hardware import find_gpus

        gpu = find_gpus([name], self.table)[0]
        if gpu.compute_capability not in ARCHITECTURES and name != OUTSIDE[0]:
            known = ", ".join(f"{a}.{b} ({name})" for (a, b), name in ARCHITECTURES.items())
            raise UserError(f"gpu {name}: the fit knows compute capabilities {known}; remove its rows")
        return gpu

    def measurement(self, row: dict[str, str], batch: int | None = None) -> Any:
        from fit_speed import Measurement

        size = int(row["batch_size"])
        batch = batch or (size if row["mode"] == "train" else INFER_BATCH)
        group = (row["model"], row["image_size"], row["mode"])
        return Measurement(
            self.gpu(row["gpu"]), row["mode"], engine_of(row), row["torch"], group, size,
            float(row["samples_per_sec"]), tuple(self.facts(row, batch).kernels), size / batch,
        )  # fmt: skip

    def memory(self, row: dict[str, str]) -> dict[str, Any]:
        """Returns whether the batch of a row fits its card: the peak as compiled with the plan's margin."""
        from jepa_jax.planning import estimate
        from jepa_jax.runtime.allocator import POOL_FRACTION

        facts, gpu = self.facts(row, int(row["batch_size"])), self.gpu(row["gpu"])
        needed = estimate.memory_need(facts.peak_bytes, facts.largest_convolution_bytes).total
        capacity = round(POOL_FRACTION * gpu.memory_bytes)
        recomputed = sum(kernel.recomputed for kernel in facts.kernels)
        return {"peak_bytes": facts.peak_bytes, "needed_bytes": needed, "capacity_bytes": capacity,
                "recomputed_kernels": recomputed, "fits": needed <= capacity}  # fmt: skip

    def extra_checks(self, whole: Any) -> dict[str, Any]:
        """Returns whether kernels scale with the batch, and a figure that is not in the file."""
        row = {"gpu": "rtx4090", "mode": "infer", "model": "resnet50", "image_size": "224", "batch_size": "1024",
               "engine": "torch.compile", "layout": "nchw", "torch": "2.91", "samples_per_sec": "1"}  # fmt: skip
        scaled, compiled = (self.measurement(row, batch) for batch in (INFER_BATCH, 1024))
        seconds = [one.predicted_seconds(whole.shares(one)) for one in (scaled, compiled)]
        gpu, model, size, batch, measured = OUTSIDE
        trained = {"gpu": gpu, "mode": "train", "model": model, "image_size": str(size), "batch_size": str(batch)}
        from jepa_jax.planning.factors import predict

        kernels = self.facts(trained, batch).kernels
        shares = sustained_shares(planning_shares(whole))[0]["train"]["ampere"]
        fitted = fitted_convolution(kernels, self.table[gpu], shares, batch / measured)
        seconds_outside = predict(kernels, self.table[gpu], samples=batch, shares=shares).seconds
        return {
            "scaling": {"case": "ResNet-50 at 224, RTX 4090", "from_256": seconds[0], "compiled_at_1024": seconds[1]},
            "outside": {"case": "ResNet-50 training on an A100", "measured": measured,
                        "predicted": batch / seconds_outside, "convolution": fitted},
        }  # fmt: skip


def planning_shares(whole: Any) -> dict[str, dict[str, dict[str, float]]]:
    """Returns the shares that plans use: of the software that stands for XLA, for each architecture."""
    from fit_speed import Measurement

    from jepa_jax.planning.factors import ARCHITECTURES
    from jepa_jax.runtime.hardware import load_table

    cards = {capability: gpu for gpu in load_table().values() for capability in [gpu.compute_capability]}
    return {
        mode: {
            name: whole.shares(Measurement(cards[capability], mode, engine, version, "", 1, 1.0, ()))
            for capability, name in ARCHITECTURES.items()
        }
        for mode, (engine, version) in STANDS_FOR_XLA.items()
    }


def sustained_shares(shares: dict[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    """Returns shares of the rates that the measured cards sustain, none above MOST, and these rates over advertised.

    The rate that a card sustains is taken to be that of which its fastest kind of work reaches MOST.
    """
    sustained: dict[str, dict[str, float]] = {}
    for name in shares["train"]:
        traffic = max(own[name]["traffic"] for own in shares.values())
        products = max(share for own in shares.values() for kind, share in own[name].items() if kind != "traffic")
        sustained[name] = {"products": max(1.0, products / MOST), "traffic": max(1.0, traffic / MOST)}

    def below(name: str, own: dict[str, float]) -> dict[str, float]:
        by = sustained[name]
        return {kind: share / by["traffic" if kind == "traffic" else "products"] for kind, share in own.items()}

    return {mode: {name: below(name, own) for name, own in each.items()} for mode, each in shares.items()}, sustained


def fitted_convolution(kernels: Any, gpu: Any, shares: dict[str, float], seconds: float) -> float:
    """Returns the share of convolutions at which a program takes so many seconds, at most MOST."""
    from jepa_jax.planning.factors import predict

    def slower(share: float) -> bool:
        return predict(kernels, gpu, samples=1, shares={**shares, "convolution": share}).seconds > seconds

    low, high = 0.05, MOST
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if slower(middle) else (low, middle)
    return high


def a100_shares(shares: dict[str, Any], convolution: float) -> dict[str, dict[str, float]]:
    """Returns the row of the A100 by mode: that of Ampere, convolutions as OUTSIDE says."""
    ratio = convolution / shares["train"]["ampere"]["convolution"]
    return {
        mode: own["ampere"] | {"convolution": min(MOST, ratio * own["ampere"]["convolution"])}
        for mode, own in shares.items()
    }


def factors_document(document: dict[str, Any]) -> dict[str, Any]:
    """Returns the table of factors with where it is from and how far unseen rows were off."""
    labels = {"train": "train", "infer": "infer torch.compile"}
    shares, sustained = document["shares"], document["sustained"]
    return {
        "source": SOURCE,
        "fitted_by": "profiling/check_predictions.py",
        "sustained": {name: {k: round(v, 4) for k, v in own.items()} for name, own in sustained.items()},
        **{
            mode: {
                "software": " ".join(("PyTorch", *STANDS_FOR_XLA[mode])),
                "shares": {name: {k: round(v, 4) for k, v in own.items()} for name, own in shares[mode].items()},
                **{key: round(document[key]["left_out"][label], 4) for key in ("median_abs_error", "p90_abs_error")},
            }
            for mode, label in labels.items()
        },
    }


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    sys.exit(Command("profiling/check_predictions.py", __doc__, add_flags, check_predictions, program="python").main())
