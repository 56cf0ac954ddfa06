"""One rule for randomness: a stream is named by what it is for, so that no draw depends on another's order."""

from __future__ import annotations

import hashlib


def stream_seed(seed: int, *purpose: object) -> int:
    """Return a 63-bit seed that is a pure function of (seed, purpose): same words, same stream, on any machine."""
    words = "/".join(["oelm", str(seed), *map(str, purpose)])
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "big") >> 1
