# Needs python3 and make; everything else is installed into .venv, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-all test-faults test-slurm soak mutants check bench bench-speed figures docs wheel setup clean
.DEFAULT_GOAL := demo

demo: setup  ## train four small GPTs and compare them (about 5 minutes on 2 cores)
	@$(BIN)/oelm demo

# One more than the number of cores, at most eight: tests that kill and restart mostly wait.
CORES = import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
WORKERS = $(shell n=$$($(BIN)/python -c '$(CORES)'); echo $$((n < 8 ? n + 1 : 8)))

# Tests do not need a slow disk: where there is one in memory, with room, it is used.
SHM := $(shell test "$$(df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 {print $$4}')" -gt 4000000 2>/dev/null && echo /dev/shm)
# Bytecode is kept whatever the environment says: without it, every worker and every child process compiles all anew.
test test-all test-faults: export PYTHONDONTWRITEBYTECODE =

# Files in their order: by their number of tests, the long ones with few would come last and leave cores idle.
test: setup  ## every test but the slow ones
	@$(if $(SHM),TMPDIR=$(SHM)) $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow"

test-all: setup  ## every test
	@$(if $(SHM),TMPDIR=$(SHM)) $(BIN)/pytest

MINUTES ?= 30

test-faults: setup  ## every fault and attack of docs/reliability.md, with counts and seeds (under 10 minutes on 2 cores)
	@$(if $(SHM),TMPDIR=$(SHM)) $(BIN)/pytest -n 2 --dist loadfile -m faults

soak: setup  ## kill a runner and its runs at random for MINUTES; every run must end bit-identical to its oracle
	@$(if $(SHM),TMPDIR=$(SHM)) $(BIN)/python -m tests.faults.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(if $(RECORD),--record)

mutants: setup  ## put 43 one-line bugs into the code, one at a time: the tests must fail
	@$(if $(SHM),TMPDIR=$(SHM)) $(BIN)/python -m tests.faults.mutants

test-slurm: setup  ## real jobs through a real SLURM on this host; as root, installs Debian's slurm-wlm and munge first
	@$(BIN)/python -m tests.slurm.one_host $(BIN)/pytest tests/slurm

check: setup  ## lint, format, types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: setup bench-speed  ## bench-speed, then ratios against a tiktoken script, transformers.Trainer and one process; stored under results/bench
	@$(BIN)/python benchmarks/preparation.py --record
	@$(BIN)/python benchmarks/finetuning.py --record
	@$(BIN)/python benchmarks/ranks.py --record

# About 25 minutes on two quiet cores, most of it at Medium-512, where a step takes 10 s. One part at one shape, alone:
# python benchmarks/methods.py --shape medium --record
bench-speed: setup  ## time training steps and generation: ours, transformers, a plain step, methods against the baseline
	@$(BIN)/python benchmarks/where_time_goes.py --record
	@$(BIN)/python benchmarks/training_step.py --record
	@$(BIN)/python benchmarks/methods.py --record
	@$(BIN)/python benchmarks/generation.py --record
	@$(BIN)/python benchmarks/classifier.py --record
	@for table in bounds time step methods parameters generation classifier; do echo; $(BIN)/python benchmarks/tables.py $$table; done

figures: setup  ## rewrite the tables of README and docs from the records under results/
	@$(BIN)/python studies/figures.py

docs: setup  ## build the docs site into build/docs; a warning is an error
	@$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs
	@echo 'open build/docs/index.html'

WHEEL := build/wheel

wheel:  ## build the wheel, install it without extras into a fresh environment, and use it there (needs a package index)
	@rm -rf $(WHEEL)
	@$(PYTHON) -m venv $(WHEEL)/env
	@$(WHEEL)/env/bin/python -m pip wheel -qq --disable-pip-version-check --no-deps -w $(WHEEL) .
	@$(WHEEL)/env/bin/python -m pip install -qq --disable-pip-version-check --no-compile -c constraints.txt $(WHEEL)/*.whl
	@cd $(WHEEL) && unset PYTHONPATH && export OELM_CACHE=$$PWD/cache && \
	for words in list "train --budget smoke" status report "report --html report.html"; do \
	  env/bin/oelm $$words > printed.txt 2>&1 && echo "oelm $$words: works" || { cat printed.txt; exit 1; }; done

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once; a few minutes)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "oelm needs Python 3.11 or newer; set PYTHON=...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[all,docs,dev]'
	@touch $(STAMP)

clean:  ## remove the environment and caches, never outputs
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
