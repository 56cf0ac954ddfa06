"""Load a run, finished or not: its config, its model at a checkpoint, its tokenizer."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer
from torch import nn

from oelm.config import FinetuneConfig, RunConfig, TrainConfig
from oelm.data.tokenizer import load_tokenizer
from oelm.errors import CheckpointError
from oelm.files import read_json, sha256_file
from oelm.method.apply import fold, freeze_as_of
from oelm.models.gpt import GPT, build_gpt
from oelm.models.hub import shaped_classifier
from oelm.runs.layout import (
    BEST,
    CHECKPOINTS,
    CONFIG,
    LATEST,
    SAVED_MANIFEST,
    SAVED_MODEL,
    TOKENIZER,
    checkpoint_name,
)
from oelm.runs.records import read_any_config, read_config
from oelm.runs.status import read_status
from oelm.train.checkpoint import Checkpoint, check_bound, check_frozen_saved, load_model, open_checkpoint


@dataclass(frozen=True)
class _Loaded:
    path: Path
    config: TrainConfig
    checkpoint: Checkpoint
    model: nn.Module

    @property
    def step(self) -> int:
        return self.checkpoint.saved.state.step

    def tokenizer_path(self) -> Path:
        """Return the run's tokenizer.json; raise CheckpointError if the weights were trained with another."""
        path, expected = self.path / TOKENIZER, self.checkpoint.saved.tokenizer_sha256
        if not path.is_file() or sha256_file(path) != expected:
            raise CheckpointError(f"{path}: missing, or not the tokenizer these weights were trained with ({expected[:12]}...)")
        return path


@dataclass(frozen=True)
class LoadedRun(_Loaded):
    """A language model's run at one checkpoint, verified byte by byte."""

    config: RunConfig
    model: GPT

    def folded(self, *, keep_slices: bool = False) -> GPT:
        """Return a copy of the model with learnt gains and corrections folded into plain weights, slices too by default."""
        plain = copy.deepcopy(self.model)
        fold(plain, keep_slices=keep_slices)
        return plain

    def tokenizer(self) -> Tokenizer:
        """Return the run's tokenizer; raise CheckpointError if the weights were trained with another."""
        return load_tokenizer(self.tokenizer_path().parent)


@dataclass(frozen=True)
class LoadedClassifier(_Loaded):
    """A classifier's run at one checkpoint, verified byte by byte."""

    config: FinetuneConfig

    def labels(self) -> tuple[str, ...]:
        """Return the names of the labels, in the order of the model's outputs."""
        by_number: dict[int, str] = self.model.config.id2label  # type: ignore[assignment,union-attr]
        return tuple(by_number[number] for number in sorted(by_number))

    def folded(self) -> nn.Module:
        """Return a copy of the model with learnt gains and corrections folded into plain weights."""
        plain = copy.deepcopy(self.model)
        fold(plain)
        return plain


def load_any(path: Path, *, which: str = "best") -> LoadedRun | LoadedClassifier:
    """Load a run of either kind at its 'best' or 'latest' checkpoint or at a step, or a checkpoint directory itself."""
    return _followed(path, which, _load)


def load_run(path: str | Path, *, which: str = "best") -> LoadedRun:
    """Load a language model's run at its 'best' or 'latest' checkpoint or at a step, or a checkpoint directory itself.

    A classifier is refused; export it with `oelm export` and load that with `transformers`.
    """
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(f"load_run takes the path of a run, not {path!r} ({type(path).__name__})")
    return _followed(Path(path), which, _load_gpt)


Opened = TypeVar("Opened")


def _followed(path: Path, which: str, load: Callable[[Path], Opened]) -> Opened:
    """Load the chosen checkpoint; again if a running training replaced and pruned it meanwhile."""
    while True:
        folder = find_checkpoint(path, which=which).resolve()
        try:
            return load(folder)
        except (CheckpointError, OSError):
            if find_checkpoint(path, which=which).resolve() == folder:
                raise


def _load_gpt(folder: Path) -> LoadedRun:
    # Refuses a classifier before its weights are read.
    read_config(folder.parent.parent / CONFIG)
    loaded = _load(folder)
    assert isinstance(loaded, LoadedRun)
    return loaded


def _load(folder: Path) -> LoadedRun | LoadedClassifier:
    run = folder.parent.parent
    config, checkpoint = read_any_config(run / CONFIG), _opened(folder)
    check_bound(checkpoint, run, config)
    model: nn.Module
    if isinstance(config, RunConfig):
        model = build_gpt(config.model, seed=config.seed)
    else:
        model = shaped_classifier(run / "model")
    freeze_as_of(model, config.method, seed=config.seed, steps=config.planned_steps, step=checkpoint.saved.state.step)
    load_model(checkpoint, model)
    check_frozen_saved(model, checkpoint, run)
    if isinstance(config, RunConfig):
        assert isinstance(model, GPT)
        return LoadedRun(run, config, checkpoint, model.eval())
    return LoadedClassifier(run, config, checkpoint, model.eval())


def _opened(folder: Path) -> Checkpoint:
    """Open a checkpoint; if it is damaged, the error names the others of its run."""
    try:
        return open_checkpoint(folder)
    except CheckpointError as problem:
        names = [path.name.removeprefix("step-") for path in folder.parent.glob("step-*") if path != folder]
        others = sorted(int(name) for name in names if name.isdecimal())
        steps = " or ".join(map(str, others))
        way_on = f"try --checkpoint {steps}" if others else "the run has no other; repeat its command to continue training"
        raise CheckpointError(f"{problem}; {way_on}") from None


def _pointed(pointer: Path) -> str:
    try:
        content = read_json(pointer, error=CheckpointError)
    except CheckpointError as problem:
        raise CheckpointError(f"{problem}; give the step with --checkpoint") from None
    target = content.get("checkpoint") if isinstance(content, dict) else None
    if not isinstance(target, str) or not re.fullmatch(r"checkpoints/step-\d{8,}", target):
        raise CheckpointError(f"{pointer}: does not name a checkpoint of this run; give the step with --checkpoint")
    return target


def _own(folder: Path) -> Path:
    """Return a run's checkpoint folder; raise CheckpointError if it is a link."""
    if folder.is_symlink():
        raise CheckpointError(f"{folder}: is a link; give the path of its target instead")
    return folder


def find_checkpoint(path: Path, *, which: str) -> Path:
    """Return the checkpoint directory that a path and a choice select; raise CheckpointError if there is none."""
    if (path / SAVED_MODEL).is_file() and (path / SAVED_MANIFEST).is_file():
        return path
    if (path / SAVED_MODEL).is_file():
        raise CheckpointError(f"{path}: has weights but no manifest: perhaps an exported folder, not a checkpoint of a run")
    if not path.exists():
        raise CheckpointError(
            f"{path}: no such run; `oelm train` prints the folder of its run, `oelm run` uses outputs/ID/BUDGET/VARIANT/seed-N"
        )
    if not (path / CONFIG).is_file():
        raise CheckpointError(f"{path}: neither a run directory nor a checkpoint; `oelm train` prints the folder of its run")
    if not isinstance(which, str) or len(which) > 12:
        raise CheckpointError(f"checkpoint {which!r:.40}: give 'best', 'latest' or the number of a step, as text")
    if which.isascii() and which.isdecimal():
        folder = path / checkpoint_name(int(which))
        if not folder.is_dir():
            there = ", ".join(
                sorted(p.name.removeprefix("step-").lstrip("0") or "0" for p in path.glob(f"{CHECKPOINTS}/step-*"))
            )
            raise CheckpointError(f"{path}: no checkpoint of step {which}; it has: {there or 'none'}")
        return _own(folder)
    if which not in ("best", "latest"):
        raise CheckpointError(f"checkpoint {which!r}: give 'best', 'latest' or the number of a step")
    # A run stopped before its first evaluation has a latest checkpoint and no best.
    for pointer in (path / (BEST if which == "best" else LATEST), path / LATEST):
        if pointer.is_file():
            return _own(path / _pointed(pointer))
    if (status := read_status(path)) is not None and status.status == "done":
        raise CheckpointError(
            f"{path}: the run is done, and its weights were not kept here (a record, or cleaned); train it again "
            f"(oelm train or finetune --config {path / CONFIG} --out FOLDER)"
        )
    raise CheckpointError(f"{path}: this run has not saved a checkpoint yet; let it reach its first save or evaluation")
