"""What a power cut would leave: the order of fsync, rename and removal in a save, as the system is asked for them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oelm.files import STAGING_PREFIX
from oelm.runs.layout import SAVED_MANIFEST, SAVED_MODEL, SAVED_OPTIMIZER, SAVED_STATE
from tests.conftest import run_here, tiny_config

Call = tuple[str, str]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    """What was asked of the system, in order: which file was synced, renamed, replaced or removed."""
    made: list[Call] = []
    fsync, rename, replace, rmtree = os.fsync, os.rename, os.replace, shutil.rmtree

    def synced(handle: int) -> None:
        made.append(("fsync", os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def renamed(source: Any, target: Any, **options: Any) -> None:
        made.append(("rename", str(target)))
        rename(source, target, **options)

    def replaced(source: Any, target: Any, **options: Any) -> None:
        made.append(("replace", str(target)))
        replace(source, target, **options)

    def removed(path: Any, **options: Any) -> None:
        made.append(("rmtree", str(path)))
        rmtree(path, **options)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(shutil, "rmtree", removed)
    yield made


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="the system does not tell which file a handle is")
def test_every_byte_of_a_save_is_durable_before_it_appears_and_nothing_goes_before_that(
    calls: list[Call], text_file: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run_here(tiny_config(text_file, steps=12, save_every=4, eval_every=99, keep_checkpoints=2), run)
    published = [number for number, call in enumerate(calls) if call[0] == "rename" and "/checkpoints/step-" in call[1]]
    assert [Path(calls[number][1]).name for number in published] == ["step-00000004", "step-00000008", "step-00000012"]
    before = 0
    for number in published:
        synced = [Path(path) for what, path in calls[before:number] if what == "fsync"]
        staging = {path.parent for path in synced if path.name == SAVED_MODEL}
        assert len(staging) == 1
        (folder,) = staging
        # The rows up to here, then every file of the checkpoint, and the folder with their names.
        assert synced.index(run / "metrics.jsonl") < synced.index(folder / SAVED_STATE)
        assert {folder / name for name in (SAVED_MODEL, SAVED_OPTIMIZER, SAVED_STATE, SAVED_MANIFEST)} <= set(synced)
        assert synced[-1] == folder
        written = [Path(path).name for what, path in calls[before:number] if what == "replace" and Path(path).parent == folder]
        assert written[-1] == SAVED_MANIFEST
        after = calls[number + 1 :]
        assert after[0] == ("fsync", str(run / "checkpoints"))
        # Only a checkpoint that is there to stay is pointed to, and only then an older one goes.
        order = [what for what, path in after if "latest.json" in path or (what == "rename" and "step-" in path)]
        assert order[:1] == ["replace"]
        before = number + 1
    # It goes by a rename, whole, and is deleted then.
    taken = [path for what, path in calls if what == "rename" and f"/{STAGING_PREFIX}step-" in path]
    assert [Path(path).name[: len(f"{STAGING_PREFIX}step-00000004-")] for path in taken] == [f"{STAGING_PREFIX}step-00000004-"]
    assert calls.index(("rename", taken[0])) < calls.index(("rmtree", taken[0]))


@pytest.mark.parametrize("keep", [2, 3, 4])
def test_as_many_checkpoints_stay_as_were_asked_for_and_the_best(keep: int, text_file: Path, tmp_path: Path) -> None:
    # One evaluation, at the end: the best is among the newest.
    run_here(tiny_config(text_file, steps=12, save_every=2, eval_every=99, keep_checkpoints=keep), tmp_path / "run")
    names = sorted(path.name for path in (tmp_path / "run").glob("checkpoints/*"))
    assert names == [f"step-{step:08d}" for step in range(2, 13, 2)][-keep:]
    assert json.loads((tmp_path / "run" / "best.json").read_text())["step"] == 12
