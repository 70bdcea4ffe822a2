"""Facts about the documents: links, commands, flags and configs that they name exist."""

import importlib.util
import pathlib
import re
import shlex

import numpy as np
import pytest

from jepa_jax.cli.flags import Parser
from jepa_jax.cli.main import COMMANDS, find_command

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)
WIDEST = 120  # columns of a line of prose


def test_pages_are_finished_and_what_they_name_exists(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "profiling")
    checks = (unfinished, missing_links, links_that_leave_the_site, missing_files, unknown_flags, long_lines)
    mistakes = []
    for page in PAGES:
        text = page.read_text()
        mistakes += [f"{page.name}: {check.__name__}: {found}" for check in checks for found in check(page, text)]
    assert not mistakes, "\n".join(mistakes)


def unfinished(page, text):
    return re.findall(r"@[A-Z]+@", text)


def missing_links(page, text):
    return [link for link in local_links(text) if not (page.parent / link).exists()]


def links_that_leave_the_site(page, text):
    """The site holds nothing but docs/."""
    docs = ROOT / "docs"
    if not page.is_relative_to(docs):
        return []
    return [link for link in local_links(text) if not (page.parent / link).resolve().is_relative_to(docs)]


def local_links(text):
    return [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]


def missing_files(page, text):
    """Returns files of scripts, checks, configs and, in the design, of the package that do not exist."""
    files = re.findall(r"((?:scripts|profiling)/\w+\.py)", text)
    files += [f"configs/{name}.py" for name in re.findall(r"--config=(?:configs/)?([a-z]\w*)", text)]
    if page.name == "design.md":
        files += [f"jepa_jax/{name}" for name in re.findall(r"`([a-z_]+/[a-z_/]+\.py)\b", text)]
    return [name for name in files if not (ROOT / name).exists()]


def unknown_flags(page, text):
    """Yields the lines of code blocks with a command that does not exist, or has no such flag."""
    for line, command in commands(text):
        parser = Parser("")
        if command[0] == "python":
            script = importlib.import_module(pathlib.Path(command[1]).stem)
            if not hasattr(script, "add_flags"):  # its docstring says what it takes
                command = [word for word in command if not word.startswith("--") or word not in script.__doc__]
            else:
                script.add_flags(parser)
        elif command[1] in COMMANDS:
            find_command(command[1]).add_flags(parser)
        flags = [word.partition("=")[0] for word in command[2:] if word.startswith("--")]
        exists = command[0] == "python" or command[1] in COMMANDS
        if not exists or not all(known(parser, flag) for flag in flags):
            yield line


def commands(text):
    """Yields the lines of code blocks that run a command of ours, with its words; `--` starts a second command."""
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True) if re.match(r"\s*(jepa-jax|python profiling)\b", line) else []
            cut = words.index("--") if "--" in words else len(words)
            if words:
                yield line, words[:cut]
            if cut < len(words):
                yield line, [words[0], *words[cut + 1 :]]


def known(parser, flag):
    """Returns whether a command has a flag, also of the config, of absl or of jax."""
    name = flag.removeprefix("--").replace("-", "_")
    names = (name, name.removeprefix("no"), name.removeprefix("no_"))
    return any(map(parser.has_flag, names)) or name.startswith(("config.", "noconfig.", "jax_")) or name == "flagfile"


def long_lines(page, text):
    """Returns lines of prose that are too wide; rows of tables, code blocks and single words may be."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in prose.splitlines() if len(line) > WIDEST and not line.lstrip().startswith("|")]
    return [line[:60] for line in lines if " " in line.strip().lstrip("-*>#0123456789. ")]


def test_the_navigation_of_the_site_lists_every_page():
    listed = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}


def test_the_code_of_the_first_page_runs_on_features(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    codes = np.arange(40) % 2
    features = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32) + 3 * codes[:, None]
    names = [f"{('cat', 'dog')[code]}/{place}.jpg" for place, code in enumerate(codes)]
    np.savez("features.npz", names=np.array(names), features=np.float32(features))
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "start.md").read_text(), re.DOTALL)
    done: dict = {}
    for block in blocks:
        if "import torch" in block and importlib.util.find_spec("torch") is None:
            continue
        exec(block, done)
    assert len(blocks) == 4 and done["classifier"].score(features, done["labels"]) > 0.9
