"""Figures as people read them: of a run that diverged as a power of ten, never as hundreds of digits."""

from __future__ import annotations

_READABLE = 1e6


def fixed(value: float, places: int, *, sign: bool = False) -> str:
    """Return a number with so many decimal places: '23.46', from a million on '1.0e+304', and 'inf'."""
    if abs(value) < _READABLE:
        return f"{value:+.{places}f}" if sign else f"{value:.{places}f}"
    return f"{value:+.1e}" if sign else f"{value:.1e}"
