"""What a finished run leaves behind, as types, read without torch; and its figures computed once more from its metrics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from oelm.errors import DataError
from oelm.files import MAX_JSON_BYTES, read_json, read_plain
from oelm.strict import Strict
from oelm.train.metrics import read_jsonl, read_metrics
from oelm.train.status import Status
from oelm.train.timing import PHASES, step_statistics

Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
Joules = Annotated[float, Field(ge=0)]
_TESTED = ("test_step", "test_loss", "test_ppl", "test_bits_per_byte", "test_accuracy")
_PPLS = ("test_ppl", "bigram_ppl", "test_bigram_ppl")


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
    earlier: list[dict[str, Any]]
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


RESTORE = "restore the record from a copy, or repeat the run"
TIMING, METRICS = "timing_stats.json", "metrics.jsonl"
Split = Literal["val", "test"]
# A run's answers on each split, one row an example or a document.
PREDICTIONS: dict[Split, str] = {"val": "predictions.jsonl", "test": "test_predictions.jsonl"}


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
    ngram: dict[Split, list[float]] = Field(default_factory=dict)
    ngram_tokens: Count | None = None

    @property
    def best(self) -> float:
        """The headline: PPL or accuracy, at its best on validation."""
        value = self.best_ppl if self.best_ppl is not None else self.best_accuracy
        assert value is not None
        return value

    @property
    def test(self) -> float | None:
        """The same model's PPL or accuracy on the test split, where it was measured."""
        return self.test_ppl if self.best_ppl is not None else self.test_accuracy

    def on(self, split: Split) -> float | None:
        """Return the headline on a split."""
        return self.best if split == "val" else self.test

    def bigram_on(self, split: Split) -> float | None:
        """Return the bigram model's PPL on a split."""
        return self.bigram_ppl if split == "val" else self.test_bigram_ppl

    def majority_on(self, split: Split) -> float | None:
        """Return the share of the largest class of a split."""
        return self.majority_accuracy if split == "val" else self.test_majority_accuracy

    def five_gram_on(self, split: Split) -> float | None:
        """Return the 5-gram model's PPL on a split; None for runs made before it was measured."""
        return self.ngram[split][4] if split in self.ngram else None


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


@dataclass(frozen=True)
class RunRecord:
    """Everything a finished run wrote, each file in its type; `config` stays plain data, for it names a method."""

    path: Path
    config: dict[str, Any]
    manifest: Manifest
    audit: AuditRecord
    status: Status
    figures: Figures
    steps: list[StepRow]
    evaluations: list[EvaluationRow]
    predictions: Predictions
    attention: AttentionRecord | None
    test_predictions: Predictions = field(default_factory=list)


Parsed = TypeVar("Parsed", bound=BaseModel)


def read_as(kind: type[Parsed], path: Path) -> Parsed:
    """Read a JSON file into its type; DataError names the file and what is wrong in it."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise DataError(f"{path}: {path.stat().st_size:,} bytes is too large for a JSON file of ours; it is not one")
        return kind.model_validate_json(read_plain(path))
    except OSError as problem:
        raise DataError(f"{path}: cannot be read ({problem})") from None
    except ValidationError as problem:
        raise DataError(f"{path}: {_first(problem)}") from None


def read_rows(kind: type[Parsed], path: Path, rows: list[dict[str, Any]]) -> list[Parsed]:
    """Return rows of a .jsonl file in their type; DataError names the file and the row."""
    parsed: list[Parsed] = []
    for number, row in enumerate(rows, start=1):
        try:
            parsed.append(kind.model_validate(row))
        except ValidationError as problem:
            raise DataError(f"{path}: row {number}: {_first(problem)}") from None
    return parsed


def _first(problem: ValidationError) -> str:
    error = problem.errors()[0]
    return f"{'.'.join(str(part) for part in error['loc']) or 'content'}: {error['msg']}"


def read_record(run: Path) -> RunRecord:
    """Read a finished run's files; DataError names the first that is missing, damaged or of another type."""
    config = read_json(run / "config.json")
    if not isinstance(config, dict):
        raise DataError(f"{run / 'config.json'}: must be an object, found {type(config).__name__}")
    metrics = read_metrics(run / "metrics.jsonl")
    looked = run / "attention.json"
    return RunRecord(
        path=run,
        config=config,
        manifest=read_as(Manifest, run / "manifest.json"),
        audit=read_as(AuditRecord, run / "audit.json"),
        status=read_as(Status, run / "status.json"),
        figures=read_as(Figures, run / "timing_stats.json"),
        steps=read_rows(StepRow, run / "metrics.jsonl", [row for row in metrics if "loss" in row]),
        evaluations=read_rows(EvaluationRow, run / "metrics.jsonl", [row for row in metrics if "loss" not in row]),
        predictions=_read_predictions(run / PREDICTIONS["val"]),
        attention=read_as(AttentionRecord, looked) if looked.is_file() else None,
        test_predictions=_read_predictions(run / PREDICTIONS["test"]),
    )


def _read_predictions(path: Path) -> Predictions:
    rows = read_jsonl(path)
    if rows and "example" in rows[0]:
        return read_rows(ExampleRow, path, rows)
    return read_rows(DocumentRow, path, rows)


def figure_problems(record: RunRecord) -> list[str]:
    """Compute a run's figures once more from its metrics and predictions, and tell which are not what stands there."""
    steps, evaluations, figures = record.steps, record.evaluations, record.figures
    if not steps or not evaluations:
        return ["metrics.jsonl holds no steps or no evaluations"]
    expected: dict[str, Any] = {
        "final_loss": steps[-1].loss,
        "tokens": round(sum(row.tokens_per_s * row.step_s for row in steps)),
        "step_s": StepTimes.model_validate(
            step_statistics([row.step_s for row in steps], warmup_steps=int(record.config.get("timing_warmup_steps", 0)))
        ),
    }
    expected |= _recomputed(figures, evaluations)
    problems = [
        f"{name} is {getattr(figures, name)}, its metrics give {value}"
        for name, value in expected.items()
        if not _agrees(getattr(figures, name), value)
    ]
    return problems + tested_problems(figures) + _gaps(record) + _sums(record)


def read_judged(run: Path, *, steps: object) -> tuple[Figures, list[EvaluationRow]]:
    """Read a finished run's figures and evaluations; DataError where one is missing, damaged, or at odds with another file."""
    figures = read_as(Figures, run / TIMING)
    if (figures.best_ppl is None) == (figures.best_accuracy is None):
        raise DataError(f"{run / TIMING}: must have one of best_ppl and best_accuracy")
    if "total" not in figures.wall_s:
        raise DataError(f"{run / TIMING}: wall_s has no total")
    evaluations = _read_evaluations(run / METRICS)
    if problems := judged_problems(run, figures, evaluations, steps=steps):
        raise DataError(f"{run}/{problems[0]}; {RESTORE}")
    return figures, evaluations


def _read_evaluations(path: Path) -> list[EvaluationRow]:
    try:
        rows = [row for row in read_metrics(path, only='"val_loss"') if "val_loss" in row]
    except OSError as problem:
        raise DataError(f"{path}: cannot be read ({problem})") from None
    evaluations = read_rows(EvaluationRow, path, rows)
    if max((row.step for row in evaluations), default=0) < 1:
        raise DataError(f"{path}: holds no evaluation")
    return evaluations


def judged_problems(run: Path, figures: Figures, evaluations: list[EvaluationRow], *, steps: object) -> list[str]:
    """Compute every figure that a verdict may rest on once more, from the evaluations and from the answers that are stored.

    Return what disagrees: the file, what it has, and what the others give. `steps` is how many the config has, if it says so.
    """
    problems = _curve_problems(evaluations, steps)
    if problems:
        return problems
    stored = f"{TIMING}: "
    for name, value in _recomputed(figures, evaluations).items():
        if not _agrees(getattr(figures, name), value):
            problems.append(f"{stored}{name} is {getattr(figures, name)}, {METRICS} gives {value}")
    ranks = {row.step: row.val_loss if figures.best_ppl is not None else -(row.val_accuracy or 0.0) for row in evaluations}
    best = min(ranks, key=ranks.__getitem__)
    if ranks.get(figures.best_step) != ranks[best]:
        problems.append(f"{stored}best_step is {figures.best_step}, {METRICS} gives {best}")
    problems += [stored + problem for problem in tested_problems(figures)]
    for split in PREDICTIONS:
        problems += _answer_problems(run, figures, split)
    return problems


def _curve_problems(evaluations: list[EvaluationRow], steps: object) -> list[str]:
    """Tell what is wrong with the evaluations themselves: each step once, in order, to the last one, losses that can be."""
    for before, row in pairwise(evaluations):
        if row.step <= before.step:
            told = "is evaluated twice" if row.step == before.step else f"is evaluated after step {before.step}"
            return [f"{METRICS}: step {row.step} {told}"]
    if isinstance(steps, int) and evaluations[-1].step != steps:
        return [f"{METRICS}: the last evaluation is of step {evaluations[-1].step}, config.json has {steps} steps"]
    for row in evaluations:
        if row.val_loss < 0:
            return [f"{METRICS}: val_loss is {row.val_loss} at step {row.step}: a cross entropy is never below 0"]
        if row.val_ppl is not None and not _agrees(row.val_ppl, _perplexity(row.val_loss)):
            return [f"{METRICS}: val_ppl is {row.val_ppl} at step {row.step}, its val_loss gives {_perplexity(row.val_loss)}"]
        if row.val_accuracy is not None and not 0 <= row.val_accuracy <= 1:
            return [f"{METRICS}: val_accuracy is {row.val_accuracy} at step {row.step}: no share of examples"]
    return []


def _recomputed(figures: Figures, evaluations: list[EvaluationRow]) -> dict[str, float | None]:
    """Return the figures that follow from the evaluations of a run of this kind."""
    last, best = evaluations[-1], min(row.val_loss for row in evaluations)
    found: dict[str, float | None] = {"final_val_loss": last.val_loss, "best_val_loss": best}
    if figures.best_ppl is not None:
        found |= {"final_ppl": _perplexity(last.val_loss), "best_ppl": _perplexity(best)}
        found |= {"final_bits_per_byte": last.bits_per_byte}
    if figures.best_accuracy is not None:
        accuracies = [row.val_accuracy for row in evaluations if row.val_accuracy is not None]
        found |= {"final_accuracy": last.val_accuracy, "best_accuracy": max(accuracies, default=None)}
    return found


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


def _agrees(stored: object, value: object) -> bool:
    """Whether two figures are the same but for the last bits, which another machine's exp and order of sums may differ in."""
    if isinstance(stored, float | int) and isinstance(value, float | int):
        return math.isclose(stored, value, rel_tol=1e-9)
    return stored == value


def _answer_problems(run: Path, figures: Figures, split: Split) -> list[str]:
    """Tell which figures the stored answers do not give: of the final model on validation, of the best on test."""
    path = run / PREDICTIONS[split]
    if not path.is_file():
        return []
    rows = _read_predictions(path)
    on_test = ("test_loss", "test_accuracy", "test_majority_accuracy")
    names = ("final_val_loss", "final_accuracy", "majority_accuracy") if split == "val" else on_test
    if not rows or not _weight(rows):
        return [f"{path.name}: holds no whole answer"]
    found: dict[str, float] = {names[0]: sum(row.nats for row in rows) / _weight(rows)}
    answers = [row for row in rows if isinstance(row, ExampleRow)]
    if answers and figures.best_accuracy is not None:
        found[names[1]] = sum(row.label == row.predicted for row in answers) / len(answers)
        # Records of before it was measured have none.
        if figures.majority_on(split) is not None:
            found[names[2]] = majority_share([row.label for row in answers])
    return [
        f"{TIMING}: {name} is {getattr(figures, name)}, {path.name} gives {value}"
        for name, value in found.items()
        if not _agrees(getattr(figures, name), value)
    ]


def tested_problems(figures: Figures) -> list[str]:
    """Tell which figures of the test split, and of n-gram models, cannot be: half of them there, or at odds."""
    named = ("test_step", "test_loss", *(("test_ppl", "test_bits_per_byte") if figures.best_ppl is not None else ()))
    named += ("test_accuracy",) if figures.best_accuracy is not None else ()
    there = [name for name in _TESTED if getattr(figures, name) is not None]
    problems = [f"{name} is {getattr(figures, name)}: no perplexity" for name in _PPLS if (getattr(figures, name) or 1) < 1]
    problems += [f"ngram: {values} on {split}: no perplexities of order 1 to 5" for split, values in _odd_ngrams(figures)]
    if not there:
        return problems
    if set(there) != set(named):
        return [*problems, f"of the test split there are {', '.join(there)}; expected {', '.join(named)}"]
    if figures.test_step != figures.best_step:
        problems.append(f"test_step is {figures.test_step}, the best on validation was {figures.best_step}")
    if figures.test_ppl is not None and not _agrees(figures.test_ppl, _perplexity(figures.test_loss or 0.0)):
        problems.append(f"test_ppl is {figures.test_ppl}, its test_loss {figures.test_loss} gives another")
    if figures.test_accuracy is not None and not 0 <= figures.test_accuracy <= 1:
        problems.append(f"test_accuracy is {figures.test_accuracy}: no share of examples")
    return problems


def _odd_ngrams(figures: Figures) -> list[tuple[Split, list[float]]]:
    return [(split, values) for split, values in figures.ngram.items() if len(values) != 5 or min(values) < 1]


def _gaps(record: RunRecord) -> list[str]:
    """Tell steps that are missing or stand twice."""
    numbers = [row.step for row in record.steps]
    return [] if numbers == list(range(1, len(numbers) + 1)) else ["metrics.jsonl has steps missing or twice"]


def _sums(record: RunRecord) -> list[str]:
    """Tell where parts do not make up their whole."""
    problems = []
    wall = record.figures.wall_s
    # Sums of a few hundred numbers in double precision, in another order.
    if not math.isclose(sum(wall[phase] for phase in PHASES), wall["total"], rel_tol=1e-9):
        problems.append("wall_s: the phases do not add up to the total")
    if record.predictions and not _give(record.predictions, record.evaluations[-1].val_loss):
        problems.append("predictions.jsonl does not give the final validation loss")
    tested = record.figures.test_loss
    if (tested is None) != (not record.test_predictions) or (tested is not None and not _give(record.test_predictions, tested)):
        problems.append("test_predictions.jsonl does not give the test loss")
    if record.audit.trainable + record.audit.frozen != record.audit.total:
        problems.append("audit.json: trainable and frozen do not add up to the total")
    return problems


def _give(rows: Predictions, loss: float) -> bool:
    return math.isclose(sum(row.nats for row in rows) / _weight(rows), loss, rel_tol=1e-9)


def _weight(rows: Predictions) -> int:
    """Return by what the sum of the answers' losses is divided: tokens, or examples."""
    return sum(row.tokens if isinstance(row, DocumentRow) else 1 for row in rows)
