"""Text for people and systems: figures, times, safe names, and users' text made fit to print."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from typing import Any

_READABLE = 1e6


def fixed(value: float, places: int, *, sign: bool = False) -> str:
    """Return a number with this many decimal places: '23.46'; from a million on '1.0e+304'; 'inf'."""
    if abs(value) < _READABLE:
        return f"{value:+.{places}f}" if sign else f"{value:.{places}f}"
    return f"{value:+.1e}" if sign else f"{value:.1e}"


def figure_text(metric: str, value: float | None) -> str:
    """Return a PPL or an accuracy as people read it; nothing where there is none."""
    if value is None:
        return ""
    return fixed(value, 2) if metric == "ppl" else f"{fixed(100 * value, 2)}%"


def counted(count: int, thing: str) -> str:
    """Return how many there are of something whose plural ends in s, as words."""
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


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


_WIDE = r"\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6"
# What stays whole where a line breaks: a word, or one Chinese character.
_PIECE = re.compile(rf"[{_WIDE}]|[^\s{_WIDE}]+")
_PATH = re.compile(r"\S/\S")
# Texts of this breadth need not break, and a path keeps so much of its end.
_COMFORTABLE, _SHORTEST_PATH = 20, 16


def breadth(text: str) -> int:
    """Return how many letters' room a text takes: a Chinese character that of two."""
    return len(text) if text.isascii() else sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def column_bands(
    columns: Sequence[Sequence[str]], room: int, *, gap: int = 2, keys: int = 1, whole: Collection[int] = ()
) -> list[dict[int, int]]:
    """Return the width of each column, by its number, so that all fit in `room` letters and no word breaks.

    A column has its heading first. Cells break at spaces, but for those of the columns `whole`, and long paths are shortened.
    What still does not fit goes into further bands, one below the other, each of which begins with the first `keys` columns.
    """
    natural = [max(map(breadth, cells)) for cells in columns]
    least = [_least(cells, is_whole=number in whole) for number, cells in enumerate(columns)]
    bands: list[list[int]] = [[]]
    for number in range(len(columns)):
        if len(bands[-1]) > keys and sum(least[each] + gap for each in [*bands[-1], number]) - gap > room:
            bands.append(list(range(keys)))
        bands[-1].append(number)
    # Headings break before texts do.
    soft = [width if number in whole else natural[number] for number, width in enumerate(least)]
    fits = [sum(natural[number] + gap for number in band) - gap <= room for band in bands]
    return [
        _fitted(band, natural if is_fit else soft, least, room - gap * (len(band) - 1))
        for band, is_fit in zip(bands, fits, strict=True)
    ]


def _least(cells: Sequence[str], *, is_whole: bool) -> int:
    """Return how narrow a column may become."""
    longest = max((breadth(piece) for cell in cells for piece in _PIECE.findall(cell)), default=0)
    if is_whole:
        return max(longest, *map(breadth, cells[1:]), 0)
    longest = min(longest, _SHORTEST_PATH) if any(map(_PATH.search, cells)) else longest
    return max(longest, min(_COMFORTABLE, max(map(breadth, cells[1:]), default=0)))


def _fitted(band: Sequence[int], natural: Sequence[int], least: Sequence[int], room: int) -> dict[int, int]:
    """Return the widths of a band's columns: the broadest give way until all fit, as far as they can."""
    widths = {number: natural[number] for number in band}
    while sum(widths.values()) > room and (wide := [number for number in band if widths[number] > least[number]]):
        widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


def shortened(text: str, width: int) -> str:
    """Return text in which words that are longer than a column lose their beginning: of a path the end tells most."""
    return _PIECE.sub(lambda word: word[0] if breadth(word[0]) <= width else f"\u2026{word[0][1 - width :]}", text)
