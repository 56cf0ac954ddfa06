"""The names of a run's files and folders. No other module spells them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

EvaluatedSplit = Literal["val", "test"]

CONFIG = "config.json"
MANIFEST = "manifest.json"
AUDIT = "audit.json"
STATUS = "status.json"
METRICS = "metrics.jsonl"
TIMING = "timing_stats.json"
ATTENTION = "attention.json"
# A run's answers on each split, one row an example or a document.
PREDICTIONS: dict[EvaluatedSplit, str] = {"val": "predictions.jsonl", "test": "test_predictions.jsonl"}
TOKENIZER = "tokenizer.json"
# Of a classifier: the config of its architecture, as transformers writes it.
MODEL_FOLDER = "model"
MODEL_CONFIG = f"{MODEL_FOLDER}/config.json"
LOG = "training.log"
# What the process of a run printed, where a queue started it.
CONSOLE = "console.log"

LOCK = ".lock"
# Beside the lock and never in it: where the lock is a file that must be there, its content is the lock's own.
HOLDER = ".holder"
# Where a launcher keeps a lock for each run that it starts and waits for.
_LAUNCHES = ".launch"
# Where what was submitted to SLURM is written down.
SUBMISSIONS = ".slurm"

LATEST, BEST = "latest.json", "best.json"
POINTERS = (BEST, LATEST)
CHECKPOINTS = "checkpoints"
# The files of one checkpoint.
SAVED_MANIFEST, SAVED_STATE, SAVED_MODEL, SAVED_OPTIMIZER = (
    "manifest.json",
    "state.json",
    "model.safetensors",
    "optimizer.safetensors",
)
CHECKPOINT_FILES = (SAVED_MANIFEST, SAVED_MODEL, SAVED_OPTIMIZER, SAVED_STATE)

# What a run leaves beside its weights.
RECORDS = tuple(
    sorted((ATTENTION, AUDIT, CONFIG, MANIFEST, METRICS, MODEL_CONFIG, *PREDICTIONS.values(), STATUS, TIMING, TOKENIZER, LOG))
)
# Of the runs of one experiment and budget: which of the points tried was the best.
SWEEP = "sweep.json"
# Of a folder of runs: the best n-gram model of each text that they were trained on.
COUNTERS = "counters.json"


def checkpoint_name(step: int) -> str:
    """Return the path of a step's checkpoint below its run."""
    return f"{CHECKPOINTS}/step-{step:08d}"


def heads_picture(step: int) -> str:
    """Return the name, without its kind, of the picture of the heads at a step."""
    return f"heads-step-{step}"


def launch_lock_path(root: Path, run: Path) -> Path:
    """Return the lock that a launcher holds from before it starts a run until after its end."""
    return root / _LAUNCHES / f"{'--'.join(run.relative_to(root).parts)}.lock"
