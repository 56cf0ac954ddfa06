"""The shapes and arms that `oelm bench --shape` and `make bench` measure."""

from __future__ import annotations

import copy
import difflib
from typing import Any

from oelm.errors import ConfigError
from oelm.train.config import FinetuneConfig, RunConfig, parse_as, parse_config

_COLUMNS = ("vocab_size", "seq_len", "model_dim", "num_layers", "num_heads", "ff_dim", "batch_size")
# Independent of the budgets, which may change: a published ratio must keep its meaning.
_SHAPES = {
    "laptop": (512, 64, 128, 4, 4, 512, 32),
    "512": (2048, 256, 512, 6, 8, 2048, 8),
    "medium": (50257, 512, 512, 6, 8, 2048, 8),
    # A smoke test of the benchmarks; never a result.
    "tiny": (300, 16, 32, 2, 2, 64, 4),
}
# The shape of bert-base with fresh weights: the earlier study's classifier, at its batch and length.
CLASSIFIER = "bert"
_BERT = {"vocab_size": 30522, "model_dim": 768, "num_layers": 12, "num_heads": 12, "ff_dim": 3072, "num_labels": 3}
PUBLISHED = ("laptop", "512", "medium")
# The arm with an eighth of the rows in Q and K, which learn: in speed, the rival of freezing them.
THIN = "thin"
_THIN_SHARE = 8


def shape_settings(name: str) -> dict[str, Any]:
    """Return the settings of a step of this shape, without dropout; raise ConfigError for an unknown name."""
    if name not in (*_SHAPES, CLASSIFIER):
        near = difflib.get_close_matches(name, (*_SHAPES, CLASSIFIER), n=1)
        hint = f" (did you mean '{near[0]}'?)" if near else ""
        raise ConfigError(f"unknown shape {name!r}{hint}; shapes: {', '.join((*_SHAPES, CLASSIFIER))}")
    # Random tokens are timed; no data is read.
    common: dict[str, Any] = {"schedule": {"warmup_steps": 0}, "steps": 1000}
    if name == CLASSIFIER:
        examples = {"task": "stdlib", "max_length": 128}
        sizes = {"batch_size": 16, "micro_batch_size": 16}
        return common | sizes | {"model": _BERT | {"dropout": 0.0}, "examples": examples, "optim": {"lr": 2e-5}}
    model: dict[str, Any] = dict(zip(_COLUMNS, _SHAPES[name], strict=True))
    batch_size = model.pop("batch_size")
    return common | {
        "model": model | {"dropout": 0.0},
        "data": {"source": "stdlib", "tokenizer": "bpe:512"},
        "optim": {"lr": 3e-4},
        "batch_size": batch_size,
        "micro_batch_size": batch_size,
        "eval_every": 1000,
        "save_every": 1000,
    }


def with_arm(settings: dict[str, Any], arm: str) -> dict[str, Any]:
    """Return the settings with a method, or those of the baseline with thin Q and K."""
    changed = copy.deepcopy(settings)
    if arm != THIN:
        return changed | {"method": arm}
    if "examples" in changed:
        raise ConfigError(f"{THIN!r} needs our GPT, and shape '{CLASSIFIER}' is a BERT; give a method, e.g. oelm_freeze")
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
