"""Notebooks are their pages, with pictures; and pages run as they stand, here with fewer steps."""

import importlib
import json
import pathlib

import pytest

DOCS = pathlib.Path(__file__).parents[1] / "docs"
NAMES = ("tutorial", "notebooks/photographs", "notebooks/method", "notebooks/plan_and_tune")
LARGEST = 300_000  # bytes of a file that everybody downloads with a clone
# What makes a page shorter than it is for readers.
SHORTER = {
    '"train.max_steps": 20': '"train.max_steps": 2',
    '"train.max_steps": 100': '"train.max_steps": 2',
    '"data.num_train": 1024, "data.num_test": 512, "data.batch_size": 64, "optim.epochs": 4.0': (
        '"data.num_train": 128, "data.num_test": 64, "data.batch_size": 64, "train.max_steps": 2'
    ),
    "--budget=60s": "--budget=2h --batch_sizes=16 --prefetch=2",
}


@pytest.fixture
def writer(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("write_notebook")


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_its_page_and_has_pictures(name, writer):
    page, file = DOCS / f"{name}.md", DOCS / f"{name}.ipynb"
    stored = json.loads(file.read_text())
    outputs = [cell["outputs"] for cell in stored["cells"][2:] if cell["cell_type"] == "code"]
    assert writer.notebook(page, outputs) == stored, f"run python docs/write_notebook.py {page}"
    kinds = {kind for cell in outputs for one in cell for kind in one.get("data", {})}
    assert any(kind.startswith("image/") for kind in kinds)
    assert not any(one["output_type"] == "error" for cell in outputs for one in cell)
    assert file.stat().st_size < LARGEST


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_page_runs(name, writer, tmp_path):
    text = (DOCS / f"{name}.md").read_text()
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    page = tmp_path / "page.md"
    page.write_text(text)
    outputs = writer.outputs_of(page, str(tmp_path))
    assert len(outputs) == len(writer.split(text)) // 2
    assert any(
        "data" in one and any(kind.startswith("image/") for kind in one["data"]) for out in outputs for one in out
    )


def test_pages_and_notebooks_are_the_same_list(writer):
    assert [page.relative_to(DOCS).with_suffix("").as_posix() for page in writer.PAGES] == sorted(
        NAMES, key=lambda name: (name != "tutorial", name)
    )
