"""What all typed data has in common: strict models, and nested settings by dotted path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Frozen, no coercion, no unknown keys, no NaN."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


def flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one mapping from dotted paths to values."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
