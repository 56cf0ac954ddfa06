"""What an interleaved timing leaves behind, for reports: read and written without torch."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from pydantic import ValidationError

from oelm.files import write_json
from oelm.strict import Strict

FOLDER = "bench"


class TimingRecord(Strict):
    """Two sides that took turns: how many times as fast the second is, with its interval, and what arithmetic allows."""

    first: str
    second: str
    shape: str
    value: float
    low: float
    high: float
    bound: float
    rounds: int
    first_step_s: float
    second_step_s: float
    first_peak_bytes: int
    second_peak_bytes: int


def write_timing(root: Path, record: TimingRecord) -> Path:
    """Write a timing under `<root>/bench/`; a repeated one replaces its forerunner, and no other does."""
    told = "\0".join((record.first, record.second, record.shape))
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", told).strip("-.")[:100]
    # Names that differ in a sign or far behind have the same slug.
    digest = hashlib.sha256(told.encode()).hexdigest()
    path = root / FOLDER / f"{slug}-{digest[:8]}.json"
    write_json(path, record.model_dump(mode="json"))
    return path


def read_timings(root: Path) -> list[TimingRecord]:
    """Return the timings under a root; what cannot be read is passed over."""
    found = []
    for path in sorted((root / FOLDER).glob("*.json")):
        try:
            found.append(TimingRecord.model_validate_json(path.read_bytes()))
        except (OSError, ValidationError):
            continue
    return found
