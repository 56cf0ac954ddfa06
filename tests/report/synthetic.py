"""Finished runs as training leaves them, without training: every file agrees with every other, the figures are chosen."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from oelm.config import with_overrides
from oelm.experiments.catalog import Catalog, load_catalog
from oelm.experiments.sweep import SweepPoint, SweepRecord
from oelm.method.method import resolve_method, selects_layer
from oelm.runs.layout import SWEEP
from oelm.train.timing import PHASES, step_statistics

SEEDS = range(5)
REVISION = "0123456789abcdef0123456789abcdef01234567"
TOKENS_PER_STEP = 4096
# The shape of the run's model, from which its audit follows.
_DIM, _LAYERS, _HEADS, _VOCAB, _FF = 64, 2, 2, 1024, 256


@dataclass(frozen=True)
class Fate:
    """Everything that is chosen about a run; the figure is `ppl` or `accuracy`, reached at its last evaluation.

    `test` is the best model's PPL or accuracy on the test split, None without one; `test_right` are its answers there.
    `five_gram` is a 5-gram model's PPL, on either split; `bigram` a bigram model's, which records made before have instead.
    `losses` are the validation losses at equal distances, the last at the last step; by default they fall to the best.
    `right` are a classifier's final answers, which then give its final accuracy. `settings` change the config by dotted
    path. `entropies` are those of the heads, layer by layer; None writes no attention.json.
    """

    ppl: float | None = None
    accuracy: float | None = None
    test: float | None = None
    bigram: float | None = None
    five_gram: float | None = None
    test_right: tuple[bool, ...] = ()
    losses: tuple[float, ...] = ()
    right: tuple[bool, ...] = ()
    method: str = "baseline"
    settings: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 20
    step_s: float = 0.05
    overhead_s: float = 0.0
    data: str = "tinystories"
    fingerprint: str = ""
    entropies: tuple[tuple[float, ...], ...] | None = ((1.0, 2.0), (1.5, 2.5))
    revision: str | None = REVISION
    heartbeat: str = "2026-01-02T03:04:05+00:00"


@cache
def package_catalog() -> Catalog:
    """Return the catalog as everybody has it."""
    return load_catalog()


def write_run(root: Path, experiment: str, seed: int, fate: Fate, *, budget: str = "laptop", variant: str = "default") -> Path:
    """Write one finished run with all its files; return its folder."""
    run = root / experiment / budget / variant / f"seed-{seed}"
    if isinstance(steps := fate.settings.get("steps"), int):
        fate = replace(fate, steps=steps)
    run.mkdir(parents=True, exist_ok=True)
    evaluations = _evaluations(fate, seed)
    trained = _steps(fate)
    rows = sorted([*trained, *evaluations], key=lambda row: row["step"])
    config = config_of(fate, seed)
    for name, value in {
        "config.json": config,
        "status.json": _status(fate),
        "manifest.json": _manifest(fate),
        "audit.json": audit_of(fate.method),
        "timing_stats.json": _figures(fate, trained, evaluations, config),
    }.items():
        write_plain(run / name, value)
    write_lines(run / "metrics.jsonl", rows)
    write_lines(run / "predictions.jsonl", _predictions(fate, evaluations[-1]["val_loss"]))
    if fate.test is not None:
        write_lines(run / "test_predictions.jsonl", _test_predictions(fate))
    if fate.entropies is not None:
        write_plain(run / "attention.json", _attention(fate))
    return run


def write_arm(
    root: Path,
    experiment: str,
    figures: Sequence[float],
    *,
    seeds: Sequence[int] = SEEDS,
    budget: str = "laptop",
    variant: str = "default",
    tests: Sequence[float | None] = (),
    **chosen: Any,
) -> list[Path]:
    """Write an arm's runs, a PPL (1 or more) or an accuracy (a share below 1) for each seed, and one on test in `tests`."""
    method = package_catalog().experiments[experiment].method if experiment in package_catalog().experiments else "baseline"
    chosen = {"method": method} | chosen
    return [
        write_run(root, experiment, seed, _fate(figure, chosen | {"test": test}), budget=budget, variant=variant)
        for seed, figure, test in zip(seeds, figures, tests or [None] * len(figures), strict=True)
    ]


def _fate(figure: float, chosen: Mapping[str, Any]) -> Fate:
    return Fate(ppl=figure, **chosen) if figure >= 1 else Fate(accuracy=figure, **{"entropies": None, **chosen})


def write_plain(path: Path, value: Any) -> None:
    """Write JSON in one go: a thousand runs have eight thousand files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without indentation: only then is it encoded in C.
    _replace(path, json.dumps(value) + "\n")


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write one JSON object a line."""
    _replace(path, "".join(json.dumps(row) + "\n" for row in rows))


def _replace(path: Path, text: str) -> None:
    # Never in place: the file may be linked from another study.
    path.unlink(missing_ok=True)
    path.write_text(text, encoding="utf-8")


def linked(study: Path, target: Path) -> Path:
    """Return a study of the same files elsewhere: what is written there by functions of this module leaves the first alone."""
    return shutil.copytree(study, target, copy_function=os.link)


def config_of(fate: Fate, seed: int) -> dict[str, Any]:
    """Return a run's whole config: a language model's with `data`, a classifier's with `examples`."""
    shape: dict[str, Any] = {"model_dim": _DIM, "num_layers": _LAYERS, "num_heads": _HEADS, "ff_dim": _FF}
    config: dict[str, Any] = {
        "method": dict(_method(fate.method)),
        "optim": {"lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0.01, "clip_norm": 1.0},
        "schedule": {"warmup_steps": 2, "final_fraction": 0.0},
        "steps": fate.steps,
        "batch_size": 8,
        "timing_warmup_steps": 2,
        "seed": seed,
        "device": "auto",
    }
    if fate.ppl is not None:
        config |= {"model": {"vocab_size": _VOCAB, "seq_len": 64, **shape, "dropout": 0.0}}
        config |= {"data": {"source": fate.data, "tokenizer": "bpe:1024", "max_tokens": None}}
    else:
        config |= {"model": {"source": None, "architecture": "bert", "sha256": "", "num_labels": 2, **shape}}
        config |= {"examples": {"task": fate.data, "folder": None, "dev": None, "max_length": 64, "max_train": None}}
    return with_overrides(config, dict(fate.settings))


@cache
def _method(name: str) -> dict[str, Any]:
    return resolve_method(name).model_dump(mode="json")


def _losses(fate: Fate, seed: int) -> tuple[float, ...]:
    if fate.losses:
        # No two seeds have the same losses to the last bit, either.
        worst = max(range(len(fate.losses)), key=fate.losses.__getitem__)
        return tuple(loss + (seed * 1e-12 if number == worst else 0.0) for number, loss in enumerate(fate.losses))
    best = math.log(fate.ppl) if fate.ppl is not None else 1.0 - (fate.accuracy or 0.0)
    # No two seeds begin alike, whatever they come to.
    return (best + 1.0 + seed / 1024, best + 0.5, best + 0.25, best)


def _evaluations(fate: Fate, seed: int) -> list[dict[str, Any]]:
    losses = _losses(fate, seed)
    assert fate.steps % len(losses) == 0, "evaluations at equal distances"
    rows: list[dict[str, Any]] = []
    for number, loss in enumerate(losses, start=1):
        row = {"step": number * fate.steps // len(losses), "val_loss": loss}
        if fate.ppl is not None:
            row |= {"val_ppl": math.exp(loss), "bits_per_byte": loss / 2}
        else:
            assert fate.accuracy is not None
            # It is best early where the final answers are told apart from it.
            is_best = number == (1 if fate.right else len(losses))
            row |= {"val_accuracy": fate.accuracy if is_best else fate.accuracy / 2}
        rows.append(row)
    if fate.right:
        rows[-1]["val_accuracy"] = sum(fate.right) / len(fate.right)
    return rows


def _steps(fate: Fate) -> list[dict[str, Any]]:
    # A power of two in the pace, so that tokens come out whole from it again.
    pace = TOKENS_PER_STEP / fate.step_s
    return [
        {"step": step, "loss": 5.0 - step / 64, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_s": pace, "step_s": fate.step_s}
        for step in range(1, fate.steps + 1)
    ]


def _figures(
    fate: Fate, steps: list[dict[str, Any]], evaluations: list[dict[str, Any]], config: dict[str, Any]
) -> dict[str, Any]:
    stepping = fate.steps * fate.step_s
    wall = dict.fromkeys(PHASES, 0.0) | {"step": stepping, "other": fate.overhead_s}
    best_loss = min(row["val_loss"] for row in evaluations)
    last = evaluations[-1]
    figures: dict[str, Any] = {
        "step_s": step_statistics([row["step_s"] for row in steps], warmup_steps=config["timing_warmup_steps"]),
        "wall_s": wall | {"total": stepping + fate.overhead_s},
        "tokens": fate.steps * TOKENS_PER_STEP,
        "final_loss": steps[-1]["loss"],
        "final_val_loss": last["val_loss"],
        "best_val_loss": best_loss,
        "best_step": min(evaluations, key=lambda row: -row["val_accuracy"] if fate.ppl is None else row["val_loss"])["step"],
    }
    if fate.ppl is not None:
        ppls = {"final_ppl": last["val_ppl"], "best_ppl": math.exp(best_loss), "final_bits_per_byte": last["bits_per_byte"]}
        return figures | ppls | _tested(fate, figures["best_step"])
    figures |= {"final_accuracy": last["val_accuracy"], "best_accuracy": max(row["val_accuracy"] for row in evaluations)}
    return figures | _tested(fate, figures["best_step"])


def _tested(fate: Fate, step: int) -> dict[str, Any]:
    figures: dict[str, Any] = {} if fate.bigram is None else {"bigram_ppl": fate.bigram}
    if fate.five_gram is not None:
        splits = ("val",) if fate.test is None else ("val", "test")
        figures |= {"ngram": {split: _orders(fate.five_gram) for split in splits}, "ngram_tokens": 1000}
    if fate.test is None:
        return figures
    loss = _test_loss(fate)
    if fate.ppl is None:
        return figures | {"test_step": step, "test_loss": loss, "test_accuracy": fate.test}
    figures |= {} if fate.bigram is None else {"test_bigram_ppl": fate.bigram}
    return figures | {"test_step": step, "test_loss": loss, "test_ppl": math.exp(loss), "test_bits_per_byte": loss / 2}


def _orders(five_gram: float) -> list[float]:
    """Perplexities of order 1 to 5, the last as given."""
    return [five_gram * factor for factor in (16, 8, 4, 2, 1)]


def _test_loss(fate: Fate) -> float:
    assert fate.test is not None
    return math.log(fate.test) if fate.ppl is not None else 1.0 - fate.test


def _test_predictions(fate: Fate) -> list[dict[str, Any]]:
    loss = _test_loss(fate)
    if fate.ppl is not None:
        return [{"document": number, "tokens": 100, "nats": 100 * loss} for number in range(2)]
    right = fate.test_right or _right(fate.test or 0.0)
    return [{"example": n, "label": 0, "predicted": int(not is_right), "nats": loss} for n, is_right in enumerate(right)]


def _predictions(fate: Fate, final_loss: float) -> list[dict[str, Any]]:
    if fate.ppl is not None:
        return [{"document": number, "tokens": 100, "nats": 100 * final_loss} for number in range(3)]
    right = fate.right or _right(fate.accuracy or 0.0)
    return [
        {"example": number, "label": number % 2, "predicted": number % 2 if is_right else 1 - number % 2, "nats": final_loss}
        for number, is_right in enumerate(right)
    ]


def _right(accuracy: float) -> tuple[bool, ...]:
    """Return answers of which exactly this share is right: to as many examples as that takes."""
    count = next(count for count in (100, 1000, 10_000) if math.isclose(round(accuracy * count), accuracy * count))
    return tuple(number < round(accuracy * count) for number in range(count))


def _status(fate: Fate) -> dict[str, Any]:
    return {
        "step": fate.steps,
        "steps": fate.steps,
        "eta_s": 0.0,
        "loss": 4.0,
        "best": fate.ppl if fate.ppl is not None else fate.accuracy,
        "metric": "ppl" if fate.ppl is not None else "accuracy",
        "step_s": fate.step_s,
        "device": "cpu",
        "status": "done",
        "heartbeat": fate.heartbeat,
        "pid": 4321,
        "host": "secret-host-name",
        "started": fate.heartbeat,
        "message": "",
    }


def _manifest(fate: Fate) -> dict[str, Any]:
    fingerprint = fate.fingerprint or hashlib.sha256(fate.data.encode()).hexdigest()
    return {
        "python": "3.11.7",
        "oelm": "0.1.0",
        "source_revision": fate.revision,
        "torch": "2.13.0+cpu",
        "numpy": "2.4.6",
        "environment": {
            "torch": "2.13.0+cpu",
            "device": "cpu",
            "precision": "float32",
            "threads": "1",
            "cpu_capability": "AVX2",
            "machine": "x86_64",
        },
        "data": {"name": fate.data, "source": "made", "fingerprint": fingerprint, "tokenizer": "bpe:1024"},
        "earlier": [],
    }


def audit_of(method: str) -> dict[str, Any]:
    """Return the audit of the writer's small GPT: Q and K frozen where the method freezes them from the start."""
    chosen, one = _method(method), _DIM * _DIM
    parts = () if chosen["freeze_at"] else chosen["freeze"]
    layers = chosen["layers"] if isinstance(chosen["layers"], str) else tuple(chosen["layers"])
    frozen_layers = [layer for layer in range(_LAYERS) if selects_layer(layers, layer, _LAYERS)]
    by_role = {
        role: _role(_LAYERS * one, frozen=len(frozen_layers) * one if part in parts else 0)
        for role, part in (("query", "q"), ("key", "k"))
    }
    on_top = [role for role, none in (("gain", "none"), ("correction", 0)) if chosen[role] != none and chosen["freeze"]]
    by_role |= {role: _role(_LAYERS, frozen=0) for role in on_top}
    free = {"embedding": _VOCAB * _DIM + 64 * _DIM, "value_output": 2 * _LAYERS * one, "feed_forward": 2 * _LAYERS * _DIM * _FF}
    by_role |= {role: _role(count, frozen=0) for role, count in free.items()}
    trainable, frozen = (sum(counts[name] for counts in by_role.values()) for name in ("trainable", "frozen"))
    return {
        "total": trainable + frozen,
        "trainable": trainable,
        "frozen": frozen,
        "by_role": by_role,
        "projections": [
            _projection(layer, part, layer in frozen_layers and part in parts, one)
            for layer in range(_LAYERS)
            for part in ("q", "k")
        ],
    }


def _role(count: int, *, frozen: int) -> dict[str, int]:
    return {"trainable": count - frozen, "frozen": frozen}


def _projection(layer: int, part: str, is_frozen: bool, num_parameters: int) -> dict[str, Any]:
    return {
        "name": f"blocks.{layer}.attention.{part}",
        "pattern": f"blocks.*.attention.{part}",
        "layer": layer,
        "part": part,
        "num_heads": _HEADS,
        "num_parameters": num_parameters,
        "is_frozen": is_frozen,
        "digest": "0" * 64 if is_frozen else None,
        "orthonormality_error": 0.0 if is_frozen else 0.5,
    }


def _attention(fate: Fate) -> dict[str, Any]:
    heads = [
        {
            "layer": layer,
            "head": head,
            "entropy": entropy,
            "uniform_entropy": 3.0,
            "effective_rank": 10 * entropy,
            "logit_std": entropy / 4,
            "mean_distance": 2 * entropy,
            "induction": entropy / 16,
        }
        for layer, entropies in enumerate(fate.entropies or ())
        for head, entropy in enumerate(entropies)
    ]
    return {"step": fate.steps, "tokens": 256, "heads": heads}


def write_sweep(
    root: Path,
    experiment: str,
    best: int,
    *,
    rates: Sequence[float] = (3e-4, 1e-3, 3e-3),
    seeds: tuple[int, ...] = (100, 101),
    changes: dict[str, Any] | None = None,
    like: str | None = None,
    apart: float = 1.0,
) -> SweepRecord:
    """Write an arm's sweep over learning rates, of which the one of this number came out best; return it."""
    points = tuple(
        SweepPoint(
            values={"optim.lr": rate}, variant=f"lr-{rate:g}-0{number}", seeds=seeds, score=3.0 + apart * abs(number - best)
        )
        for number, rate in enumerate(rates)
    )
    sweep = SweepRecord(
        experiment=experiment,
        budget="laptop",
        grid={"optim.lr": list(rates)},
        changes=changes or {},
        points=points,
        best=best,
        at_edge=("optim.lr",) if best in (0, len(rates) - 1) else (),
        written="2026-01-02T03:04:05+00:00",
        like=like,
    )
    write_plain(root / experiment / "laptop" / SWEEP, sweep.model_dump(mode="json"))
    return sweep


def write_tuned(root: Path, experiment: str, rate: float, figures: Sequence[float] = (30.0, 31.0)) -> None:
    """Write an arm that was tuned to a rate."""
    write_arm(root, experiment, figures, seeds=range(len(figures)), variant="tuned-0123abcd", settings={"optim.lr": rate})
