"""Shapes of the pretrained models in the catalog, to count their parameters without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from oelm.models.hub import described_classifier, load_transformers

# By repository: the config class of `transformers`, and the differences from its defaults.
_KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "google-bert/bert-base-uncased": ("BertConfig", {}),
    "sentence-transformers/all-MiniLM-L6-v2": (
        "BertConfig",
        {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    ),
    "google-t5/t5-small": ("T5Config", {}),
    "facebook/bart-base": (
        "BartConfig",
        {"d_model": 768}
        | {f"{half}_layers": 6 for half in ("encoder", "decoder")}
        | {f"{half}_attention_heads": 12 for half in ("encoder", "decoder")}
        | {f"{half}_ffn_dim": 3072 for half in ("encoder", "decoder")},
    ),
}


def classifier_skeleton(source: str, *, num_labels: int) -> nn.Module | None:
    """Return the classifier of a folder or a known hub id, without weights; None for an unknown id.

    A folder whose config.json describes no classifier raises CheckpointError; its code never runs.
    """
    transformers = load_transformers()
    repo = source.partition("@")[0]
    with torch.device("meta"):
        if Path(source).is_dir():
            return described_classifier(Path(source), num_labels=num_labels)
        if repo not in _KNOWN:
            return None
        name, settings = _KNOWN[repo]
        config = getattr(transformers, name)(**settings, num_labels=num_labels)
        model: nn.Module = transformers.AutoModelForSequenceClassification.from_config(config)
    return model
