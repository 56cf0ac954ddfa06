"""The types of a run's files: the run writes them, everybody else reads them."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from oelm.config import FinetuneConfig, RunConfig, parse_any
from oelm.errors import CheckpointError, ConfigError, DataError
from oelm.files import (
    Guard,
    Parsed,
    Strict,
    dump_json,
    first_error,
    read_as,
    read_json,
    write_json,
    write_text,
)
from oelm.runs.layout import CHECKPOINTS, CONFIG, COUNTERS, LATEST, MANIFEST, TIMING, EvaluatedSplit
from oelm.runs.metrics import read_jsonl

Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
Joules = Annotated[float, Field(ge=0)]


class DataRecord(Strict):
    """What a run was trained on."""

    name: str
    source: str
    fingerprint: str
    tokenizer: str


class Manifest(Strict):
    """`manifest.json`: with what a run was computed; `earlier` sittings in another setting stand beside it."""

    python: str
    oelm: str
    source_revision: str | None
    torch: str
    numpy: str
    environment: dict[str, str]
    data: DataRecord
    earlier: list[dict[str, Any]] = []
    # The id that its checkpoints carry; runs from before there were ids have none.
    run: str = ""


class ProjectionRecord(Strict):
    """One Q or K of `audit.json`."""

    name: str
    pattern: str
    layer: Count
    part: str
    num_heads: Count
    num_parameters: Count
    is_frozen: bool
    digest: str | None
    orthonormality_error: float
    is_selection: bool = False


class AuditRecord(Strict):
    """`audit.json`: parameters by role, and every projection."""

    total: Count
    trainable: Count
    frozen: Count
    selected: Count = 0
    by_role: dict[str, dict[str, Count]]
    projections: list[ProjectionRecord]


class StepTimes(Strict):
    """Step times after warm-up; only counts where none was measured."""

    measured_steps: Count
    warmup_steps: Count
    outliers: Count = 0
    mean: Seconds | None = None
    median: Seconds | None = None
    std: Seconds | None = None
    min: Seconds | None = None
    max: Seconds | None = None
    p95: Seconds | None = None
    p99: Seconds | None = None


class TextCounter(Strict):
    """An n-gram model of a text, and what it makes of a split."""

    vocabulary: Annotated[int, Field(ge=1)]
    order: Annotated[int, Field(ge=1)]
    bits_per_byte: Annotated[float, Field(gt=0)]


class Counters(Strict):
    """`counters.json` in a folder of runs: the best n-gram model of each text, by its fingerprint and split."""

    format: Literal["oelm-counters-1"] = "oelm-counters-1"
    best: dict[str, dict[EvaluatedSplit, TextCounter]] = Field(default_factory=dict)

    @staticmethod
    def read(root: Path) -> Counters:
        """Return what is recorded in a folder of runs, if anything."""
        if not (root / COUNTERS).is_file():
            return Counters()
        try:
            return read_as(Counters, root / COUNTERS)
        except DataError as problem:
            again = f"oelm data info NAME --counters --record {root}"
            raise DataError(f"{problem}; delete the file and write it again: {again}") from None

    def with_text(self, fingerprint: str, best: dict[EvaluatedSplit, TextCounter]) -> Counters:
        """Return the record with the figures of one more text."""
        return self.model_copy(update={"best": dict(sorted({**self.best, fingerprint: best}.items()))})


class Figures(Strict):
    """`timing_stats.json`: of a language model with PPLs, of a classifier with accuracies.

    Those of the test split are of the model that was best on validation, and there where the data has such a split;
    `majority_accuracy` is what naming the largest class always would come to on the same examples. `ngram` holds, by split,
    what n-gram models of order 1 to 5 make of the same text, counted on so many tokens of training text; runs made before
    have a bigram model's figure only. `energy_j` is what the machine's own counters say: 'cpu' of all its packages and their
    memory, whichever process used it, 'gpu' of the run's card; without such a counter there is none.
    """

    step_s: StepTimes
    wall_s: dict[str, Seconds]
    energy_j: dict[Literal["cpu", "gpu"], Joules] = Field(default_factory=dict)
    tokens: Count
    final_loss: float
    final_val_loss: float
    best_val_loss: float
    best_step: Count
    final_ppl: float | None = None
    best_ppl: float | None = None
    final_bits_per_byte: float | None = None
    final_accuracy: float | None = None
    best_accuracy: float | None = None
    test_step: Count | None = None
    test_loss: float | None = None
    test_ppl: float | None = None
    test_bits_per_byte: float | None = None
    test_accuracy: float | None = None
    bigram_ppl: float | None = None
    test_bigram_ppl: float | None = None
    majority_accuracy: float | None = None
    test_majority_accuracy: float | None = None
    ngram: dict[EvaluatedSplit, list[float]] = Field(default_factory=dict)
    ngram_tokens: Count | None = None

    def on(self, split: EvaluatedSplit) -> float | None:
        """Return the headline, PPL or accuracy, of the model that was best on validation, where the split was measured."""
        if self.best_ppl is None:
            return self.best_accuracy if split == "val" else self.test_accuracy
        return self.best_ppl if split == "val" else self.test_ppl

    def majority_on(self, split: EvaluatedSplit) -> float | None:
        """Return the share of the largest class of a split."""
        return self.majority_accuracy if split == "val" else self.test_majority_accuracy


def recorded_figure(run: Path, name: str, part: str = "") -> float | None:
    """Return one figure of a run's timing_stats.json, if it is there; nothing else of the file is checked."""
    try:
        found = read_json(run / TIMING)[name]
        value = found[part] if part else found
    except (DataError, KeyError, TypeError):
        return None
    return float(value) if isinstance(value, int | float) else None


def majority_share(labels: Sequence[int]) -> float:
    """Return the accuracy of naming the largest class always."""
    return max(Counter(labels).values()) / len(labels)


class HeadRecord(Strict):
    """One head of `attention.json`."""

    layer: Count
    head: Count
    entropy: float
    uniform_entropy: float
    effective_rank: float
    logit_std: float
    mean_distance: float
    induction: float


class AttentionRecord(Strict):
    """`attention.json`: what each head of the trained model does."""

    step: Count
    tokens: Count
    heads: list[HeadRecord]


class StepRow(Strict):
    """A step's row of metrics.jsonl."""

    step: Count
    loss: float
    lr: float
    grad_norm: float | None
    tokens_per_s: float
    step_s: Seconds


class EvaluationRow(Strict):
    """An evaluation's row of metrics.jsonl."""

    step: Count
    val_loss: float
    val_ppl: float | None = None
    bits_per_byte: float | None = None
    val_accuracy: float | None = None


class DocumentRow(Strict):
    """A document's row of predictions.jsonl or test_predictions.jsonl."""

    document: Count
    tokens: Count
    nats: float


class ExampleRow(Strict):
    """An example's row of predictions.jsonl or test_predictions.jsonl."""

    example: Count
    label: Count
    predicted: Count
    nats: float


Predictions = list[DocumentRow] | list[ExampleRow]


def write_record(path: Path, record: Strict, *, guard: Guard | None = None) -> None:
    """Write a record into its file. What was not measured is left out, and reads as its default."""
    write_json(path, record.model_dump(mode="json", exclude_unset=True), guard=guard)


def write_records(path: Path, records: Sequence[Strict], *, guard: Guard | None = None) -> None:
    """Write records into a .jsonl file, one a line."""
    lines = (dump_json(record.model_dump(mode="json", exclude_unset=True), indent=None) for record in records)
    write_text(path, "".join(f"{line}\n" for line in lines), guard=guard)


def read_rows(kind: type[Parsed], path: Path, rows: list[dict[str, Any]]) -> list[Parsed]:
    """Return rows of a .jsonl file in their type; DataError names the file and the row."""
    parsed: list[Parsed] = []
    for number, row in enumerate(rows, start=1):
        try:
            parsed.append(kind.model_validate(row))
        except ValidationError as problem:
            raise DataError(f"{path}: row {number}: {first_error(problem)}") from None
    return parsed


def read_predictions(path: Path) -> Predictions:
    """Read a run's answers: of a classifier by example, of a language model by document."""
    rows = read_jsonl(path)
    if rows and "example" in rows[0]:
        return read_rows(ExampleRow, path, rows)
    return read_rows(DocumentRow, path, rows)


def read_any_config(path: Path) -> RunConfig | FinetuneConfig:
    """Read the config that a run of either kind left behind, from the file or the run's directory."""
    path = path / CONFIG if path.is_dir() else path
    return parse_any(read_json(path, error=ConfigError), where=str(path))


def read_config(path: Path) -> RunConfig:
    """Read the config that a language model's run left behind."""
    config = read_any_config(path)
    if isinstance(config, FinetuneConfig):
        raise ConfigError(f"{path}: a classifier's run, not a language model's; export it, and open it with transformers")
    return config


def read_manifest(run: Path) -> dict[str, Any]:
    """Return a run's manifest.json, nothing where there is none; DataError where what we need of it has another type."""
    path = run / MANIFEST
    # os.path, which takes a name that no file can have for one that is not there; who claims the folder tells the user.
    if not os.path.isfile(path):
        return {}
    manifest = read_json(path)
    problem = ""
    if not isinstance(manifest, dict):
        problem = f"must be an object, found {type(manifest).__name__}"
    elif not isinstance(data := manifest.get("data", {}), dict):
        problem = f"data must be an object, found {type(data).__name__}"
    elif not isinstance(found := data.get("fingerprint", ""), str):
        problem = f"data.fingerprint must be text, found {type(found).__name__}"
    elif not isinstance(rows := manifest.get("earlier", []), list) or not all(isinstance(row, dict) for row in rows):
        problem = "earlier must be a list of objects"
    if problem:
        raise DataError(f"{path}: {problem}; restore the file from a copy, or move {run} aside and repeat the same command")
    return dict(manifest)


def data_fingerprint(run: Path) -> str:
    """Return the fingerprint of the data that a run began with, if it began."""
    return str(read_manifest(run).get("data", {}).get("fingerprint", ""))


def run_id(run: Path) -> str:
    """Return the id in a run's manifest; '' where it has none, as before there were ids."""
    path = run / MANIFEST
    if not path.is_file():
        return ""
    manifest = read_json(path, error=CheckpointError)
    found = manifest.get("run") if isinstance(manifest, dict) else None
    return found if isinstance(found, str) else ""


def checkpoint_step(path: Path) -> int | None:
    """Return the step that a checkpoint's folder is named after; None where it is no such name."""
    found = re.fullmatch(r"step-(\d{8,})", path.name)
    return int(found[1]) if found else None


def checkpoint_folders(run: Path) -> list[Path]:
    """Return the folders of a run's checkpoints, the newest first; links are none."""
    found = {path: checkpoint_step(path) for path in (run / CHECKPOINTS).glob("step-*")}
    steps = {path: step for path, step in found.items() if step is not None and path.is_dir() and not path.is_symlink()}
    return sorted(steps, key=steps.__getitem__, reverse=True)


def saved_step(run: Path) -> int:
    """Return the step of a run's newest checkpoint by `latest.json`, 0 where nothing was saved; CheckpointError if damaged."""
    path = run / LATEST
    if not path.is_file():
        return 0
    pointer = read_json(path, error=CheckpointError)
    step = pointer.get("step") if isinstance(pointer, dict) else None
    if type(step) is not int or step < 0:
        raise CheckpointError(f"{path}: names no step; restore the file from a copy, or move {run} aside and train again")
    return step
