# Needs python3 and make; everything else is installed into .venv, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-all test-slurm check bench setup clean
.DEFAULT_GOAL := demo

demo: setup  ## train four small GPTs, compare them (under 5 minutes on 2 cores)
	@$(BIN)/oelm demo

test: setup  ## every test but the slow ones
	@$(BIN)/pytest -m "not slow"

test-all: setup  ## every test
	@$(BIN)/pytest

test-slurm: setup  ## real jobs through a real SLURM on this host; as root, installs Debian's slurm-wlm and munge first
	@$(BIN)/python -m tests.slurm.one_host $(BIN)/pytest tests/slurm

check: setup  ## lint, format, types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: setup  ## ratios against transformers, a plain tiktoken script, and frozen against baseline
	@$(BIN)/python benchmarks/training_step.py
	@$(BIN)/python benchmarks/generation.py
	@$(BIN)/python benchmarks/preparation.py
	@$(BIN)/python benchmarks/finetuning.py
	@$(BIN)/python benchmarks/ranks.py

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once; a few minutes)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "oelm needs Python 3.11 or newer; set PYTHON=...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	@touch $(STAMP)

clean:  ## remove the environment and caches, never outputs
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
