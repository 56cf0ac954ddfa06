"""Every arm next to its baseline: whether the two can be compared, which class and which question they belong to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from oelm.config import flatten
from oelm.errors import ConfigError, DataError
from oelm.experiments.catalog import Catalog, Criterion, Experiment
from oelm.experiments.plan import TUNABLE, TUNED, confounding, tuned_alike
from oelm.experiments.sweep import SweepRecord, read_sweep
from oelm.method.method import Method, learning_later, method_kind, method_name
from oelm.report.arms import (
    Arm,
    FinishedRun,
    common_split,
    data_difference,
    difference_text,
    differing_settings,
    known_differences,
)
from oelm.report.judge import comparison_key
from oelm.report.words import Words
from oelm.runs.find import OWN, ArmKey, own_baselines
from oelm.runs.layout import SWEEP, EvaluatedSplit
from oelm.stats import Interval, PairedGap, document_log_ratio, example_difference, paired_gap


def gap_between(arm: Arm, other: Arm, split: EvaluatedSplit) -> PairedGap:
    """Return the gap between two arms on a split, paired by seed, at the usual level."""
    return paired_gap(arm.on(split), other.on(split), arm.metric)


def over_documents(ours: Sequence[FinishedRun], theirs: Sequence[FinishedRun], split: EvaluatedSplit) -> Interval | None:
    """Return the interval over documents of paired runs of language models, where all kept their losses on the same ones."""
    try:
        sides = [[run.documents(split) for run in runs] for runs in (ours, theirs)]
    except DataError:
        return None
    texts = {tuple((row.document, row.tokens) for row in rows) for side in sides for rows in side}
    if len(texts) != 1:
        return None
    tokens = [count for _, count in texts.pop()]
    mine, reference = ([[row.nats for row in rows] for rows in side] for side in sides)
    return document_log_ratio(mine, reference, tokens)


def over_examples(ours: Sequence[FinishedRun], theirs: Sequence[FinishedRun], split: EvaluatedSplit) -> Interval | None:
    """Return the interval over examples of paired runs of a classifier, where all kept their answers to the same examples.

    On validation the answers are those of the final models.
    """
    try:
        sides = [[run.predictions(split) for run in runs] for runs in (ours, theirs)]
    except DataError:
        return None
    # Answers to other questions cannot be paired, nor those of a file that was cut off.
    if not ours or len({tuple((row.example, row.label) for row in rows) for side in sides for rows in side}) > 1:
        return None
    return example_difference(*([[row.label == row.predicted for row in rows] for rows in side] for side in sides))


@dataclass(frozen=True)
class Pair:
    """An arm and its baseline at the same budget and variant. `confounded` lists what differs besides the method."""

    arm: Arm
    baseline: Arm
    experiment: Experiment | None
    confounded: tuple[str, ...]

    @cached_property
    def seeds(self) -> list[int]:
        """The seeds that both have."""
        return sorted(self.arm.best.keys() & self.baseline.best.keys())

    @cached_property
    def split(self) -> EvaluatedSplit:
        """What the two are compared on, never one of them on the one and one on the other."""
        return common_split(self.arm, self.baseline)

    @cached_property
    def gap(self) -> PairedGap:
        """The gap on that split, at the usual level; a verdict may rest on a wider interval."""
        return gap_between(self.arm, self.baseline, self.split)


@dataclass(frozen=True)
class Sweeps:
    """The sweeps of some arms, each read once: by experiment, budget and root, or why one cannot be read."""

    roots: tuple[Path, ...]
    found: Mapping[tuple[str, str, Path], SweepRecord | ConfigError]

    @classmethod
    def read(cls, arms: Iterable[Arm], roots: Sequence[Path]) -> Sweeps:
        """Read the sweeps of the arms' experiments at their budgets under every root."""
        places = dict.fromkeys((arm.experiment, arm.budget, root) for arm in arms for root in roots)
        found: dict[tuple[str, str, Path], SweepRecord | ConfigError] = {}
        for experiment, budget, root in places:
            if (root / experiment / budget / SWEEP).is_file():
                try:
                    found[experiment, budget, root] = read_sweep(experiment, budget, root)
                except ConfigError as problem:
                    found[experiment, budget, root] = problem
        return cls(tuple(roots), found)

    def of(self, arm: Arm) -> list[SweepRecord]:
        """Return the readable sweeps of an arm's experiment at its budget, one of each root: those next to its runs first."""
        ordered = sorted(self.roots, key=lambda root: not any(run.path.is_relative_to(root) for run in arm.runs))
        found = [self.found.get((arm.experiment, arm.budget, root)) for root in ordered]
        return [sweep for sweep in found if isinstance(sweep, SweepRecord)]

    @property
    def damages(self) -> list[str]:
        """What is wrong with those that cannot be read."""
        return [str(problem) for problem in self.found.values() if isinstance(problem, ConfigError)]

    def without_chosen(self, arm: Arm) -> Arm:
        """Return an arm without the seeds its setting was chosen on: what won by their luck must not be judged on them."""
        # The best setting of a sweep has a separate folder, and may be given the sweep's seeds again.
        is_tuned = arm.variant.startswith(TUNED)
        points = [point for sweep in self.of(arm) for point in sweep.points if is_tuned or point.variant == arm.variant]
        chosen = {seed for point in points for seed in point.seeds}
        runs = tuple(run for run in arm.runs if run.seed not in chosen)
        return replace(arm, runs=runs, unfinished=tuple(run for run in arm.unfinished if run.seed not in chosen))

    def at_its_best(self, arm: Arm) -> SweepRecord | None:
        """Return an arm's sweep where its runs have the best setting of it."""
        sweep = next(iter(self.of(arm)), None)
        if sweep is None or sweep.best is None:
            return None
        settings = flatten(arm.first.config)
        chosen = sweep.points[sweep.best].values
        return sweep if all(settings.get(key) == value for key, value in chosen.items()) else None


@dataclass(frozen=True)
class Findings:
    """All arms that were found, those that can be compared with a baseline, and the catalog they come from.

    `swept` are the seeds that arms of comparisons have and that are left out there: a sweep chose their setting on them.
    """

    catalog: Catalog
    roots: tuple[Path, ...]
    arms: tuple[Arm, ...]
    pairs: tuple[Pair, ...]
    sweeps: Sweeps
    swept: Mapping[ArmKey, tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def families(self) -> list[tuple[Arm, list[Pair]]]:
        """Each baseline with the arms that are compared with it."""
        found: dict[ArmKey, tuple[Arm, list[Pair]]] = {}
        for pair in self.pairs:
            found.setdefault(pair.baseline.key, (pair.baseline, []))[1].append(pair)
        return list(found.values())

    def by_weight(self) -> list[list[Arm]]:
        """Return each family's arms, its baseline first; variants come later than what they vary, smoke last."""
        ordered = sorted(self.families, key=lambda family: (family[0].budget == "smoke", family[0].variant != "default"))
        return [[baseline, *(pair.arm for pair in pairs)] for baseline, pairs in ordered]

    def without_baseline(self) -> list[tuple[Arm, ArmKey]]:
        """Return the usable arms that have no usable baseline at their budget and variant, each with the place of one."""
        usable, known = {arm.key for arm in self.arms if arm.is_usable}, baseline_keys(self.arms, self.catalog)
        places = [(arm, known.get(arm.key)) for arm in self.arms if arm.is_usable]
        return [(arm, key) for arm, key in places if key is not None and key not in usable]

    def unswept(self, arms: Iterable[Arm]) -> list[Arm]:
        """Return arms without the seeds their setting was chosen on, and without arms that only a sweep tried."""
        return [left for arm in arms if (left := self.sweeps.without_chosen(arm)).runs]

    def damages(self) -> list[str]:
        """Return what is wrong with every record that the report would have used and cannot."""
        return [run.problem for arm in self.arms for run in arm.unfinished if run.problem] + self.sweeps.damages

    def restricted(self, experiments: Collection[str]) -> Findings:
        """Return what was found of some experiments."""
        arms = tuple(arm for arm in self.arms if arm.experiment in experiments)
        pairs = [pair for pair in self.pairs if {pair.arm.experiment, pair.baseline.experiment} <= {*experiments}]
        swept = {key: seeds for key, seeds in self.swept.items() if key[0] in experiments}
        return replace(self, arms=arms, pairs=tuple(pairs), swept=swept)


def find(arms: Sequence[Arm], catalog: Catalog, roots: Sequence[Path]) -> Findings:
    """Pair every usable arm with its baseline; damaged, mixed and lonely ones stay among the arms."""
    by_key, sweeps = {arm.key: arm for arm in arms}, Sweeps.read(arms, roots)
    baselines = baseline_keys(arms, catalog)
    pairs = []
    swept: dict[ArmKey, tuple[int, ...]] = {}
    for arm in arms:
        other = by_key.get(baselines.get(arm.key, ("", "", "")))
        experiment = _own_experiment(arm) if arm.experiment in OWN else catalog.experiments.get(arm.experiment)
        if other is None or not _comparable(arm, other, experiment):
            continue
        ours, theirs = sweeps.without_chosen(arm), sweeps.without_chosen(other)
        if not ours.runs:
            continue
        for whole, rest in ((arm, ours), (other, theirs)):
            if left_out := tuple(sorted(whole.best.keys() - rest.best.keys())):
                swept[whole.key] = left_out
        if theirs.runs:
            pairs.append(Pair(ours, theirs, experiment, _differs_besides(ours, theirs, catalog, sweeps)))
    return Findings(catalog, tuple(roots), tuple(arms), tuple(pairs), sweeps, swept)


def _comparable(arm: Arm, baseline: Arm, experiment: Experiment | None) -> bool:
    if not arm.is_usable or not baseline.is_usable:
        return False
    # An entry of a user's own catalog may have become another kind since its runs were made.
    kinds = {"language_model": "ppl", "classifier": "accuracy"}
    named = {kinds[experiment.kind]} if experiment is not None else set()
    return len({arm.metric, baseline.metric} | named) == 1


def baseline_keys(arms: Iterable[Arm], catalog: Catalog) -> dict[ArmKey, ArmKey]:
    """Return where each arm's baseline is: as the catalog has it, or of `oelm train` the arm of the same config."""
    named, own = catalog.baselines(), dict[ArmKey, Mapping[str, Any]]()
    found: dict[ArmKey, ArmKey] = {}
    for arm in arms:
        if arm.experiment in named:
            found[arm.key] = named[arm.experiment], arm.budget, arm.variant
        elif arm.experiment in OWN and arm.runs:
            own[arm.key] = arm.first.config
            if method_kind(arm.method) != "free":
                # Where the baseline would be, if no arm has the same config.
                found[arm.key] = arm.experiment, arm.budget, "baseline"
    return found | own_baselines(own)


def _own_experiment(arm: Arm) -> Experiment | None:
    """Return what the runs of `oelm train` or `oelm finetune` are judged by: the study's usual bound, at five seeds."""
    if not arm.runs:
        return None
    is_gpt = arm.metric == "ppl"
    bound = Criterion(ppl_ratio_at_most=1.05) if is_gpt else Criterion(accuracy_loss_at_most=0.05)
    kind: Literal["language_model", "classifier"] = "language_model" if is_gpt else "classifier"
    return Experiment(
        id=arm.experiment,
        baseline=arm.experiment,
        kind=kind,
        data=arm.data,
        method=_own_method(arm),
        criterion=bound,
        where=f"oelm {arm.experiment}",
    )


def _own_method(arm: Arm) -> str:
    """Return the name of the method of a run that has no entry in the catalog."""
    try:
        return method_name(Method.model_validate(arm.method))
    except ValidationError:
        # Of a version with other fields.
        return arm.shown


def _differs_besides(arm: Arm, baseline: Arm, catalog: Catalog, sweeps: Sweeps) -> tuple[str, ...]:
    """Return what besides the method, or a control's shape, two arms differ in, but for settings both were tuned in alike."""
    ours, theirs = arm.first, baseline.first
    settings = differing_settings(ours.recipe, theirs.recipe)
    differing = {**settings, **known_differences(arm.computed_with, baseline.computed_with)}
    tuned = _tuned_alike(arm, baseline, catalog, sweeps)
    unfair = confounding(differing, tuned=tuned, is_larger=lambda: ours.audit.total > theirs.audit.total)
    return (*(difference_text(key, differing[key]) for key in unfair), *data_difference(ours, theirs))


def _tuned_alike(arm: Arm, baseline: Arm, catalog: Catalog, sweeps: Sweeps) -> set[str]:
    """Return the settings that both arms have from the best point of the same sweep.

    Of sweeps that were taken over, both must be, from an arm and its baseline elsewhere.
    """
    if not arm.variant.startswith(TUNED):
        return set()
    ours, theirs = sweeps.at_its_best(arm), sweeps.at_its_best(baseline)
    if ours is None or theirs is None or ours.terms != theirs.terms:
        return set()
    sources = (ours.like or arm.experiment, theirs.like or baseline.experiment)
    return set(ours.grid) if tuned_alike(*sources, catalog.baselines()) else set()


def split_text(split: EvaluatedSplit, words: Words) -> str:
    """Return how a split is called in tables."""
    return words("split.test") if split == "test" else words("split.val")


def label(arm: Arm) -> str:
    """Return how an arm is called in tables and pictures."""
    return arm.experiment if arm.variant == "default" else f"{arm.experiment} ({arm.shown})"


def method_of(arm: Arm, catalog: Catalog) -> str | None:
    """Return the name of an arm's method; None where it is one of the user's own, which has no name."""
    if arm.experiment in OWN:
        return _own_method(arm)
    experiment = catalog.experiments.get(arm.experiment)
    return experiment.method if experiment is not None and isinstance(experiment.method, str) else None


def method_text(arm: Arm, catalog: Catalog, words: Words) -> str:
    """Return how an arm's method is called in tables; those without a name are distinguished by their experiment.

    One method on models of two architectures is not the same thing, so another architecture is named with it.
    """
    return on_architecture(arm, method_of(arm, catalog) or words("method.own", experiment=arm.experiment), words)


def on_architecture(arm: Arm, name: str, words: Words) -> str:
    """Return a name with what the arm's model has that others have not."""
    return words("method.short_conv", method=name) if has_short_conv(arm) else name


def has_short_conv(arm: Arm) -> bool:
    """Whether the arm's model has a short convolution before its first layer."""
    return bool(arm.first.config.get("model", {}).get("short_conv", 0))


def is_uniform(arm: Arm) -> bool:
    """Whether an arm's attention has no Q and K: both are frozen at zero everywhere, so all visible tokens weigh the same."""
    is_zero = arm.method.get("init") == "gaussian" and arm.method.get("std") == 0
    return is_zero and method_kind(arm.method) == "pure"


def draw_of(arm: Arm) -> int | None:
    """Return the seed of an arm's frames where they have a separate one."""
    # Weights that are kept or derived from existing ones are not drawn.
    kept = ("native", "orthonormalized", "polar", "spectral", "spectral_flat")
    is_drawn = arm.method.get("freeze") and arm.method.get("init") not in kept
    seed = arm.method.get("seed") if is_drawn else None
    return seed if isinstance(seed, int) else None


# Beyond `LITTLE` of the baseline's Q and K what learns on top is no little any more. The controls last: what as few trainable
# parameters give without any frame.
CLASSES = ("pure", "little", "partial", "much", "control")
LITTLE = 1 / 8
_QK_ROLES = ("query", "key", "query_key_value", "gain", "correction")


def class_of(pair: Pair) -> str:
    """Return the class of an arm compared with its baseline: one that freezes nothing is a control."""
    kind = method_kind(pair.arm.method)
    if kind == "free":
        return "control"
    ours, whole = learning_in_qk(pair.arm), learning_in_qk(pair.baseline)
    is_much = ours is not None and whole is not None and ours > LITTLE * whole
    return "much" if kind == "little" and is_much else kind


def learning_in_qk(arm: Arm) -> int | None:
    """Return how many parameters learn on the Q/K side from the first step on; None where Q, K and V are one weight."""
    roles = arm.first.audit.by_role
    if "query_key_value" in roles:
        return None
    return sum(counts["trainable"] for role, counts in roles.items() if role in _QK_ROLES)


def change_later(arm: Arm) -> int:
    """Return by how many parameters more learn at the end of an arm's training than at its start; or fewer."""
    return learning_later(arm.method, arm.first.audit.projections)


def pair_text(pair: Pair, catalog: Catalog, words: Words) -> str:
    """Return the name of an arm among others of its baseline: by its method, or as the control that it is."""
    if class_of(pair) != "control":
        return method_text(pair.arm, catalog, words)
    return on_architecture(pair.arm, rival_of(pair) or method_of(pair.arm, catalog) or pair.arm.experiment, words)


def rival_of(pair: Pair) -> str:
    """Return what a control's name has that its baseline's has not: of `GPT-01-thin`, and of `conv-thin.stdlib`, thin.

    It is empty for arms that are no controls.
    """
    if class_of(pair) != "control":
        return ""
    name, dot, data = pair.arm.experiment.rpartition(".")
    ours, theirs = pair.arm.experiment, pair.baseline.experiment
    if dot and theirs.endswith(dot + data):
        ours, theirs = name, theirs.removesuffix(dot + data)
    return ours.removeprefix(theirs).removeprefix("conv-" if has_short_conv(pair.arm) else "").strip("-")


def plain_words(pair: Pair, catalog: Catalog, words: Words) -> str:
    """Return what learns in an arm's Q and K in plain words; nothing if there are no words for it."""
    return words.optional(f"plain.{rival_of(pair) or method_of(pair.arm, catalog)}")


# What is asked about, apart from experiment and budget: the method, the model, how much text. The data is known by
# its fingerprint, wherever it lies.
_ASKED = ("method.", "model.", "data.max_tokens", "examples.", "steps", "epochs", "batch_size", "init_from.sha256")
_PLACES = ("model.source", "examples.folder", "examples.dev")


def question_of(arm: Arm) -> str:
    """Return a short digest of what an arm asks: the same for every rate, schedule and seed at which it is tried.

    A setting that is off, or that an older record lacks, is left out.
    """
    run = arm.first
    asked = {
        key: value
        for key, value in flatten(run.recipe).items()
        if key.startswith(_ASKED) and not key.startswith((*TUNABLE, *_PLACES)) and value
    }
    told = json.dumps([run.fingerprint, sorted(asked.items())], default=str)
    return hashlib.sha256(told.encode()).hexdigest()[:12]


def questions_of(arms: Iterable[Arm]) -> dict[str, str]:
    """Return what the arms that can be used ask, by the key of their looks."""
    return {comparison_key(*arm.key): question_of(arm) for arm in arms if arm.is_usable}
