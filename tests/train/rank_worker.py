"""A run on several processes: `start_ranks` lets torchrun start them, and as one of them this file is run."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oelm.train.config import TrainConfig

ROOT = Path(__file__).parents[2]
FAST = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def torchrun(ranks: int, *command: str, restarts: int = 0) -> list[str]:
    """Return the argv that starts a module on so many processes of this host."""
    options = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    return [sys.executable, "-m", "torch.distributed.run", *options, "-m", *command]


@contextlib.contextmanager
def ranks_started(
    config: TrainConfig, out: Path, ranks: int, *, restarts: int = 0, fault: str = "", timeout_s: float = 60.0
) -> Iterator[subprocess.Popen[str]]:
    """Start a run on so many processes; whatever is left of it at the end is killed."""
    told = out.with_name(f"{out.name}-told")
    told.mkdir(exist_ok=True)
    given = {"config": config.as_dict(), "out": str(out), "told": str(told), "fault": fault}
    environment = {**os.environ, **FAST, "OELM_RANK_TIMEOUT_S": str(timeout_s), "RANK_WORKER": json.dumps(given)}
    process = subprocess.Popen(
        torchrun(ranks, "tests.train.rank_worker", restarts=restarts),
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        for pid in pids(out):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        process.communicate()


def run_ranks(config: TrainConfig, out: Path, ranks: int, **settings: Any) -> str:
    """Bring a run to its end on so many processes; return what they printed."""
    with ranks_started(config, out, ranks, **settings) as process:
        printed, _ = process.communicate(timeout=120)
        assert process.returncode == 0, printed
    return printed


def told(out: Path, kind: str) -> list[dict[str, Any]]:
    """Return what the processes of a run told of themselves ('start', 'end'), by rank."""
    files = sorted(out.with_name(f"{out.name}-told").glob(f"{kind}-*.json"))
    return [json.loads(path.read_text()) for path in files]


def pids(out: Path) -> list[int]:
    return [row["pid"] for row in told(out, "start")]


def wait_for(condition: Any, *, timeout_s: float = 60.0) -> None:
    """Wait until something holds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, "waited in vain"
        time.sleep(0.01)


def main() -> None:
    import torch

    from oelm.errors import OelmError
    from oelm.train.config import parse_any
    from oelm.train.dist import joined
    from oelm.train.run import train
    from oelm.train.stop import StopFlag
    from tests.train.rank_faults import FAULTS, Recorder

    torch.set_num_threads(1)
    given = json.loads(os.environ["RANK_WORKER"])
    rank, folder = int(os.environ["RANK"]), Path(given["told"])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    _tell(folder / f"start-{rank}.json", {"pid": os.getpid(), "attempt": attempt})
    row: dict[str, Any] = {}
    if given["fault"] and attempt == 0:
        FAULTS[given["fault"]](rank)
    try:
        with StopFlag() as stop, joined("cpu") as world, Recorder(world) as watch:
            result = train(parse_any(given["config"], where="test"), Path(given["out"]), stop=stop, watch=watch, world=world)
            row = {"status": result.status, "step": result.step, "bytes": world.reduced_bytes, "ids": watch.ids}
            code = 75 if result.status == "stopped" else 0
    except OelmError as problem:
        row, code = {"error": type(problem).__name__, "message": str(problem)}, problem.exit_code
    _tell(folder / f"end-{rank}.json", {**row, "code": code, "time": time.time()})
    sys.stdout.flush()
    os._exit(code)


def _tell(path: Path, row: dict[str, Any]) -> None:
    staging = path.with_suffix(".tmp")
    staging.write_text(json.dumps(row))
    staging.rename(path)


if __name__ == "__main__":
    main()
