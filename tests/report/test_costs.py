"""Recorded timings are shown in the reader's language, whatever version of `oelm bench` recorded them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oelm.bench.record import FOLDER, TimedShape, write_timing
from oelm.report.build import build_report
from oelm.report.document import Document
from tests.bench.test_record import OLD, timing
from tests.report.reading import rows
from tests.report.synthetic import package_catalog, write_arm

PLAIN = "4 layers, 128 wide, dropout 0.0, batch 32 x 64"
BEHIND = "4 layers, 128 wide, dropout 0.0, short convolution of 3, batch 32 x 64"
IN_CHINESE = {
    PLAIN: "4 层，宽度 128，dropout 0.0，批大小 32 x 64",
    BEHIND: "4 层，宽度 128，dropout 0.0，3 个词元的短卷积，批大小 32 x 64",
}


def document(root: Path, lang: str) -> Document:
    return build_report((root,), package_catalog()).document(lang)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for arm in ("GPT-01", "GPT-02"):
        write_arm(tmp_path, arm, [20.0, 20.2], seeds=[0, 1])
    (tmp_path / FOLDER).mkdir()
    return tmp_path


def write_old(root: Path, shape: str) -> None:
    (root / FOLDER / "old.json").write_text(json.dumps(OLD | {"shape": shape}))


@pytest.mark.parametrize("sentence", IN_CHINESE)
def test_the_shape_of_an_old_record_is_shown_in_the_readers_language(root: Path, sentence: str) -> None:
    write_old(root, sentence)
    assert [row["model"] for row in rows(document(root, "en"), "speed")] == [sentence]
    assert [row["模型"] for row in rows(document(root, "zh"), "speed")] == [IN_CHINESE[sentence]]


@pytest.mark.parametrize(
    ("more", "english", "chinese"),
    [
        ({}, "2 layers, 32 wide, dropout 0.1, batch 4 x 16", "2 层，宽度 32，dropout 0.1，批大小 4 x 16"),
        (
            {"short_conv": 2, "vocab_size": 50257},
            "2 layers, 32 wide, dropout 0.1, short convolution of 2, batch 4 x 16, vocabulary 50,257",
            "2 层，宽度 32，dropout 0.1，2 个词元的短卷积，批大小 4 x 16，词表 50,257",
        ),
    ],
)
def test_the_shape_of_a_record_is_shown_in_the_readers_language(
    root: Path, more: dict[str, Any], english: str, chinese: str
) -> None:
    shape = TimedShape(num_layers=2, model_dim=32, seq_len=16, batch_size=4, dropout=0.1, **more)
    write_timing(root, timing(shape=shape))
    assert [row["model"] for row in rows(document(root, "en"), "speed")] == [english]
    assert [row["模型"] for row in rows(document(root, "zh"), "speed")] == [chinese]
