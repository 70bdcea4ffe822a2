"""Writes the notebooks of pages: every block of Python is a cell, run once, with what it printed and drew.

python docs/write_notebook.py [PAGE...]   # by default all: docs/tutorial.md and docs/notebooks/*.md

Pages run in a temporary folder, each in a process of its own; those that are not named keep the outputs that they have.
"""

import ast
import base64
import contextlib
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

DOCS = pathlib.Path(__file__).parent
PAGES = (DOCS / "tutorial.md", *sorted((DOCS / "notebooks").glob("*.md")))
INSTALL = """\
SOURCE = "{clone}"  # a clone, a wheel, or git+https://... : what pip installs the package from, if it is not there

import importlib.util

if importlib.util.find_spec("jepa_jax") is None:
    %pip install -q {{SOURCE}}
"""
LARGE = 40_000  # bytes of a PNG from which on a picture is kept as JPEG
WIDEST = 640  # pixels of a side of a picture; larger ones are made smaller
RUN = "import sys, write_notebook as w; w.run(sys.argv[1], sys.argv[2], vars(sys.modules['__main__']))"


def split(page: str) -> list[str]:
    """Returns the parts of a page of Markdown: text and blocks of Python in turns."""
    return re.split(r"^```python\n(.*?)^```\n", page, flags=re.MULTILINE | re.DOTALL)


def notebook(page: pathlib.Path, outputs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Returns the notebook of a page whose blocks have these outputs."""
    cells = []
    for place, part in enumerate(split(page.read_text())):
        is_code = place % 2 == 1
        cells.append(cell("code" if is_code else "markdown", part, outputs[place // 2] if is_code else []))
    clone = "/".join([".."] * len(page.resolve().relative_to(DOCS.resolve()).parts))
    cells.insert(1, cell("code", INSTALL.format(clone=clone + ("[plan]" if "`plan`" in page.read_text() else "")), []))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    for number, one in enumerate(cells):
        one["id"] = f"cell-{number}"
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def cell(kind: str, text: str, outputs: list[dict[str, Any]]) -> dict[str, Any]:
    text = re.sub(r"\[([^\]]+)\]\((?!\w+://)[^)]+\)", r"\1", text).strip() if kind == "markdown" else text.strip()
    more: dict[str, Any] = {"execution_count": None, "outputs": outputs} if kind == "code" else {}
    return {"cell_type": kind, "metadata": {}, "source": text.splitlines(keepends=True), **more}


def run(page: str, target: str, namespace: dict[str, Any]) -> None:
    """Runs the blocks of a page in a namespace, and writes their outputs as JSON."""
    outputs = []
    for block in split(pathlib.Path(page).read_text())[1::2]:
        *statements, last = ast.parse(block).body
        value, said = None, io.StringIO()
        with contextlib.redirect_stdout(said):
            if isinstance(last, ast.Expr):
                exec(compile(ast.Module(statements, []), page, "exec"), namespace)
                value = eval(compile(ast.Expression(last.value), page, "eval"), namespace)
            else:
                exec(compile(block, page, "exec"), namespace)
        printed = {"output_type": "stream", "name": "stdout", "text": said.getvalue().splitlines(keepends=True)}
        shown = {"output_type": "display_data", "metadata": {}, "data": content(value)}
        outputs.append([one for one in (printed, shown) if one.get("text") or one.get("data")])
    pathlib.Path(target).write_text(json.dumps(outputs))


def content(value: Any) -> dict[str, Any]:
    """Returns what a notebook shows of a value: a figure, a picture or text."""
    if hasattr(value, "_repr_svg_"):
        return {"image/svg+xml": value._repr_svg_().splitlines(keepends=True)}
    if hasattr(value, "_repr_png_"):
        png, jpeg = io.BytesIO(), io.BytesIO()
        value = value.copy()
        value.thumbnail((WIDEST, WIDEST))
        value.save(png, "PNG", optimize=True)
        value.convert("RGB").save(jpeg, "JPEG", quality=70)
        kind, data = ("png", png) if len(png.getvalue()) < LARGE else ("jpeg", jpeg)
        return {f"image/{kind}": base64.b64encode(data.getvalue()).decode()}
    return {} if value is None else {"text/plain": [repr(value)]}


def outputs_of(page: pathlib.Path, folder: str) -> list[list[dict[str, Any]]]:
    """Runs a page in a folder, in a process of its own; returns the outputs of its blocks."""
    target = pathlib.Path(folder, "outputs.json")
    paths = os.pathsep.join([str(DOCS.resolve()), str(DOCS.resolve().parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", RUN, str(page.resolve()), str(target)]
    subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": paths}, check=True)
    return json.loads(target.read_text())


def text_of(content: dict[str, Any]) -> str:
    """Returns the content of a notebook's file."""
    return json.dumps(content, indent=1) + "\n"


if __name__ == "__main__":
    for page in [pathlib.Path(name) for name in sys.argv[1:]] or PAGES:
        with tempfile.TemporaryDirectory() as folder:
            page.with_suffix(".ipynb").write_text(text_of(notebook(page, outputs_of(page, folder))))
