"""How gaps go with size and length: every size beside its own baseline, and nothing where there is nothing to follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oelm.config import with_overrides
from oelm.files import read_json, write_json
from oelm.report.build import build_report
from tests.report.reading import cells, english, names, rows, table
from tests.report.synthetic import package_catalog, write_arm

BASE = [20.0, 20.2, 19.9]


def write_size(root: Path, experiment: str, ratio: float, *, width: int = 64, steps: int = 20, **chosen: Any) -> None:
    """Write an arm of three seeds at a width and a length; its audit counts a million parameters for every 64 of width."""
    variant = chosen.pop("variant", f"width-{width}-steps-{steps}-0123abcd")
    settings = {"model.model_dim": width, **chosen.pop("settings", {})}
    luck = (1.0, 1.001, 0.999) if ratio != 1 else (1.0, 1.0, 1.0)
    seeds = chosen.pop("seeds", range(3))
    figures = [ratio * value * chance for value, chance in zip(BASE, luck, strict=True)][: len(seeds)]
    for run in write_arm(root, experiment, figures, seeds=seeds, variant=variant, steps=steps, settings=settings, **chosen):
        audit = read_json(run / "audit.json")
        audit["total"] = width * 10**6 // 64
        audit["trainable"] = audit["total"] - audit["frozen"]
        write_json(run / "audit.json", audit, durable=False)


@pytest.fixture
def widths(tmp_path: Path) -> Path:
    for width, ratio in ((64, 1.1), (128, 1.2), (256, 1.3)):
        write_size(tmp_path, "GPT-01", 1.0, width=width)
        write_size(tmp_path, "GPT-02", ratio, width=width)
    return tmp_path


def test_every_width_has_a_row_with_the_gap_to_its_own_baseline_smallest_first(widths: Path) -> None:
    found = rows(english(widths), "sizes")
    assert [row["layers x width"] for row in found] == ["2 x 64", "2 x 128", "2 x 256"]
    assert [row["parameters"] for row in found] == ["1,000,000", "2,000,000", "4,000,000"]
    assert [row["oelm_freeze"].split(" ")[0] for row in found] == ["+10.0%", "+20.0%", "+30.0%"]
    assert {row["seeds"] for row in found} == {"3"} and {row["data"] for row in found} == {"tinystories"}


def test_every_length_has_a_row_shortest_first(tmp_path: Path) -> None:
    for steps, ratio in ((2000, 1.1), (500, 1.2)):
        write_size(tmp_path, "GPT-01", 1.0, steps=steps)
        write_size(tmp_path, "GPT-02", ratio, steps=steps)
    found = rows(english(tmp_path), "sizes")
    assert [(row["steps"], row["oelm_freeze"].split(" ")[0]) for row in found] == [("500", "+20.0%"), ("2,000", "+10.0%")]


def test_gaps_have_intervals_and_the_baseline_its_perplexity(widths: Path) -> None:
    (row, *_) = rows(english(widths), "sizes")
    assert row["oelm_freeze"] == "+10.0% [+9.7, +10.3]" and row["baseline PPL"] == "20.03"


def test_one_size_alone_gives_no_table(tmp_path: Path) -> None:
    write_size(tmp_path, "GPT-01", 1.0)
    write_size(tmp_path, "GPT-02", 1.1)
    assert "sizes" not in names(english(tmp_path))


def test_a_method_that_was_tried_at_one_size_only_has_no_column(widths: Path) -> None:
    write_size(widths, "GPT-03", 1.5, width=128)
    assert table(english(widths), "sizes").columns[7:] == ("oelm_freeze",)


def test_a_size_at_which_a_method_was_not_tried_is_left_empty(widths: Path) -> None:
    for width in (64, 256):
        write_size(widths, "GPT-03", 1.5, width=width)
    assert [row["oelm_random"].split(" ")[0] for row in rows(english(widths), "sizes")] == ["+50.0%", "", "+50.0%"]


def test_sizes_of_two_data_sets_are_not_taken_for_sizes_of_one(tmp_path: Path) -> None:
    for baseline, frozen, data, width in (("GPT-01", "GPT-02", "tinystories", 64), ("GPT-04", "GPT-05", "openwebtext", 128)):
        write_size(tmp_path, baseline, 1.0, width=width, data=data)
        write_size(tmp_path, frozen, 1.1, width=width, data=data)
    assert "sizes" not in names(english(tmp_path))


def test_a_data_set_of_one_size_has_no_row_beside_one_of_several(widths: Path) -> None:
    write_size(widths, "GPT-04", 1.0, data="openwebtext")
    write_size(widths, "GPT-05", 1.1, data="openwebtext")
    assert {row["data"] for row in rows(english(widths), "sizes")} == {"tinystories"}


def test_a_convolution_is_another_architecture_and_no_other_size(tmp_path: Path) -> None:
    write_size(tmp_path, "GPT-01", 1.0)
    write_size(tmp_path, "GPT-02", 1.1)
    for experiment, ratio in (("GPT-01-conv", 1.0), ("GPT-02-conv", 1.02)):
        write_size(tmp_path, experiment, ratio, width=128, settings={"model.short_conv": 3})
    assert "sizes" not in names(english(tmp_path))
    for experiment, ratio in (("GPT-01-conv", 1.0), ("GPT-02-conv", 1.04)):
        write_size(tmp_path, experiment, ratio, width=256, settings={"model.short_conv": 3})
    assert [
        (row["layers x width"], row["oelm_freeze after a short convolution"]) for row in rows(english(tmp_path), "sizes")
    ] == [
        ("2 x 128 after a short convolution", "+2.0% [+1.7, +2.3]"),
        ("2 x 256 after a short convolution", "+4.0% [+3.7, +4.3]"),
    ]


def test_two_families_of_one_size_are_told_apart_by_their_names(widths: Path) -> None:
    for experiment, ratio in (("GPT-01", 1.0), ("GPT-02", 1.05)):
        write_size(widths, experiment, ratio, variant="lr-0.01-89abcdef", settings={"optim.lr": 0.01})
    found = [(row["data"], row["oelm_freeze"].split(" ")[0]) for row in rows(english(widths), "sizes")]
    assert found == [
        ("tinystories (GPT-01 (lr-0.01))", "+5.0%"),
        ("tinystories (GPT-01 (width-64-steps-20))", "+10.0%"),
        ("tinystories", "+20.0%"),
        ("tinystories", "+30.0%"),
    ]


def test_what_is_confounded_or_smoke_is_no_size(tmp_path: Path) -> None:
    write_size(tmp_path, "GPT-01", 1.0)
    write_size(tmp_path, "GPT-02", 1.1)
    write_size(tmp_path, "GPT-01", 1.0, width=128)
    write_size(tmp_path, "GPT-02", 1.1, width=128, settings={"optim.lr": 0.5})
    for experiment, ratio in (("GPT-01", 1.0), ("GPT-02", 1.2)):
        write_size(tmp_path, experiment, ratio, width=256, budget="smoke")
    assert "sizes" not in names(english(tmp_path))


def test_a_control_stands_under_its_own_name(widths: Path) -> None:
    for width in (64, 128):
        write_size(widths, "GPT-01-thin", 1.04, width=width, settings={"model.qk_dim": 4})
    assert table(english(widths), "sizes").columns[7:] == ("thin", "oelm_freeze")


def test_of_two_arms_of_one_method_that_of_most_seeds_stands_there(widths: Path) -> None:
    for width in (64, 128):
        write_size(widths, "GPT-02-lr3e-4", 1.7, width=width, seeds=range(2))
    assert [row["oelm_freeze"].split(" ")[0] for row in rows(english(widths), "sizes")] == ["+10.0%", "+20.0%", "+30.0%"]


def test_where_arms_have_unequal_seeds_each_gap_says_how_many(widths: Path) -> None:
    for width in (64, 128):
        write_size(widths, "GPT-03", 1.5, width=width, seeds=range(2))
    first, _, last = rows(english(widths), "sizes")
    assert first["seeds"] == "" and first["oelm_random"].endswith("(n=2)") and first["oelm_freeze"].endswith("(n=3)")
    assert last["seeds"] == "3" and last["oelm_freeze"].endswith("]")


def test_arms_without_a_column_do_not_count_among_the_seeds(widths: Path) -> None:
    write_size(widths, "GPT-03", 1.5, width=64, seeds=range(1))
    assert [row["seeds"] for row in rows(english(widths), "sizes")] == ["3", "3", "3"]


def test_the_baselines_perplexity_is_that_of_the_seeds_that_arms_have_too(widths: Path) -> None:
    write_arm(
        widths, "GPT-01", [200.0], seeds=[3], variant="width-64-steps-20-0123abcd", steps=20, settings={"model.model_dim": 64}
    )
    assert rows(english(widths), "sizes")[0]["baseline PPL"] == "20.03"


def test_arms_that_share_no_seed_with_their_baseline_were_not_tried(tmp_path: Path) -> None:
    for width in (64, 128):
        write_size(tmp_path, "GPT-01", 1.0, width=width)
        write_size(tmp_path, "GPT-02", 1.1, width=width, seeds=range(5, 8))
    assert "sizes" not in names(english(tmp_path))


def test_the_rates_are_told_and_whether_they_were_swept(tmp_path: Path) -> None:
    for width, rate in ((64, 0.008), (128, 0.004)):
        for experiment, ratio in (("GPT-01", 1.0), ("GPT-02", 1.1)):
            variant = "tuned-0123abcd" if width == 128 else "width-64-0123abcd"
            write_size(tmp_path, experiment, ratio, width=width, variant=variant, settings={"optim.lr": rate})
    assert [row["rate"] for row in rows(english(tmp_path), "sizes")] == ["0.008", "0.004 (swept)"]


@pytest.mark.parametrize(
    "other",
    [
        {"settings": {"model.seq_len": 128}},
        {"settings": {"model.vocab_size": 2048}},
        {"settings": {"batch_size": 16}},
        {"settings": {"optim.clip_norm": 0.3}},
        {"settings": {"model.dropout": 0.1}},
        {"fingerprint": "f" * 64},
    ],
    ids=str,
)
def test_what_differs_in_more_than_size_length_and_rate_is_no_other_size(other: dict[str, Any], tmp_path: Path) -> None:
    for experiment, ratio in (("GPT-01", 1.0), ("GPT-02", 1.1)):
        write_size(tmp_path, experiment, ratio, width=64)
        write_size(tmp_path, experiment, ratio, width=128, **other)
    assert "sizes" not in names(english(tmp_path))


def test_a_baseline_that_is_no_real_one_is_marked(tmp_path: Path) -> None:
    # One text, so one 5-gram: the narrow models lose to it.
    five_gram = 1.5 * max(BASE)
    for width, size in ((64, 2.0), (128, 1.0)):
        write_size(tmp_path, "GPT-01", size, width=width, five_gram=five_gram)
        write_size(tmp_path, "GPT-02", 1.1 * size, width=width, five_gram=five_gram)
    assert [cell.mark for cell in cells(english(tmp_path), "sizes", "baseline PPL")] == ["warn", ""]


@pytest.mark.parametrize("setting", ["steps", "model.num_layers", "model.model_dim"])
def test_a_record_that_does_not_tell_its_size_is_left_out(setting: str, widths: Path) -> None:
    for path in widths.glob("*/laptop/width-64*/seed-*/config.json"):
        write_json(path, with_overrides(read_json(path), {setting: None}), durable=False)
    assert [row["layers x width"] for row in rows(english(widths), "sizes")] == ["2 x 128", "2 x 256"]


def test_classifiers_have_no_such_table(tmp_path: Path) -> None:
    for width in (64, 128):
        for experiment, accuracy in (("SST-2-01", 0.9), ("SST-2-02", 0.8)):
            write_arm(
                tmp_path,
                experiment,
                [accuracy] * 3,
                seeds=range(3),
                variant=f"width-{width}-0123abcd",
                data="sst2",
                steps=20,
                settings={"model.model_dim": width},
            )
    assert "sizes" not in names(english(tmp_path))


def test_gaps_on_test_say_so_in_both_languages(tmp_path: Path) -> None:
    for width in (64, 128):
        write_size(tmp_path, "GPT-06", 1.0, width=width, data="wikitext103", tests=[2 * value for value in BASE])
        write_size(tmp_path, "GPT-07", 1.1, width=width, data="wikitext103", tests=[2.4 * value for value in BASE])
    assert {row["oelm_freeze"] for row in rows(english(tmp_path), "sizes")} == {"+20.0% [+20.0, +20.0] (test)"}
    assert {row["baseline PPL"] for row in rows(english(tmp_path), "sizes")} == {"40.07 (test)"}
    chinese = build_report([tmp_path], package_catalog()).document("zh")
    found = table(chinese, "sizes")
    assert found.columns[:2] == ("数据", "层数 x 宽度") and found.rows[0][-1].text.endswith("（测试集）")
