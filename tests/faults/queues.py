"""Queues of runs as users start them: launchers in processes of their own, and their runs in others, all to be killed."""

from __future__ import annotations

import contextlib
import json
import multiprocessing as mp
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from oelm.files import sha256_file
from oelm.runs.metrics import read_metrics
from tests.faults import stand_in

SERVER = mp.get_context("forkserver")
# What launchers load before they look at their arguments, and what the other users of this one server load.
_PRELOADED = [
    "oelm.cli.app",
    "oelm.experiments.forecast",
    "oelm.experiments.notify",
    "oelm.experiments.queue",
    "oelm.experiments.slots",
    "oelm.experiments.study",
    "oelm.experiments.summary",
    "oelm.experiments.torchrun",
    "oelm.train.run",
    "oelm.train.track",
    "rich.table",
    "torch._dynamo",
    "transformers.models.bert.modeling_bert",
]
STEPS = 60
# Small enough to train in half a second; saves and evaluations at odd places.
SETTINGS = f"""\
    steps: {STEPS}
    eval_every: 13
    save_every: 7
    batch_size: 4
    micro_batch_size: 2
    data.tokenizer: "bpe:300"
    model.seq_len: 16
    model.dropout: 0.1
"""
CATALOG = f"""\
mine-01:
  title: attention learns
  kind: language_model
  data: {{text}}
  method: baseline
  groups: [mine]
  settings:
{SETTINGS}
mine-02:
  extends: mine-01
  title: frozen
  method: oelm_freeze
  baseline: mine-01
  criterion: {{{{ppl_ratio_at_most: 1.05}}}}
"""
_MARK = "OELM_TEST_QUEUE"


def preload() -> None:
    """Let the server load what launchers need; of all who say what it loads, the last one is heard."""
    SERVER.set_forkserver_preload(_PRELOADED)


preload()


def write_catalog(folder: Path, text: Path) -> Path:
    """Write a catalog of an experiment and its baseline on a text; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "experiments.yaml").write_text(CATALOG.format(text=json.dumps(str(text))), encoding="utf-8")
    return folder


@dataclass
class Launch:
    """A launcher in a process of its own; what it prints is in a file."""

    process: ForkServerProcess
    printed: Path

    def wait(self, *, timeout_s: float = 240) -> int:
        self.process.join(timeout=timeout_s)
        assert self.process.exitcode is not None, f"still there after {timeout_s} s:\n{self.text}"
        return self.process.exitcode

    @property
    def text(self) -> str:
        return self.printed.read_text(encoding="utf-8", errors="replace") if self.printed.exists() else ""

    @property
    def is_over(self) -> bool:
        return not self.process.is_alive()

    def send(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)


@dataclass
class Queue:
    """A working folder with its catalog, and every process that was started in it."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)

    @property
    def outputs(self) -> Path:
        return self.folder / "outputs"

    def add(self, name: str, entry: str) -> None:
        """Add an experiment to the catalog's group."""
        with (self.folder / "experiments.yaml").open("a", encoding="utf-8") as catalog:
            catalog.write(f"\n{name}: {entry}\n")

    def launch(self, *arguments: str) -> Launch:
        """Start `oelm` with these arguments."""
        printed = self.folder / f"printed-{len(self.launches)}.txt"
        environment = {_MARK: str(self.folder), "OELM_CACHE": os.environ["OELM_CACHE"], **self.environment}
        child = SERVER.Process(target=_launched, args=(arguments, str(self.folder), str(printed), environment))
        child.start()
        self.launches.append(Launch(child, printed))
        return self.launches[-1]

    def finish(self, *arguments: str, code: int = 0) -> str:
        """Run `oelm` to its end; return what it printed."""
        launch = self.launch(*arguments)
        found = launch.wait()
        assert found == code, f"exit code {found}, not {code}:\n{launch.text}"
        assert "Traceback" not in launch.text, launch.text
        return launch.text

    def runs(self) -> list[Path]:
        """Return the folders of runs that there are, by name."""
        return sorted(path.parent for path in self.outputs.glob("*/*/*/seed-*/status.json"))

    def workers(self) -> dict[int, str]:
        """Return the processes of runs under way, orphans included, with the run's folder."""
        found: dict[int, str] = {}
        for entry in Path("/proc").glob("[0-9]*"):
            # A process that ends while it is looked at is not there.
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                marks = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                if "work" in words and f"{_MARK}={self.folder}" in marks:
                    found[int(entry.name)] = words[-2]
        return found

    def lose_everything(self) -> None:
        """End every process at once, as when a machine goes down: none sees another end."""
        pids = [launch.process.pid for launch in self.launches if not launch.is_over]
        pids += list(self.workers())
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid or 0, number)
        for launch in self.launches:
            launch.process.join(timeout=30)
        self.wait_until(lambda: not self.workers())

    def wait_until(self, is_so: Callable[[], bool], *, timeout_s: float = 120) -> None:
        """Wait until something holds; fail with what launchers printed when it never does."""
        deadline = time.monotonic() + timeout_s
        while not is_so():
            assert time.monotonic() < deadline, "\n".join(launch.text for launch in self.launches)
            time.sleep(0.02)


@contextlib.contextmanager
def queue_in(folder: Path, text: Path, **environment: str) -> Iterator[Queue]:
    """Yield a queue on a text; whatever it left running is ended afterwards."""
    queue = Queue(write_catalog(folder, text), environment)
    try:
        yield queue
    finally:
        queue.lose_everything()


def with_stand_ins(folder: Path, **environment: str) -> dict[str, str]:
    """Return the environment in which a launcher starts stand-ins for runs."""
    script = folder / "stand-in"
    if not script.exists():
        folder.mkdir(parents=True, exist_ok=True)
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{stand_in.__file__}" "$@"\n')
        script.chmod(0o755)
    return {"STAND_IN": str(script), **environment}


def _launched(arguments: Sequence[str], folder: str, printed: str, environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.update(environment)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        os.environ.pop(name, None)
    handle = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    # A command line's own handling of signals, not that of the server this process is forked from.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "FILE_BYTES" in environment:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(environment["FILE_BYTES"]),) * 2)
    if "STAND_IN" in environment:
        sys.executable = environment["STAND_IN"]
    from oelm.cli import main

    sys.argv = ["oelm", *arguments]
    main()


def rows(run: Path) -> int:
    """Return how many rows of metrics a run has written."""
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def steps_of(run: Path) -> list[int]:
    return [row["step"] for row in read_metrics(run / "metrics.jsonl") if "loss" in row]


def notes(run: Path) -> list[dict[str, Any]]:
    """Return what the stand-ins of a run wrote down, in order."""
    log = run / "training.log"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def sittings(run: Path) -> list[tuple[float, float]]:
    """Return when each stand-in held its run, from beginning to end; a killed one ends at its last word."""
    ends = {note["pid"]: note["at"] for note in notes(run) if note["what"] == "ended"}
    return [(note["at"], ends.get(note["pid"], note["at"])) for note in notes(run) if note["what"] == "began"]


def digests(folder: Path) -> dict[str, tuple[str, int]]:
    """Return the digest and the time of last change of every file below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (sha256_file(path), path.stat().st_mtime_ns) for path in files}


def most_at_once(spans: Sequence[tuple[float, float]]) -> int:
    """Return how many of these spans of time overlap at most."""
    return max((sum(begin <= moment < end for begin, end in spans) for moment, _ in spans), default=0)
