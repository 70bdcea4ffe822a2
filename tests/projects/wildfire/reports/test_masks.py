"""Predicted masks in reports: figures, animation, best and worst fires."""

import io
import json
import re

import numpy as np
import pytest
from PIL import Image

from jepa_jax.cli.runs import summary_text
from jepa_jax.projects.wildfire.data.panels import FALSE_ALARM, IGNITED, LEGEND, PANELS, PREDICTED
from jepa_jax.projects.wildfire.reports.animation import GAP, HEADER, SIDE, spread_gif
from jepa_jax.projects.wildfire.reports.fires_page import fire_strip
from jepa_jax.projects.wildfire.reports.results import COLUMNS, result_rows
from jepa_jax.reports.run_report import write_report

SUMMARY = {
    "status": "finished", "average_precision": 0.71, "new_average_precision": 0.42, "f1": 0.66, "iou": 0.5,
    "precision": 0.6, "recall": 0.7, "persistence_average_precision": 0.61, "persistence_f1": 0.55,
    "shuffled_wind_new_average_precision": 0.31, "baseline_average_precision": 0.63, "average_precision_gain": 0.08,
    "average_precision_gain_interval_95": [0.05, 0.11], "fire_average_precision_mean": 0.69,
    "fire_average_precision_std": 0.12, "test_fires": 40, "threshold": 0.37, "threshold_is_chosen": True,
    "probe_accuracy": None, "num_classes": 0, "baselines": {},
}  # fmt: skip


def exhibits(size=16, frames=4, fires=4, seed=0):
    """Returns fires on a slope that grow at random."""
    rng = np.random.default_rng(seed)
    masks = np.maximum.accumulate(rng.random((fires, frames + 1, size, size)) < 0.1, axis=1)
    return {
        "fire": masks[:, :-1, ..., None], "valid": np.ones((fires, frames), bool),
        "wind": rng.random((fires, frames, 2), np.float32), "static": rng.random((fires, size, size, 2), np.float32),
        "target": masks[:, -1, ..., None], "known": np.ones((fires, size, size, 1), bool),
        "fire_id": np.arange(10, 10 + fires), "probability": rng.random((fires, size, size)).astype(np.float16),
        "is_best": np.arange(fires) < 2, "threshold": np.float32(0.37),
        "average_precision": np.linspace(0.9, 0.1, fires, dtype=np.float32),
        "new_average_precision": np.array([0.8, np.nan, 0.3, 0.05], np.float32)[:fires],
        "spread_masks": masks[0], "spread_wind": rng.random((frames, 2), np.float32),
        "spread_static": rng.random((size, size, 2), np.float32), "spread_known": np.ones((size, size), bool),
        "spread_fire_id": np.int32(10), "spread_probability": rng.random((frames, size, size)).astype(np.float16),
    }  # fmt: skip


def write_run(workdir, arrays=None):
    (workdir / "exhibits").mkdir()
    np.savez_compressed(workdir / "exhibits" / "next_mask.npz", **(exhibits() if arrays is None else arrays))
    (workdir / "summary.json").write_text(json.dumps(SUMMARY))
    write_report(workdir)
    return (workdir / "report.html").read_text(), workdir / "masks.html"


@pytest.mark.parametrize(("size", "frames"), [(16, 4), (20, 1), (300, 2)])
def test_the_animation_has_a_frame_per_prediction_and_whole_pixels(size, frames):
    data = spread_gif(exhibits(size, frames))
    side = SIDE // size * size if size < SIDE else size
    with Image.open(io.BytesIO(data)) as gif:
        assert gif.format == "GIF" and gif.size == (2 * side + 3 * GAP, side + HEADER + GAP)
        assert getattr(gif, "n_frames", 1) == frames
        for index in range(frames):
            gif.seek(index)
            gif.load()


def test_the_animation_shows_hits_misses_and_false_alarms_of_each_frame():
    arrays = exhibits(frames=2)
    gif = Image.open(io.BytesIO(spread_gif(arrays)))
    side, factor = SIDE, SIDE // 16
    for index in range(2):
        gif.seek(index)
        pixels = np.asarray(gif.convert("RGB"), int)
        errors = pixels[HEADER + factor // 2 : HEADER + side : factor, 2 * GAP + side + factor // 2 :: factor][:, :16]
        now, after = arrays["spread_masks"][index : index + 2]
        predicted = arrays["spread_probability"][index].astype("f4") >= arrays["threshold"]
        for colour, where in {
            PREDICTED: ~now & after & predicted, IGNITED: after & ~predicted, FALSE_ALARM: predicted & ~after
        }.items():  # fmt: skip
            assert where.any() and np.abs(errors[where] - colour).max() <= 12  # the palette of a GIF is limited


def test_north_wind_draws_an_arrow_to_the_south():
    def ink(direction):
        arrays = {**exhibits(frames=1), "spread_wind": np.array([[1, direction]], np.float32)}
        frame = np.asarray(Image.open(io.BytesIO(spread_gif(arrays))).convert("L"))
        arrow = frame[HEADER // 2 - 16 : HEADER // 2 + 17, GAP + SIDE - 34 : GAP + SIDE - 1] < 100
        return np.argwhere(arrow).mean(0) - 16  # the head weighs more than the tail

    assert ink(0)[0] > 0.5 and abs(ink(0)[1]) < 0.7
    assert ink(0.25)[1] < -0.5 and abs(ink(0.25)[0]) < 0.7  # from the east to the west


def test_the_page_lists_the_best_fire_first_and_the_worst_first(tmp_path):
    _, path = write_run(tmp_path)
    page = path.read_text()
    assert re.findall(r"<h3>Fire (\d+)", page) == ["10", "11", "13", "12"]
    assert (
        page.index("Best fires</h2>") < page.index("Fire 10") < page.index("Worst fires</h2>") < page.index("Fire 13")
    )
    assert "Fire 13 · AP 0.100, AP of newly burning 0.050 · history of 4 frames" in page
    assert "Fire 11 · AP 0.633 · history of 4 frames" in page  # nothing ignited there
    assert all(meaning in page for meaning in LEGEND.values()) and "nan" not in page.split("<h2>")[1]
    assert page.count('alt="Fire ') == 4 and not re.search(r"https?:", page)
    with Image.open(io.BytesIO(fire_strip(exhibits(), 0))) as strip:
        assert strip.width > len(PANELS) * 150


def test_the_report_embeds_the_animation_and_shows_figures_beside_baselines(tmp_path):
    report, _ = write_run(tmp_path)
    assert report.count("data:image/gif;base64,") == 1 and '<a href="masks.html">' in report
    assert len(report) < 1_500_000 and (tmp_path / "exhibits" / "next_mask.gif").stat().st_size < 400_000
    for fact in (
        "0.710",
        "0.420",
        "best baseline 0.630",
        "persistence",
        "0.610",
        "+0.080 over the best baseline",
        "+0.050 to +0.110",
        "40 test fires: AP 0.690 ± 0.120",
        "probability 0.370",
        "Animation of test fire 10",
    ):
        assert fact in report, fact
    assert "Trained encoder" not in report and "No accuracy" not in report and "This part failed" not in report
    assert all(source.startswith("data:") for source in re.findall(r'src="([^"]*)"', report))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"no archive"])
def test_broken_exhibits_are_described_in_words(tmp_path, content):
    (tmp_path / "exhibits").mkdir()
    (tmp_path / "exhibits" / "next_mask.npz").write_bytes(content)
    page = write_report(tmp_path).read_text()
    assert "next_mask.npz cannot be shown" in page and "This part failed" not in page


def test_missing_arrays_are_described_in_words(tmp_path):
    arrays = exhibits()
    del arrays["static"]
    report, _ = write_run(tmp_path, arrays)
    assert "next_mask.npz cannot be shown" in report and "This part failed" not in report and "0.710" in report


def test_a_run_without_masks_has_no_such_section(tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps({"status": "finished", "probe_accuracy": 50.0}))
    page = write_report(tmp_path).read_text()
    assert "Predicted masks" not in page and "Trained encoder" in page
    assert not (tmp_path / "masks.html").exists() and result_rows({"probe_accuracy": 50.0}) == []


def test_the_terminal_gets_the_same_table():
    lines = summary_text(SUMMARY, "runs/x").splitlines()
    assert all(title in lines[0] for title in COLUMNS.values())
    rows = {line.split("  ")[0]: line for line in lines[1:5]}
    assert rows["model"].split() == ["model", "0.710", "0.420", "0.600", "0.700", "0.660", "0.500"]
    assert rows["persistence"].split() == ["persistence", "0.610", *"–––", "0.550", "–"]
    assert any("40 test fires" in line for line in lines) and lines[-1] == "report: runs/x/report.html"


@pytest.mark.slow
def test_a_run_leaves_pictures_exhibits_and_a_report_with_the_animation(trained):
    folder, summary, _ = trained
    pictures = list((folder / "pictures").glob("*.png"))
    assert len(pictures) == 2 and np.asarray(Image.open(pictures[0])).std() > 10
    with np.load(folder / "exhibits" / "next_mask.npz") as kept:
        assert kept["fire_id"].tolist()[:3] == summary["best_fires"][:3]
        assert kept["spread_probability"].shape == (5, 16, 16)
    report = (folder / "report.html").read_text()
    assert "data:image/gif" in report and "This part failed" not in report and (folder / "masks.html").exists()
