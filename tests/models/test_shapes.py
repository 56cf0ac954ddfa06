"""Pretrained models are counted before they are fetched, and a folder's config.json can do no harm."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from oelm.errors import CheckpointError
from oelm.files import write_json
from oelm.models.hub import classifier_skeleton
from tests.cases import case

transformers = pytest.importorskip("transformers")

# Published sizes of the bare models; on top comes a head over `width`: a dense layer where there is one, and the labels.
BERT_BASE, MINILM, T5_SMALL, BART_BASE = 109_482_240, 22_713_216, 60_506_624, 139_420_416


def size(model: nn.Module | None) -> int:
    assert model is not None
    return sum(parameter.numel() for parameter in model.parameters())


def head(width: int, labels: int, *, dense: bool) -> int:
    return (width * width + width) * dense + width * labels + labels


@pytest.mark.parametrize(
    ("repo", "bare", "width", "dense"),
    [
        ("google-bert/bert-base-uncased", BERT_BASE, 768, False),
        ("sentence-transformers/all-MiniLM-L6-v2", MINILM, 384, False),
        ("google-t5/t5-small", T5_SMALL, 512, True),
        ("facebook/bart-base", BART_BASE, 768, True),
    ],
)
def test_a_model_of_the_catalog_has_its_published_size_and_a_head(repo: str, bare: int, width: int, dense: bool) -> None:
    for source, labels in ((repo, 2), (f"{repo}@0123abc", 3)):
        assert size(classifier_skeleton(source, num_labels=labels)) == bare + head(width, labels, dense=dense)


def test_a_skeleton_has_shapes_and_no_numbers() -> None:
    model = classifier_skeleton("google-bert/bert-base-uncased", num_labels=2)
    assert model is not None and {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_making_a_skeleton_draws_no_random_number() -> None:
    before = torch.random.get_rng_state()
    classifier_skeleton("google-t5/t5-small", num_labels=2)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_model_that_is_not_known_is_none_and_the_hub_is_not_asked() -> None:
    cases: list[str] = ["bert-base-uncased", "org/other", "@", "/nowhere", "google-bert/bert-base-uncased/x", "a\x00b"]
    for source in cases:
        with case(source):
            assert classifier_skeleton(source, num_labels=2) is None


def test_a_folder_is_counted_by_its_own_config(tmp_path: Path) -> None:
    facts = {"model_type": "bert", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    folder = folder_of(tmp_path / "tiny", **facts, vocab_size=10, max_position_embeddings=4)
    embeddings = (10 + 4 + 2) * 8 + 2 * 8
    layer = 4 * (8 * 8 + 8) + 2 * (2 * 8) + (8 * 16 + 16) + (16 * 8 + 8)
    assert size(classifier_skeleton(str(folder), num_labels=5)) == embeddings + layer + (8 * 8 + 8) + head(8, 5, dense=False)


def folder_of(folder: Path, **facts: Any) -> Path:
    write_json(folder / "config.json", facts, durable=False)
    return folder


def test_a_folder_that_describes_no_classifier_is_refused_by_name(tmp_path: Path) -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"model_type": "nobody-knows"},
        {"model_type": "whisper"},
        {"model_type": "bert", "hidden_size": "wide"},
        {"model_type": "bert", "hidden_size": 10, "num_attention_heads": 3},
        {"model_type": "bert", "hidden_size": -4},
        {"model_type": 5},
    ]
    for number, facts in enumerate(kinds):
        folder = folder_of(tmp_path / f"odd-{number}", **facts)
        told = rf"^{folder}: its config.json describes no classifier \(.+\)$"
        with case(facts), pytest.raises(CheckpointError, match=told):
            classifier_skeleton(str(folder), num_labels=2)


def test_a_folder_with_a_damaged_config_is_refused_by_name(tmp_path: Path) -> None:
    for content in ("", "{", "[]", "NaN"):
        (tmp_path / "config.json").write_text(content)
        with case(content), pytest.raises(CheckpointError, match=str(tmp_path)):
            classifier_skeleton(str(tmp_path), num_labels=2)


def test_a_folder_without_a_config_is_no_model_s(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no config.json"):
        classifier_skeleton(str(tmp_path), num_labels=2)


def test_code_that_a_folder_names_is_neither_run_nor_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path / "evil", model_type="evil", auto_map={"AutoConfig": "evil.EvilConfig"})
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass EvilConfig: ...\n")
    # Whoever is asked would say yes.
    answers = io.StringIO("y\n" * 5)
    monkeypatch.setattr(sys, "stdin", answers)
    with pytest.raises(CheckpointError, match="describes no classifier"):
        classifier_skeleton(str(folder), num_labels=2)
    assert not (tmp_path / "ran").exists() and answers.tell() == 0
