"""What the documents point to is there, and nothing was left to fill in."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_page_is_finished_and_its_links_exist(page):
    text = page.read_text()
    assert not re.search(r"@[A-Z]+@", text)
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert all((page.parent / link).exists() for link in links), links


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_name_files_that_exist(page):
    for name in re.findall(r"python ((?:scripts|profiling)/\w+\.py)", page.read_text()):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"--config=(configs/\w+\.py)", page.read_text()):
        assert (ROOT / name).exists(), name
