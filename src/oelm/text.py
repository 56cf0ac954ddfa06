"""Text for people and systems: figures, times, safe names, and users' text made fit to print."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

_READABLE = 1e6


def fixed(value: float, places: int, *, sign: bool = False) -> str:
    """Return a number with this many decimal places: '23.46'; from a million on '1.0e+304'; 'inf'."""
    if abs(value) < _READABLE:
        return f"{value:+.{places}f}" if sign else f"{value:.{places}f}"
    return f"{value:+.1e}" if sign else f"{value:.1e}"


def duration(seconds: float | None) -> str:
    """Return seconds as h:mm:ss, or m:ss under an hour."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10))}


def is_device(name: str) -> bool:
    """Whether Windows reserves a name, up to its first dot, for a device."""
    return name.split(".")[0].lower() in _DEVICES


def is_safe(name: str) -> bool:
    """Whether a name has only letters, digits, '.', '_' and '-', starts with a letter or digit and does not end in a dot."""
    return NAME.fullmatch(name) is not None and not name.endswith(".")


_SHOWN_INSTEAD = "\ufffd"
# Overrides and isolates of reading direction show a name as another one; the rest are no characters in XML, and vl-convert
# ends the whole process on those.
_CONTROLS = [code for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n\r\x85"]
_BIDI = [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_NO_CHARACTERS = [*range(0xD800, 0xE000), 0xFEFF, 0xFFFE, 0xFFFF]
_LINE_ENDS = dict.fromkeys([0x0D, 0x85, 0x2028, 0x2029], "\n")
_TABLE = dict.fromkeys([*_CONTROLS, *_BIDI, *_NO_CHARACTERS], _SHOWN_INSTEAD) | _LINE_ENDS


def plain_text(text: str) -> str:
    """Return `text` with U+FFFD for what does not print and newlines for every kind of line end."""
    return text.replace("\r\n", "\n").translate(_TABLE)


def on_one_line(text: str) -> str:
    """Return `plain_text` with every stretch of white space as one space."""
    return " ".join(plain_text(text).split())


def plain_values(value: Any) -> Any:
    """Return JSON-like data with every text made plain; a number that JSON cannot hold becomes null, which charts leave out."""
    if isinstance(value, str):
        return plain_text(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: plain_values(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(inner) for inner in value]
    return value


def distinct_names(names: Iterable[str]) -> list[str]:
    """Return for each name one that is safe as a file's, an anchor's or a label's, no two alike even where case is ignored."""
    taken: set[str] = set()
    distinct = []
    for name in names:
        safe = re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-")[:80] or "part"
        candidate, count = safe, 1
        while candidate.lower() in taken:
            count += 1
            candidate = f"{safe}-{count}"
        taken.add(candidate.lower())
        distinct.append(candidate)
    return distinct
