"""Checkpoints that appear whole or not at all: safetensors and JSON, with a manifest of sha256 written last."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from oelm.errors import CheckpointError, OelmError
from oelm.files import (
    STAGING_PREFIX,
    Guard,
    disk_full,
    dump_json,
    fsync_dir,
    move_within,
    publish_dir,
    read_json,
    sha256_file,
    write_json,
    write_text,
)
from oelm.method.apply import adopt_record
from oelm.method.audit import check_frozen
from oelm.method.axes import compact_states
from oelm.train.optim import load_optimizer_tensors, optimizer_tensors
from oelm.train.state import SavedState

log = logging.getLogger(__name__)
MANIFEST, STATE, MODEL, OPTIMIZER = "manifest.json", "state.json", "model.safetensors", "optimizer.safetensors"
_STEP_DIR = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory that matches its manifest."""

    path: Path
    saved: SavedState


class Checkpoints:
    """The checkpoints of one run directory: `checkpoints/step-N/`, and the pointers `latest.json` and `best.json`.

    `guard` proves before every write and removal that the caller still holds the directory.
    """

    def __init__(self, run: Path, *, keep: int, guard: Guard | None = None) -> None:
        self.run, self.folder, self.keep, self.guard = run, run / "checkpoints", keep, guard

    def publish(self, saved: SavedState, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
        """Write a whole checkpoint, then the pointers, then prune; raise if a frozen tensor has moved."""
        check_frozen(model)
        target = self.folder / f"step-{saved.state.step:08d}"
        with publish_dir(target, guard=self.guard) as staging, _explained_by(self.guard):
            _save_tensors(_stored(model), staging / MODEL)
            _save_tensors(optimizer_tensors(optimizer, model), staging / OPTIMIZER)
            write_json(staging / STATE, saved.model_dump(mode="json"))
            write_text(staging / MANIFEST, _manifest_text(staging))
        self.point(saved)
        self._prune(saved)
        return target

    def point(self, saved: SavedState) -> None:
        """Write `latest.json` and `best.json` of a state; a kill may have come between a checkpoint and its pointers."""
        state, guard = saved.state, self.guard
        latest = {"step": state.step, "checkpoint": f"checkpoints/step-{state.step:08d}"}
        write_json(self.run / "latest.json", latest, guard=guard)
        best = f"checkpoints/step-{state.best_step or 0:08d}"
        # An older state may have a best that was pruned since, or none.
        if state.best_step is None or not (self.run / best).is_dir():
            if guard is not None:
                guard()
            (self.run / "best.json").unlink(missing_ok=True)
        else:
            found = {"step": state.best_step, "checkpoint": best, "value": state.best_value}
            write_json(self.run / "best.json", found, guard=guard)

    def newest(self, *, exact_step: int | None) -> Checkpoint | None:
        """Return the newest whole checkpoint, warning of each damaged one that was skipped; None if nothing was saved.

        With `exact_step`, return that one or raise CheckpointError.
        """
        if exact_step is not None:
            try:
                return open_checkpoint(self.folder / f"step-{exact_step:08d}")
            except CheckpointError as problem:
                raise CheckpointError(f"{problem}; leave --exact-step out to resume from the newest whole checkpoint") from None
        problems: list[str] = []
        for path in self._paths_newest_first():
            try:
                checkpoint = open_checkpoint(path)
            except CheckpointError as problem:
                problems.append(str(problem))
                continue
            for problem_text in problems:
                log.warning("%s; going back to step %d", problem_text, checkpoint.saved.state.step)
            return checkpoint
        if problems:
            raise CheckpointError(
                f"no checkpoint of {self.run} is whole: {problems[0]}. Move the folder aside to start again from step 0"
            )
        return None

    def _paths_newest_first(self) -> Iterator[Path]:
        found = [path for path in self.folder.glob("step-*") if _STEP_DIR.fullmatch(path.name) and _is_plain_dir(path)]
        yield from sorted(found, key=_step_of, reverse=True)

    def _prune(self, saved: SavedState) -> None:
        kept = {saved.state.step, saved.state.best_step}
        older = [path for path in self._paths_newest_first() if _step_of(path) <= saved.state.step]
        for path in older[self.keep :]:
            if _step_of(path) not in kept:
                try:
                    _remove(path, self.guard)
                except OSError as problem:
                    log.warning("%s: an old checkpoint cannot be removed (%s)", path, problem)

    def forget_after(self, step: int) -> None:
        """Remove the checkpoints of later steps, because the run resumes from `step`.

        Raises CheckpointError if one cannot be removed: the next command would resume from it.
        """
        for path in list(self._paths_newest_first()):
            if _step_of(path) > step:
                try:
                    _remove(path, self.guard)
                    fsync_dir(self.folder)
                except OSError as problem:
                    raise CheckpointError(
                        f"{path} cannot be removed ({problem}), so the run cannot go back to step {step}: "
                        "remove that folder yourself and repeat the command"
                    ) from problem

    def any(self) -> bool:
        """Whether anything was saved."""
        return next(self._paths_newest_first(), None) is not None


@contextlib.contextmanager
def _explained_by(guard: Guard | None) -> Iterator[None]:
    """On a failure, let the guard report first that the folder is gone; safetensors reports only a missing file."""
    try:
        yield
    except (SafetensorError, OelmError):
        if guard is not None:
            guard()
        raise


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _remove(path: Path, guard: Guard | None) -> None:
    """Remove a checkpoint by a rename, then delete it; leftovers are deleted at the next start."""
    retired = path.with_name(f"{STAGING_PREFIX}{path.name}-{secrets.token_hex(4)}")
    move_within(path.parent, os.rename, path.name, retired.name, guard=guard)
    try:
        shutil.rmtree(retired)
    except OSError as problem:
        # NFS keeps an open file under another name.
        log.warning("%s: could not be deleted entirely (%s); the run deletes the rest when it next starts", retired, problem)


def saved_step(run: Path) -> int:
    """Return the step in `latest.json`, 0 if nothing was saved; raise CheckpointError if it is damaged."""
    path = run / "latest.json"
    if not path.is_file():
        return 0
    pointer = read_json(path, error=CheckpointError)
    step = pointer.get("step") if isinstance(pointer, dict) else None
    if type(step) is not int or step < 0:
        raise CheckpointError(f"{path}: names no step; restore the file from a copy, or move {run} aside and train again")
    return step


def open_checkpoint(path: Path) -> Checkpoint:
    """Verify every file of a checkpoint against its manifest, and parse its state; raise CheckpointError otherwise."""
    if not _is_plain_dir(path):
        raise CheckpointError(f"{path}: no such checkpoint")
    _check_manifest(path)
    try:
        saved = SavedState.model_validate_json((path / STATE).read_bytes())
    except ValidationError as problem:
        raise CheckpointError(f"{path / STATE}: {problem.errors()[0]['msg']}") from None
    if _STEP_DIR.fullmatch(path.name) and _step_of(path) != saved.state.step:
        raise CheckpointError(f"{path}: holds step {saved.state.step}, whatever its name says: copied over another?")
    return Checkpoint(path, saved)


def _check_manifest(path: Path) -> None:
    names = (MODEL, OPTIMIZER, STATE, MANIFEST)
    for name in names:
        if not (path / name).is_file():
            raise CheckpointError(f"{path / name}: missing")
    # The manifest too must be byte for byte the text that these files give.
    actual = _manifest_text(path)
    if (path / MANIFEST).read_bytes() == actual.encode():
        return
    recorded: Any = read_json(path / MANIFEST, error=CheckpointError)
    for name, found in json.loads(actual)["files"].items():
        entry = recorded.get("files", {}).get(name) if isinstance(recorded, dict) else None
        if isinstance(entry, dict) and entry != found:
            raise CheckpointError(
                f"{path / name}: {found['bytes']:,} bytes, sha256 {found['sha256'][:12]}..., not as recorded: damaged"
            )
    raise CheckpointError(f"{path / MANIFEST}: damaged")


def load_model(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Copy a checkpoint's weights and frozen digests into a model of the same shape."""
    tensors = load_tensors(checkpoint.path / MODEL)
    load_weights(model, tensors, where=str(checkpoint.path / MODEL))
    adopt_record(model, checkpoint.saved.frozen)


def load_weights(model: nn.Module, tensors: dict[str, Tensor], *, where: str) -> None:
    """Copy tensors into a model; raise CheckpointError unless all names and shapes match."""
    own = _stored(model)
    for name in sorted(own.keys() ^ tensors.keys()):
        raise CheckpointError(f"{where}: {'lacks' if name in own else 'has an unknown'} tensor {name}: another model's")
    for name, tensor in tensors.items():
        if own[name].shape != tensor.shape:
            raise CheckpointError(f"{where}: {name} is {tuple(tensor.shape)}, the model's is {tuple(own[name].shape)}")
    # Not by copying into the state_dict: for a split projection it holds copies.
    model.load_state_dict(tensors)


def _stored(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's tensors, with the coordinates of slices in place of dense weights."""
    with compact_states():
        return dict(model.state_dict())


def load_optimizer(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore the optimizer's state from a checkpoint."""
    load_optimizer_tensors(optimizer, model, load_tensors(checkpoint.path / OPTIMIZER))


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file; raise CheckpointError if it is not one."""
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as problem:
        raise CheckpointError(f"{path}: cannot be read as safetensors ({problem})") from problem


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(_apart({name: tensor.detach().contiguous() for name, tensor in tensors.items()}), path)
    except SafetensorError as problem:
        # The library reports errno as text: 28 is no space, 27 the file-size limit, 122 a quota.
        if re.search(r"os error (28|27|122)\b", str(problem)):
            raise disk_full(path, problem) from problem
        raise


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that share memory (tied embeddings): the format does not support sharing."""
    seen: set[int] = set()
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        apart[name] = tensor.clone() if tensor.numel() and tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return apart


def _manifest_text(folder: Path) -> str:
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": sha256_file(folder / name)}
        for name in (MODEL, OPTIMIZER, STATE)
    }
    digest = hashlib.sha256(dump_json(files).encode()).hexdigest()
    return dump_json({"format": "oelm-checkpoint-1", "files": files, "sha256": digest}) + "\n"


def _is_plain_dir(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
