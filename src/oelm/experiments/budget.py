"""`budget`: one dial from which model size, steps, batch and vocabulary follow."""

from __future__ import annotations

import copy
import difflib
from typing import Any

from oelm.errors import ConfigError

# paper: the recipe of the earlier study ("Medium-512"), exactly; laptop: minutes on two CPU cores; smoke: seconds,
# proves the path and is never a result.
_BUDGETS: dict[str, dict[str, Any]] = {
    "paper": {
        "model": {
            "vocab_size": 0,
            "seq_len": 512,
            "model_dim": 512,
            "num_layers": 6,
            "num_heads": 8,
            "ff_dim": 2048,
            "dropout": 0.1,
        },
        "data": {"source": "stdlib", "tokenizer": "gpt2"},
        "optim": {"lr": 3e-4},
        "schedule": {"warmup_steps": 1000},
        "steps": 100_000,
        "batch_size": 8,
        "micro_batch_size": 8,
        "eval_every": 1000,
        "save_every": 5000,
    },
    "laptop": {
        "model": {
            "vocab_size": 0,
            "seq_len": 128,
            "model_dim": 128,
            "num_layers": 4,
            "num_heads": 4,
            "ff_dim": 512,
            "dropout": 0.0,
        },
        "data": {"source": "stdlib", "tokenizer": "bpe:2048"},
        "optim": {"lr": 2e-3},
        "schedule": {"warmup_steps": 100},
        "steps": 2000,
        "batch_size": 16,
        "micro_batch_size": 16,
        "eval_every": 500,
        "save_every": 500,
    },
    "smoke": {
        "model": {
            "vocab_size": 0,
            "seq_len": 32,
            "model_dim": 32,
            "num_layers": 2,
            "num_heads": 2,
            "ff_dim": 64,
            "dropout": 0.0,
        },
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


def budget_settings(budget: str) -> dict[str, Any]:
    """Return the settings of a budget as plain data, to be changed and parsed into a RunConfig."""
    if budget not in _BUDGETS:
        near = difflib.get_close_matches(budget, BUDGETS, n=1)
        hint = f" (did you mean '{near[0]}'?)" if near else ""
        raise ConfigError(f"unknown budget {budget!r}{hint}; there are: {', '.join(BUDGETS)}")
    return copy.deepcopy(_BUDGETS[budget])
