"""Which class a method's verdict belongs to; from plain data, so that a report need not load torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Kind = Literal["free", "pure", "little", "partial"]


def method_kind(method: Mapping[str, Any]) -> Kind:
    """Return what a method lets learn on the Q/K side: everything, nothing, something on top, or some of it sometimes.

    `little` says where it learns, not how much: that depends on the shape too. A report tells it as a share of the baseline's.
    """
    parts = method.get("freeze") or ()
    if not parts:
        return "free"
    if len(parts) < 2 or method.get("layers", "all") != "all" or method.get("thaw") or method.get("freeze_at"):
        return "partial"
    return "little" if method.get("gain", "none") != "none" or method.get("correction") else "pure"
