"""Checkpoints that appear whole or not at all, what they hold, and what binds them to their run."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import platform
import re
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from oelm.config import TrainConfig
from oelm.errors import CheckpointError, OelmError
from oelm.files import (
    STAGING_PREFIX,
    Guard,
    Strict,
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
from oelm.method.audit import audit, check_frozen
from oelm.method.layers import compact_states
from oelm.runs.layout import (
    AUDIT,
    BEST,
    CHECKPOINTS,
    CONFIG,
    LATEST,
    MANIFEST,
    SAVED_MANIFEST,
    SAVED_MODEL,
    SAVED_OPTIMIZER,
    SAVED_STATE,
    checkpoint_name,
)
from oelm.runs.records import checkpoint_folders, checkpoint_step, run_id
from oelm.train.device import Compute
from oelm.train.optim import load_optimizer_tensors, optimizer_tensors


class TrainState(Strict):
    """The position of a run. Batch order and dropout noise are functions of (seed, step), so they are not saved."""

    step: int = Field(default=0, ge=0)
    tokens: int = Field(default=0, ge=0)
    evaluated_step: int = Field(default=0, ge=0)
    best_value: float | None = None
    best_step: int | None = None
    loss_scale: dict[str, int | float] = {}

    def advanced(self, *, tokens: int) -> TrainState:
        return self.model_copy(update={"step": self.step + 1, "tokens": self.tokens + tokens})

    def evaluated(self, value: float) -> TrainState:
        """Return the state after an evaluation at this step; less is better, and the first of equals is the best."""
        update: dict[str, Any] = {"evaluated_step": self.step}
        if self.best_value is None or value < self.best_value:
            update |= {"best_value": value, "best_step": self.step}
        return self.model_copy(update=update)

    @property
    def is_best_here(self) -> bool:
        """Whether the best evaluation so far is that of this step."""
        return self.best_step == self.step


class SavedState(Strict):
    """`state.json` of a checkpoint: the position, and what it was computed with."""

    state: TrainState
    clock: dict[str, float]
    frozen: dict[str, str]
    data_fingerprint: str
    tokenizer_sha256: str
    environment: dict[str, str]
    # Empty in old checkpoints.
    software: dict[str, str] = {}
    run: str = ""
    config: dict[str, Any] = {}
    energy_j: dict[str, float] = {}


def environment(compute: Compute, *, processes: int = 1) -> dict[str, str]:
    """Return what decides the low bits of a computation; a change is reported on resume."""
    return {
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name() if compute.device == "cuda" else compute.device,
        "precision": compute.precision,
        "threads": str(torch.get_num_threads()),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu": processor(),
        "machine": platform.machine(),
        "processes": str(processes),
    }


@functools.cache
def processor() -> str:
    """Return maker, family, model and stepping of the CPU: two CPUs of one capability may round differently."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except (OSError, UnicodeDecodeError):
        return platform.processor() or "unknown"
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    parts = [fields.get(name, "") for name in ("vendor_id", "cpu family", "model", "stepping")]
    return " ".join(filter(None, parts)) or platform.processor() or "unknown"


def software() -> dict[str, str]:
    """Return the versions of the code; a change is reported on resume, as it may change more than low bits."""
    return {"oelm": version("oelm"), "source": source_revision() or "unknown", "python": platform.python_version()}


@functools.cache
def source_revision() -> str | None:
    """Return the git commit of the package's own checkout, marked when files differ from it; None outside of one."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        commit = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        dirty = subprocess.run(
            ["git", "-C", str(root), "status", "--porcelain", "--", "src"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if commit.returncode:
        return None
    return commit.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")


log = logging.getLogger(__name__)


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
        self.run, self.folder, self.keep, self.guard = run, run / CHECKPOINTS, keep, guard

    def publish(self, saved: SavedState, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
        """Write a whole checkpoint, then the pointers, then prune; raise if a frozen tensor has moved."""
        check_frozen(model)
        target = self.run / checkpoint_name(saved.state.step)
        with publish_dir(target, guard=self.guard) as staging, _explained_by(self.guard):
            _save_tensors(_stored(model), staging / SAVED_MODEL)
            _save_tensors(optimizer_tensors(optimizer, model), staging / SAVED_OPTIMIZER)
            write_json(staging / SAVED_STATE, saved.model_dump(mode="json"))
            write_text(staging / SAVED_MANIFEST, _manifest_text(staging))
        self.point(saved)
        self._prune(saved)
        return target

    def point(self, saved: SavedState) -> None:
        """Write `latest.json` and `best.json` of a state; a kill may have come between a checkpoint and its pointers."""
        state, guard = saved.state, self.guard
        latest = {"step": state.step, "checkpoint": checkpoint_name(state.step)}
        write_json(self.run / LATEST, latest, guard=guard)
        best = checkpoint_name(state.best_step or 0)
        # Going back to an older state can leave it with a best that was pruned since, or with none yet.
        if state.best_step is None or not (self.run / best).is_dir():
            if guard is not None:
                guard()
            (self.run / BEST).unlink(missing_ok=True)
        else:
            found = {"step": state.best_step, "checkpoint": best, "value": state.best_value}
            write_json(self.run / BEST, found, guard=guard)

    def newest(self, *, exact_step: int | None) -> Checkpoint | None:
        """Return the newest whole checkpoint, warning of each damaged one that was skipped; None if nothing was saved.

        With `exact_step`, return that one or raise CheckpointError.
        """
        if exact_step is not None:
            try:
                return open_checkpoint(self.run / checkpoint_name(exact_step))
            except CheckpointError as problem:
                raise CheckpointError(f"{problem}; leave --exact-step out to resume from the newest whole checkpoint") from None
        problems: list[str] = []
        for path in checkpoint_folders(self.run):
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

    def _prune(self, saved: SavedState) -> None:
        kept = {saved.state.step, saved.state.best_step}
        older = [path for path in checkpoint_folders(self.run) if (checkpoint_step(path) or 0) <= saved.state.step]
        for path in older[self.keep :]:
            if checkpoint_step(path) not in kept:
                try:
                    _remove(path, self.guard)
                except OSError as problem:
                    log.warning("%s: an old checkpoint cannot be removed (%s)", path, problem)

    def forget_after(self, step: int) -> None:
        """Remove the checkpoints of later steps, because the run resumes from `step`.

        Raises CheckpointError if one cannot be removed: the next command would resume from it.
        """
        for path in checkpoint_folders(self.run):
            if (checkpoint_step(path) or 0) > step:
                try:
                    _remove(path, self.guard)
                    fsync_dir(self.folder)
                except OSError as problem:
                    raise CheckpointError(
                        f"{path} cannot be removed ({problem}), so the run cannot go back to step {step}: "
                        "remove that folder yourself and repeat the command"
                    ) from problem


@contextlib.contextmanager
def _explained_by(guard: Guard | None) -> Iterator[None]:
    """On a failure, let the guard report first that the folder is gone; safetensors reports only a missing file."""
    try:
        yield
    except (SafetensorError, OelmError):
        if guard is not None:
            guard()
        raise


def _remove(path: Path, guard: Guard | None) -> None:
    """Remove a checkpoint by a rename, then delete it; leftovers are deleted at the next start."""
    retired = path.with_name(f"{STAGING_PREFIX}{path.name}-{secrets.token_hex(4)}")
    move_within(path.parent, os.rename, path.name, retired.name, guard=guard)
    try:
        shutil.rmtree(retired)
    except OSError as problem:
        # NFS keeps an open file under another name.
        log.warning("%s: could not be deleted entirely (%s); the run deletes the rest when it next starts", retired, problem)


def open_checkpoint(path: Path) -> Checkpoint:
    """Verify every file of a checkpoint against its manifest, and parse its state; raise CheckpointError otherwise."""
    if path.is_symlink() or not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint")
    _check_manifest(path)
    try:
        saved = SavedState.model_validate_json((path / SAVED_STATE).read_bytes())
    except ValidationError as problem:
        raise CheckpointError(f"{path / SAVED_STATE}: {problem.errors()[0]['msg']}") from None
    if checkpoint_step(path) not in (None, saved.state.step):
        raise CheckpointError(f"{path}: holds step {saved.state.step}, whatever its name says: copied over another?")
    return Checkpoint(path, saved)


def _check_manifest(path: Path) -> None:
    names = (SAVED_MODEL, SAVED_OPTIMIZER, SAVED_STATE, SAVED_MANIFEST)
    for name in names:
        if not (path / name).is_file():
            raise CheckpointError(f"{path / name}: missing")
    # The manifest too must be byte for byte the text that these files give.
    actual = _manifest_text(path)
    if (path / SAVED_MANIFEST).read_bytes() == actual.encode():
        return
    recorded: Any = read_json(path / SAVED_MANIFEST, error=CheckpointError)
    for name, found in json.loads(actual)["files"].items():
        entry = recorded.get("files", {}).get(name) if isinstance(recorded, dict) else None
        if isinstance(entry, dict) and entry != found:
            raise CheckpointError(
                f"{path / name}: {found['bytes']:,} bytes, sha256 {found['sha256'][:12]}..., not as recorded: damaged"
            )
    raise CheckpointError(f"{path / SAVED_MANIFEST}: damaged")


def load_model(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Copy a checkpoint's weights and frozen digests into a model of the same shape."""
    tensors = load_tensors(checkpoint.path / SAVED_MODEL)
    load_weights(model, tensors, where=str(checkpoint.path / SAVED_MODEL))
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
    load_optimizer_tensors(optimizer, model, load_tensors(checkpoint.path / SAVED_OPTIMIZER))


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
        for name in (SAVED_MODEL, SAVED_OPTIMIZER, SAVED_STATE)
    }
    digest = hashlib.sha256(dump_json(files).encode()).hexdigest()
    return dump_json({"format": "oelm-checkpoint-1", "files": files, "sha256": digest}) + "\n"


_UNBOUND = (
    ("steps",),
    ("extended_at",),
    ("data", "source"),
    ("data", "tokenizer"),
    ("init_from", "checkpoint"),
    ("model", "source"),
    *(("examples", name) for name in ("task", "folder", "dev", "columns", "labels")),
)


def bound_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that all checkpoints of a run share, wherever it is and however long, including the seed."""
    settings = config.as_dict()
    for *sections, name in _UNBOUND:
        inner: Any = settings
        for section in sections:
            inner = inner.get(section)
            if not isinstance(inner, dict):
                break
        else:
            inner.pop(name, None)
    return settings


def check_bound(checkpoint: Checkpoint, run: Path, config: TrainConfig) -> None:
    """Raise CheckpointError if a checkpoint is another run's, or if the run's config changed since it was saved.

    A checkpoint from before ids were recorded is opened with a warning.
    """
    saved, own = checkpoint.saved, run_id(run)
    changes = list(_changes(saved.config, bound_settings(config))) if saved.config else []
    listed = f": {'; '.join(changes[:6])}" if changes else ""
    if saved.run and own and saved.run != own:
        raise CheckpointError(
            f"{checkpoint.path}: was saved by another run (id {saved.run[:12]}, this run's id is {own[:12]}){listed}. "
            f"Move that folder out of {run}, and repeat the command"
        )
    if changes:
        raise CheckpointError(
            f"{run / CONFIG}: is not the config that {checkpoint.path.name} was saved with{listed}. Put the file back "
            "as it was; to train with other settings, choose another --out"
        )
    if not saved.run:
        log.warning(
            "%s: saved by a version that did not record the run of a checkpoint, so it could not be checked",
            checkpoint.path,
        )
    elif not own:
        log.warning("%s: names no run, so the id of %s could not be checked", run / MANIFEST, checkpoint.path.name)


def check_frozen_saved(model: nn.Module, checkpoint: Checkpoint, run: Path) -> None:
    """Raise CheckpointError if a loaded model's frozen bytes differ from those in audit.json, written when the run started.

    Only what is frozen both then and now is compared: a method may thaw, or freeze later.
    """
    path = run / AUDIT
    try:
        recorded = _recorded_digests(read_json(path, error=CheckpointError)) if path.is_file() else {}
    except CheckpointError as problem:
        raise CheckpointError(
            f"{problem}, so the frozen weights cannot be compared with those that the run began with; restore the file from a "
            "copy, or move it aside to skip that check"
        ) from None
    for projection in audit(model).projections if recorded else ():
        then, now = recorded.get(projection.name), projection.digest
        if then and now and then != now:
            raise CheckpointError(
                f"{checkpoint.path}: its frozen {projection.name} (sha256 {now[:12]}...) is not the one that this run began "
                f"with ({path.name}: {then[:12]}...): another run's checkpoint. Move that folder out of {run}"
            )


def _recorded_digests(audit_record: Any) -> dict[str, str]:
    rows = audit_record.get("projections") if isinstance(audit_record, dict) else None
    plain = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return {str(row.get("name")): row["digest"] for row in plain if isinstance(row.get("digest"), str)}


def _changes(then: Any, now: Any, at: str = "") -> Iterator[str]:
    """Yield the differences in settings that both versions have."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in then:
            if key in now:
                yield from _changes(then[key], now[key], f"{at}.{key}" if at else key)
    elif then != now:
        yield f"{at} was {then!r}, is {now!r}"
