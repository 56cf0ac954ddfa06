"""What the tests of fine-tuning share: small tables, small configs, and reading a run back."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from oelm.config import FinetuneConfig, parse_as, with_overrides
from oelm.data.tokens import no_progress
from oelm.files import sha256_file
from oelm.process import StopFlag
from oelm.runs.metrics import read_metrics
from oelm.runs.rundir import RunDir
from oelm.train.classify import ClassifierTask, prepare_task_examples
from oelm.train.device import Compute
from oelm.train.run import Result, train
from oelm.train.session import Session, build_session
from oelm.train.watch import Silence, Watch
from tests.models.test_hub import BAD, GOOD, NEUTRAL

NUM_TRAIN, NUM_DEV, BATCH, MICRO = 95, 70, 6, 2
CPU = Compute("cpu", "float32", "test")
Rows = list[tuple[str, str, str]]


def made_rows(count: int, *, seed: int) -> Rows:
    """Return sentences of 3 to 10 words that say good or bad with one word, a second text, and the label."""
    chance, made = random.Random(seed), []
    for number in range(count):
        label = ("neg", "pos")[number % 2]
        words = chance.choices(NEUTRAL, k=chance.randint(2, 9))
        words.insert(chance.randint(0, len(words)), chance.choice(GOOD if label == "pos" else BAD))
        made.append((" ".join(words), " ".join(chance.choices(NEUTRAL, k=chance.randint(1, 3))), label))
    return made


def write_table(path: Path, rows: Rows) -> Path:
    path.write_text("\n".join(["sentence\tsecond\tlabel", *("\t".join(row) for row in rows)]) + "\n")
    return path


def write_tables(folder: Path) -> Path:
    """Write train.tsv and dev.tsv, which share no sentence; return the folder."""
    folder.mkdir(exist_ok=True)
    train_rows = made_rows(NUM_TRAIN, seed=1)
    seen = {row[0] for row in train_rows}
    dev_rows = [row for row in made_rows(3 * NUM_DEV, seed=2) if row[0] not in seen]
    write_table(folder / "train.tsv", train_rows)
    write_table(folder / "dev.tsv", dev_rows[:NUM_DEV])
    return folder


def tiny_finetune(model: Path, tables: Path, **overrides: Any) -> FinetuneConfig:
    """Return the config of a run of seconds; dots in keys are written '__'."""
    base: dict[str, Any] = {
        "model": {"source": str(model), "num_labels": 2},
        "examples": {
            "task": str(tables / "train.tsv"),
            "dev": str(tables / "dev.tsv"),
            "columns": "text=sentence,label=label",
            "max_length": 16,
        },
        "method": "oelm_freeze",
        "optim": {"lr": 3e-3},
        "schedule": {"warmup_steps": 2},
        "steps": 12,
        "eval_every": 5,
        "save_every": 4,
        "batch_size": BATCH,
        "micro_batch_size": MICRO,
    }
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return parse_as(FinetuneConfig, with_overrides(base, dotted), where="test")


def finetune_here(config: FinetuneConfig, out: Path, *, stop: StopFlag | None = None, watch: Watch | None = None) -> Result:
    return train(config, out, stop=stop or StopFlag(), watch=watch or Silence())


def task_of(config: FinetuneConfig) -> ClassifierTask:
    source = config.model.source
    folder = Path(source) if source is not None else None
    examples = prepare_task_examples(config.examples, folder, vocab_size=config.model.vocab_size, progress=no_progress)
    return ClassifierTask(examples, config, CPU, folder=folder)


def session_of(config: FinetuneConfig, out: Path) -> Session:
    """Return a session at step 0."""
    with RunDir(out) as folder:
        return build_session(config, folder, task_of(config), CPU, stop=StopFlag(), watch=Silence())


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def evaluations(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run / "metrics.jsonl") if "val_loss" in row]


def table_rows(path: Path) -> Rows:
    return [(a, b, c) for a, b, c in (line.split("\t") for line in path.read_text().splitlines()[1:])]


def evidence(run: Path) -> dict[str, Any]:
    """Return what must be equal between a disturbed run and an undisturbed one: everything but clocks and speeds."""
    rows = read_metrics(run / "metrics.jsonl")
    latest = run / read(run / "latest.json")["checkpoint"]
    return {
        "losses": [(row["step"], row["loss"].hex(), row["lr"].hex(), row["grad_norm"].hex()) for row in rows if "loss" in row],
        "evaluations": [(row["step"], row["val_loss"].hex(), row["val_accuracy"].hex()) for row in rows if "val_loss" in row],
        "model": sha256_file(latest / "model.safetensors"),
        "optimizer": sha256_file(latest / "optimizer.safetensors"),
        "state": read(latest / "state.json")["state"],
        "predictions": sha256_file(run / "predictions.jsonl"),
        "best": read(run / "best.json"),
    }


# Sums of at most 48 float32 products in another order, through 2 layers, on logits below 10: 48 * 2**-24 * 2 * 10 = 6e-5.
NATS_TOLERANCE = 6e-5
