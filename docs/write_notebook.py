"""Writes docs/tutorial.ipynb, the tutorial as a notebook: every block of Python of docs/tutorial.md is a cell.

python docs/write_notebook.py
"""

import json
import pathlib
import re
from typing import Any

DOCS = pathlib.Path(__file__).parent
INSTALL = """\
SOURCE = ".."  # a clone, a wheel, or git+https://... : what pip installs the package from, if it is not there

import importlib.util

if importlib.util.find_spec("jepa_jax") is None:
    %pip install -q {SOURCE}
"""


def notebook(page: str) -> dict[str, Any]:
    """Returns the notebook of a page of Markdown."""
    parts = re.split(r"^```python\n(.*?)^```\n", page, flags=re.MULTILINE | re.DOTALL)
    cells = [cell("markdown", part) if place % 2 == 0 else cell("code", part) for place, part in enumerate(parts)]
    cells.insert(1, cell("code", INSTALL))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    for number, one in enumerate(cells):
        one["id"] = f"cell-{number}"
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def cell(kind: str, text: str) -> dict[str, Any]:
    text = re.sub(r"\[([^\]]+)\]\((?!\w+://)[^)]+\)", r"\1", text).strip() if kind == "markdown" else text.strip()
    more: dict[str, Any] = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "metadata": {}, "source": text.splitlines(keepends=True), **more}


def text_of(page: str) -> str:
    """Returns the content of the notebook's file."""
    return json.dumps(notebook(page), indent=1) + "\n"


if __name__ == "__main__":
    (DOCS / "tutorial.ipynb").write_text(text_of((DOCS / "tutorial.md").read_text()))
