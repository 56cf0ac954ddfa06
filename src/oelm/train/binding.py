"""What binds a checkpoint to its run: the run's id, its settings, what is frozen at its step, and the digests of that."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from oelm.config import TrainConfig
from oelm.errors import CheckpointError
from oelm.files import read_json
from oelm.method.apply import freeze, hold
from oelm.method.audit import audit
from oelm.method.plan import Plan, plan_of
from oelm.runs.layout import AUDIT, MANIFEST
from oelm.runs.records import run_id
from oelm.train.checkpoint import Checkpoint

log = logging.getLogger(__name__)
_UNBOUND = (
    ("steps",),
    ("extended_at",),
    ("data", "source"),
    ("data", "tokenizer"),
    ("init_from", "checkpoint"),
    ("model", "source"),
    *(("examples", name) for name in ("task", "folder", "dev", "columns", "labels")),
)


def freeze_as_of(model: nn.Module, config: TrainConfig, *, step: int) -> Plan:
    """Freeze what the run's method freezes after `step` updates; return the plan of what is frozen when."""
    freeze(model, config.method, seed=config.seed)
    # An extended run keeps the plan of its first length: the past is not planned again.
    plan = plan_of(model, config.method, steps=(*config.extended_at, config.steps)[0])
    hold(model, plan.frozen_at(max(0, step - 1)))
    return plan


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
            f"{run / 'config.json'}: is not the config that {checkpoint.path.name} was saved with{listed}. Put the file back "
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
