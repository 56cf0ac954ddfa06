"""Models with a short convolution beside models without: never in one row, and told against each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from oelm.files import read_json, write_json
from oelm.report.document import Table
from tests.report.reading import blocks, english, rows, texts
from tests.report.test_classes import write_class

BEHIND = "after a short convolution"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    for experiment in ("GPT-01", "GPT-02", "GPT-01-thin"):
        write_class(tmp_path, experiment)
    return tmp_path


def write_behind(root: Path, like: str, name: str, *, times: float = 1.0, variant: str = "default", data: str = "") -> None:
    """Write an arm like one of TinyStories' behind a short convolution, with other perplexities."""
    more = {"model.short_conv": 3}
    write_class(root, like, name=name, data=data or "tinystories", more=more, times=times, variant=variant)


def has_plain(root: Path) -> bool:
    return any(isinstance(block, Table) and block.name == "plain" for block in blocks(english(root)))


def test_arms_of_one_method_stand_in_rows_of_their_own(plain: Path) -> None:
    write_behind(plain, "GPT-01", "GPT-01-conv")
    write_behind(plain, "GPT-02", "GPT-02-conv")
    found = {row["method"]: row for row in rows(english(plain), "classes") if row["class"] == "pure"}
    assert list(found) == ["oelm_freeze", f"oelm_freeze {BEHIND}"]
    assert all("FAIL" in row["tinystories"] for row in found.values())
    assert [row["method"] for row in rows(english(plain), "verdicts")] == ["thin", *found]


def test_a_control_on_two_data_sets_is_one_row_called_by_what_it_is(tmp_path: Path) -> None:
    for data in ("tinystories", "stdlib"):
        write_behind(tmp_path, "GPT-01", f"conv-learn.{data}", data=data)
        write_behind(tmp_path, "GPT-01-thin", f"conv-thin.{data}", data=data)
    (row,) = rows(english(tmp_path), "classes")
    assert row["method"] == f"thin {BEHIND}"
    assert all(row[data] for data in ("tinystories", "stdlib"))


@pytest.mark.parametrize("missing", ["GPT-02", "GPT-09"])
def test_across_data_sets_no_architecture_takes_the_other_s_row(plain: Path, missing: str) -> None:
    write_class(plain, "GPT-01", name="GPT-08", data="stdlib")
    write_class(plain, "GPT-02", name="GPT-09", data="stdlib")
    write_behind(plain, "GPT-01", "GPT-08-conv", data="stdlib")
    write_behind(plain, "GPT-02", "GPT-09-conv", data="stdlib")
    for run in (plain / missing).glob("*/*/seed-4"):
        (run / "timing_stats.json").unlink()
    found = {row["method"]: row for row in rows(english(plain), "classes")}
    assert {"oelm_freeze", f"oelm_freeze {BEHIND}"} < found.keys()
    assert found[f"oelm_freeze {BEHIND}"]["tinystories"] == "" != found[f"oelm_freeze {BEHIND}"]["stdlib"]
    assert all(found["oelm_freeze"][name] for name in ("tinystories", "stdlib"))


@pytest.mark.parametrize("variants", [("default", "default"), ("tuned-01234567", "tuned-89abcdef")])
def test_what_stands_behind_a_convolution_is_told_against_the_plain_baseline(tmp_path: Path, variants: tuple[str, str]) -> None:
    for experiment in ("GPT-01", "GPT-02"):
        write_class(tmp_path, experiment, variant=variants[0])
    assert not has_plain(tmp_path)
    write_behind(tmp_path, "GPT-01", "GPT-01-conv", times=0.9, variant=variants[1])
    write_behind(tmp_path, "GPT-02-lowrank", "GPT-02-conv", times=0.9, variant=variants[1])
    # Of this corpus there is no plain baseline: nothing to tell of it.
    write_behind(tmp_path, "GPT-01", "GPT-08-conv", data="stdlib")
    write_behind(tmp_path, "GPT-02", "GPT-09-conv", data="stdlib")
    found = rows(english(tmp_path), "plain")
    assert [tuple(row) for row in found] == [("method", "trainable", "tinystories")] * 3
    assert [(row["method"], row["tinystories"].split(" ")[0]) for row in found] == [
        ("baseline", ""),
        (f"baseline {BEHIND}", "-10.0%"),
        (f"oelm_freeze {BEHIND}", "-9.1%"),
    ]
    assert all("[" in row["tinystories"] for row in found[1:])


def test_models_of_two_sizes_are_counted_apart(plain: Path) -> None:
    write_behind(plain, "GPT-01", "GPT-01-conv")
    write_behind(plain, "GPT-02", "GPT-02-conv")
    for like, name in (("GPT-01", "GPT-08"), ("GPT-02", "GPT-09")):
        write_class(plain, like, name=name, data="stdlib")
        write_behind(plain, like, f"{name}-conv", data="stdlib")
    for run in [*plain.glob("GPT-08*/*/*/seed-*"), *plain.glob("GPT-09*/*/*/seed-*")]:
        audit = read_json(run / "audit.json")
        more = {name: audit[name] + 1_000_000 for name in ("trainable", "total")}
        write_json(run / "audit.json", audit | more, durable=False)
    found = rows(english(plain), "plain")
    assert [row["method"] for row in found] == [
        name for name in ("baseline", f"baseline {BEHIND}", f"oelm_freeze {BEHIND}") for _ in "ab"
    ]
    counts = [int(row["trainable"].replace(",", "")) for row in found]
    assert all(large - small == 1_000_000 for small, large in zip(counts[::2], counts[1::2], strict=True))
    assert all((row["tinystories"] == "") != (row["stdlib"] == "") for row in found[2:])


def test_without_a_common_seed_there_is_nothing_to_tell(plain: Path) -> None:
    write_behind(plain, "GPT-01", "GPT-01-conv")
    write_behind(plain, "GPT-02", "GPT-02-conv")
    for run in plain.glob("GPT-0?-conv/*/*/seed-*"):
        run.rename(run.with_name(f"seed-1{run.name[-1]}"))
        config = read_json(run.with_name(f"seed-1{run.name[-1]}") / "config.json")
        write_json(
            run.with_name(f"seed-1{run.name[-1]}") / "config.json", config | {"seed": 10 + config["seed"]}, durable=False
        )
    assert [row["tinystories"] for row in rows(english(plain), "plain")] == ["", "", ""]


def test_a_control_without_a_convolution_stands_beside_no_arm_with_one(plain: Path) -> None:
    write_behind(plain, "GPT-01", "GPT-01-conv")
    write_behind(plain, "GPT-02-lowrank", "GPT-02-conv")
    (alone,) = [text for text in texts(english(plain), "classes") if text.startswith("No control")]
    assert f"{BEHIND} (a little): tinystories" in alone
    assert not any(isinstance(block, Table) and block.name == "controls" for block in blocks(english(plain)))


def test_an_arm_with_a_convolution_proves_nothing_against_a_baseline_without(tmp_path: Path) -> None:
    write_class(tmp_path, "GPT-01")
    write_class(tmp_path, "GPT-02", more={"model.short_conv": 3})
    (row,) = rows(english(tmp_path), "verdicts")
    assert row["verdict"].startswith("CONFOUNDED")
