"""The package as pip builds it: the wheel, and an editable install used from the parent of the clone."""

import os
import pathlib
import pkgutil
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest

import jepa_jax

ROOT = pathlib.Path(__file__).parents[1]
BULKY = (".git", ".venv", ".cache", "runs", "build", "*.egg-info", ".*_cache", "__pycache__")


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the repository, called like the package."""
    folder = tmp_path_factory.mktemp("parent") / "jepa_jax"
    shutil.copytree(ROOT, folder, symlinks=True, ignore=shutil.ignore_patterns(*BULKY))
    return folder


def pip(*arguments, python=sys.executable):
    subprocess.run([python, "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, arguments)], check=True)


# What a plain JAX program imports for each tool of docs/guides/extend.md, most of it when the tool is first called;
# the layers of ours that come along, and which of the larger packages beside jax.
TOOLS = {
    "jepa_jax.losses.vicreg": ("base losses", ""),
    "jepa_jax.models.vit": ("base config models runtime", "flax optax"),
    "jepa_jax.data.pipeline jepa_jax.data.elements jepa_jax.data.augment": ("base config data runtime", "grain orbax"),
    "jepa_jax.planning": ("base compiled planning runtime", ""),
    "jepa_jax.profiling.own_loop jepa_jax.reports.profile_section": (
        "base compiled config profiling reports runtime", "PIL jinja2",
    ),
    "jepa_jax.experiments.tune jepa_jax.reports.experiment_page": (
        "base config data experiments methods program reports runtime",
        "PIL flax grain jinja2 ml_collections optax orbax",
    ),
}  # fmt: skip
LARGE = "PIL cv2 flax grain jinja2 matplotlib ml_collections optax orbax pyarrow scipy sklearn tensorflow_datasets"
MOST_MODULES = 95  # of ours, of any tool


# Imports each group of modules that it is given in a process of its own, which has jax already, and says what came.
IMPORTS = """
import jax, os, sys
for names in sys.argv[1:]:
    if os.fork() == 0:
        for name in names.split():
            exec(f"import {name} as module")
        ours = [one.split(".") for one in sys.modules if one.startswith("jepa_jax.")]
        large = [one for one in sys.modules if one in {*os.environ["LARGE"].split()}]
        layers = sorted({one[1] for one in ours})
        print(len(ours), " ".join(layers), " ".join(sorted(large)), sep=",", flush=True)
        os._exit(0)
    if code := os.waitstatus_to_exitcode(os.wait()[1]):
        sys.exit(code)
"""


@pytest.fixture(scope="module")
def found():
    """What comes along with each of the tools, and with all modules."""
    names = [module.name for module in pkgutil.walk_packages(jepa_jax.__path__, "jepa_jax.")]
    everything = " ".join(name for name in names if not name.endswith("__main__"))
    command = [sys.executable, "-c", IMPORTS, *TOOLS, everything]
    ended = subprocess.run(command, cwd=ROOT, env={**os.environ, "LARGE": LARGE}, capture_output=True, text=True)
    lines = [line.split(",") for line in ended.stdout.splitlines()]
    return [(int(count), layers, large) for count, layers, large in lines], ended, everything.split()


def test_every_module_can_be_imported_under_another_name(found):
    """No function of the API has the name of a folder: it would shadow the folder in `import a.b.c as d`."""
    lines, ended, names = found
    assert ended.returncode == 0, ended.stderr
    assert "jepa_jax.training.loop" in names and lines[-1][0] >= len(names)


def test_tools_for_plain_jax_programs_bring_along_only_the_layers_below_them(found):
    """A loss, a model, the pipeline or a plan does not cost a program the import of training, pages and commands."""
    tools = found[0][: len(TOOLS)]
    assert [(layers, large) for _, layers, large in tools] == list(TOOLS.values())
    assert max(count for count, *_ in tools) <= MOST_MODULES


@pytest.mark.slow
def test_the_wheel_holds_configs_templates_and_tables(clone, tmp_path):
    pip("wheel", "--no-deps", "--wheel-dir", tmp_path, clone)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, pattern in (
        ("configs", "*.py"),
        ("jepa_jax/reports/templates", "*"),
        ("jepa_jax", "**/*.toml"),
        ("jepa_jax", "**/*.json"),
    ):
        for path in (ROOT / folder).glob(pattern):
            name = str(path.relative_to(ROOT))
            assert (f"jepa_jax/{name}" if folder == "configs" else name) in names
    assert not any(name.startswith(("tests/", "scripts/", "profiling/")) for name in names)


@pytest.mark.slow
def test_the_source_distribution_holds_what_its_tests_read(clone, tmp_path):
    pytest.importorskip("build")
    subprocess.run([sys.executable, "-m", "build", "--sdist", "--outdir", tmp_path, clone], check=True)
    (file,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("configs", "docs", "jepa_jax", "profiling", "scripts", "tests"):
        for path in (clone / folder).rglob("*"):
            name = path.relative_to(clone).as_posix()
            assert path.is_dir() or name in names or "__pycache__" in name, name
    assert {"Makefile", "constraints.txt", "mkdocs.yml", "CHANGELOG.md", ".ci/run"} <= names


def test_every_extra_stands_in_the_table_of_the_docs():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (table,) = re.findall(r"\| extra \|.*?\n\n", (ROOT / "docs" / "index.md").read_text(), re.DOTALL)
    named = [name for line in table.strip().splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert sorted(named) == sorted(extras)


@pytest.mark.slow
def test_an_editable_install_works_from_the_parent_of_the_clone(clone, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path], check=True)
    pip("install", "--no-deps", "--editable", clone, python=tmp_path / "bin/python")
    program = "import jepa_jax; print(jepa_jax.__file__, jepa_jax.train.__doc__.split()[0], jepa_jax.__version__)"
    command = [str(tmp_path / "bin/python"), "-c", program]
    shown = subprocess.run(command, cwd=clone.parent, env={}, capture_output=True, text=True, check=True).stdout
    assert shown.split()[:2] == [str(clone / "jepa_jax/__init__.py"), "Trains"]
