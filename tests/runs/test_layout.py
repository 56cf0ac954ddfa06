"""Only runs/ spells the names of a run's files."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from oelm.runs import layout
from oelm.runs.layout import CHECKPOINT_FILES, PREDICTIONS, RECORDS, checkpoint_name
from oelm.runs.records import checkpoint_folders, checkpoint_step

SRC = Path(layout.__file__).parents[1]
NAMES = {
    *RECORDS,
    *layout.POINTERS,
    *CHECKPOINT_FILES,
    layout.CONSOLE,
    layout.HOLDER,
    layout.SUBMISSIONS,
    layout.SWEEP,
}
# Names that others use for files of their own: model folders of the hub, token sets, exports.
THEIR_OWN = {
    "models": {"config.json", "model.safetensors", "tokenizer.json"},
    "data": {"tokenizer.json"},
}
# A path that ends in such a name, or a name alone; not a sentence that mentions one.
PATH = re.compile(r"[^\s{}]*")


def spelled(path: Path) -> list[str]:
    """Return the file names of runs that a module spells in a string that is used as a path."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own = THEIR_OWN.get(path.relative_to(SRC).parts[0], set())
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    names = {text.rpartition("/")[2] if PATH.fullmatch(text) else "" for text in texts}
    return sorted((names | {*texts}) & NAMES - own)


def test_no_other_package_spells_a_file_of_a_run() -> None:
    others = [path for path in sorted(SRC.rglob("*.py")) if path.parent.name != "runs"]
    assert others and {str(path): names for path in others if (names := spelled(path))} == {}


def test_the_scan_sees_a_name_that_is_spelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.runs.test_layout.SRC", tmp_path)
    (tmp_path / "own.py").write_text('a = run / "status.json"\nb = run / f"seed-*/config.json"\nc = "no status.json there"\n')
    assert spelled(tmp_path / "own.py") == ["config.json", "status.json"]


def test_checkpoints_are_found_by_their_step_the_newest_first(tmp_path: Path) -> None:
    for step in (3, 200_000_000, 12):
        (tmp_path / checkpoint_name(step)).mkdir(parents=True)
    (tmp_path / layout.CHECKPOINTS / "step-9").mkdir()
    (tmp_path / layout.CHECKPOINTS / "step-00000099").symlink_to(tmp_path)
    assert [checkpoint_step(path) for path in checkpoint_folders(tmp_path)] == [200_000_000, 12, 3]
    assert checkpoint_folders(tmp_path / "none") == []


def test_every_record_is_listed_once() -> None:
    assert len(set(RECORDS)) == len(RECORDS) and set(PREDICTIONS.values()) <= set(RECORDS)
