"""Names that are safe as folder names on every system."""

from __future__ import annotations

import re

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10))}


def is_device(name: str) -> bool:
    """Whether Windows reserves a name, up to its first dot, for a device."""
    return name.split(".")[0].lower() in _DEVICES


def is_safe(name: str) -> bool:
    """Whether a name has only letters, digits, '.', '_' and '-', starts with a letter or digit and does not end in a dot."""
    return NAME.fullmatch(name) is not None and not name.endswith(".")
