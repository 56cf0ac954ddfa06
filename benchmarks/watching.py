"""What `oelm watch` costs the runs on the same machine: training steps on all cores, with and without it, in turns.

    python benchmarks/watching.py                          # about half an hour on a quiet machine
    python benchmarks/watching.py --rounds 2 --seconds 20  # whether it works

The watched folder holds copies of the runs under results/, 1,000 in all, one of them under way: it gets an evaluation and a
heartbeat with every few steps. The watcher runs from the first block to the last and is stopped (SIGSTOP) in every second
one. It updates at once when it is woken, so a block has one update more than its length allows, and the ratio is too high
rather than too low.

Two measures. Wall time a step is what a user sees; on a busy machine it is noise. The share of the machine's CPU time that the
watcher takes while it is awake is exact on any machine, and the most that runs on all cores can lose to it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from oelm.bench.interleave import shape_config, training_step
from oelm.stats import mean_ratio

RESULTS = Path(__file__).resolve().parent.parent / "results"
# Steps between two signs of life of the run under way.
EVERY = 5


def copy_runs(root: Path, count: int) -> Path:
    """Copy recorded runs until there are so many; return one that is made to look under way."""
    found = sorted(path.parent for path in RESULTS.glob("*/*/*/*/seed-*/status.json"))
    for number, run in zip(range(count), itertools.cycle(found), strict=False):
        study, experiment, budget, variant, seed = run.relative_to(RESULTS).parts
        # The same experiment may be in several studies.
        target = root / experiment / budget / f"{variant}-{study}-{number // len(found)}" / seed
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(run, target)
    return target


def advance(run: Path, number: int) -> None:
    """Write what a run writes now and then: an evaluation, and a status with a new heartbeat."""
    status = json.loads((run / "status.json").read_text())
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    status |= {"status": "running", "host": "elsewhere", "step": number, "steps": 10**6, "heartbeat": now}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 10**5 + number, "val_loss": 2.0 + 1 / (1 + number), "val_ppl": 8.0}) + "\n")
    draft = run / "draft"
    draft.write_text(json.dumps(status))
    draft.replace(run / "status.json")


@contextlib.contextmanager
def watching(root: Path) -> Iterator[subprocess.Popen[str]]:
    """Start `oelm watch` on a folder; yield it once its first page is written, which reads every run."""
    command = [sys.executable, "-m", "oelm", "watch", "--out", str(root), "--html", str(root.parent / "watch.html")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watcher:
        try:
            assert watcher.stdout is not None and "kept up to date" in watcher.stdout.readline()
            yield watcher
        finally:
            watcher.send_signal(signal.SIGCONT)
            watcher.kill()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has taken so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def block(step: Callable[[], None], run: Path, seconds: float, numbers: Iterator[int]) -> float:
    """Train for so long; return the seconds a step took on average."""
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        number = next(numbers)
        if number % EVERY == 0:
            advance(run, number)
        step()
        count += 1
    return (time.perf_counter() - began) / count


def measure(folder: Path, options: argparse.Namespace) -> None:
    run = copy_runs(folder / "outputs", options.runs)
    step = training_step(shape_config(options.shape, "baseline"))
    numbers = itertools.count(1)
    block(step, run, min(10.0, options.seconds), numbers)
    times: dict[bool, list[float]] = {True: [], False: []}
    shares: list[float] = []
    with watching(folder / "outputs") as watcher:
        for number in range(options.rounds):
            # A-B-B-A: a machine that slows down steadily favours neither.
            for is_watched in (True, False) if number % 2 else (False, True):
                watcher.send_signal(signal.SIGCONT if is_watched else signal.SIGSTOP)
                before, began = cpu_seconds(watcher.pid), time.perf_counter()
                times[is_watched].append(block(step, run, options.seconds, numbers))
                if is_watched:
                    spent = time.perf_counter() - began
                    shares.append((cpu_seconds(watcher.pid) - before) / (spent * (os.cpu_count() or 1)))
        assert watcher.poll() is None, "the watcher has ended"
    page = (folder / "watch.html").stat().st_size
    print(f"{options.runs} runs, page {page / 1e3:.0f} KB, {options.rounds} rounds of 2 x {options.seconds:g} s, interleaved")
    print(f"  a step takes {statistics.median(times[False]):.3f} s (median), {torch.get_num_threads()} threads")
    print(f"  with a watcher a step takes {mean_ratio(times[True], times[False])} the time (wall time)")
    print(f"  the watcher takes {statistics.fmean(shares):.2%} of the machine's CPU time, {max(shares):.2%} at most in a block")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=90.0, help="length of a block; several updates should fit")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--shape", default="laptop", choices=("tiny", "laptop", "512"))
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        measure(Path(name), options)


if __name__ == "__main__":
    main()
