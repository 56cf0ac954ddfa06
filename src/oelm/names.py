"""Names: which can be a folder on every system, and which known one a misspelt name is nearest to."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10))}


def is_device(name: str) -> bool:
    """Whether Windows keeps a name, whatever follows its first dot, for a device."""
    return name.split(".")[0].lower() in _DEVICES


def is_safe(name: str) -> bool:
    """Whether a name has only letters, digits, '.', '_' and '-', a letter or digit first, and no dot at its end."""
    return NAME.fullmatch(name) is not None and not name.endswith(".")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean '...'?)" with the nearest known name, ignoring case; '' if none is near."""
    by_case = {text.lower(): text for text in known}
    # GPT2 is GPT-02.
    alike = [text for text in by_case if _plain(text) == _plain(name)]
    near = alike or difflib.get_close_matches(name.lower(), by_case, n=1, cutoff=0.5)
    return f" (did you mean '{by_case[near[0]]}'?)" if near else ""


def _plain(name: str) -> str:
    """Return a name without what is easily left out: punctuation, and zeros before a number."""
    return re.sub(r"[^a-z0-9]|(?<![0-9])0+(?=[0-9])", "", name.lower())
