"""What binds a checkpoint to its run: the run's id, the settings it was saved with, and the digests of what is frozen."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from oelm.config import TrainConfig
from oelm.errors import CheckpointError
from oelm.files import read_json
from oelm.method.audit import audit
from oelm.runs.layout import AUDIT, CONFIG, MANIFEST
from oelm.runs.records import run_id
from oelm.train.checkpoint import Checkpoint

log = logging.getLogger(__name__)
# An extended run changes its length. Places differ between machines, and portable folders shorten them; what was found there is
# bound by its own digests: of the data, the tokenizer and the weights to start from.
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
    """Return the settings, the seed among them, that all checkpoints of a run share wherever it is and however long."""
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
    """Raise CheckpointError where a checkpoint is another run's, or the run's config was changed since it was saved.

    One from before checkpoints were bound is opened with a warning.
    """
    saved, own = checkpoint.saved, run_id(run)
    changes = list(_changes(saved.config, bound_settings(config))) if saved.config else []
    told = f": {'; '.join(changes[:6])}" if changes else ""
    if saved.run and own and saved.run != own:
        raise CheckpointError(
            f"{checkpoint.path}: was saved by another run (id {saved.run[:12]}, this run's id is {own[:12]}){told}. "
            f"Move that folder out of {run}, and repeat the command"
        )
    if changes:
        raise CheckpointError(
            f"{run / CONFIG}: is not the config that {checkpoint.path.name} was saved with{told}. Put the file back "
            "as it was; to train with other settings, choose another --out"
        )
    if not saved.run:
        log.warning(
            "%s: saved by a version that did not note which run a checkpoint is of, so that could not be checked",
            checkpoint.path,
        )
    elif not own:
        log.warning("%s: names no run, so the id of %s could not be checked", run / MANIFEST, checkpoint.path.name)


def check_frozen(model: nn.Module, checkpoint: Checkpoint, run: Path) -> None:
    """Raise CheckpointError where a loaded model holds other frozen bytes than the run's audit.json, written at its start.

    Only what is frozen both then and now is compared: a method may thaw, or freeze later.
    """
    path = run / AUDIT
    try:
        recorded = _recorded_digests(read_json(path, error=CheckpointError)) if path.is_file() else {}
    except CheckpointError as problem:
        raise CheckpointError(
            f"{problem}, so the frozen weights cannot be compared with those that the run began with; restore the file from a "
            "copy, or move it aside to go without that check"
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
    """Yield what differs, of the settings that both versions know."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in then:
            if key in now:
                yield from _changes(then[key], now[key], f"{at}.{key}" if at else key)
    elif then != now:
        yield f"{at} was {then!r}, is {now!r}"
