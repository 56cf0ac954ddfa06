"""Stands in for `oelm work`: keeps its promises to the launcher in 30 ms instead of the seconds that loading torch takes.

It takes the run's lock, writes its status, counts steps into metrics.jsonl, goes on behind what an earlier sitting wrote,
saves and leaves 75 when asked to, and fails on a learning rate from 100 up, or while a certain file is there. Only the
standard library: it starts at once.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import math
import os
import signal
import socket
import sys
import time
from typing import Any

# While torch loads, a process is deaf to signals and holds nothing: as long as this file is there.
GATE = os.environ.get("STAND_IN_GATE", "")
# As long as this one is there, runs rest behind their fifth step, where they hear signals.
HOLD, HOLD_AT = os.environ.get("STAND_IN_HOLD", ""), 5
STEP_S = float(os.environ.get("STAND_IN_STEP_S", "0.004"))
# How long a process that found its run in other hands takes to leave: torch has much to put away.
LEAVE_S = float(os.environ.get("STAND_IN_LEAVE_S", "0"))
# How long a finished one, which says so already, still holds its folder.
CLOSE_S = float(os.environ.get("STAND_IN_CLOSE_S", "0"))
# While there is a file of this name, runs fail; of the second one, before they have written anything.
CAUSE, EARLY_CAUSE = os.environ.get("STAND_IN_CAUSE", ""), os.environ.get("STAND_IN_EARLY_CAUSE", "")
LARGEST_LR = 100.0


def main() -> int:
    path = sys.argv[-1]
    config = json.load(sys.stdin)
    if os.path.exists(EARLY_CAUSE):
        print("DataError: the data is gone")
        return 3
    while os.path.exists(GATE):
        time.sleep(0.01)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    os.chdir(path)
    lock = os.open(".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"error: {path} is in use", flush=True)
        time.sleep(LEAVE_S)
        return 3
    note("began", threads=os.environ.get("OMP_NUM_THREADS"), source=config["data"]["source"])
    code = train(config, asked)
    time.sleep(CLOSE_S)
    note("ended", code=code)
    return code


def train(config: dict[str, Any], asked: list[int]) -> int:
    """Go on to the last step; return the exit code."""
    if json.load(open("status.json"))["status"] == "done":
        return 0
    lr = config["optim"]["lr"]
    with open("metrics.jsonl", "a+") as rows:
        rows.seek(0)
        first = sum(1 for _ in rows)
        write_status("running", first, config["steps"])
        for step in range(first + 1, config["steps"] + 1):
            while step > HOLD_AT and os.path.exists(HOLD) and not asked:
                time.sleep(0.01)
            if asked:
                write_status("stopped", step - 1, config["steps"], message="SIGTERM")
                return 75
            if lr >= LARGEST_LR or os.path.exists(CAUSE):
                message = f"NonFiniteError: step {step}: loss inf at lr {lr}"
                write_status("failed", step - 1, config["steps"], message=message)
                print(f"error: {message}")
                return 3
            time.sleep(STEP_S)
            # One write a row: a kill leaves it whole or not at all.
            rows.write(json.dumps({"step": step, "loss": 1.0 / step}) + "\n")
            rows.flush()
    best = 1.0 + (math.log10(lr) + 2.0) ** 2
    replace("timing_stats.json", {"best_val_loss": best, "wall_s": {"total": 1.0}})
    write_status("done", config["steps"], config["steps"], best=math.exp(best), metric="ppl")
    return 0


def note(word: str, **facts: Any) -> None:
    """Add a line to training.log: what happened, in which process, when by the clock that all processes share."""
    with open("training.log", "a") as log:
        log.write(json.dumps({"what": word, "pid": os.getpid(), "at": time.monotonic(), **facts}) + "\n")


def write_status(name: str, step: int, steps: int, **facts: Any) -> None:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    row = {"step": step, "steps": steps, "status": name, "pid": os.getpid(), "host": socket.gethostname()}
    replace("status.json", row | {"heartbeat": now, "started": now} | facts)


def replace(name: str, value: dict[str, Any]) -> None:
    staging = f".staging-{os.getpid()}"
    with open(staging, "w") as file:
        json.dump(value, file)
    os.replace(staging, name)


if __name__ == "__main__":
    sys.exit(main())
