"""Which of torchrun's processes this one is; known without loading torch."""

from __future__ import annotations

import os


def is_one_of_many() -> bool:
    """Whether torchrun started this process beside others."""
    return os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ


def own_rank() -> int:
    """Return this process's number among those that torchrun started; 0 where it started none."""
    return int(os.environ["RANK"]) if is_one_of_many() else 0
