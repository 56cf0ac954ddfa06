"""The rank of this process under torchrun, without loading torch."""

from __future__ import annotations

import os


def is_one_of_many() -> bool:
    """Whether torchrun started this process together with others."""
    return os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ


def own_rank() -> int:
    """Return the rank of this process under torchrun; 0 without torchrun."""
    return int(os.environ["RANK"]) if is_one_of_many() else 0
