"""Pretrained models and tables that several files of tests fine-tune on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.test_hub import write_model
from tests.train.finetuning import write_tables


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(scope="module")
def calm_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without dropout."""
    folder = tmp_path_factory.mktemp("models") / "calm"
    return write_model(folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tables(tmp_path_factory.mktemp("tables"))
