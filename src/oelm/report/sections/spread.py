"""What each ingredient is worth, and how gaps change with the size of the model and its training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from oelm.config import flatten
from oelm.experiments.plan import SHAPE, TUNED
from oelm.report.arms import Arm, common_split, differing_settings, mean_figure
from oelm.report.document import Cell, Section, Table, Text
from oelm.report.pairs import Findings, Pair, gap_between, label, method_of, on_architecture, pair_text, split_text
from oelm.report.sections.baselines import unfit_baselines
from oelm.report.words import Words
from oelm.runs.layout import Split
from oelm.text import fixed

# From nothing learnt and nothing known to everything learnt: what Q and K of each method have. Frames across all heads
# (oelm_global) are no rung: they have what oelm_freeze has and more, but nothing above has that too.
RUNGS: dict[str, tuple[str, ...]] = {
    "uniform": (),
    "oelm_random": ("random",),
    "gaussian_matched": ("random", "scale"),
    "oelm_freeze": ("random", "scale", "rows"),
    "oelm_freeze_pretrained": ("scale", "rows", "space"),
    "rotated": ("rows", "space", "size"),
    "polar": ("rows", "space", "size", "frame"),
    "spectral_flat": ("rows", "space", "size", "pairs"),
    "pretrained_freeze": ("weights",),
    "baseline": ("learning",),
}


def ladder_section(findings: Findings, words: Words) -> Section | None:
    """Return, for every family of at least three arms, what each rung changes against the one below."""
    rows: list[tuple[Cell, ...]] = []
    for baseline, pairs in findings.families:
        fair = [pair.arm for pair in pairs if not pair.confounded]
        # Of several arms with one method, the one of most seeds; the baseline is the top whatever else learns.
        arms = {method_of(arm, findings.catalog): arm for arm in sorted(reversed(fair), key=lambda arm: len(arm.runs))}
        arms["baseline"] = baseline
        climbing = [(method, arms[method]) for method in RUNGS if method in arms]
        if len(climbing) < 3:
            continue
        # One split for the whole ladder: its steps add up.
        split = common_split(*(arm for _, arm in climbing))
        for (lower, below), (upper, arm) in pairwise(climbing):
            adds = added(lower, upper, words)
            rows.append((*_step(baseline, below, arm, adds, split), Cell(split_text(split, words))))
    if not rows:
        return None
    columns = tuple(words(f"ladder.{name}") for name in ("family", "from", "to", "adds", "gap", "seeds", "on"))
    table = Table("ladder", words("ladder.caption"), columns, tuple(rows), frozenset({4, 5}))
    return Section("ladder", words("ladder.title"), (Text(words("ladder.text")), table))


def added(lower: str, upper: str, words: Words) -> str:
    """Return what the upper of two methods of the ladder adds to the lower."""
    return words.listed(words(f"rung.{ingredient}") for ingredient in RUNGS[upper] if ingredient not in RUNGS[lower])


def _step(baseline: Arm, below: Arm, arm: Arm, adds: str, split: Split) -> tuple[Cell, ...]:
    gap = gap_between(arm, below, split)
    common = len(arm.best.keys() & below.best.keys())
    family = f"{label(baseline)}, {baseline.budget}"
    return Cell(family), Cell(label(below)), Cell(label(arm)), Cell(adds), Cell(gap.text, gap.value), Cell(str(common), common)


_RATE, _STEPS = "optim.lr", "steps"
# Families of one table may differ in these: size, length, what follows from them, and how often they evaluate and save.
_MAY_DIFFER = {*SHAPE, _STEPS, _RATE, "schedule.warmup_steps", "extended_at", "micro_batch_size"}
_MAY_DIFFER |= {"eval_every", "save_every", "keep_checkpoints", "timing_warmup_steps"}


@dataclass(frozen=True)
class _Family:
    """A baseline of one size and length, and the arms that can be compared with it, by name: of each that of most seeds."""

    baseline: Arm
    pairs: dict[str, Pair]

    @cached_property
    def settings(self) -> dict[str, Any]:
        return flatten(self.baseline.first.config)

    @property
    def is_whole(self) -> bool:
        """Whether the record has size and length; missing values are not guessed."""
        return all(type(self.settings.get(key)) is int for key in ("model.num_layers", "model.model_dim", _STEPS))

    @property
    def size(self) -> tuple[int, int]:
        """Parameters, and steps."""
        return self.baseline.first.audit.total, self.settings[_STEPS]

    @property
    def data(self) -> str:
        return self.baseline.data

    def is_like(self, other: _Family) -> bool:
        """Whether two differ in size and length and what goes with them, and in nothing else."""
        ours, theirs = self.baseline.first, other.baseline.first
        return ours.fingerprint == theirs.fingerprint and differing_settings(ours.recipe, theirs.recipe).keys() <= _MAY_DIFFER


def sizes_section(findings: Findings, words: Words) -> Section | None:
    """Return the gaps at every size and length of what was tried at more than one."""
    groups = [group for alike in _groups(_families(findings, words)) if (group := _followed(alike))]
    if not groups:
        return None
    families = [family for group in groups for family in group]
    methods = list(dict.fromkeys(name for family in families for name in family.pairs))
    same = Counter((number, family.size) for number, group in enumerate(groups) for family in group)
    unfit = unfit_baselines(findings)
    rows = [
        (
            Cell(family.data if same[number, family.size] == 1 else f"{family.data} ({label(family.baseline)})"),
            *_about(family, words, is_unfit=family.baseline.key in unfit),
            *_gaps(family, methods, words),
        )
        for number, group in enumerate(groups)
        for family in group
    ]
    names = ("data", "shape", "parameters", "steps", "rate", "seeds", "ppl")
    columns = (*(words(f"sizes.{name}") for name in names), *methods)
    table = Table("sizes", words("sizes.caption"), columns, tuple(rows), frozenset(range(2, len(columns))))
    return Section("sizes", words("sizes.title"), (Text(words("sizes.text")), table))


def _families(findings: Findings, words: Words) -> list[_Family]:
    """Return the language models that are results, each with its fair comparisons, smallest and shortest first."""
    found = []
    for baseline, pairs in findings.families:
        named: dict[str, Pair] = {}
        for pair in pairs:
            name = pair_text(pair, findings.catalog, words)
            if pair.seeds and not pair.confounded and len(pair.seeds) > (len(named[name].seeds) if name in named else 0):
                named[name] = pair
        family = _Family(baseline, named)
        if named and baseline.metric == "ppl" and baseline.budget != "smoke" and family.is_whole:
            found.append(family)
    return sorted(found, key=lambda family: (family.data, family.size, family.baseline.key))


def _groups(families: Sequence[_Family]) -> list[list[_Family]]:
    groups: list[list[_Family]] = []
    for family in families:
        group = next((group for group in groups if group[0].is_like(family)), None)
        if group is None:
            groups.append([family])
        else:
            group.append(family)
    return groups


def _followed(alike: Sequence[_Family]) -> list[_Family]:
    """Return families with only the arms that were tried at several sizes."""
    sizes: dict[str, set[tuple[int, int]]] = {}
    for family in alike:
        for name in family.pairs:
            sizes.setdefault(name, set()).add(family.size)
    kept = [
        _Family(family.baseline, {name: pair for name, pair in family.pairs.items() if len(sizes[name]) > 1})
        for family in alike
    ]
    return [family for family in kept if family.pairs]


def _about(family: _Family, words: Words, *, is_unfit: bool) -> tuple[Cell, ...]:
    """Return what a row is about: shape, parameters, steps, rates, seeds, and the baseline's perplexity on these seeds."""
    pairs, settings = list(family.pairs.values()), family.settings
    parameters, steps = family.size
    shape = f"{settings['model.num_layers']} x {settings['model.model_dim']}"
    counts = {len(pair.seeds) for pair in pairs}
    split = pairs[0].split
    on_split = family.baseline.on(split)
    mean = mean_figure([on_split[seed] for seed in sorted({seed for pair in pairs for seed in pair.seeds})], "ppl")
    shown = words("across.on_test", gap=fixed(mean, 2)) if split == "test" else fixed(mean, 2)
    return (
        Cell(on_architecture(family.baseline, shape, words)),
        Cell(f"{parameters:,}", parameters),
        Cell(f"{steps:,}", steps),
        Cell(_rates(family, words)),
        Cell(str(min(counts)) if len(counts) == 1 else "", min(counts)),
        Cell(shown, mean, "warn" if is_unfit else ""),
    )


def _rates(family: _Family, words: Words) -> str:
    """Return the rates of baseline and arms, each once, and whether they came out of a sweep."""
    arms = [family.baseline, *(pair.arm for pair in family.pairs.values())]
    rates = dict.fromkeys(flatten(arm.first.config).get(_RATE) for arm in arms)
    shown = words.listed(f"{rate:g}" for rate in rates if isinstance(rate, int | float))
    return words("sizes.swept", rates=shown) if family.baseline.variant.startswith(TUNED) else shown


def _gaps(family: _Family, methods: Sequence[str], words: Words) -> list[Cell]:
    """Return a family's gap by each method, empty where it was not tried; with its seeds where not all have as many."""
    is_uneven = len({len(pair.seeds) for pair in family.pairs.values()}) > 1
    cells = []
    for method in methods:
        if (pair := family.pairs.get(method)) is None:
            cells.append(Cell(""))
            continue
        shown = f"{pair.gap.text} (n={len(pair.seeds)})" if is_uneven else pair.gap.text
        shown = words("across.on_test", gap=shown) if pair.split == "test" else shown
        cells.append(Cell(shown, pair.gap.value))
    return cells
