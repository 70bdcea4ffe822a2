"""Projects: the core finds their classes by name, and does not know them."""

import importlib
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest

from jepa_jax import projects
from jepa_jax.base.classes import ClassTable, load_object
from jepa_jax.data.sources import SOURCES
from jepa_jax.evals.evaluators import EVALUATORS
from jepa_jax.methods.contract import METHODS
from jepa_jax.models.registry import MODELS
from jepa_jax.reports.run_files import RESULTS
from jepa_jax.weights.load import FAMILIES

TABLES = {
    "SOURCES": SOURCES, "METHODS": METHODS, "MODELS": MODELS, "EVALUATORS": EVALUATORS, "FAMILIES": FAMILIES,
    "RESULTS": RESULTS,
}  # fmt: skip
NAMES = [module.name for module in pkgutil.iter_modules(projects.__path__)]
CORE = pathlib.Path(projects.__path__[0]).parent


def entries(project, table):
    return getattr(importlib.import_module(f"jepa_jax.projects.{project}"), table, {})


@pytest.mark.parametrize("project", NAMES)
def test_every_entry_of_a_project_is_found_under_its_name_and_exists(project):
    for table, known in TABLES.items():
        for name, reference in entries(project, table).items():
            assert known[name] == reference and load_object(reference)


def test_no_name_is_given_twice():
    for table, known in TABLES.items():
        names = [name for project in NAMES for name in entries(project, table)]
        assert len(set(names)) == len(names) and len(ClassTable("NOTHING", known)) == len(known)
        assert all("jepa_jax.projects." in known[name] for name in names)  # it hides no name of the core


def test_the_core_names_no_project():
    words = {name for project in NAMES for table in TABLES for name in (project, *entries(project, table))}
    named = re.compile(rf"\b({'|'.join(words)})\b|jepa_jax\.projects\.\w|\bfires?\b", re.IGNORECASE)
    files = [file for file in CORE.rglob("*.py") if file.relative_to(CORE).parts[0] not in ("projects", "configs")]
    found = {file.name: text[0] for file in files if (text := named.search(file.read_text()))}
    assert len(files) > 100 and found == {}


def test_a_project_is_imported_without_jax():
    imports = "; ".join(f"import jepa_jax.projects.{name}" for name in NAMES)
    subprocess.run([sys.executable, "-c", f"import sys; {imports}; assert 'jax' not in sys.modules"], check=True)
