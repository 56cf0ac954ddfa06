"""An archive carries what sweeps found: without it, tuned runs would arrive as runs of arbitrary rates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from oelm.experiments.archive import check_archive, import_archive
from oelm.experiments.inventory import Inventory
from oelm.files import read_json, write_json
from oelm.runs.layout import SWEEP
from tests.experiments.archived import FIRST, SECOND, made, write_run
from tests.report.reading import english, rows
from tests.report.synthetic import write_sweep, write_tuned

PLACE = f"GPT-02/smoke/{SWEEP}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "outputs"
    for path in (FIRST, SECOND):
        write_run(root, path)
    write_json(root / PLACE, {"experiment": "GPT-02", "changes": {"data.source": str(Path.cwd() / "mine.txt")}})
    return root


def test_a_sweep_travels_with_the_runs_beside_it_and_without_the_machine(root: Path, tmp_path: Path) -> None:
    write_json(root / "GPT-03" / "smoke" / SWEEP, {"experiment": "GPT-03"})
    archive, inventory = made(root)
    assert [sweep.path for sweep in inventory.sweeps] == [PLACE] and check_archive(archive) == inventory
    import_archive(archive, tmp_path / "there")
    assert read_json(tmp_path / "there" / PLACE) == {"experiment": "GPT-02", "changes": {"data.source": "./mine.txt"}}
    assert not (tmp_path / "there" / "GPT-03").exists()


def test_a_sweep_that_is_there_is_left_alone_and_one_that_is_missing_is_added(root: Path, tmp_path: Path) -> None:
    archive, _ = made(root)
    there = tmp_path / "there"
    write_json(there / PLACE, {"experiment": "mine"})
    assert import_archive(archive, there).added == (FIRST, SECOND)
    assert read_json(there / PLACE) == {"experiment": "mine"}
    (there / PLACE).unlink()
    assert import_archive(archive, there).already_there == (FIRST, SECOND)
    assert read_json(there / PLACE)["experiment"] == "GPT-02"


def test_a_link_in_a_sweeps_place_is_not_followed(root: Path, tmp_path: Path) -> None:
    archive, _ = made(root)
    (tmp_path / "there" / "GPT-02" / "smoke").mkdir(parents=True)
    (tmp_path / "there" / PLACE).symlink_to(tmp_path / "elsewhere.json")
    import_archive(archive, tmp_path / "there")
    assert not (tmp_path / "elsewhere.json").exists() and (tmp_path / "there" / PLACE).is_symlink()


def test_a_damaged_sweep_stays_behind_with_a_remark(root: Path) -> None:
    (root / PLACE).write_text("{")
    _, inventory = made(root)
    assert inventory.sweeps == () and f"{PLACE}: left out, for it is damaged or too large" in inventory.remarks


def test_tuned_arms_are_still_tuned_alike_after_the_journey(tmp_path: Path) -> None:
    root = tmp_path / "outputs"
    for experiment, best, rate in (("GPT-01", 0, 3e-4), ("GPT-02", 1, 1e-3)):
        write_sweep(root, experiment, best)
        write_tuned(root, experiment, rate)
    archive, _ = made(root)
    import_archive(archive, tmp_path / "there")
    before, after = (rows(english(place), "verdicts") for place in (root, tmp_path / "there"))
    assert before == after and "CONFOUNDED" not in str(after)


GOOD = {"path": PLACE, "size_bytes": 9, "sha256": "0" * 64}


@pytest.mark.parametrize(
    "sweeps",
    [
        [{**GOOD, "path": f"GPT-09/smoke/{SWEEP}"}],
        [{**GOOD, "path": f"../smoke/{SWEEP}"}],
        [{**GOOD, "path": f"/GPT-02/{SWEEP}"}],
        [{**GOOD, "path": "GPT-02/smoke/other.json"}],
        [{**GOOD, "path": f"GPT-02/{SWEEP}"}],
        [{**GOOD, "size_bytes": 2**40}],
        [GOOD, GOOD],
    ],
    ids=["without-a-run", "upward", "absolute", "another-file", "another-place", "huge", "twice"],
)
def test_a_sweep_that_cannot_be_one_is_refused(sweeps: list[dict[str, Any]], root: Path) -> None:
    listed = made(root)[1].model_dump(mode="json")
    assert Inventory.model_validate_json(json.dumps({**listed, "sweeps": [GOOD]})).sweeps[0].path == PLACE
    with pytest.raises(ValidationError):
        Inventory.model_validate_json(json.dumps({**listed, "sweeps": sweeps}))
