"""Open a finished or unfinished run for use: its config, its model at a checkpoint, its tokenizer."""

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

from oelm.config import FinetuneConfig, RunConfig
from oelm.data.tokenizer import load_tokenizer
from oelm.errors import CheckpointError
from oelm.files import read_json, sha256_file
from oelm.method.apply import fold
from oelm.models.gpt import GPT, build_gpt
from oelm.models.hub import shaped_classifier
from oelm.runs.layout import BEST, CHECKPOINTS, CONFIG, LATEST, SAVED_MANIFEST, SAVED_MODEL, TOKENIZER, checkpoint_name
from oelm.runs.records import read_any_config, read_config
from oelm.runs.status import read_status
from oelm.train.binding import check_bound, check_frozen
from oelm.train.checkpoint import Checkpoint, load_model, open_checkpoint
from oelm.train.held import freeze_as_of


@dataclass(frozen=True)
class LoadedRun:
    """A run opened at one checkpoint; every byte of it was checked, frozen weights by their digests."""

    path: Path
    config: RunConfig
    checkpoint: Checkpoint
    model: GPT

    @property
    def step(self) -> int:
        return self.checkpoint.saved.state.step

    def folded(self, *, keep_slices: bool = False) -> GPT:
        """Return a copy of the model whose learnt gains and corrections, if any, are folded into plain weights.

        Slices become plain weights, too, unless they are to be kept.
        """
        plain = copy.deepcopy(self.model)
        fold(plain, keep_slices=keep_slices)
        return plain

    def tokenizer(self) -> Tokenizer:
        """Read the run's tokenizer; raise CheckpointError when it is not the one that the weights were trained with."""
        _checked_tokenizer(self.path, self.checkpoint)
        return load_tokenizer(self.path)


@dataclass(frozen=True)
class LoadedClassifier:
    """A classifier's run opened at one checkpoint, every byte of it checked."""

    path: Path
    config: FinetuneConfig
    checkpoint: Checkpoint
    model: nn.Module

    @property
    def step(self) -> int:
        return self.checkpoint.saved.state.step

    def labels(self) -> tuple[str, ...]:
        """Return the names of the labels, in the order of the model's outputs."""
        by_number: dict[int, str] = self.model.config.id2label  # type: ignore[assignment,union-attr]
        return tuple(by_number[number] for number in sorted(by_number))

    def tokenizer_path(self) -> Path:
        """Return the run's tokenizer.json; raise CheckpointError when it is not the one the weights were trained with."""
        return _checked_tokenizer(self.path, self.checkpoint)

    def folded(self) -> nn.Module:
        """Return a copy of the model whose learnt gains and corrections, if any, are folded into plain weights."""
        plain = copy.deepcopy(self.model)
        fold(plain)
        return plain


def _checked_tokenizer(run: Path, checkpoint: Checkpoint) -> Path:
    path, expected = run / TOKENIZER, checkpoint.saved.tokenizer_sha256
    if not path.is_file() or sha256_file(path) != expected:
        raise CheckpointError(f"{path}: missing, or not the tokenizer these weights were trained with ({expected[:12]}...)")
    return path


def load_any(path: Path, *, which: str = "best") -> LoadedRun | LoadedClassifier:
    """Open a run of either kind at its 'best' or 'latest' checkpoint or at a step, or a checkpoint directory itself."""
    return _followed(path, which, _load_any)


def _load_any(folder: Path) -> LoadedRun | LoadedClassifier:
    run = folder.parent.parent
    config = read_any_config(run / CONFIG)
    if isinstance(config, RunConfig):
        return _load_run(folder)
    checkpoint = _opened(folder)
    check_bound(checkpoint, run, config)
    model = shaped_classifier(run / "model")
    freeze_as_of(model, config, step=checkpoint.saved.state.step)
    load_model(checkpoint, model)
    check_frozen(model, checkpoint, run)
    return LoadedClassifier(run, config, checkpoint, model.eval())


def load_run(path: str | Path, *, which: str = "best") -> LoadedRun:
    """Open a run directory at its 'best' or 'latest' checkpoint or at a step, or open a checkpoint directory itself.

    Of language models; a classifier is refused, for `oelm export` makes a folder of it that `transformers` opens.
    """
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(f"load_run takes the path of a run, not {path!r} ({type(path).__name__})")
    return _followed(Path(path), which, _load_run)


def _load_run(folder: Path) -> LoadedRun:
    checkpoint = _opened(folder)
    run = folder.parent.parent
    config = read_config(run / CONFIG)
    check_bound(checkpoint, run, config)
    model = build_gpt(config.model, seed=config.seed)
    freeze_as_of(model, config, step=checkpoint.saved.state.step)
    load_model(checkpoint, model)
    check_frozen(model, checkpoint, run)
    return LoadedRun(run, config, checkpoint, model.eval())


Opened = TypeVar("Opened")


def _followed(path: Path, which: str, load: Callable[[Path], Opened]) -> Opened:
    """Load the checkpoint that is meant. A run that trains may replace and prune it meanwhile: then the one meant by then."""
    while True:
        folder = find_checkpoint(path, which=which).resolve()
        try:
            return load(folder)
        except (CheckpointError, OSError):
            if find_checkpoint(path, which=which).resolve() == folder:
                raise


def _opened(folder: Path) -> Checkpoint:
    """Open a checkpoint; where it is damaged, name the others of its run, one of which may be whole."""
    try:
        return open_checkpoint(folder)
    except CheckpointError as problem:
        names = [path.name.removeprefix("step-") for path in folder.parent.glob("step-*") if path != folder]
        others = sorted(int(name) for name in names if name.isdecimal())
        steps = " or ".join(map(str, others))
        way_on = f"try --checkpoint {steps}" if others else "the run has no other; repeat its command to train on"
        raise CheckpointError(f"{problem}; {way_on}") from None


def _pointed(pointer: Path) -> str:
    try:
        content = read_json(pointer, error=CheckpointError)
    except CheckpointError as problem:
        raise CheckpointError(f"{problem}; give the step with --checkpoint") from None
    target = content.get("checkpoint") if isinstance(content, dict) else None
    if not isinstance(target, str) or not re.fullmatch(r"checkpoints/step-\d{8,}", target):
        raise CheckpointError(f"{pointer}: names no checkpoint of this run; give the step with --checkpoint")
    return target


def _own(folder: Path) -> Path:
    """Return a run's checkpoint; raise CheckpointError where a link leads to another's."""
    if folder.is_symlink():
        raise CheckpointError(f"{folder}: is a link; to open what it leads to, give that checkpoint's own path")
    return folder


def find_checkpoint(path: Path, *, which: str) -> Path:
    """Return the checkpoint directory that a path and a choice mean; raise CheckpointError when there is none."""
    if (path / SAVED_MODEL).is_file() and (path / SAVED_MANIFEST).is_file():
        return path
    if (path / SAVED_MODEL).is_file():
        raise CheckpointError(f"{path}: weights without our manifest: an exported folder, maybe, but no checkpoint of a run")
    if not path.exists():
        raise CheckpointError(
            f"{path}: no such run; `oelm train` says where its run is, those of `oelm run` are outputs/ID/BUDGET/VARIANT/seed-N"
        )
    if not (path / CONFIG).is_file():
        raise CheckpointError(f"{path}: neither a run directory nor a checkpoint; runs are where `oelm train` said")
    if not isinstance(which, str) or len(which) > 12:
        raise CheckpointError(f"checkpoint {which!r:.40}: say 'best', 'latest' or the number of a step, as text")
    if which.isascii() and which.isdecimal():
        folder = path / checkpoint_name(int(which))
        if not folder.is_dir():
            there = ", ".join(
                sorted(p.name.removeprefix("step-").lstrip("0") or "0" for p in path.glob(f"{CHECKPOINTS}/step-*"))
            )
            raise CheckpointError(f"{path}: no checkpoint of step {which}; there are: {there or 'none'}")
        return _own(folder)
    if which not in ("best", "latest"):
        raise CheckpointError(f"checkpoint {which!r}: say 'best', 'latest' or the number of a step")
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
