"""Each number by which the earlier study contradicts itself comes out of the arithmetic."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

from oelm.experiments.forecast import count_parameters
from tests.cases import case
from tests.test_figures import script


@pytest.fixture(scope="module")
def study() -> ModuleType:
    return script("studies/contradictions.py")


def test_the_numbers(study: ModuleType) -> None:
    cases: list[tuple[str, list[str]]] = [
        ("parameters", ["82M", "12.9%", "44,896,768", "3,145,728", "7.0%", "514 MiB", "490 MiB"]),
        # At most 1/18 of a block.
        ("speed", ["57% faster", "57.4% apart", "5.6%", "2.3%", "1.4% slower"]),
        # 1/sqrt(512) against 0.02; 4.97 -> 4.69 is -5.6%, +6.0% the other way round.
        ("scale", ["6%", "0.044", "0.02", "24 times", "-5.6%", "+6.0%"]),
        # 1 - 8,370 / 16,287 of the time is unaccounted for.
        ("clock", ["100,000 steps", "0.0837 s", "2.33 h", "4.52 h", "49%", "0.184 s", "5.11 h"]),
        ("sizes", ["40M", "40B", "100,000", "150,000", "189 MB", "94.5M", "2M", "50M"]),
        ("chance", ["+1.08", "2490", "0.9", "-1.84", "872", "1.4"]),
        ("same_pairs", ["76.71%", "83.44%", "6.73 points"]),
        ("count", ["15 announced", "13 listed"]),
    ]
    for row, numbers in cases:
        with case(row, numbers):
            text = " | ".join(getattr(study, row)())
            assert [number for number in numbers if number not in text] == []


def test_learning_rates_of_arms_differ_from_their_baselines(study: ModuleType) -> None:
    pairs = re.findall(r"(\S+) (\S+) / \S+ ([^;]+)", study.rates().computed.split(": ", 1)[1])
    assert {(ours, theirs) for _, ours, theirs in pairs} == {("0.001", "0.0003"), ("0.0001", "2e-05")}
    assert [name for name, _, _ in pairs] == [
        *("GPT-02", "GPT-03", "GPT-05", "GPT-07"),
        *("SST-2-02", "SST-2-03", "MNLI-02", "XNLI-02"),
    ]


def test_the_parameters_counted_by_hand_are_those_of_the_model(study: ModuleType) -> None:
    config = study.gpt("GPT-02")
    audit, model = count_parameters(config), config.model
    width, inner = model.model_dim, model.ff_dim
    # Tied embeddings, positions, and in each block Q, K, V, O, a feed-forward with biases, two norms.
    block = 4 * width * width + 2 * width * inner + inner + width + 4 * width
    assert audit is not None
    assert audit.total == (50257 + model.seq_len) * width + model.num_layers * block + 2 * width
    assert audit.frozen == model.num_layers * 2 * width**2


def test_standard_errors_by_hand(study: ModuleType) -> None:
    # sqrt(0.25/100 + 0.24/100) = 0.07; a tenth is 1.43 of them.
    assert study.standard_errors(0.5, 0.6, 100) == pytest.approx(0.1 / 0.07)


def test_the_table_has_a_row_for_each(study: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    study.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(study.ROWS) == 11 and all(line.count(" | ") == 2 for line in lines)
