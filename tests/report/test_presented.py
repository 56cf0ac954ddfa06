"""What a report tells is told once, counted rightly, and named alike in all of its tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.report.reading import english, texts
from tests.report.synthetic import write_arm, write_sweep, write_tuned

BASE = [20.0, 20.2, 19.9, 20.1, 20.3]
# Chance, a tenth of a percent or so, that makes an interval of some width.
LUCK = [0.999, 1.001, 1.0, 1.002, 0.998]


def write_ratio(root: Path, experiment: str, ratio: float, *, seeds: int = 5, **chosen: Any) -> None:
    """Write an arm whose perplexity is known as a ratio of the baseline's."""
    figures = [ratio * base * luck for base, luck in zip(BASE, LUCK, strict=True)]
    write_arm(root, experiment, figures[:seeds], seeds=range(seeds), **chosen)


def write_pair(root: Path, *arms: str, **chosen: Any) -> None:
    write_arm(root, "GPT-01", BASE, **chosen)
    for arm in arms:
        write_ratio(root, arm, 1.02, **chosen)


def test_the_headline_tells_of_others_without_a_verdict_only_where_there_are_some(tmp_path: Path) -> None:
    write_pair(tmp_path, "GPT-02")
    assert "erdict" not in texts(english(tmp_path), "verdicts")[0]
    write_ratio(tmp_path, "GPT-03", 1.02, seeds=3)
    assert "1 pass, 0 fail, 0 inconclusive. Without a verdict: 1. All on" in texts(english(tmp_path), "verdicts")[0]


def test_settings_that_all_sweeps_were_made_with_are_told_once(tmp_path: Path) -> None:
    for experiment in ("GPT-01", "GPT-02", "GPT-03"):
        write_sweep(tmp_path, experiment, 1, changes={"steps": 500})
        write_tuned(tmp_path, experiment, 1e-3)
    assert texts(english(tmp_path), "tuning", "note") == [
        "GPT-01, laptop; GPT-02, laptop; GPT-03, laptop: swept with steps 500."
    ]
    write_sweep(tmp_path, "GPT-03", 1, changes={"steps": 400})
    both, other = "GPT-01, laptop; GPT-02, laptop: swept with steps 500.", "GPT-03, laptop: swept with steps 400."
    assert texts(english(tmp_path), "tuning", "note") == [both, other]


def test_arms_with_the_same_to_say_share_a_note(tmp_path: Path) -> None:
    write_pair(tmp_path)
    for arm in ("GPT-02", "GPT-03"):
        write_ratio(tmp_path, arm, 1.02, seeds=3)
    (note,) = texts(english(tmp_path), "verdicts", "note")
    assert note.startswith("GPT-02, GPT-03, laptop: 3 of 5 planned seeds are done")
