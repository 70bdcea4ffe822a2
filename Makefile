# Every target sets up .venv by itself; nothing is done twice.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup demo plan test lint format clean
help:
	@echo "make demo    train the quickstart config on embedded data, print accuracy before and after, write a report"
	@echo "make plan    compile the step of configs/rapid.py for an RTX 4090, without one: does it fit, how fast can it be"
	@echo "make test    run the tests"
	@echo "make lint    ruff and mypy; make format mends what ruff can"
	@echo "make clean   remove caches (not runs/)"
	@echo "make setup   create $(VENV) with everything a developer needs (the others do it when needed)"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is too old: Python 3.11 or newer is needed; try make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

demo: $(READY)
	$(BIN)/python scripts/train.py --config=configs/quickstart.py --workdir=runs/quickstart
	@$(BIN)/python scripts/show_summary.py --workdir=runs/quickstart

# The wheel's own assembler is used, never a CUDA toolkit of this machine; GPU= and CONFIG= ask for others.
GPU ?= rtx4090
CONFIG ?= configs/rapid.py
plan: $(READY)
	$(BIN)/python scripts/plan.py --config=$(CONFIG) --gpu=$(GPU) --novariants

test: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile tests

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy jepa_jax

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .cache .pytest_cache .mypy_cache .ruff_cache
