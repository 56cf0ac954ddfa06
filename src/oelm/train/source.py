"""Which source a run was made with."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path


@functools.cache
def source_revision() -> str | None:
    """Return the git commit of the package's own checkout, marked when files differ from it; None outside of one."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        commit = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        dirty = subprocess.run(
            ["git", "-C", str(root), "status", "--porcelain", "--", "src"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if commit.returncode:
        return None
    return commit.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")
