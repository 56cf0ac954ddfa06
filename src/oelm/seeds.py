"""One rule for randomness: a stream is named by its purpose, so that no draw depends on the order of others."""

from __future__ import annotations

import hashlib
import operator
from typing import SupportsIndex

from oelm.errors import ConfigError


def stream_seed(seed: int, *purpose: object) -> int:
    """Return a 63-bit seed that is a pure function of (seed, purpose): same words, same stream, on any machine."""
    words = "/".join(["oelm", str(seed), *map(str, purpose)])
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "big") >> 1


def whole_seed(seed: SupportsIndex, *, error: type[ConfigError] = ConfigError) -> int:
    """Return a seed as a plain int; raise `error` where it is not a whole number."""
    # Anything could be hashed, and '0', 0.0 and 0 would give three different draws.
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise error(f"seed is {seed!r} ({type(seed).__name__}); give a whole number; equal numbers give equal draws")
    return operator.index(seed)
