"""`budget`: one setting that decides model size, steps, batch and vocabulary."""

from __future__ import annotations

import copy
from typing import Any

from oelm.errors import ConfigError, suggest

# The vocabulary follows the data.
_GPT = {"vocab_size": 0, "dropout": 0.0}
# The recipe that took the baseline past the 5-gram soonest (docs/log.md). Muon trains the layers' matrices at 5 x lr.
_SMALL_RECIPE: dict[str, Any] = {
    "model": {**_GPT, "seq_len": 256, "model_dim": 128, "num_layers": 4, "num_heads": 4, "ff_dim": 512},
    "data": {"source": "stdlib", "tokenizer": "bpe:512"},
    "optim": {"name": "muon", "lr": 4e-3},
    "schedule": {"warmup_steps": 100},
    "batch_size": 8,
    "micro_batch_size": 8,
}
# paper: the recipe of the earlier study ("Medium-512"), exactly; workstation: about 11 minutes on one core, for models that
# beat a 5-gram; laptop: minutes, to learn the tool; smoke: seconds, a smoke test and never a result.
_BUDGETS: dict[str, dict[str, Any]] = {
    "paper": {
        "model": {**_GPT, "seq_len": 512, "model_dim": 512, "num_layers": 6, "num_heads": 8, "ff_dim": 2048, "dropout": 0.1},
        "data": {"source": "stdlib", "tokenizer": "gpt2"},
        "optim": {"lr": 3e-4},
        "schedule": {"warmup_steps": 1000},
        "steps": 100_000,
        "batch_size": 8,
        "micro_batch_size": 8,
        "eval_every": 1000,
        "save_every": 5000,
    },
    "workstation": {**_SMALL_RECIPE, "steps": 2400, "eval_every": 800, "save_every": 800},
    # Cut short: attention is learnt by then, but a 5-gram is still better (docs/log.md).
    "laptop": {**_SMALL_RECIPE, "steps": 1000, "eval_every": 500, "save_every": 500},
    "smoke": {
        "model": {**_GPT, "seq_len": 32, "model_dim": 32, "num_layers": 2, "num_heads": 2, "ff_dim": 64},
        "data": {"source": "stdlib", "tokenizer": "bpe:512"},
        "optim": {"lr": 2e-3},
        "schedule": {"warmup_steps": 5},
        "steps": 30,
        "batch_size": 8,
        "micro_batch_size": 8,
        "eval_every": 15,
        "save_every": 15,
    },
}
BUDGETS = tuple(_BUDGETS)
# A fresh small BERT, where no pretrained model is named, learns the task that every machine has.
_SMALL_CLASSIFIER: dict[str, Any] = {
    "model": {"vocab_size": 4096, "model_dim": 128, "num_layers": 4, "num_heads": 4, "ff_dim": 512},
    "examples": {"task": "stdlib", "max_length": 128},
    "optim": {"lr": 5e-4},
    "schedule": {"warmup_steps": 100},
    "epochs": 3,
    "batch_size": 16,
    "micro_batch_size": 16,
}
_CLASSIFIER_BUDGETS: dict[str, dict[str, Any]] = {
    "paper": {
        **_SMALL_CLASSIFIER,
        "model": {"source": "google-bert/bert-base-uncased@86b5e0934494bd15c9632b12f734a8a67f723594"},
        "examples": {"task": "sst2"},
        "optim": {"lr": 2e-5},
    },
    "workstation": _SMALL_CLASSIFIER,
    "laptop": {
        **_SMALL_CLASSIFIER,
        "examples": {"task": "stdlib", "max_length": 128, "max_train": 4000},
        "schedule": {"warmup_steps": 50},
    },
    "smoke": {
        "model": {"vocab_size": 1024, "model_dim": 32, "num_layers": 2, "num_heads": 2, "ff_dim": 64},
        "examples": {"task": "stdlib", "max_length": 32, "max_train": 256},
        "optim": {"lr": 2e-3},
        "schedule": {"warmup_steps": 5},
        "steps": 20,
        "batch_size": 8,
        "micro_batch_size": 8,
        "eval_every": 10,
        "save_every": 10,
    },
}
# How many tokens of each split an experiment reads: at laptop more than a run learns from, yet prepared in minutes; at
# smoke as much as is validated in a second.
EXTRACT_TOKENS: dict[str, int | None] = {"paper": None, "workstation": 32_000_000, "laptop": 8_000_000, "smoke": 50_000}
# Rates that suit a fresh model ruin pretrained weights.
_PRETRAINED_LR = 5e-5


def budget_settings(budget: str) -> dict[str, Any]:
    """Return a language model's settings at a budget as plain data, to be changed and parsed into a RunConfig."""
    return _settings(_BUDGETS, budget)


def classifier_settings(budget: str, *, model: str | None) -> dict[str, Any]:
    """Return a classifier's settings at a budget as plain data; `model` is a pretrained one's folder or hub id."""
    settings = _settings(_CLASSIFIER_BUDGETS, budget)
    if model is not None:
        settings["model"] = {"source": model}
        if budget != "paper":
            settings["optim"]["lr"] = _PRETRAINED_LR
    return settings


def _settings(budgets: dict[str, dict[str, Any]], budget: str) -> dict[str, Any]:
    if budget not in budgets:
        raise ConfigError(f"unknown budget {budget!r}{suggest(budget, BUDGETS)}; choose one of {', '.join(BUDGETS)}")
    return copy.deepcopy(budgets[budget])
