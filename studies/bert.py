"""The BERT half of the earlier study, with the controls it lacked: every arm's rate from the same sweep, then seeds.

    python studies/bert.py --model FOLDER --from FOLDER sweep      # every arm at every rate, on a separate seed
    python studies/bert.py --model FOLDER --from FOLDER seeds      # every arm at its best rate
    python studies/bert.py table                                   # the table, from the records under results/
    python studies/bert.py pairs                                   # arms against each other

Of SST-2, or of another task with `--task`; the records are under results/bert-TASK. Each run is `oelm finetune` in a process
of its own; repeating a command skips what is done and goes on where it stopped. A record of another task, model, number of
examples or epochs than is asked for is refused.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from oelm.stats import paired_gap

ARMS = ("baseline", "oelm_freeze_pretrained", "oelm_freeze", "gaussian_matched", "oelm_random", "pretrained_freeze")
# Those that carry the conclusion get five seeds, the others three.
FIVE_SEEDS = ("baseline", "oelm_freeze_pretrained", "oelm_freeze")
RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
# Not among the seeds of the table: a rate chosen by luck of a seed must not be judged on that seed.
SWEEP_SEED = 100
# For the first records, which do not contain the number.
FIRST_EPOCHS = 3
# What separates the causes: the first of each against the second.
PAIRS = (("oelm_freeze_pretrained", "oelm_freeze"), ("gaussian_matched", "oelm_freeze"), ("oelm_random", "oelm_freeze"))
HEADINGS = {
    "en": "| arm | lr | seeds | accuracy at the end | against the baseline, points [95%] | best of three epochs |",
    "zh": "| 组 | 学习率 | 种子数 | 训练结束时的准确率 | 与基线之差，百分点 [95%] | 三轮中的最高值 |",
}


def place(results: Path, arm: str, lr: float, seed: int) -> Path:
    """Return where a run's record is."""
    return results / arm / f"lr-{lr:g}" / f"seed-{seed}.json"


def train_examples(options: argparse.Namespace, seed: int) -> int:
    """Return how many examples a run is trained on."""
    return int(options.max_train // 4 if seed == SWEEP_SEED else options.max_train)


def read_record(options: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Return a record; exit if it belongs to another task or another kind of run."""
    record = dict(json.loads(path.read_text()))
    found = {"epochs": FIRST_EPOCHS, **record}
    wanted: dict[str, Any] = {"task": options.task}
    if options.what not in PRINTED:
        wanted |= {"train_examples": train_examples(options, record["seed"]), "epochs": options.epochs}
        wanted |= {"model": options.model.resolve().name}
    for key, value in wanted.items():
        # The first records do not contain the model.
        if found.get(key, value) != value:
            raise SystemExit(f"{path}: {key} is {found[key]}, but you asked for {value}; use another folder with --results")
    if answers := answers_of(path):
        accuracy = sum(row["label"] == row["predicted"] for row in answers) / len(answers)
        if abs(record["final_accuracy"] - accuracy) > 1e-9:
            raise SystemExit(f"{path}: final_accuracy is {record['final_accuracy']}, its answers give {accuracy}")
    return record


def run_one(options: argparse.Namespace, arm: str, lr: float, seed: int) -> dict[str, Any]:
    """Finish one run and return its record."""
    record_path = place(options.results, arm, lr, seed)
    if record_path.is_file():
        return read_record(options, record_path)
    out = options.runs / options.task / arm / f"lr-{lr:g}" / f"seed-{seed}"
    command = [sys.executable, "-m", "oelm", "finetune", "--model", str(options.model), "--task", options.task]
    command += ["--from", str(options.folder), "--method", arm, "--lr", str(lr), "--seed", str(seed), "--out", str(out)]
    command += ["--max-train", str(train_examples(options, seed)), "--epochs", str(options.epochs)]
    # No dropout, in every arm alike: one source of chance less.
    command += ["--set", "model.dropout=0"]
    if seed == SWEEP_SEED:
        command += ["--set", "eval_every=1000000", "--set", "save_every=1000000"]
    child = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)}\n{child.stderr}")
    figures, audit = (json.loads((out / name).read_text()) for name in ("timing_stats.json", "audit.json"))
    manifest = json.loads((out / "manifest.json").read_text())
    record = {
        "task": options.task,
        "arm": arm,
        "lr": lr,
        "seed": seed,
        "train_examples": train_examples(options, seed),
        "epochs": options.epochs,
        "model": options.model.resolve().name,
        "best_accuracy": figures["best_accuracy"],
        "final_accuracy": figures["final_accuracy"],
        "final_val_loss": figures["final_val_loss"],
        "median_step_s": figures["step_s"]["median"],
        "wall_s": figures["wall_s"]["total"],
        "trainable": audit["trainable"],
        "frozen": audit["frozen"],
        "data": manifest["data"]["fingerprint"],
        "source_revision": manifest["source_revision"],
    }
    record_path.parent.mkdir(parents=True, exist_ok=True)
    if seed != SWEEP_SEED:
        shutil.copyfile(out / "predictions.jsonl", record_path.with_suffix(".predictions.jsonl"))
    record_path.write_text(json.dumps(record, indent=2) + "\n")
    if not options.keep:
        shutil.rmtree(out / "checkpoints", ignore_errors=True)
    print(
        f"{arm:24} lr {lr:<7g} seed {seed:<4} accuracy {100 * record['final_accuracy']:.2f}%  {record['wall_s']:.0f} s",
        flush=True,
    )
    return record


def best_rate(options: argparse.Namespace, arm: str) -> float:
    """Return the rate of the sweep with the highest final accuracy; print a note if it is at the edge of the grid."""
    found = {lr: place(options.results, arm, lr, SWEEP_SEED) for lr in RATES}
    if missing := [path for path in found.values() if not path.is_file()]:
        raise SystemExit(f"{missing[0]}: not found; sweep every arm first: studies/bert.py sweep --task {options.task}")
    accuracy = {lr: read_record(options, path)["final_accuracy"] for lr, path in found.items()}
    chosen = max(accuracy, key=lambda lr: accuracy[lr])
    if chosen in (RATES[0], RATES[-1]):
        print(f"note: the best rate of {arm}, {chosen:g}, is at the edge of the grid")
    return chosen


Found = dict[str, dict[int, dict[str, Any]]]


def find(options: argparse.Namespace) -> Found:
    """Return every arm's records at its best rate, by seed."""
    found: Found = {}
    for arm in ARMS:
        paths = place(options.results, arm, best_rate(options, arm), SWEEP_SEED).parent.glob("seed-*.json")
        rows = [read_record(options, path) for path in sorted(paths)]
        found[arm] = {row["seed"]: row for row in rows if row["seed"] != SWEEP_SEED}
    return found


def difference(found: Found, arm: str, other: str) -> tuple[int, str]:
    """Return the number of common seeds of two arms, and their paired difference in points with its interval."""
    seeds = sorted(set(found[arm]) & set(found[other]))
    ours, theirs = ({seed: found[name][seed]["final_accuracy"] for seed in seeds} for name in (arm, other))
    return len(seeds), paired_gap(ours, theirs, "accuracy").text


def print_table(options: argparse.Namespace) -> None:
    """Print every arm's accuracy at its best rate, and its paired difference from the baseline, as Markdown."""
    found = find(options)
    print(HEADINGS[options.lang])
    print("|---|---|---|---|---|---|")
    for arm, rows in found.items():
        final = statistics.fmean(100 * rows[seed]["final_accuracy"] for seed in sorted(rows))
        best = statistics.fmean(100 * row["best_accuracy"] for row in rows.values())
        gap = "" if arm == "baseline" else difference(found, arm, "baseline")[1]
        rate = next(iter(rows.values()))["lr"]
        print(f"| `{arm}` | {rate:g} | {len(rows)} | {final:.2f}% | {gap} | {best:.2f}% |")
    if (share := majority(options)) is not None:
        print(f"| `majority_class` |  |  | {100 * share:.2f}% |  | {100 * share:.2f}% |")


def answers_of(record: Path) -> list[dict[str, Any]]:
    """Return a run's final answers, if they were stored."""
    path = record.with_suffix(".predictions.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def majority(options: argparse.Namespace) -> float | None:
    """Return the accuracy of always naming the largest class on the table's examples, if answers were stored."""
    for path in sorted(options.results.glob("*/*/seed-*.json")):
        if labels := [row["label"] for row in answers_of(path)]:
            return max(map(labels.count, set(labels))) / len(labels)
    return None


def print_pairs(options: argparse.Namespace) -> None:
    """Print the differences between arms that separate the causes, as Markdown."""
    found = find(options)
    print("| arm | against | seeds | points [95%] |\n|---|---|---|---|")
    for arm, other in PAIRS:
        count, gap = difference(found, arm, other)
        print(f"| `{arm}` | `{other}` | {count} | {gap} |")


PRINTED = {"table": print_table, "pairs": print_pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["sweep", "seeds", *PRINTED])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--from", dest="folder", type=Path)
    parser.add_argument("--task", default="sst2")
    parser.add_argument(
        "--max-train", type=int, default=4000, help="training examples of a run; a run of the sweep takes a quarter"
    )
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--runs", type=Path, default=Path("outputs/bert-study"))
    parser.add_argument("--results", type=Path, help="where the records are; default: results/bert-TASK")
    parser.add_argument("--lang", choices=sorted(HEADINGS), default="en", help="of the table's headings")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="keep the weights of every run")
    options = parser.parse_args()
    options.results = options.results or Path(f"results/bert-{options.task}")
    if options.what in PRINTED:
        PRINTED[options.what](options)
        return
    if options.model is None or options.folder is None:
        parser.error(f"{options.what} needs --model and --from")
    if options.what == "sweep":
        jobs = [(arm, lr, SWEEP_SEED) for lr in RATES for arm in ARMS]
    else:
        jobs = [(arm, best_rate(options, arm), seed) for seed in range(5) for arm in ARMS if seed < 3 or arm in FIVE_SEEDS]
    for path in [place(options.results, *job) for job in jobs]:
        # All of them before the first run: a run takes minutes.
        if path.is_file():
            read_record(options, path)
    there = sum(place(options.results, *job).is_file() for job in jobs)
    print(f"{there} of {len(jobs)} runs are recorded in {options.results}; use --results FOLDER to start in another folder")
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda job: run_one(options, *job), jobs))


if __name__ == "__main__":
    main()
