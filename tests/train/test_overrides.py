"""What `--set` takes, and what it says of values that have parts."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from oelm.budget import budget_settings
from oelm.config import RunConfig, parse_config, parse_overrides, with_overrides
from oelm.errors import ConfigError, MethodError
from oelm.method.apply import freeze
from oelm.method.method import Thaw
from oelm.models.gpt import GPT

THAW = Thaw(start=0.25, end=0.75, order="first_first")


def made(*texts: str) -> RunConfig:
    flags: dict[str, Any] = {"method": {"init": "orthogonal", "freeze": ["q", "k"]}}
    return parse_config(with_overrides(budget_settings("smoke"), parse_overrides(texts, flags=flags)), where="here")


def test_an_object_is_taken_as_json_or_part_by_part() -> None:
    whole = made('method.thaw={"start": 0.25, "end": 0.75, "order": "first_first"}')
    parts = made("method.thaw.start=0.25", "method.thaw.end=0.75", "method.thaw.order=first_first")
    assert whole.method.thaw == parts.method.thaw == THAW


def test_a_part_of_what_is_null_is_refused_with_the_parts_that_are_missing() -> None:
    with pytest.raises(ConfigError, match=r"method\.thaw\.end: missing.*method\.thaw\.order: missing"):
        made("method.thaw.start=0.25")


@pytest.mark.parametrize(
    ("text", "example"),
    [
        ("method.thaw={start: 0.8, end: 0.9}", r'\{"start": \.\.\., "end": \.\.\., "order": \.\.\.\}'),
        ("method.freeze=[v]", r'\["q", "k"\]'),
        ("optim.betas=0.9,0.95", r"\[0\.9, 0\.99\]"),
    ],
)
def test_a_value_with_parts_that_is_no_json_is_refused_with_an_example_of_it(text: str, example: str) -> None:
    with pytest.raises(ConfigError, match=rf"{text.split('=')[0]}: .*--set takes it as JSON.* such as .*{example}"):
        made(text)


def test_a_value_without_parts_is_refused_without_talk_of_json() -> None:
    with pytest.raises(ConfigError, match=r"steps: Input should be a valid integer \(given: 'many'\)$"):
        made("steps=many")


@pytest.mark.parametrize("number", ["nan", "NaN", "inf", "-Infinity"])
def test_what_is_no_number_reads_alike_from_a_flag_and_from_set(number: str) -> None:
    with pytest.raises(ConfigError) as by_set:
        made(f"optim.lr={number}")
    with pytest.raises(ConfigError) as by_flag:
        parse_config(with_overrides(budget_settings("smoke"), {"optim.lr": float(number)}), where="here")
    assert str(by_set.value).lower() == str(by_flag.value).lower().replace("-inf)", "-infinity)")
    assert "optim.lr: must be a finite number (given: " in str(by_set.value)


def test_a_correction_below_rank_one_is_refused_before_any_data_is_read() -> None:
    # 32 x 32 at smoke: rank 1 needs 64 of 1,024 numbers.
    with pytest.raises(ConfigError, match=r"method\.correction 0\.05 of Q's 32 x 32 numbers .* raise it to 0\.0625 at least"):
        made("method.correction=0.05")
    assert made("method.correction=0.0625").method.correction == 0.0625


@pytest.mark.parametrize(("share", "fits"), [(0.05, False), (0.2812, False), (0.2813, True), (0.4, True)])
def test_a_config_refuses_just_those_corrections_that_freezing_refuses(share: float, fits: bool) -> None:
    # Thin Q and K, 4 x 32: rank 1 needs 36 of 128 numbers, 0.28125 of them.
    thin = ("model.num_heads=2", "model.qk_dim=2", "model.vocab_size=16")
    with nullcontext() if fits else pytest.raises(ConfigError, match=r"0\.2813 at least"):
        made(*thin, f"method.correction={share}")
    plain = made(*thin)
    with nullcontext() if fits else pytest.raises(MethodError, match="less than a correction of rank 1 needs"):
        freeze(GPT(plain.model), plain.method.model_copy(update={"correction": share}))
