"""Rows of data sets on the Hugging Face hub, streamed through `datasets` at a pinned commit; none of their code runs."""

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


def hub_rows(source: HubSource, split: str, *, columns: tuple[str, ...], name: str) -> Iterator[tuple[int, Row]]:
    """Yield number (from 1) and content of every row of a split of the set `name`."""
    opened = _opened(source, split, name)
    if missing := [column for column in columns if opened.column_names is not None and column not in opened.column_names]:
        raise DataError(f"{source.repo} at {source.revision[:8]}: no column {missing[0]!r}; columns: {opened.column_names}")
    number = 0
    try:
        for row in opened:
            number += 1
            yield number, {column: row[column] for column in columns}
    # A broken connection or a damaged file raises whatever the library below does: httpx's, pyarrow's, ...
    except Exception as problem:
        raise _unreachable(f"{source.repo}: stopped after row {number:,} ({_reason(problem)})", name) from problem


def hub_label_names(source: HubSource, split: str, column: str, *, name: str) -> tuple[str, ...] | None:
    """Return the names that the hub gives to integer labels, if any."""
    feature = (_opened(source, split, name).features or {}).get(column)
    names = getattr(feature, "names", None)
    return tuple(names) if names else None


def _opened(source: HubSource, split: str, name: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise MissingExtraError("datasets", "data") from None
    if not Path(source.repo).is_dir() and not hub_has_an_address():
        raise _unreachable(f"{source.repo}: no network, the Hugging Face hub cannot be reached", name)
    try:
        return datasets.load_dataset(
            source.repo, source.config, split=source.splits[split], revision=source.revision, streaming=True
        )
    # What an unreachable hub raises differs by library and version.
    except Exception as problem:
        what = f"{source.repo} cannot be fetched from the Hugging Face hub ({_reason(problem)})"
        raise _unreachable(what, name) from problem


def _unreachable(what: str, name: str) -> DataError:
    return DataError(
        f"{what}; with a network, repeat the command; without one, copy the files here and run "
        f"`oelm data prepare {name} --from FOLDER` (docs/data.md names the files)"
    )


def _reason(problem: Exception) -> str:
    return str(problem).strip().splitlines()[0][:200] if str(problem).strip() else type(problem).__name__


def hub_has_an_address() -> bool:
    """Whether the hub's host name resolves; the library itself would retry for half a minute first."""
    from huggingface_hub import constants

    if urllib.request.getproxies():
        return True
    try:
        socket.getaddrinfo(urllib.parse.urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True
