"""A checkpoint is opened only as what it is: of this run, saved with this config, holding the frames the run began with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from oelm.cli.app import app
from oelm.config import parse_config
from oelm.errors import CheckpointError
from oelm.experiments.portable import archive_runs
from oelm.runs.find import scan
from oelm.runs.metrics import read_metrics
from oelm.train.checkpoint import _manifest_text
from oelm.train.load import load_any
from oelm.train.run import resolve_start
from tests.conftest import run_here, tiny_config
from tests.faults.tally import Tally

NEWEST = "checkpoints/step-00000008"
Copied = Callable[[int], Path]


def config_of(text: Path, seed: int, **overrides: Any) -> Any:
    return tiny_config(text, **{"seed": seed, "steps": 8, "eval_every": 4, "save_every": 4, **overrides})


@pytest.fixture(scope="module")
def two_runs(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs that differ by their seeds."""
    folder = tmp_path_factory.mktemp("two")
    for seed in (0, 1):
        run_here(config_of(text_file, seed), folder / f"s{seed}")
    return folder


@pytest.fixture
def copied(two_runs: Path, tmp_path: Path) -> Copied:
    return lambda seed: Path(shutil.copytree(two_runs / f"s{seed}", tmp_path / f"s{seed}"))


def put(source: Path, run: Path) -> None:
    """Copy the newest checkpoint of one run over that of another."""
    shutil.rmtree(run / NEWEST)
    shutil.copytree(source / NEWEST, run / NEWEST)


def unbound(run: Path) -> None:
    """Make a run's newest checkpoint one of a version that did not record whose it is."""
    state = json.loads((run / NEWEST / "state.json").read_text())
    for name in ("run", "config"):
        state.pop(name, None)
    (run / NEWEST / "state.json").write_text(json.dumps(state))
    (run / NEWEST / "manifest.json").write_text(_manifest_text(run / NEWEST))


def edited(path: Path, **settings: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_resuming_from_another_runs_checkpoint_is_refused(copied: Copied, text_file: Path, tally: Tally) -> None:
    run = copied(0)
    put(copied(1), run)
    pointers = [(run / name).read_bytes() for name in ("latest.json", "best.json", "metrics.jsonl")]
    with pytest.raises(CheckpointError, match=r"step-00000008: was saved by another run .*seed was 1, is 0.* Move that folder"):
        run_here(config_of(text_file, 0, steps=12), run)
    assert [(run / name).read_bytes() for name in ("latest.json", "best.json", "metrics.jsonl")] == pointers
    # With its own older one it goes on, as a run that was never touched does.
    shutil.rmtree(run / NEWEST)
    assert run_here(config_of(text_file, 0, steps=12), run).status == "done"
    tally("R5", "checkpoints of another run", held=1, of=1)


def test_of_two_runs_of_one_config_each_opens_its_own_only(copied: Copied, text_file: Path, tmp_path: Path) -> None:
    run_here(config_of(text_file, 0), tmp_path / "again")
    run = copied(0)
    put(tmp_path / "again", run)
    with pytest.raises(CheckpointError, match=r"was saved by another run \(id [0-9a-f]{12}, this run's id is [0-9a-f]{12}\)\."):
        load_any(run, which="8")


@pytest.mark.parametrize("command", ["eval", "inspect", "export", "generate"])
def test_no_command_opens_another_runs_checkpoint(command: str, copied: Copied, tmp_path: Path) -> None:
    run = copied(0)
    put(copied(1), run)
    where = [str(tmp_path / "exported")] if command == "export" else []
    result = CliRunner().invoke(app, [command, str(run), *where, "--checkpoint", "8"])
    assert result.exit_code == 3 and "was saved by another run" in " ".join(result.output.split())
    assert "unmoved" not in result.output and not (tmp_path / "exported").exists()


def test_starting_from_another_runs_checkpoint_is_refused(copied: Copied, text_file: Path, tmp_path: Path) -> None:
    run = copied(0)
    put(copied(1), run)
    start = resolve_start(run / NEWEST).model_dump()
    with pytest.raises(CheckpointError, match="was saved by another run"):
        run_here(config_of(text_file, 2, init_from=start), tmp_path / "new")


def test_a_checkpoint_from_before_they_were_bound_opens_with_a_warning(
    copied: Copied, text_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = copied(0)
    unbound(run)
    manifest = json.loads((run / "manifest.json").read_text())
    manifest.pop("run", None)
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert load_any(run, which="8").step == 8
    assert "did not record the run" in caplog.text
    assert run_here(config_of(text_file, 0, steps=12), run).status == "done"
    # From here on it is bound.
    caplog.clear()
    assert load_any(run, which="12").step == 12 and "did not record" not in caplog.text


def test_frozen_bytes_that_the_run_did_not_begin_with_are_refused(copied: Copied, text_file: Path) -> None:
    run, other = copied(0), copied(1)
    unbound(other)
    put(other, run)
    words = r"its frozen blocks\.0\.attention\.q .* is not the one that this run began with \(audit\.json"
    for opened in (lambda: load_any(run, which="8"), lambda: run_here(config_of(text_file, 0, steps=12), run)):
        with pytest.raises(CheckpointError, match=words):
            opened()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"seed": 7}, "seed was 0, is 7"),
        ({"optim": {"lr": 0.5}}, r"optim\.lr was [\d.]+, is 0\.5"),
        ({"batch_size": 8}, "batch_size was 4, is 8"),
    ],
)
def test_an_edited_config_is_told_with_what_was_changed(settings: dict[str, Any], words: str, copied: Copied) -> None:
    run = copied(0)
    edited(run / "config.json", **settings)
    config = json.loads((run / "config.json").read_text())
    edited(run / "config.json", steps=12, extended_at=[8])
    with pytest.raises(CheckpointError, match=rf"config\.json: is not the config that step-00000008 was saved with: .*{words}"):
        load_any(run, which="8")
    # The command that agrees with what was edited in is refused, too, and leaves the metrics alone.
    rows = read_metrics(run / "metrics.jsonl")
    with pytest.raises(CheckpointError, match=words):
        run_here(parse_config(config | {"steps": 12, "extended_at": [8]}, where="test"), run)
    assert read_metrics(run / "metrics.jsonl") == rows


def test_a_run_opens_from_a_portable_folder_although_its_places_are_shortened(
    two_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = "e/smoke/default/seed-0"
    shutil.copytree(two_runs / "s0", tmp_path / "root" / place)
    source = json.loads((tmp_path / "root" / place / "config.json").read_text())["data"]["source"]
    # Paths below the working folder are shortened.
    monkeypatch.chdir(Path(source).parent)
    archive_runs(tmp_path / "there", scan(tmp_path / "root"), weights=True)
    config = json.loads((tmp_path / "there" / place / "config.json").read_text())
    assert config["data"]["source"] != source
    assert load_any(tmp_path / "there" / place, which="8").step == 8


def test_a_run_whose_manifest_is_gone_keeps_its_id(copied: Copied, text_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = copied(0)
    own = json.loads((run / "manifest.json").read_text())["run"]
    (run / "manifest.json").unlink()
    assert run_here(config_of(text_file, 0, steps=12), run).status == "done"
    assert "could not be checked" in caplog.text
    assert json.loads((run / "manifest.json").read_text())["run"] == own
