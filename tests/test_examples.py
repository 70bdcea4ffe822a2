"""The files of docs/examples, used as an outside package: what the page "Extend" promises of each."""

import math
import pathlib

import pytest

from tests.runs import Silent, rows, run

EXAMPLES = pathlib.Path(__file__).parents[1] / "docs" / "examples"
SHORT = dict(train__max_steps=3, optim__warmup_epochs=0.0, eval__untrained=False, train__keep_best="")
# By file: the overrides of a tiny run that uses it.
RUNS = {
    "simclr": dict(method__name="simclr:SimClr", method__projector=(16, 8), method__temperature=5.0),
    "convnext": dict(model__name="convnext:ConvNeXt", model__width=8, model__depth=1, train__remat="full"),
}


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_examples_are_short_and_linked():
    pages = "".join(page.read_text() for page in (EXAMPLES.parent / "guides").glob("*.md"))
    for file in EXAMPLES.glob("*.py"):
        assert len(file.read_text().splitlines()) <= 60, f"{file.name}: more than 60 lines"
        assert f"examples/{file.name}" in pages, f"{file.name}: not in docs/guides"


@pytest.mark.parametrize("name", RUNS)
def test_an_example_trains(name, tmp_path):
    console = Silent()
    summary = run(tmp_path, console, **SHORT | RUNS[name])
    assert (summary["status"], summary["steps"]) == ("finished", 3)
    losses = [row["train/loss"] for row in rows(tmp_path) if "train/loss" in row]
    assert len(losses) == 3 and all(map(math.isfinite, losses))
    assert not [line for line in console.lines if "remat" in line or "will not be trained" in line]
    if name == "simclr":  # similarities that hardly differ: each of the 31 other views is as likely
        assert losses[0] == pytest.approx(math.log(31), abs=0.2)
