"""By how much `oelm watch` slows the runs on the same machine.

    python benchmarks/watching.py                          # under 12 minutes; the machine should be quiet
    python benchmarks/watching.py --rounds 2 --seconds 5   # a smoke test of the benchmark

Training steps on all cores run in short blocks, in turn with a watcher at work and with the watcher stopped (SIGSTOP). The
folder it watches has copies of the runs under results/, 1,000 in all, one of them under way: it gets an evaluation and a
heartbeat every few steps.

At its real pace the watcher is idle for more than 99% of the time, and its cost is lost in the noise of the steps. So here it
updates the page again after a second, whatever that costs, and each CPU second that it takes is compared with the time that
the steps lose (steps/s, paired blocks, 95% interval). `oelm watch` limits its CPU time to a fixed share of a core, so the
slowdown of a watched run is at most that share times the loss per CPU second.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from oelm.bench.interleave import shape_config, training_step
from oelm.cli.watch import SHARE
from oelm.stats import Ratio, mean_ratio

RESULTS = Path(__file__).resolve().parent.parent / "results"
# Steps between two signs of life of the run under way.
EVERY = 5
ALLOWED = 0.01
# `oelm watch`, with nothing to limit its share of the machine.
UNLIMITED = "import oelm.cli.watch; oelm.cli.watch.SHARE = 1e9; from oelm.cli import main; main()"


def copy_runs(root: Path, count: int) -> Path:
    """Copy recorded runs until there are so many; return one that is made to look under way."""
    found = sorted(path.parent for path in RESULTS.glob("*/*/*/*/seed-*/status.json"))
    for number, run in zip(range(count), itertools.cycle(found), strict=False):
        _, experiment, budget, variant, seed = run.relative_to(RESULTS).parts
        # The same experiment may be in several studies, and a name has at most 64 letters.
        copy = zlib.crc32(f"{run.parent} {number // len(found)}".encode())
        target = root / experiment / budget / f"{variant[:40]}-{copy:08x}" / seed
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
    page = str(root.parent / "watch.html")
    command = [sys.executable, "-c", UNLIMITED, "watch", "--out", str(root), "--html", page, "--every", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watcher:
        try:
            assert watcher.stdout is not None and "kept up to date" in watcher.stdout.readline()
            yield watcher
        finally:
            watcher.send_signal(signal.SIGCONT)
            watcher.kill()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process and its threads have taken so far."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


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
    cpu_s = wall_s = 0.0
    with watching(folder / "outputs") as watcher:
        for number in range(options.rounds):
            # A-B-B-A: a machine that slows down steadily favours neither.
            for is_watched in (True, False) if number % 2 else (False, True):
                watcher.send_signal(signal.SIGCONT if is_watched else signal.SIGSTOP)
                before, began = cpu_seconds(watcher.pid), time.perf_counter()
                times[is_watched].append(block(step, run, options.seconds, numbers))
                if is_watched:
                    cpu_s += cpu_seconds(watcher.pid) - before
                    wall_s += time.perf_counter() - began
        assert watcher.poll() is None, "the watcher has ended"
    page = (folder / "watch.html").stat().st_size
    print(f"{options.runs} runs, page {page / 1e3:.0f} KB, {options.rounds} rounds of 2 x {options.seconds:g} s, interleaved")
    print(f"  a step takes {statistics.median(times[False]):.3f} s (median), {torch.get_num_threads()} threads")
    show(mean_ratio(times[True], times[False]), cpu_s / wall_s)


def show(ratio: Ratio, load: float) -> None:
    """Print what steps cost with a watcher that takes `load` CPU seconds a second, and what they cost at its real pace."""
    print(f"  with a watcher that never rests (CPU time: {load:.1%} of a core) a step takes {ratio} the time")
    value, low, high = ((bound - 1) * SHARE / load for bound in (ratio.value, ratio.low, ratio.high))
    print(f"  at its real pace (at most {SHARE:.1%} of a core) it slows runs by {value:.2%} [{low:.2%}, {high:.2%}] at most")
    told = "less" if high < ALLOWED else "more" if low > ALLOWED else "undecided: more or less"
    print(f"  {told} than {ALLOWED:.0%}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=15.0, help="length of a block; several updates should fit")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--shape", default="laptop", choices=("tiny", "laptop", "512"))
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        measure(Path(name), options)


if __name__ == "__main__":
    main()
