"""Every command's tests run on a plain terminal."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep a CI's colours and a narrow window out of the text, and a command's log handlers out of the next test."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "140")
    before = list(logging.getLogger("oelm").handlers)
    yield
    logging.getLogger("oelm").handlers[:] = before
