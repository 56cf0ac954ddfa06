"""Runs of one draw of the frames get no verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oelm.report.judge import Looks
from tests.report.reading import english, rows, texts
from tests.report.synthetic import write_arm


def write_one_draw(root: Path, **settings: Any) -> None:
    write_arm(root, "GPT-01", (20.0, 20.2, 19.9, 20.1, 20.3))
    write_arm(root, "GPT-02", (20.1, 20.2, 20.0, 20.1, 20.4), settings={"method.seed": 11, **settings})


def test_all_seeds_on_one_draw_give_no_verdict_and_are_no_look(tmp_path: Path) -> None:
    write_one_draw(tmp_path)
    document = english(tmp_path)
    assert [row["verdict"] for row in rows(document, "verdicts")] == ["exploratory"]
    assert any("the same frames (method.seed is 11)" in text for text in texts(document, "verdicts"))
    assert Looks.read(tmp_path).entries == {}


@pytest.mark.parametrize("init", ["native", "orthonormalized"])
def test_what_is_not_drawn_is_judged_whatever_seed_its_frames_are_given(tmp_path: Path, init: str) -> None:
    write_one_draw(tmp_path, **{"method.init": init})
    assert [row["verdict"] for row in rows(english(tmp_path), "verdicts")] == ["PASS"]
