# One command each, all set-up included. `make` lists them.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
# Where it is set, each of the many processes would compile all that it imports: training.train takes 14 s instead of 5.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup pretrain test test-all test-gpu check style types docs pictures map audit lock lock-check clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(INSTALLED) ## make .venv, install with uv if it can be had (INSTALLER=pip: without), measure this machine

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"Shardline needs Python 3.11 or newer, $(PYTHON) is {sys.version.split()[0]}: make PYTHON=python3.11")'
	$(PYTHON) -m infra.setup_venv $(INSTALLER)
	$(BIN)/shardline doctor
	@echo 'Installed. Next: make pretrain, or export PATH=$(CURDIR)/$(BIN):$$PATH and shardline --help'
	@touch $@

pretrain: $(INSTALLED) ## the main job: text in, served model out (preset quickstart)
	$(BIN)/shardline pretrain quickstart

test: $(INSTALLED) ## the tests, without those marked slow; two files at once, since many tests wait
	$(BIN)/python -m pytest -m 'not slow' --numprocesses 2 --dist loadfile --no-loadscope-reorder

test-all: $(INSTALLED) ## all tests
	$(BIN)/python -m pytest

test-gpu: $(INSTALLED) ## on a machine with GPUs: its tests, its benchmark, the image; leaves docs/gpu-report.md to commit
	$(BIN)/python -m tests.support.gpu_report

check: style types test ## style, types and tests

style: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

docs: $(INSTALLED) ## build the site of docs/ into site/; a broken link is an error (`.venv/bin/python -m mkdocs serve` shows it)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	$(BIN)/python -m tests.support.docs_commands
	$(BIN)/python -m tests.support.pictures --check

pictures: $(INSTALLED) ## make the pictures of pages in docs/ anew, with Chromium, from two real runs: about 15 minutes
	$(BIN)/python -m tests.support.pictures

map: $(INSTALLED) ## draw docs/code-map.svg again, after files have moved
	$(BIN)/python -m tests.support.code_map

audit: $(INSTALLED) ## known holes in the pinned dependencies, where pip-audit reaches its data
	$(BIN)/python -m infra.audit

# The extras that infra/setup_venv.py installs, resolved for the oldest Python. A pin changes only if it has to, or by
# `make lock UPGRADE='--upgrade-package torch'`. pip stays the environment's own.
LOCK = $(BIN)/uv pip compile pyproject.toml --extra train --extra orchestrate --extra eval --extra dev --quiet \
	--python-version 3.11 --no-annotate --no-emit-package pip --custom-compile-command 'make lock' $(UPGRADE)

lock-check: $(INSTALLED) ## does constraints.txt hold the versions that pyproject.toml asks for?
	@cp constraints.txt .venv/constraints.txt
	@$(LOCK) --output-file .venv/constraints.txt
	@diff constraints.txt .venv/constraints.txt || { echo 'constraints.txt is not what pyproject.toml needs (above): make lock' >&2; exit 1; }

lock: $(INSTALLED) ## write constraints.txt: the versions that pyproject.toml asks for
	$(LOCK) --output-file constraints.txt

clean: ## remove the virtual environment; runs/ stays
	rm -rf .venv
