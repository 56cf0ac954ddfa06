"""Runs to be archived, invented, with everything beside them that must not travel; and archives read back."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

from oelm.experiments.archive import make_archive
from oelm.experiments.collect import find_runs
from oelm.experiments.inventory import Inventory
from oelm.files import STAGING_PREFIX, write_json

FIRST, SECOND = "GPT-01/smoke/default/seed-0", "GPT-02/smoke/default/seed-1"
CHECKPOINT = "checkpoints/step-00000004"


def write_run(root: Path, path: str = FIRST, *, status: str = "done", source: str = "stdlib", message: str = "") -> Path:
    """Write the files of a run, invented, with everything beside them that must not travel."""
    run = root / path
    seed = int(path.rsplit("-", 1)[1])
    write_json(run / "config.json", {"data": {"source": source}, "device": "cpu", "lr": 0.001, "seed": seed})
    write_json(run / "manifest.json", {"torch": "2", "data": {"source": source}, "note": f"on {socket.gethostname()}"})
    write_json(run / "audit.json", {"total": 9, "frozen": 3})
    said = {"step": 8, "steps": 8, "status": status, "heartbeat": "2026-01-01", "started": "2026-01-01", "message": message}
    write_json(run / "status.json", {**said, "pid": 4711, "host": socket.gethostname()})
    write_json(
        run / "timing_stats.json", {"best_ppl": 4.27 + seed, "wall_s": {"total": 9.5}, "step_s": {"mean": 0.1}, "tokens": 8}
    )
    write_json(run / "attention.json", {"step": 8, "heads": []})
    write_json(run / "model" / "config.json", {"_name_or_path": source})
    write_json(run / "best.json", {"step": 4, "checkpoint": CHECKPOINT})
    write_json(run / "latest.json", {"step": 4, "checkpoint": CHECKPOINT})
    for name in ("metrics.jsonl", "predictions.jsonl", "tokenizer.json"):
        (run / name).write_text(json.dumps({"nats": 1.5, "text": source}) + "\n")
    (run / "training.log").write_text(f"read {source}\n")
    (run / CHECKPOINT).mkdir(parents=True)
    for name in ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"):
        (run / CHECKPOINT / name).write_bytes(os.urandom(64))
    write_litter(run)
    return run


def write_litter(run: Path) -> None:
    (run / "tensorboard").mkdir()
    for name in (
        ".lock",
        ".holder",
        "console.log",
        f"{STAGING_PREFIX}abc",
        f"checkpoints/{STAGING_PREFIX}x",
        "tensorboard/events",
        "mine.txt",
    ):
        (run / name).write_text("never to be archived")


def made(root: Path, name: str = "a.tar.gz", *, weights: bool = True) -> tuple[Path, Inventory]:
    target = root.parent / name
    return target, make_archive(root, target, runs=find_runs(root, []), weights=weights)


def contents(archive_path: Path) -> dict[str, bytes]:
    """Read an archive with the standard library alone."""
    with tarfile.open(archive_path) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar.getmembers()}  # type: ignore[union-attr]


def tree(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder, the lock of imports aside."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".import.lock"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def in_child(program: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, which can be killed or starved."""
    prelude = "import os, sys; from pathlib import Path; a = [Path(x) for x in sys.argv[1:]]\n"
    prelude += "from oelm.experiments.archive import *; from oelm.experiments.collect import find_runs\n"
    command = [sys.executable, "-c", prelude + program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)
