"""The records of `oelm bench`, which reports show: read and written without torch."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from pydantic import ValidationError, field_validator

from oelm.files import Strict, dump_json, write_json

FOLDER = "bench"
# Older records hold the shape as a sentence.
_SENTENCE = re.compile(
    r"(?P<num_layers>\d+) layers, (?P<model_dim>\d+) wide, dropout (?P<dropout>[\d.e-]+),"
    r"(?: short convolution of (?P<short_conv>\d+),)? batch (?P<batch_size>\d+) x (?P<seq_len>\d+)"
)


class TimedShape(Strict):
    """The model and batch of a timed step; None where an older record lacks the field."""

    num_layers: int
    model_dim: int
    seq_len: int
    batch_size: int
    dropout: float
    short_conv: int = 0
    num_heads: int | None = None
    ff_dim: int | None = None
    vocab_size: int | None = None
    qk_dim: int | None = None
    is_classifier: bool = False


class TimingRecord(Strict):
    """Two sides that took turns: the second's relative speed with its interval, and the arithmetic bound."""

    first: str
    second: str
    shape: TimedShape
    value: float
    low: float
    high: float
    bound: float
    rounds: int
    first_step_s: float
    second_step_s: float
    first_peak_bytes: int | None
    second_peak_bytes: int | None
    first_stored: int | None = None
    second_stored: int | None = None
    first_trainable: int | None = None
    second_trainable: int | None = None
    # None in older records.
    optimizer: str | None = None
    threads: int | None = None

    @field_validator("shape", mode="before")
    @classmethod
    def _sentence_as_fields(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        found = _SENTENCE.fullmatch(value)
        if found is None:
            raise ValueError(f"not a shape that oelm bench ever wrote: {value!r}")
        known = {name: text for name, text in found.groupdict().items() if text is not None}
        return {name: float(text) if name == "dropout" else int(text) for name, text in known.items()}


def write_timing(root: Path, record: TimingRecord) -> Path:
    """Write a timing under `<root>/bench/`; it replaces only an earlier timing of the same sides and shape."""
    shape = record.shape
    slug = f"{record.first} {record.second} {shape.num_layers}x{shape.model_dim} batch {shape.batch_size}x{shape.seq_len}"
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", slug).strip("-.")[:100]
    # The slug alone is not unique.
    identity = dump_json([record.first, record.second, shape.model_dump(mode="json"), record.optimizer, record.threads])
    digest = hashlib.sha256(identity.encode()).hexdigest()
    path = root / FOLDER / f"{slug}-{digest[:8]}.json"
    write_json(path, record.model_dump(mode="json"))
    return path


def read_timings(root: Path) -> list[TimingRecord]:
    """Return the timings under a root; skip what cannot be read."""
    found = []
    for path in sorted((root / FOLDER).glob("*.json")):
        try:
            found.append(TimingRecord.model_validate_json(path.read_bytes()))
        except (OSError, ValidationError):
            continue
    return found
