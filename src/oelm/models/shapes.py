"""Shapes of the pretrained models that the catalog names, so that they can be counted before they are fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from oelm.errors import CheckpointError, MissingExtraError
from oelm.models.hub import model_facts

# By repository: the config class of `transformers`, and where the model differs from its defaults.
_KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "google-bert/bert-base-uncased": ("BertConfig", {}),
    "sentence-transformers/all-MiniLM-L6-v2": (
        "BertConfig",
        {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    ),
    "google-t5/t5-small": ("T5Config", {}),
    "facebook/bart-base": (
        "BartConfig",
        {
            "d_model": 768,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "encoder_attention_heads": 12,
            "decoder_attention_heads": 12,
            "encoder_ffn_dim": 3072,
            "decoder_ffn_dim": 3072,
        },
    ),
}


def classifier_skeleton(source: str, *, num_labels: int) -> nn.Module | None:
    """Return the classifier that a folder or a known hub id stands for, without numbers; None where that is unknown.

    A folder whose config.json describes no classifier raises CheckpointError; code that it names is never run.
    """
    try:
        import transformers
    except ImportError:
        raise MissingExtraError("transformers", "hf") from None
    repo = source.partition("@")[0]
    if Path(source).is_dir():
        model_facts(Path(source))
        return _described(transformers, Path(source), num_labels)
    if repo not in _KNOWN:
        return None
    name, settings = _KNOWN[repo]
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModelForSequenceClassification.from_config(
            getattr(transformers, name)(**settings, num_labels=num_labels)
        )
    return model


def _described(transformers: Any, folder: Path, num_labels: int) -> nn.Module:
    try:
        # Said, not left out: left out, the library asks at the terminal whether to run the folder's code.
        config = transformers.AutoConfig.from_pretrained(
            str(folder), num_labels=num_labels, local_files_only=True, trust_remote_code=False
        )
        with torch.device("meta"):
            model: nn.Module = transformers.AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)
    # What a wrong config raises differs by architecture and by version.
    except Exception as problem:
        reason = " ".join(str(problem).split())[:200]
        raise CheckpointError(f"{folder}: its config.json describes no classifier ({reason})") from problem
    return model
