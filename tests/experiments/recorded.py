"""Folders of runs as the runner and the runs themselves leave them, without training."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from oelm.files import write_json
from oelm.runs.status import Status, StatusName, now_text


def status_of(said: StatusName, **changes: Any) -> Status:
    """Return a status of this host and process, in the middle of 600 steps."""
    step = 600 if said == "done" else 0 if said == "queued" else 450
    facts: dict[str, Any] = {
        "status": said,
        "step": step,
        "steps": 600,
        "loss": 3.25,
        "step_s": 0.01,
        "device": "cpu",
        "heartbeat": now_text(),
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": now_text(),
    }
    return Status(**(facts | changes))


def record(
    root: Path,
    said: StatusName,
    *,
    experiment: str = "GPT-02",
    budget: str = "smoke",
    variant: str = "default",
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Write a run's config and status; return its folder."""
    run = root / experiment / budget / variant / f"seed-{seed}"
    write_json(run / "config.json", {"method": {"init": "native"}, "seed": seed}, durable=False)
    write_json(run / "status.json", status_of(said, **changes).model_dump(mode="json"), durable=False)
    return run
