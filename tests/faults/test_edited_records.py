"""A run's JSON files that parse and hold something else: refused by name with a way on, and no wrong figure is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from oelm.config import RunConfig
from oelm.errors import CheckpointError, DataError
from oelm.runs.status import read_status
from tests.conftest import run_here, tiny_config

MANIFESTS = {
    "[]": "must be an object, found list",
    '{"data": null}': "data must be an object, found NoneType",
    '{"data": {"fingerprint": 5}}': "data.fingerprint must be text, found int",
    '{"earlier": 5}': "earlier must be a list of objects",
}


@pytest.fixture(scope="module")
def config(text_file: Path) -> RunConfig:
    return tiny_config(text_file)


@pytest.fixture(scope="module")
def finished(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    run_here(config, out)
    return out


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("is_done", [True, False])
@pytest.mark.parametrize("content", MANIFESTS)
def test_a_manifest_of_another_type_is_refused_by_name(content: str, is_done: bool, config: RunConfig, run: Path) -> None:
    (run / "manifest.json").write_text(content)
    if not is_done:
        edit(run / "status.json", status="stopped", step=10)
    with pytest.raises(DataError, match=r"manifest\.json: .*restore the file from a copy, or move .* aside") as told:
        run_here(config, run)
    assert MANIFESTS[content] in str(told.value)
    assert (run / "manifest.json").read_text() == content


@pytest.mark.parametrize("content", ["{}", "[]", "5"])
def test_figures_of_another_type_are_refused_by_name(content: str, config: RunConfig, run: Path) -> None:
    (run / "timing_stats.json").write_text(content)
    with pytest.raises(DataError, match=r"timing_stats\.json: .*restore the file from a copy, or move .* aside"):
        run_here(config, run)


@pytest.mark.parametrize(("name", "value"), [("best_ppl", 1.5), ("best_val_loss", 0.4), ("final_ppl", 1.5), ("best_step", 5)])
def test_an_edited_figure_of_a_finished_run_is_not_told_as_its_result(
    name: str, value: float, config: RunConfig, run: Path
) -> None:
    figures = json.loads((run / "timing_stats.json").read_text())
    edit(run / "timing_stats.json", **{name: value + (figures[name] == value)})
    with pytest.raises(DataError, match=rf"timing_stats\.json: {name} is .*restore the file from a copy, or move .* aside"):
        run_here(config, run)


@pytest.mark.parametrize("content", ["{}", "[]", '{"step": "x"}', "{"])
def test_a_damaged_pointer_does_not_hide_why_a_run_ended(content: str, config: RunConfig, run: Path) -> None:
    (run / "latest.json").write_text(content)
    edit(run / "status.json", status="stopped", step=10)
    for state in run.glob("checkpoints/step-*/state.json"):
        state.unlink()
    with pytest.raises(CheckpointError, match="no checkpoint of"):
        run_here(config, run)
    status = read_status(run)
    assert status is not None and status.status == "failed" and "no checkpoint of" in status.message
