"""Rows of data sets on the Hugging Face hub, streamed through `datasets` at a pinned commit; no code of theirs is run."""

from __future__ import annotations

import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oelm.data.readers import Row
from oelm.data.sets import HubSource
from oelm.errors import DataError, MissingExtraError


def hub_rows(source: HubSource, split: str, *, columns: tuple[str, ...], ways_out: str) -> Iterator[tuple[int, Row]]:
    """Yield number (from 1) and content of every row of a split. `ways_out` ends the error of a hub out of reach."""
    opened = _opened(source, split, ways_out)
    if missing := [name for name in columns if opened.column_names is not None and name not in opened.column_names]:
        raise DataError(f"{source.repo} at {source.revision[:8]}: no column {missing[0]!r}, there are: {opened.column_names}")
    number = 0
    try:
        for row in opened:
            number += 1
            yield number, {name: row[name] for name in columns}
    # A connection that breaks and a file that came damaged raise what the library below happens to: httpx's, pyarrow's, ...
    except Exception as problem:
        raise DataError(f"{source.repo}: broke off after row {number:,} ({_reason(problem)}); {ways_out}") from problem


def hub_label_names(source: HubSource, split: str, column: str, *, ways_out: str) -> tuple[str, ...] | None:
    """Return what the hub says its integer labels mean, where it says so."""
    feature = (_opened(source, split, ways_out).features or {}).get(column)
    names = getattr(feature, "names", None)
    return tuple(names) if names else None


def _opened(source: HubSource, split: str, ways_out: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise MissingExtraError("datasets", "data") from None
    if not Path(source.repo).is_dir() and not hub_has_an_address():
        raise DataError(f"{source.repo}: no network, the Hugging Face hub cannot be reached; {ways_out}")
    try:
        return datasets.load_dataset(
            source.repo, source.config, split=source.splits[split], revision=source.revision, streaming=True
        )
    # What a hub out of reach raises differs by library, version and where the connection broke.
    except Exception as problem:
        raise DataError(
            f"{source.repo} cannot be fetched from the Hugging Face hub ({_reason(problem)}); {ways_out}"
        ) from problem


def _reason(problem: Exception) -> str:
    return str(problem).strip().splitlines()[0][:200] if str(problem).strip() else type(problem).__name__


def hub_has_an_address() -> bool:
    """Tell in a moment what the library would tell after half a minute of retries: that there is no network."""
    from huggingface_hub import constants

    if urllib.request.getproxies():
        return True
    try:
        socket.getaddrinfo(urllib.parse.urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True
