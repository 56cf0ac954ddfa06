"""Text of users made fit to print: nothing in it drives a terminal, turns the reading direction or breaks a format."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

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
