"""The way from `oelm train --text` to its first step stays short; `python studies/walk.py` prints it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WALK = Path(__file__).parents[1] / "studies" / "walk.py"


@pytest.mark.slow
def test_training_starts_after_at_most_40_modules_and_8_switches_of_package() -> None:
    command = [sys.executable, str(WALK), "--most-modules", "40", "--most-switches", "8"]
    walked = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert walked.returncode == 0, walked.stdout + walked.stderr
