# Needs python3 and make; everything else is installed into .venv, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-all check bench figures setup clean
.DEFAULT_GOAL := demo

demo: setup  ## train four small GPTs, compare them (under 5 minutes on 2 cores)
	@$(BIN)/oelm demo

test: setup  ## every test but the slow ones
	@$(BIN)/pytest -n auto --maxprocesses 8 --dist loadfile -m "not slow"

test-all: setup  ## every test
	@$(BIN)/pytest

check: setup  ## lint, format, types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: setup  ## ratios against transformers, a plain tiktoken script, and frozen against baseline
	@$(BIN)/python benchmarks/training_step.py
	@$(BIN)/python benchmarks/generation.py
	@$(BIN)/python benchmarks/preparation.py
	@$(BIN)/python benchmarks/finetuning.py

figures: setup  ## write the tables of README and docs anew from the records under results/
	@$(BIN)/python studies/figures.py

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once; a few minutes)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "oelm needs Python 3.11 or newer; set PYTHON=...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	@touch $(STAMP)

clean:  ## remove the environment and caches, never outputs
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
