"""A small study as runs leave it, without training: every section of a report has something to say about it."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
from pathlib import Path
from typing import Any

from oelm.bench.speed import TimedShape, TimingRecord, write_timing
from oelm.experiments.catalog import Catalog, load_catalog
from oelm.experiments.importer import ImportedRun, write_imported
from oelm.experiments.sweep import SweepPoint, SweepRecord
from oelm.files import write_json, write_text
from oelm.report.judge import Looks, comparison_key
from oelm.runs.layout import SWEEP
from oelm.runs.records import AttentionRecord, AuditRecord, DataRecord, Figures, HeadRecord, Manifest, StepTimes
from oelm.runs.status import now_text
from tests.experiments.recorded import record

SEEDS = range(5)
# What users and runs say in their own words, and a report repeats as it was said.
MESSAGE = "the machine ran out of memory"
OWN_SOURCE = "my own notebook, page seven"
OWN_CATALOG = f"""
MINE-01:
  extends: GPT-02
  method: {{init: orthogonal, freeze: [q]}}
  reported: {{source: "{OWN_SOURCE}", figures: {{best_ppl: 4.5}}}}
MINE-02: {{kind: language_model, data: tinystories, method: baseline, baseline: GPT-01}}
"""


def finish(
    root: Path,
    experiment: str,
    *,
    seed: int,
    best: float,
    budget: str = "laptop",
    variant: str = "default",
    data: str = "tinystories",
    settings: dict[str, Any] | None = None,
    revision: str | None = "0123456789abcdef",
) -> Path:
    """Write a finished run: a classifier's where `best` is below one, a share, else a language model's with this PPL."""
    # A share that a thousand answers can have.
    best = round(best, 3) if best < 1 else best
    run = record(root, "done", experiment=experiment, budget=budget, variant=variant, seed=seed)
    config = {"method": {"init": "native"}, "steps": 40, "optim": {"lr": 1e-3}, "seed": seed} | (settings or {})
    write_json(run / "config.json", config, durable=False)
    for name, written in (
        ("manifest", _manifest(data, revision)),
        ("audit", AuditRecord(total=9000, trainable=8000, frozen=1000, by_role={}, projections=[])),
        ("timing_stats", _figures(best)),
    ):
        write_json(run / f"{name}.json", written.model_dump(mode="json"), durable=False)
    factors = {10: 1.1 + 0.001 * seed, 20: 1.05, 30: 1.02, 40: 1.0}
    accuracy = {"val_accuracy": best} if best < 1 else {}
    evaluations = [{"step": step, "val_loss": factor * _loss(best), **accuracy} for step, factor in factors.items()]
    _write_rows(run / "metrics.jsonl", evaluations)
    if best < 1:
        wrong, loss = round(1000 * (1 - best)), _loss(best)
        answers = [{"example": n, "label": 1, "predicted": int(n * 7 % 1000 >= wrong), "nats": loss} for n in range(1000)]
        _write_rows(run / "predictions.jsonl", answers)
    else:
        write_json(run / "attention.json", _attention(seed).model_dump(mode="json"), durable=False)
    return run


def _manifest(data: str, revision: str | None) -> Manifest:
    fingerprint = hashlib.sha256(data.encode()).hexdigest()
    environment = {
        "device": "cpu",
        "precision": "float32",
        "machine": "x86_64",
        "cpu_capability": "AVX2",
        "threads": "1",
    }
    return Manifest(
        python="3.11.2",
        oelm="0.1.0",
        source_revision=revision,
        torch="2.7.0",
        numpy="2.0.0",
        environment=environment,
        data=DataRecord(name=data, source="made.txt", fingerprint=fingerprint, tokenizer="bpe:300"),
        earlier=[],
    )


def _loss(best: float) -> float:
    return 1 - best if best < 1 else math.log(best)


def _figures(best: float) -> Figures:
    headline: dict[str, Any] = {"best_accuracy": best, "final_accuracy": best}
    if best >= 1:
        headline = {"best_ppl": best, "final_ppl": best}
    return Figures(
        step_s=StepTimes(measured_steps=30, warmup_steps=10, mean=0.02, median=0.019),
        wall_s={"total": 60.0},
        tokens=1_000_000,
        final_loss=_loss(best),
        final_val_loss=_loss(best),
        best_val_loss=_loss(best),
        best_step=40,
        **headline,
    )


def _attention(seed: int) -> AttentionRecord:
    heads = [
        HeadRecord(
            layer=layer,
            head=head,
            entropy=1.0 + 0.1 * seed,
            uniform_entropy=3.0,
            effective_rank=4.0,
            logit_std=0.5,
            mean_distance=6.0,
            induction=0.1,
        )
        for layer in range(2)
        for head in range(2)
    ]
    return AttentionRecord(step=40, tokens=1000, heads=heads)


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows), durable=False)


def arm(root: Path, experiment: str, ppl: float, *, seeds: range = SEEDS, spread: float = 0.001, **changes: Any) -> None:
    """Write an arm's runs around a figure, each seed a little off."""
    for seed in seeds:
        finish(root, experiment, seed=seed, best=ppl * (1 + spread * (seed % 3)), **changes)


def record_study(root: Path) -> None:
    """Write arms of every fate under `root` and a second root beside it, and a catalog with two of the user's own."""
    write_text(root / "own.yaml", OWN_CATALOG)
    _write_judged(root)
    _write_not_judged(root)
    _write_mixed(root)
    _write_unfinished(root)
    _write_sweeps(root)
    _write_beside_runs(root)


def own_catalog(root: Path) -> Catalog:
    """Return the catalog that the study was run from."""
    return load_catalog(root / "own.yaml")


def second_root(root: Path) -> Path:
    """Return the other folder of runs, which holds a seed that the first one has too."""
    return root.with_name(f"{root.name}-second")


def _write_judged(root: Path) -> None:
    arm(root, "GPT-01", 30.0)
    arm(root, "GPT-02", 30.6, spread=0.002)
    arm(root, "GPT-03", 40.0, spread=0.003, revision="0123456789abcdef+changes")
    arm(root, "GPT-02-matched", 31.4, spread=0.02, revision=None)
    # One off at every seed alike: no spread.
    arm(root, "GPT-02-global", 30.9)
    # Some seeds without a partner; on other data, more seeds than planned.
    arm(root, "GPT-02-uniform", 60.0, spread=0.004, seeds=range(1, 7))
    arm(root, "MINE-01", 30.5, spread=0.005)
    arm(root, "GPT-04", 50.0, data="openwebtext", seeds=range(6))
    arm(root, "GPT-05", 51.0, spread=0.002, data="openwebtext", seeds=range(6))
    arm(root, "SST-2-01", 0.9, data="sst2")
    arm(root, "SST-2-02", 0.88, spread=0.005, data="sst2")
    arm(root, "SST-2-02-asis", 0.89, spread=0.005, data="sst2")
    arm(root, "MNLI-01", 0.8, data="mnli")
    arm(root, "MNLI-02", 0.7, spread=0.005, data="mnli")
    looks = Looks(root, {})
    looks.record({comparison_key("GPT-02", "laptop", "default"): (0, 1, 2)}, date=datetime.date(2024, 1, 2))
    looks.record({comparison_key("GPT-03", "laptop", "default"): (0, 1, 9)}, date=datetime.date(2024, 1, 2))


def _write_not_judged(root: Path) -> None:
    # Confounded by rate and data; no criterion; one seed; fewer than planned; no seed in common; smoke.
    arm(root, "GPT-06", 25.0, data="wikitext103")
    arm(root, "GPT-07", 29.0, data="wikitext2", settings={"optim": {"lr": 3e-4}})
    arm(root, "MINE-02", 31.0, spread=0.002)
    arm(root, "GPT-02-lr3e-4", 31.0, seeds=range(1))
    arm(root, "GPT-01-lean", 31.0, spread=0.002, seeds=range(3))
    arm(root, "SST-2-03", 0.8, seeds=range(7, 9), data="sst2")
    arm(root, "GPT-01", 90.0, budget="smoke", seeds=range(2))
    arm(root, "GPT-02", 91.0, budget="smoke", spread=0.002, seeds=range(2))


def _write_mixed(root: Path) -> None:
    finish(root, "XNLI-01", seed=0, best=0.8)
    finish(root, "XNLI-01", seed=1, best=0.8, settings={"optim": {"lr": 2e-5}})
    finish(root, "XNLI-02", seed=0, best=0.8)
    finish(root, "XNLI-02", seed=1, best=0.8, data="xnli")
    for where in (root, second_root(root)):
        finish(where, "T5-01", seed=0, best=0.8)


def _write_unfinished(root: Path) -> None:
    long_ago = "2024-01-02T03:04:05+00:00"
    record(root, "running", experiment="T5-02", seed=0, host="elsewhere")
    record(root, "running", experiment="T5-02", seed=1, host="elsewhere", heartbeat=long_ago)
    record(root, "running", experiment="T5-02", seed=2, pid=2**22 + 1)
    record(root, "queued", experiment="T5-02", seed=3)
    record(root, "failed", experiment="T5-02", seed=4, message=MESSAGE)
    record(root, "stopped", experiment="T5-02", seed=5)
    record(root, "done", experiment="T5-02", seed=6)
    write_text(record(root, "queued", experiment="T5-02", seed=7) / "status.json", "{", durable=False)


def _write_sweeps(root: Path) -> None:
    rates = [1e-4, 1e-3]
    for experiment in ("GPT-01", "GPT-02"):
        points = tuple(
            SweepPoint(values={"optim.lr": rate}, variant=f"lr-{number}", seeds=(100, 101), score=3.5 - number)
            for number, rate in enumerate(rates)
        )
        sweep = SweepRecord(
            experiment=experiment,
            budget="laptop",
            grid={"optim.lr": rates},
            changes={},
            points=points,
            best=1,
            at_edge=("optim.lr",),
            written=now_text(),
        )
        write_json(root / experiment / "laptop" / SWEEP, sweep.model_dump(mode="json"), durable=False)


def _write_beside_runs(root: Path) -> None:
    """Write a timing in turns, and two experiments of the earlier study."""
    timing = TimingRecord(
        first="baseline",
        second="oelm_freeze",
        shape=TimedShape(num_layers=2, model_dim=32, seq_len=32, batch_size=8, dropout=0.0),
        value=1.02,
        low=1.01,
        high=1.03,
        bound=1.05,
        rounds=20,
        first_step_s=0.02,
        second_step_s=0.0196,
        first_peak_bytes=1000,
        second_peak_bytes=900,
    )
    write_timing(root, timing)
    write_imported([reported("GPT-01", 9.0, ((10, 2.0), (20, 1.9))), reported("GPT-02", 9.5, ((10, 2.1), (20, 2.0)))], root)


def reported(arm: str, best_ppl: float, losses: tuple[tuple[int, float], ...]) -> ImportedRun:
    """Return an experiment of the earlier study as it is kept."""
    curves = {"best_ppl": ((20, best_ppl),), "val_loss": losses}
    return ImportedRun(study="old", arm=arm, seed=0, name=f"{arm}_x", format="study", curves=curves, source={})
