"""Numbers and times for people: from a million on as a power of ten, so that a diverged run prints no endless digits."""

from __future__ import annotations

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
