"""A runner and its runs, killed at random for half an hour: in the end every run is bit-equal to its oracle.

python -m tests.faults.soak --minutes 30 --seed 1; the exit code is 0 when everything held, 1 otherwise. With --record what it
ends with is kept for docs/reliability.md.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from tests.conftest import made_text
from tests.faults.harness import evidence
from tests.faults.queues import Queue, preload, queue_in
from tests.faults.test_runner_kills import BOTH, KINDS, RUNS, Evidence, check_exactly_once, kill, wait_for_moment

MOST_KILLS = 4
RECORD = Path(__file__).resolve().parents[2] / "results" / "soak.txt"


def disturbed(queue: Queue, chance: random.Random, counts: Counter[str]) -> None:
    """Launch a queue again and again, kill something at a random moment of each launch, then let it finish."""
    for _ in range(chance.randint(1, MOST_KILLS)):
        kind = chance.choice(KINDS)
        launch = queue.launch(*BOTH)
        moment = wait_for_moment(queue, launch, RUNS, chance)
        is_hit = kill(queue, launch, kind, chance)
        counts[f"{kind} killed" if is_hit else "over before the kill"] += 1
        print(f"  {kind} {'killed' if is_hit else 'not killed: it was over'} at {moment}", flush=True)
    queue.finish(*BOTH)


def undisturbed(folder: Path, text: Path) -> Evidence:
    with queue_in(folder, text) as queue:
        queue.finish(*BOTH)
        return {name: evidence(queue.outputs / name) for name in RUNS}


def soak(folder: Path, *, minutes: float, seed: int) -> tuple[bool, str]:
    """Go on for so many minutes; whether every queue ended as its oracle, exactly once, and what came of it in words."""
    text = folder / "made.txt"
    text.write_text(made_text(6000), encoding="utf-8")
    counts: Counter[str] = Counter()
    oracle, began, failures = undisturbed(folder / "oracle", text), time.monotonic(), 0
    while time.monotonic() - began < 60 * minutes:
        number = counts["queues"]
        print(f"queue {number}, seed {seed + number}", flush=True)
        with queue_in(folder / f"queue-{number}", text) as queue:
            try:
                disturbed(queue, random.Random(seed + number), counts)
                check_exactly_once(queue, oracle)
            except AssertionError as problem:
                failures += 1
                print(f"  FAILED: {problem}", flush=True)
        counts["queues"] += 1
    told = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    runs = counts["queues"] * len(RUNS)
    summary = (
        f"soak: {(time.monotonic() - began) / 60:.1f} minutes, seeds {seed} to {seed + counts['queues'] - 1}: {told}\n"
        f"soak: {runs - len(RUNS) * failures} of {runs} runs done exactly once and bit-equal to their oracle"
    )
    return failures == 0 and runs > 0, summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument(
        "--record", action="store_true", help=f"keep what it ends with in {RECORD.relative_to(RECORD.parents[1])}"
    )
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    preload()
    with tempfile.TemporaryDirectory(prefix="oelm-soak-") as folder:
        os.environ["OELM_CACHE"] = str(Path(folder) / "cache")
        has_held, summary = soak(Path(folder), minutes=arguments.minutes, seed=arguments.seed)
    print(summary)
    if arguments.record:
        RECORD.write_text(f"{summary}\n", encoding="utf-8")
    return 0 if has_held else 1


if __name__ == "__main__":
    sys.exit(main())
