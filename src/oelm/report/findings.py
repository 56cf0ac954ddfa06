"""What recorded runs have to do with each other: every arm beside its baseline, and whether the two can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from oelm.dotted import flatten
from oelm.errors import ConfigError
from oelm.experiments.fair import TUNED, confounding, tuned_alike
from oelm.experiments.registry import Catalog, Experiment
from oelm.experiments.sweep import SweepRecord, read_sweep
from oelm.method.kind import method_kind
from oelm.report.collect import Arm, ArmKey, Run, common_split, difference_text, differing_settings
from oelm.report.computed import known_differences
from oelm.report.words import Words
from oelm.runs.layout import SWEEP, Split


@dataclass(frozen=True)
class Pair:
    """An arm and its baseline at the same budget and variant. `confounded` says what else than the method differs."""

    arm: Arm
    baseline: Arm
    experiment: Experiment | None
    confounded: tuple[str, ...]

    @property
    def seeds(self) -> list[int]:
        """The seeds that both have."""
        return sorted(self.arm.best.keys() & self.baseline.best.keys())

    @property
    def split(self) -> Split:
        """What the two are compared on, never one of them on the one and one on the other."""
        return common_split(self.arm, self.baseline)


@dataclass(frozen=True)
class Findings:
    """All arms that were found, those that can be set beside a baseline, and the catalog they come from.

    `swept` are the seeds that arms of comparisons have and that are left out there: a sweep chose their setting on them.
    """

    catalog: Catalog
    roots: tuple[Path, ...]
    arms: tuple[Arm, ...]
    pairs: tuple[Pair, ...]
    swept: Mapping[ArmKey, tuple[int, ...]] = field(default_factory=dict)

    def families(self) -> list[tuple[Arm, list[Pair]]]:
        """Return each baseline with the arms that are compared with it."""
        found: dict[ArmKey, tuple[Arm, list[Pair]]] = {}
        for pair in self.pairs:
            found.setdefault(pair.baseline.key, (pair.baseline, []))[1].append(pair)
        return list(found.values())

    def by_weight(self) -> list[tuple[Arm, list[Pair]]]:
        """Return the families in the order in which they are worth a picture: variants later, smoke last."""
        return sorted(self.families(), key=lambda family: (family[0].budget == "smoke", _is_variant(family[0])))

    def without_baseline(self) -> list[tuple[Arm, ArmKey]]:
        """Return the usable arms that have no usable baseline at their budget and variant, each with the place of one."""
        usable = {arm.key for arm in self.arms if arm.is_usable}
        places = [(arm, baseline_key(arm, self.catalog)) for arm in self.arms if arm.is_usable]
        return [(arm, key) for arm, key in places if key is not None and key not in usable]


def find(arms: Sequence[Arm], catalog: Catalog, roots: Sequence[Path]) -> Findings:
    """Pair every usable arm with its baseline; damaged, mixed and lonely ones stay among the arms."""
    by_key = {arm.key: arm for arm in arms}
    pairs = []
    swept: dict[ArmKey, tuple[int, ...]] = {}
    for arm in arms:
        other = by_key.get(baseline_key(arm, catalog) or ("", "", ""))
        experiment = catalog.experiments.get(arm.experiment)
        if other is None or not _comparable(arm, other, experiment):
            continue
        ours, theirs = _without_swept(arm, roots), _without_swept(other, roots)
        if not ours.runs:
            continue
        for whole, rest in ((arm, ours), (other, theirs)):
            if left_out := tuple(sorted(whole.best.keys() - rest.best.keys())):
                swept[whole.key] = left_out
        if theirs.runs:
            pairs.append(Pair(ours, theirs, experiment, confounds(ours, theirs, catalog, roots)))
    return Findings(catalog, tuple(roots), tuple(arms), tuple(pairs), swept)


def _comparable(arm: Arm, baseline: Arm, experiment: Experiment | None) -> bool:
    if not arm.is_usable or not baseline.is_usable:
        return False
    # An entry of a user's own catalog may have become another kind since its runs were made.
    kinds = {"language_model": "ppl", "classifier": "accuracy"}
    named = {kinds[experiment.kind]} if experiment is not None else set()
    return len({arm.metric, baseline.metric} | named) == 1


def _without_swept(arm: Arm, roots: Sequence[Path]) -> Arm:
    """Return an arm without the seeds that its setting was chosen on: what won by their luck must not be judged on them."""
    # What came out of a sweep best has a folder of its own, and may be given its seeds again.
    is_tuned = arm.variant.startswith(TUNED)
    points = [point for sweep in _sweeps_of(arm, roots) for point in sweep.points if is_tuned or point.variant == arm.variant]
    swept = {seed for point in points for seed in point.seeds}
    runs, rest = (tuple(run for run in runs if run.seed not in swept) for runs in (arm.runs, arm.unfinished))
    return replace(arm, runs=runs, unfinished=rest)


def unswept(arms: Sequence[Arm], roots: Sequence[Path]) -> list[Arm]:
    """Return what is left of arms without the seeds that their setting was chosen on; none of those that were tries alone."""
    return [left for arm in arms if (left := _without_swept(arm, roots)).runs]


def baseline_key(arm: Arm, catalog: Catalog) -> ArmKey | None:
    """Return where an arm's baseline is."""
    experiment = catalog.experiments.get(arm.experiment)
    return (experiment.baseline, arm.budget, arm.variant) if experiment is not None and experiment.baseline else None


def confounds(arm: Arm, baseline: Arm, catalog: Catalog, roots: Sequence[Path]) -> tuple[str, ...]:
    """Return what besides the method, or a control's shape, two arms differ in, but for settings both were tuned in alike."""
    ours, theirs = arm.runs[0], baseline.runs[0]
    settings = differing_settings(ours.recipe, theirs.recipe)
    differing = {**settings, **known_differences(arm.computed_with, baseline.computed_with)}
    tuned = _tuned_alike(arm, baseline, catalog, roots)
    unfair = confounding(differing, tuned=tuned, is_larger=lambda: _parameters(ours) > _parameters(theirs))
    changes = [difference_text(key, differing[key]) for key in unfair]
    if ours.fingerprint != theirs.fingerprint:
        changes.append(difference_text("data.fingerprint", (ours.fingerprint[:8], theirs.fingerprint[:8])))
    return tuple(changes)


def _parameters(run: Run) -> int:
    assert run.audit is not None
    return run.audit.total


def _tuned_alike(arm: Arm, baseline: Arm, catalog: Catalog, roots: Sequence[Path]) -> set[str]:
    """Return the settings that both arms have from the best point of the same sweep.

    Of sweeps that were taken over, both must be, from an arm and its baseline elsewhere.
    """
    if not arm.variant.startswith(TUNED):
        return set()
    ours, theirs = (_at_its_best(each, roots) for each in (arm, baseline))
    if ours is None or theirs is None or ours.terms != theirs.terms:
        return set()
    sources = (ours.like or arm.experiment, theirs.like or baseline.experiment)
    return set(ours.grid) if tuned_alike(*sources, catalog.baselines()) else set()


def _at_its_best(arm: Arm, roots: Sequence[Path]) -> SweepRecord | None:
    """Return an arm's sweep where its runs have what came out best of it."""
    sweep = sweep_of(arm, roots)
    if sweep is None or sweep.best is None:
        return None
    settings = flatten(arm.runs[0].config or {})
    chosen = sweep.points[sweep.best].values
    return sweep if all(settings.get(key) == value for key, value in chosen.items()) else None


def sweep_of(arm: Arm, roots: Sequence[Path]) -> SweepRecord | None:
    """Return the sweep of an arm's experiment at its budget, where there is a readable one: that beside its runs first."""
    return next(iter(_sweeps_of(arm, roots)), None)


def _sweeps_of(arm: Arm, roots: Sequence[Path]) -> list[SweepRecord]:
    """Return the readable sweeps of an arm's experiment at its budget, one of each root: those beside its runs first."""
    ordered = sorted(roots, key=lambda root: not any(run.path.is_relative_to(root) for run in arm.runs))
    found = [_read_sweep(arm.experiment, arm.budget, root) for root in ordered]
    return [sweep for sweep in found if sweep is not None and not isinstance(sweep, ConfigError)]


def _read_sweep(experiment: str, budget: str, root: Path) -> SweepRecord | ConfigError | None:
    """Return a sweep, or why it cannot be read; None where there is none."""
    if not (root / experiment / budget / SWEEP).is_file():
        return None
    try:
        return read_sweep(experiment, budget, root)
    except ConfigError as problem:
        return problem


def damaged_sweeps(findings: Findings) -> list[str]:
    """Return what is wrong with the sweeps beside the arms that cannot be read."""
    places = dict.fromkeys((arm.experiment, arm.budget, root) for arm in findings.arms for root in findings.roots)
    found = [_read_sweep(*place) for place in places]
    return [str(problem) for problem in found if isinstance(problem, ConfigError)]


def damages(findings: Findings) -> list[str]:
    """Return what is wrong with every record that a report would have used and cannot."""
    runs = [run for arm in findings.arms for run in arm.unfinished]
    return [run.problem for run in runs if run.problem] + damaged_sweeps(findings)


def swept_remarks(findings: Findings, words: Words) -> list[str]:
    """Say which seeds are left out of comparisons, for a sweep chose the arm's setting on them."""
    return [
        words("remark.swept", arm="/".join(key), seeds=words.listed(seeds)) for key, seeds in sorted(findings.swept.items())
    ]


def split_text(split: Split, words: Words) -> str:
    """Return how a split is called in tables."""
    return words("split.test") if split == "test" else words("split.val")


def _is_variant(arm: Arm) -> bool:
    return arm.variant != "default"


def label(arm: Arm) -> str:
    """Return how an arm is called in tables and pictures."""
    return arm.experiment if arm.variant == "default" else f"{arm.experiment} ({arm.shown})"


def method_of(arm: Arm, catalog: Catalog) -> str | None:
    """Return the name of an arm's method; None where it is one of the user's own, which has no name."""
    experiment = catalog.experiments.get(arm.experiment)
    return experiment.method if experiment is not None and isinstance(experiment.method, str) else None


def method_text(arm: Arm, catalog: Catalog, words: Words) -> str:
    """Return how an arm's method is called in tables; those without a name are told apart by their experiment.

    One method on models of two architectures is not the same thing, so another architecture is named with it.
    """
    return on_architecture(arm, method_of(arm, catalog) or words("method.own", experiment=arm.experiment), words)


def on_architecture(arm: Arm, name: str, words: Words) -> str:
    """Return a name with what the arm's model has that others have not."""
    return words("method.short_conv", method=name) if has_short_conv(arm) else name


def has_short_conv(arm: Arm) -> bool:
    """Whether a short convolution stands before the first layer of the arm's model."""
    config = arm.runs[0].config
    return config is not None and bool(config.get("model", {}).get("short_conv", 0))


def is_uniform(arm: Arm) -> bool:
    """Whether an arm's attention has no Q and K: both are frozen at zero everywhere, so all visible tokens weigh the same."""
    method = (arm.runs[0].config or {}).get("method", {})
    is_zero = method.get("init") == "gaussian" and method.get("std") == 0
    return is_zero and method_kind(method) == "pure"


def draw_of(arm: Arm) -> int | None:
    """Return the seed of an arm's frames where it is one of their own."""
    config = arm.runs[0].config
    assert config is not None
    method = config.get("method", {})
    # Weights that are kept, or made from those that were there, are not drawn.
    is_drawn = method.get("freeze") and method.get("init") not in (
        "native",
        "orthonormalized",
        "polar",
        "spectral",
        "spectral_flat",
    )
    seed = method.get("seed") if is_drawn else None
    return seed if isinstance(seed, int) else None
