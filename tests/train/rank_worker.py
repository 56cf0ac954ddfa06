"""A run on several processes of this host, forked from a server that has torch loaded, or started by torchrun itself.

As one of torchrun's processes this file is run.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing as mp
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from oelm.config import TrainConfig

ROOT = Path(__file__).parents[2]
SERVER = mp.get_context("forkserver")
# Loading torch takes longer than a tiny run; the list is that of all who use the one server of a test session.
_PRELOADED = ["oelm.train.run", "oelm.budget", "tests.train.rank_faults", "tests.train.finetuning"]
# What torch's parallel module loads in each process that uses it: a second of CPU.
SERVER.set_forkserver_preload([*_PRELOADED, "torch._dynamo"])
_LIMIT_S = 120.0


@dataclass(frozen=True)
class Given:
    """What one process is to do."""

    config: dict[str, Any]
    out: str
    fault: str = ""
    timeout_s: float = 60.0

    @property
    def folder(self) -> Path:
        """Where the processes tell of themselves."""
        return Path(f"{self.out}-told")


@contextlib.contextmanager
def forked(config: TrainConfig, out: Path, ranks: int, **settings: Any) -> Iterator[list[ForkServerProcess]]:
    """Start a run on so many processes, without torchrun; whatever is left of it at the end is killed."""
    given = Given(config.as_dict(), str(out), **settings)
    given.folder.mkdir(exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    children = [SERVER.Process(target=_forked, args=(given, rank, ranks, port)) for rank in range(ranks)]
    for child in children:
        child.start()
    try:
        yield children
    finally:
        for child in children:
            child.kill()
            child.join()


def run_forked(config: TrainConfig, out: Path, ranks: int, **settings: Any) -> list[dict[str, Any]]:
    """Bring a run to its end on so many processes; return what each of them told at its end."""
    with forked(config, out, ranks, **settings) as children:
        for child in children:
            child.join(_LIMIT_S)
        assert [child.exitcode for child in children] == [0] * ranks, told(out, "end")
    return told(out, "end")


def _forked(given: Given, rank: int, size: int, port: int) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ.update(place)
    work(given, rank, attempt=0)


@contextlib.contextmanager
def by_torchrun(
    config: TrainConfig, out: Path, ranks: int, *, restarts: int, **settings: Any
) -> Iterator[subprocess.Popen[str]]:
    """Start a run with torchrun; whatever is left of it at the end is killed."""
    given = Given(config.as_dict(), str(out), **settings)
    given.folder.mkdir(exist_ok=True)
    options = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, "-m", "tests.train.rank_worker"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RANK_WORKER": json.dumps(vars(given))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for pid in [process.pid, *pids(out)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def told(out: Path, kind: str) -> list[dict[str, Any]]:
    """Return what the processes of a run told of themselves ('start', 'end'), by rank."""
    return [json.loads(path.read_text()) for path in sorted(Path(f"{out}-told").glob(f"{kind}-*.json"))]


def pids(out: Path) -> list[int]:
    return [row["pid"] for row in told(out, "start")]


def wait_for(condition: Callable[[], bool], *, timeout_s: float = _LIMIT_S) -> None:
    """Wait until something holds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, "waited in vain"
        time.sleep(0.01)


def work(given: Given, rank: int, *, attempt: int) -> None:
    """Be one process of a run, and tell how that ended."""
    import torch

    from oelm.config import parse_any
    from oelm.errors import OelmError
    from oelm.process import StopFlag
    from oelm.train.dist import TIMEOUT_SETTING, joined
    from oelm.train.run import train
    from tests.train.rank_faults import FAULTS, Recorder

    torch.set_num_threads(1)
    os.environ[TIMEOUT_SETTING] = str(given.timeout_s)
    _tell(given.folder / f"start-{rank}.json", {"pid": os.getpid(), "attempt": attempt})
    row: dict[str, Any] = {}
    if given.fault and attempt == 0:
        FAULTS[given.fault](rank)
    try:
        with StopFlag() as stop, joined("cpu") as world, Recorder(world) as watch:
            config = parse_any(given.config, where="test")
            result = train(config, Path(given.out), stop=stop, watch=watch, world=world)
            row = {"status": result.status, "step": result.step, "bytes": watch.step_bytes, "ids": watch.ids}
            code = 75 if result.status == "stopped" else 0
    except OelmError as problem:
        row, code = {"error": type(problem).__name__, "message": str(problem)}, problem.exit_code
    _tell(given.folder / f"end-{rank}.json", {**row, "code": code, "time": time.time()})
    sys.stdout.flush()
    os._exit(code)


def _tell(path: Path, row: dict[str, Any]) -> None:
    staging = path.with_suffix(".tmp")
    staging.write_text(json.dumps(row))
    staging.rename(path)


if __name__ == "__main__":
    settings = json.loads(os.environ["RANK_WORKER"])
    work(Given(**settings), int(os.environ["RANK"]), attempt=int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
