"""Two that prepare the same data: the second says that it waits, hears a stop, and takes what the first has made."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from filelock import FileLock

from oelm.data import tokens as tokens_module
from oelm.data.example_sets import prepare_examples
from oelm.data.examples import Example, ExampleSource
from oelm.data.prepare import prepare
from oelm.data.tokenizer import wordpiece
from oelm.data.tokens import OnProgress
from oelm.errors import StoppedError
from oelm.process import StopFlag
from oelm.train.task import seen_progress
from oelm.train.watch import Silence
from tests.conftest import oelm_command
from tests.data.test_tasks import write_vocabulary

SPEC = "bpe:300"
WAITING = "waiting for another process that prepares this"
Prepared = Callable[[OnProgress], Path]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that no other test sees; who waits for it looks often."""
    monkeypatch.setenv("OELM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tokens_module, "_WAIT_S", 0.05)
    return tmp_path / "cache"


@pytest.fixture(params=["tokens", "examples"])
def prepared(request: pytest.FixtureRequest, cache: Path, text_file: Path, tmp_path: Path) -> Prepared:
    """What prepares a small set of either kind and returns its folder."""
    if request.param == "tokens":
        return lambda progress: prepare(str(text_file), tokenizer=SPEC, progress=progress).path
    folder = write_vocabulary(tmp_path / "vocabulary")
    wordpiece(folder).save(str(folder / "tokenizer.json"))
    rows = [Example("a cat sat", None, 0), Example("two birds", None, 1)]
    source = ExampleSource("made", "by hand", ("no", "yes"), {"train": partial(iter, rows)})
    tokenizer = str(folder / "tokenizer.json")
    return lambda progress: prepare_examples(source, tokenizer=tokenizer, max_length=8, progress=progress).path


def nothing(what: str, done: int, total: int, tokens: int) -> None: ...


def lock_of(target: Path) -> FileLock:
    return FileLock(target.parent / f".{target.name}.lock", thread_local=False)


def held_elsewhere(lock: FileLock) -> None:
    """Take a lock as another process would: not in this thread."""
    thread = threading.Thread(target=lock.acquire)
    thread.start()
    thread.join()


def test_who_waits_says_so_and_takes_what_the_other_made(prepared: Prepared) -> None:
    target = prepared(nothing)
    lock, told = lock_of(target), []
    held_elsewhere(lock)

    def progress(what: str, done: int, total: int, tokens: int) -> None:
        if what == WAITING:
            told.append(what)
            lock.release()

    assert prepared(progress) == target and told == [WAITING]


def test_a_stop_ends_the_waiting(prepared: Prepared) -> None:
    lock, stop = lock_of(prepared(nothing)), StopFlag()
    held_elsewhere(lock)
    stop.request("test")
    with pytest.raises(StoppedError, match="repeat the same command"):
        prepared(_only_waiting(seen_progress(stop, Silence())))
    assert lock.is_locked
    lock.release()


def _only_waiting(progress: OnProgress) -> OnProgress:
    """A stop that comes when all else is done but the waiting."""

    def told(what: str, done: int, total: int, tokens: int) -> None:
        if what == WAITING:
            progress(what, done, total, tokens)

    return told


def test_a_command_that_waits_says_so_and_hears_a_signal(cache: Path, text_file: Path, tmp_path: Path) -> None:
    lock = lock_of(prepare(str(text_file), tokenizer=SPEC).path)
    command = ["train", "--budget", "smoke", "--text", str(text_file), "--tokenizer", SPEC, "--out", str(tmp_path / "run")]
    with lock:
        child = subprocess.Popen(
            oelm_command(*command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path
        )
        assert child.stdout is not None
        for line in child.stdout:
            if WAITING in line:
                break
        else:
            pytest.fail("it never said that it waits")
        began = time.monotonic()
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=60)
    assert child.returncode == 75 and time.monotonic() - began < 20
