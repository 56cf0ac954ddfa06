"""Generation is timed arm against arm and against the same text of `transformers`."""

from __future__ import annotations

import pytest

from oelm.bench.greedy import TRANSFORMERS, can_export, compare_generation
from oelm.bench.interleave import shape_config
from oelm.config import RunConfig
from oelm.errors import OelmError


def arms(*names: str) -> list[tuple[str, RunConfig]]:
    return [(name, shape_config("tiny", name)) for name in names]


def test_arms_take_turns_with_transformers_on_the_export() -> None:
    writers = compare_generation(arms("baseline", "oelm_lowrank", "thin"), rounds=2, num_tokens=30, has_transformers=True)
    assert [writer.name for writer in writers] == ["baseline", "oelm_lowrank", "thin", TRANSFORMERS]
    first, *_, theirs = writers
    assert (first.ratio.value, first.ratio.low, first.ratio.high, first.ratio.count) == (1.0, 1.0, 1.0, 2)
    assert first.against_transformers is not None and theirs.against_transformers is not None
    assert first.against_transformers.value == pytest.approx(1 / theirs.ratio.value)
    assert all(writer.tokens_per_s > 0 and writer.ratio.low <= writer.ratio.high for writer in writers)


def test_without_transformers_arms_are_compared_alone() -> None:
    # Two arms of one name are two contenders.
    writers = compare_generation(arms("baseline", "baseline"), rounds=2, num_tokens=3, has_transformers=False)
    assert [writer.name for writer in writers] == ["baseline", "baseline"]
    assert all(writer.against_transformers is None for writer in writers)


def test_a_context_without_room_is_refused() -> None:
    config = shape_config("tiny", "baseline")
    short = config.model_copy(update={"model": config.model.model_copy(update={"seq_len": 4})})
    with pytest.raises(OelmError, match="a context of 4 tokens leaves no room after a prompt of 4"):
        compare_generation([("short", short)], rounds=2, num_tokens=3, has_transformers=False)


def test_only_what_gpt_2_has_a_place_for_is_compared_with_transformers() -> None:
    plain = shape_config("tiny", "oelm_freeze")
    behind = plain.model_copy(update={"model": plain.model.model_copy(update={"short_conv": 2})})
    assert can_export(plain) and not can_export(behind) and not can_export(shape_config("tiny", "thin"))
