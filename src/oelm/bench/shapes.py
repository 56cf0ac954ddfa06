"""The shapes at which speed is published, and arms by name: what `oelm bench --shape` and `make bench` measure."""

from __future__ import annotations

import copy
from typing import Any

from oelm.errors import ConfigError, suggest
from oelm.train.config import FinetuneConfig, RunConfig, parse_as, parse_config

# Not the budgets: those may change, and a published ratio must keep its meaning.
_SHAPES: dict[str, dict[str, int]] = {
    "laptop": {
        "vocab_size": 512,
        "seq_len": 64,
        "model_dim": 128,
        "num_layers": 4,
        "num_heads": 4,
        "ff_dim": 512,
        "batch_size": 32,
    },
    "512": {
        "vocab_size": 2048,
        "seq_len": 256,
        "model_dim": 512,
        "num_layers": 6,
        "num_heads": 8,
        "ff_dim": 2048,
        "batch_size": 8,
    },
    "medium": {
        "vocab_size": 50257,
        "seq_len": 512,
        "model_dim": 512,
        "num_layers": 6,
        "num_heads": 8,
        "ff_dim": 2048,
        "batch_size": 8,
    },
    # A smoke test of the benchmarks; never a result.
    "tiny": {
        "vocab_size": 300,
        "seq_len": 16,
        "model_dim": 32,
        "num_layers": 2,
        "num_heads": 2,
        "ff_dim": 64,
        "batch_size": 4,
    },
}
# The shape of bert-base with fresh weights: the earlier study's classifier, at its batch and length.
CLASSIFIER = "bert"
_BERT = {"vocab_size": 30522, "model_dim": 768, "num_layers": 12, "num_heads": 12, "ff_dim": 3072, "num_labels": 3}
PUBLISHED = ("laptop", "512", "medium")
# The arm whose Q and K have an eighth of the rows and learn: the rival in speed of a method that freezes them.
THIN = "thin"
_THIN_SHARE = 8


def shape_settings(name: str) -> dict[str, Any]:
    """Return the settings of a step of this shape, without dropout; raise ConfigError for a name that does not exist."""
    if name == CLASSIFIER:
        return _classifier_settings()
    if name not in _SHAPES:
        known = (*_SHAPES, CLASSIFIER)
        raise ConfigError(f"unknown shape {name!r}{suggest(name, known)}; shapes: {', '.join(known)}")
    model: dict[str, Any] = dict(_SHAPES[name])
    batch_size = model.pop("batch_size")
    return {
        "model": model | {"dropout": 0.0},
        # Random tokens are timed; nothing of this is read.
        "data": {"source": "stdlib", "tokenizer": "bpe:512"},
        "optim": {"lr": 3e-4},
        "schedule": {"warmup_steps": 0},
        "steps": 1000,
        "batch_size": batch_size,
        "micro_batch_size": batch_size,
        "eval_every": 1000,
        "save_every": 1000,
    }


def _classifier_settings() -> dict[str, Any]:
    return {
        "model": _BERT | {"dropout": 0.0},
        # Random tokens are timed, as many as this; nothing is read.
        "examples": {"task": "stdlib", "max_length": 128},
        "optim": {"lr": 2e-5},
        "schedule": {"warmup_steps": 0},
        "steps": 1000,
        "batch_size": 16,
        "micro_batch_size": 16,
    }


def with_arm(settings: dict[str, Any], arm: str) -> dict[str, Any]:
    """Return the settings with a method's name, or those of the baseline with thin Q and K."""
    changed = copy.deepcopy(settings)
    if arm != THIN:
        return changed | {"method": arm}
    if "examples" in changed:
        raise ConfigError(f"{THIN!r} is an arm of our GPT, and shape '{CLASSIFIER}' is a BERT; give a method, e.g. oelm_freeze")
    head_dim = changed["model"]["model_dim"] // changed["model"]["num_heads"]
    changed["model"]["qk_dim"] = max(1, head_dim // _THIN_SHARE)
    return changed | {"method": "baseline"}


def shape_config(shape: str, arm: str, *, dropout: float = 0.0) -> RunConfig:
    """Return the config of one arm at a named shape."""
    settings = with_arm(shape_settings(shape), arm)
    settings["model"]["dropout"] = dropout
    return parse_config(settings, where=f"{arm} at {shape}")


def classifier_config(arm: str, *, max_length: int = 128) -> FinetuneConfig:
    """Return the config of one arm at the classifier's shape, with examples of this length."""
    settings = with_arm(shape_settings(CLASSIFIER), arm)
    settings["examples"]["max_length"] = max_length
    return parse_as(FinetuneConfig, settings, where=f"{arm} at {CLASSIFIER}")
