"""Damaged checkpoints: every one is told by its file, none is loaded, and the run goes back to the one before."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oelm.errors import CheckpointError
from oelm.files import sha256_file
from oelm.train.checkpoint import Checkpoints, open_checkpoint
from oelm.train.load import load_run
from tests.conftest import tiny_settings
from tests.faults.harness import evidence, finish, start
from tests.faults.tally import Tally
from tests.train.test_resume import half_precision

FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")
FLIPS, SEED = 25, 20261117


@pytest.fixture(scope="module")
def settings(text_file: Path) -> dict[str, Any]:
    return tiny_settings(text_file, steps=20, eval_every=10, save_every=4)


@pytest.fixture(scope="module")
def oracle(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("oracle") / "run"
    finish(settings, out)
    return out


@pytest.fixture
def run(oracle: Path, tmp_path: Path) -> Path:
    """A copy of the run whose newest checkpoint may be damaged."""
    return Path(shutil.copytree(oracle, tmp_path / "run"))


def cuts(size: int) -> list[int]:
    """Return ten places to cut a file at: around its beginning and end, inside a header, and on the way."""
    return [
        0,
        1,
        8,
        size // 10,
        size // 4,
        size // 2,
        size * 3 // 4,
        size - 512 if size > 1024 else size - 3,
        size - 2,
        size - 1,
    ]


def damages(name: str, whole: bytes) -> Iterator[tuple[str, bytes | None]]:
    """Yield what may have become of a file: a word for it, and its content, None where it is gone."""
    chance = random.Random(f"{SEED} {name}")
    for size in cuts(len(whole)):
        yield f"cut at byte {size}", whole[:size]
    for place in (0, len(whole) - 1, *(chance.randrange(len(whole)) for _ in range(FLIPS - 2))):
        bit = chance.randrange(8)
        yield f"bit {bit} of byte {place} flipped", whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :]
    yield "gone", None
    yield "longer by a byte", whole + b"\0"
    yield "not JSON", b"{not json"
    yield "JSON of another kind", b"[1, 2]\n"
    yield "zeros", bytes(len(whole))


def check_refused(run: Path, newest: Path, older: Path, what: str) -> None:
    """The damage is told with the file, the run goes back with a warning, and an exact step is refused."""
    with pytest.raises(CheckpointError) as told:
        open_checkpoint(newest)
    assert str(newest) in str(told.value), what
    fallback = Checkpoints(run, keep=2).newest(exact_step=None)
    assert fallback is not None and fallback.path == older, what
    with pytest.raises(CheckpointError, match=rf"{newest.name}.*; leave --exact-step out"):
        Checkpoints(run, keep=2).newest(exact_step=20)
    # A link is refused before it is followed; everything else with the checkpoints that are left.
    way_on = "give the path of its target" if newest.is_symlink() else "; try --checkpoint 16"
    with pytest.raises(CheckpointError, match=rf"{newest.name}.*{way_on}"):
        load_run(run, which="latest")


@pytest.mark.parametrize("name", FILES)
def test_every_damage_to_a_file_is_found_and_none_is_loaded(name: str, run: Path, tally: Tally) -> None:
    newest, older = sorted(run.glob("checkpoints/step-*"))[::-1]
    whole, found = (newest / name).read_bytes(), 0
    for what, content in damages(name, whole):
        if content is None:
            (newest / name).unlink()
        else:
            (newest / name).write_bytes(content)
        check_refused(run, newest, older, f"{name}: {what}")
        found += 1
    assert found == 10 + FLIPS + 5
    (newest / name).write_bytes(whole)
    assert open_checkpoint(newest).path == newest
    tally("R5", "damages to a checkpoint's files found and refused", held=found, of=found, seed=SEED)


@pytest.mark.parametrize("kind", ["empty", "gone", "a link", "another step's files"])
def test_a_folder_that_is_no_whole_checkpoint_is_not_loaded(kind: str, run: Path, tmp_path: Path, tally: Tally) -> None:
    newest, older = sorted(run.glob("checkpoints/step-*"))[::-1]
    shutil.move(newest, tmp_path / "moved")
    if kind == "empty":
        newest.mkdir()
    elif kind == "a link":
        newest.symlink_to(tmp_path / "moved")
    elif kind == "another step's files":
        shutil.copytree(older, newest)
    if kind == "another step's files":
        with pytest.raises(CheckpointError, match=r"step-00000020: holds step 16"):
            open_checkpoint(newest)
    check_refused(run, newest, older, kind)
    tally("R5", "folders that are no whole checkpoint", held=1, of=1)


def test_run_with_a_damaged_checkpoint_goes_back_with_a_warning_and_ends_the_same(
    settings: dict[str, Any], oracle: Path, run: Path
) -> None:
    weights = run / "checkpoints" / "step-00000020" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 4
    weights.write_bytes(content)
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps(status | {"status": "running", "step": 20}))
    finish(settings, run)
    assert evidence(run) == evidence(oracle)
    assert "damaged; going back to step 16" in (run / "training.log").read_text()


def test_exact_step_refuses_a_damaged_checkpoint_and_changes_nothing(
    settings: dict[str, Any], run: Path, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    (run / "checkpoints" / "step-00000020" / "state.json").unlink()
    (run / "status.json").unlink()
    kept = {path: sha256_file(path) for path in run.rglob("step-*/*")}
    child = start(settings, run, exact_step=20, told=str(told))
    child.join(timeout=60)
    assert child.exitcode == 3 and "step-00000020/state.json: missing" in told.read_text()
    assert kept == {path: sha256_file(path) for path in run.rglob("step-*/*")}


def test_run_whose_every_checkpoint_is_damaged_is_refused(settings: dict[str, Any], run: Path, tmp_path: Path) -> None:
    told = tmp_path / "told"
    for checkpoint in run.glob("checkpoints/step-*"):
        (checkpoint / "state.json").unlink()
    (run / "status.json").unlink()
    child = start(settings, run, told=str(told))
    child.join(timeout=60)
    assert child.exitcode == 3
    assert "no checkpoint of" in told.read_text() and "Move the folder aside" in told.read_text()


def test_a_checkpoint_saved_over_itself_is_the_same(text_file: Path, tmp_path: Path, tally: Tally) -> None:
    half_precision(text_file, tmp_path / "run")
    # Once more: this session's weights and moments are those of the file, perhaps mapped from it.
    session = half_precision(text_file, tmp_path / "run")
    assert session.saved is not None and session.saved.step == 12
    folder = tmp_path / "run" / "checkpoints" / "step-00000012"
    before = {path.name: sha256_file(path) for path in folder.iterdir()}
    with session.folder:
        session.checkpoints.publish(open_checkpoint(folder).saved, session.model, session.optimizer)
    assert before == {path.name: sha256_file(path) for path in folder.iterdir()}
    tally("R6", "saves over the checkpoint that was loaded", held=1, of=1)
