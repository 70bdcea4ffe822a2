# Every target installs what it needs into .venv, once: what it runs and no more.
SHELL := bash
PYTHON ?= python3
# Versions that are known to work; `make CONSTRAINTS= test` takes the newest of everything.
CONSTRAINTS ?= constraints.txt
VENV := .venv
BIN := $(VENV)/bin
RUN := $(VENV)/.ready-run
PLAN := $(VENV)/.ready-plan
TEST := $(VENV)/.ready-test
DEV := $(VENV)/.ready-dev
DOCS := $(VENV)/.ready-docs
ALL := $(RUN) $(PLAN) $(TEST) $(DEV) $(DOCS)
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-compile $(CONSTRAINTS:%=--constraint %) --editable
# On all cores, where pip takes one; a few files of others are no Python of this version.
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib
# On a terminal one line says what pip is at, and for how long; elsewhere pip says nothing but what is wrong.
INSTALL := @set -o pipefail; install() { echo "installing $$1 into $(VENV), 1 to 3 minutes"; \
	if [ -t 1 ]; then $(PIP) "$$1" | while read -r -t 1 line || (($$? > 128)); do last=$${line:-$$last}; \
	printf '\r\033[K%3d s  %.70s' $$SECONDS "$$last"; done && printf '\r\033[K'; \
	else $(PIP) "$$1" --quiet; fi && { $(COMPILE) || true; }; }; install
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --durations=15

.PHONY: help setup demo plan test test-slow test-all check-device lint format docs clean
help:
	@echo "make demo      train the quickstart config on embedded data, print accuracy before and after, write a report"
	@echo "make plan      predict whether configs/rapid.py fits an RTX 4090, and how fast it can be; needs no GPU"
	@echo "make test      run the tests"
	@echo "make test-all  run the tests and then those marked slow"
	@echo "make check-device  check kernels, programs, profiler and restarts on this machine's device, a CPU included"
	@echo "make lint      check with ruff, mypy and import-linter; make format fixes what ruff can"
	@echo "make docs      build the documentation into site/; every broken link is an error"
	@echo "make clean     remove caches (not runs/)"
	@echo "make setup     create $(VENV) with everything a developer needs"

setup: $(DEV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is too old: Python 3.11 or newer is needed; try make PYTHON=python3.12" >&2; exit 1; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# One call of pip for each purpose: calls that build on each other resolve and build the same things again. What a
# larger one installs is marked as installed, and no two run at once.
.NOTPARALLEL:
$(ALL): pyproject.toml $(CONSTRAINTS) | $(BIN)/python

$(RUN):
	$(INSTALL) .
	@touch $@

# XLA's compiler for GPUs apart from the rest: where jax finds it without a driver, it reports that at each start.
$(PLAN): | $(RUN)
	@echo "installing XLA's compiler for GPUs into $(VENV)/plan, 1 minute"
	@[ "$$(uname)" != Linux ] || { version=$$($(BIN)/python -c 'from importlib.metadata import version; print(version("jax"))'); \
	$(PIP:--editable=) --quiet --upgrade --no-deps --target $(VENV)/plan jax-cuda12-plugin==$$version \
	jax-cuda12-pjrt==$$version nvidia-cuda-nvcc-cu12; }
	@touch $@

$(TEST):
	$(INSTALL) '.[test]'
	@touch $@ $(RUN)

$(DEV): | $(PLAN)
	$(INSTALL) '.[dev]'
	@touch $@ $(RUN) $(TEST)

$(DOCS):
	$(INSTALL) '.[docs]'
	@touch $@ $(RUN)

demo: $(RUN)
	$(BIN)/jepa-jax train --config=quickstart --workdir=runs/quickstart

# GPU= and CONFIG= plan another GPU or config.
GPU ?= rtx4090
CONFIG ?= rapid
plan: $(PLAN)
	$(BIN)/jepa-jax plan --config=$(CONFIG) --gpu=$(GPU) --novariants

test: $(TEST) $(PLAN)
	$(PYTEST) tests

test-slow: $(TEST) $(PLAN)
	$(PYTEST) -m slow tests

test-all: test test-slow

check-device: $(DEV)
	$(BIN)/jepa-jax check-gpu --minutes=120

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy jepa_jax
	$(BIN)/lint-imports

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

clean:
	rm -rf .cache .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build site
