"""Resuming in another setting, on other data, in a folder that cannot be written: told with the difference, or refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oelm.data.prepare import prepare
from oelm.errors import DataError
from oelm.runs.find import scan
from oelm.runs.layout import SAVED_MANIFEST, SAVED_STATE
from oelm.train.checkpoint import _manifest_text
from tests.conftest import tiny_settings
from tests.experiments.recorded import record
from tests.faults.harness import finish, start
from tests.faults.tally import Tally

STEPS = 8


def first_two(cases: Sequence[Any]) -> list[Any]:
    """Return cases of which all but two are among the slow tests."""
    rest = [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases[2:]]
    return [*cases[:2], *rest]


@pytest.fixture(scope="module")
def settings(text_file: Path) -> dict[str, Any]:
    return tiny_settings(text_file, steps=STEPS, eval_every=4, save_every=4)


@pytest.fixture(scope="module")
def halfway(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed behind its first save."""
    out = tmp_path_factory.mktemp("halfway") / "run"
    child = start(settings, out, die_at=5)
    child.join(timeout=120)
    assert (out / "checkpoints" / "step-00000004").is_dir()
    return out


@pytest.fixture
def run(halfway: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(halfway, tmp_path / "run"))


def recorded_with(run: Path, part: str, **changes: str) -> None:
    """Make a checkpoint one that was saved in another setting, whole as that one would be."""
    folder = run / "checkpoints" / "step-00000004"
    state = json.loads((folder / SAVED_STATE).read_text())
    state[part] |= changes
    (folder / SAVED_STATE).write_text(json.dumps(state))
    (folder / SAVED_MANIFEST).write_text(_manifest_text(folder))


# What was other when the checkpoint was saved, and what is said of it.
SETTINGS = [
    ("environment", {"torch": "2.7.0"}, "torch was 2.7.0, is 2."),
    ("environment", {"threads": "64"}, "threads was 64, is 1"),
    ("environment", {"cpu_capability": "AVX512"}, "cpu_capability was AVX512, is "),
    ("environment", {"cpu": "GenuineIntel 6 0 0"}, "cpu was GenuineIntel 6 0 0, is "),
    ("environment", {"machine": "arm64"}, "machine was arm64, is "),
    ("environment", {"device": "NVIDIA H100"}, "device was NVIDIA H100, is cpu"),
    ("software", {"oelm": "0.0.1"}, "oelm was 0.0.1, is "),
    ("software", {"source": "0123abc"}, "source was 0123abc, is "),
    ("software", {"python": "3.9.1"}, "python was 3.9.1, is 3."),
]


@pytest.mark.parametrize(("part", "changes", "said"), first_two(SETTINGS), ids=lambda value: str(value)[:24])
def test_other_setting_warns_with_the_difference_and_strict_refuses_it(
    part: str, changes: dict[str, str], said: str, settings: dict[str, Any], run: Path, tmp_path: Path, tally: Tally
) -> None:
    recorded_with(run, part, **changes)
    told = tmp_path / "told"
    child = start(settings, run, strict=True, told=str(told))
    child.join(timeout=60)
    assert child.exitcode == 3 and said in told.read_text() and "leave --strict out" in told.read_text()
    finish(settings, run)
    log = (run / "training.log").read_text()
    assert any("WARNING" in line and said in line for line in log.splitlines()), log
    tally("R14", "other settings told, and refused under --strict", held=1, of=1)


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"seed": 7}, "seed: 0 there, 7 asked for"),
    ({"batch_size": 8}, "batch_size: 4 there, 8 asked for"),
    ({"save_every": 3}, "save_every: 4 there, 3 asked for"),
    ({"steps": 30}, "is not finished (8 steps planned), so it cannot be extended to 30"),
    ({"steps": 6}, "steps: 8 there, 6 asked for"),
    ({"optim": {"lr": 0.5}}, "optim.lr: 0.002 there, 0.5 asked for"),
]


@pytest.mark.parametrize(("changes", "said"), first_two(CONFIGS), ids=lambda value: str(value)[:24])
def test_other_config_is_refused_with_the_difference(
    changes: dict[str, Any], said: str, settings: dict[str, Any], run: Path, tmp_path: Path, tally: Tally
) -> None:
    told, before = tmp_path / "told", (run / "config.json").read_bytes()
    child = start({**settings, **changes}, run, told=str(told))
    child.join(timeout=60)
    assert child.exitcode == 3 and said in told.read_text() and "choose another --out" in told.read_text()
    assert (run / "config.json").read_bytes() == before
    tally("R14", "other configs refused with the difference", held=1, of=1)


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\1")


def _replace(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _claim_dtype(path: Path) -> None:
    meta = json.loads((path.parent / "meta.json").read_text())
    (path.parent / "meta.json").write_text(json.dumps(meta | {"dtype": "uint32"}))


def _beyond_vocabulary(path: Path) -> None:
    """Put an id in that no vocabulary has, and let the record agree with the file."""
    ids = np.fromfile(path, "<u2")
    ids[len(ids) // 2] = 60_000
    ids.tofile(path)
    meta = json.loads((path.parent / "meta.json").read_text())
    from oelm.files import sha256_file

    meta["splits"]["train"]["sha256"] = sha256_file(path)
    (path.parent / "meta.json").write_text(json.dumps(meta))


TOKEN_FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (lambda path: os.truncate(path, path.stat().st_size // 2), r"bytes, expected"),
    "odd length": (_append, r"bytes, expected"),
    "wrong dtype": (_claim_dtype, r"bytes, expected"),
    "id beyond the vocabulary": (_beyond_vocabulary, r"holds token id 60000, but the vocabulary has 300"),
    "another of equal size": (
        _replace,
        r"sha256 \w+\.\.\., expected",
    ),
    "gone": (Path.unlink, r"missing"),
}


@pytest.mark.parametrize("fault", first_two(list(TOKEN_FAULTS)))
def test_spoiled_token_file_is_refused_by_name_and_never_kills(
    fault: str, settings: dict[str, Any], run: Path, text_file: Path, tmp_path: Path, tally: Tally
) -> None:
    spoil, said = TOKEN_FAULTS[fault]
    prepared = prepare(str(text_file), tokenizer="bpe:300")
    copy = Path(shutil.copytree(prepared.path, tmp_path / "tokens"))
    mine = {**settings, "data": {**settings["data"], "source": str(copy)}}
    spoil(copy / "train.bin")
    for out in (tmp_path / "new", run):
        told = tmp_path / f"told-{out.name}"
        child = start(mine, out, told=str(told))
        child.join(timeout=60)
        # Not by a signal: a map beyond a file's end would be SIGBUS.
        assert child.exitcode == 3, f"{out.name}: exit code {child.exitcode}"
        assert re.search(said, told.read_text()) and "train.bin" in told.read_text() and "; " in told.read_text()
    tally("R10", "spoiled token files refused, by a new run and by one that goes on", held=2, of=2)


as_nobody = pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root can become somebody else")
NOBODY = 65534


def opened_to_nobody(*paths: Path) -> None:
    """Let everybody look into folders that pytest keeps to their owner, and write into none."""
    for path in paths:
        for folder in (path, *path.parents):
            if "pytest-of-" in str(folder):
                folder.chmod(0o755)


def told_to_nobody(settings: dict[str, Any], out: Path) -> str:
    """Start a run as a user who may write nothing here; return what it is told."""
    told = Path("/tmp") / f"oelm-told-{os.getpid()}"
    try:
        child = start(settings, out, user=NOBODY, told=str(told))
        child.join(timeout=60)
        assert child.exitcode == 3, f"exit code {child.exitcode}"
        return told.read_text()
    finally:
        told.unlink(missing_ok=True)


@as_nobody
def test_folder_that_cannot_be_written_is_told(settings: dict[str, Any], text_file: Path, tmp_path: Path, tally: Tally) -> None:
    prepared = prepare(str(text_file), tokenizer="bpe:300").path
    opened_to_nobody(tmp_path, prepared)
    said = told_to_nobody({**settings, "data": {**settings["data"], "source": str(prepared)}}, tmp_path / "closed" / "run")
    assert "cannot be written" in said and "choose a folder" in said and str(tmp_path) in said
    assert not (tmp_path / "closed").exists()
    tally("R15", "folders that cannot be written to", held=1, of=1)


@as_nobody
def test_text_that_cannot_be_read_is_told(settings: dict[str, Any], tmp_path: Path, tally: Tally) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    (closed / "mine.txt").write_text("mine")
    opened_to_nobody(tmp_path)
    closed.chmod(0o700)
    said = told_to_nobody({**settings, "data": {**settings["data"], "source": str(closed / "mine.txt")}}, tmp_path / "run")
    assert f"{closed / 'mine.txt'}: cannot be read (Permission denied); give a file" in said
    tally("R15", "texts that cannot be read", held=1, of=1)


def test_a_text_of_an_endless_name_is_refused() -> None:
    with pytest.raises(DataError, match=r"x{200}: cannot be read \(File name too long\)"):
        prepare("x" * 5000, tokenizer="bpe:300")


@pytest.mark.slow
def test_ten_thousand_runs_are_listed_within_two_seconds(tmp_path: Path, tally: Tally) -> None:
    first = record(tmp_path / "runs", "done", experiment="E-0000", seed=0)
    for number in range(10_000):
        folder = tmp_path / "runs" / f"E-{number // 100:04d}" / "smoke" / "default" / f"seed-{number % 100}"
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("config.json", "status.json"):
            if folder != first:
                os.link(first / name, folder / name)
    # By processor time, for others may use this machine meanwhile; even so they slow each other down, as plain reading shows.
    began = time.process_time()
    statuses = [json.loads(path.read_bytes()) for path in (tmp_path / "runs").glob("*/*/*/*/status.json")]
    plain = time.process_time() - began
    began = time.process_time()
    views = scan(tmp_path / "runs")
    took = time.process_time() - began
    assert len(views) == len(statuses) == 10_000 and {view.state for view in views} == {"done"}
    assert took < max(2, 4 * plain)
    tally("R15", "runs listed in under 2 s", held=len(views), of=10_000)
