"""Facts about the documents: links, commands, flags and configs that they name exist."""

import importlib
import pathlib
import re
import shlex

import pytest

from jepa_jax.cli.flags import OVERRIDE, Parser
from jepa_jax.cli.main import COMMANDS, find

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_page_is_finished_and_its_links_exist(page):
    text = page.read_text()
    assert not re.search(r"@[A-Z]+@", text)
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert all((page.parent / link).exists() for link in links), links


def test_pages_of_the_site_link_to_one_another_only():
    """The site holds nothing but docs/."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        links = [link for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()) if "://" not in link]
        outside = [link for link in links if not (page.parent / link).resolve().is_relative_to(ROOT / "docs")]
        assert not outside, (page, outside)


def test_the_navigation_of_the_site_lists_every_page():
    listed = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}


def test_the_notebook_is_the_tutorial(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    made = importlib.import_module("write_notebook").text_of((ROOT / "docs" / "tutorial.md").read_text())
    assert (ROOT / "docs" / "tutorial.ipynb").read_text() == made, "run python docs/write_notebook.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_files_and_configs_that_a_page_names_exist(page):
    text = page.read_text()
    for name in re.findall(r"((?:scripts|profiling)/\w+\.py)", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"--config=(?:configs/)?([a-z]\w*)", text):
        assert (ROOT / "configs" / f"{name}.py").exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_of_a_page_have_their_flags(page, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "profiling")
    for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True) if re.match(r"\s*(jepa-jax|python profiling)\b", line) else []
            cut = words.index("--") if "--" in words else len(words)  # what follows is a command of its own
            for command in filter(None, (words[:cut], [*words[:1], *words[cut + 1 :]] if cut < len(words) else [])):
                parser = Parser("")
                if command[0] == "python":
                    importlib.import_module(pathlib.Path(command[1]).stem).add_flags(parser)
                else:
                    assert command[1] in COMMANDS, line
                    find(command[1]).add_flags(parser)
                flags = [word.partition("=")[0] for word in command[2:] if word.startswith("--")]
                assert all(parser.has_flag(flag) or flag.startswith(OVERRIDE) for flag in flags), line
