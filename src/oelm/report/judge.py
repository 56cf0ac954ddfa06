"""Verdicts: whether an arm meets its criterion, how sure we are, and how often we have looked."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Self

from pydantic import Field, model_validator

from oelm.errors import DataError
from oelm.experiments.catalog import Criterion
from oelm.files import Strict, held, read_as, room_checked, write_json
from oelm.stats import LEVEL, Interval, Metric, common_seeds, corrected_level, look_level, paired_interval

Verdict = Literal[
    "PASS",
    "FAIL",
    "INCONCLUSIVE",
    "EXPLORATORY",
    "ONE_SEED",
    "CONFOUNDED",
    "UNFIT_BASELINE",
    "NO_CRITERION",
    "NO_BASELINE",
    "UNFINISHED",
]
ReasonCode = Literal[
    "interval_inside",
    "interval_outside",
    "interval_across",
    "no_spread",
    "fewer_seeds",
    "one_draw",
    "seeds_dropped",
    "seeds_gone",
    "seeds_refused",
    "one_seed",
    "confounded",
    "disputed_counter",
    "uncounted_baseline",
    "outcounted_baseline",
    "little_attention",
    "overfitted_baseline",
    "no_criterion",
    "no_baseline",
    "baseline_not_run",
    "not_run",
    "no_common_seed",
    "unpaired_seeds",
    "later_look",
    "beyond_plan",
    "many_comparisons",
    "mixed_arm",
    "mixed_baseline",
    "unproven",
]
Value = int | float | tuple[int, ...] | tuple[str, ...]

LOOKS = "looks.json"
_LOCK = ".looks.lock"
# Differences that agree to nine digits were not made by chance: two trainings never do.
_NO_SPREAD = 1e-9
NO_QUESTIONS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Reason:
    """Why a verdict is what it is, or what to keep in mind: a code and its values, put into words elsewhere."""

    code: ReasonCode
    values: Mapping[str, Value]


@dataclass(frozen=True)
class Judgement:
    """A verdict, the interval it rests on at the level used, and the reasons: what decided first, then what qualifies it."""

    verdict: Verdict
    interval: Interval | None
    level: float
    look: int
    num_seeds: int
    planned: int
    comparisons: int
    reasons: tuple[Reason, ...]

    @property
    def is_look(self) -> bool:
        """Whether this counts as a look: only what could have been a PASS or a FAIL does."""
        return self.verdict in ("PASS", "FAIL", "INCONCLUSIVE")


def judge(
    ours: Mapping[int, float],
    theirs: Mapping[int, float] | None,
    *,
    metric: Metric,
    criterion: Criterion | None,
    planned: int,
    look: int,
    comparisons: int,
    share: int | None = None,
    confounded_by: tuple[str, ...],
    unfit: Reason | None = None,
    dropped: tuple[int, ...] = (),
    refused: tuple[int, ...] = (),
    draw: int | None = None,
    level: float = LEVEL,
) -> Judgement:
    """Judge an arm's finished runs against its baseline's: PPLs or accuracies by seed; None where no baseline is named.

    `look` and `dropped` are what `Looks` says of the common seeds, `comparisons` how many are judged together, `share` how many
    of them the error is divided by, all if it is None, and `confounded_by` other settings that differ; `unfit`
    is what makes the baseline no real one; `refused` are seeds of either whose records cannot be used; `draw` is the seed of
    the arm's frames where all runs share one. PASS, FAIL and INCONCLUSIVE need the planned number of seeds.
    """
    seeds = common_seeds(ours, theirs or {})
    used = look_level(corrected_level(level, share or comparisons), look)
    interval = None if theirs is None else paired_interval(ours, theirs, metric, level=used)
    decided = (
        _without_pairs(ours, theirs, seeds)
        or _without_verdict(ours, theirs, seeds, metric=metric, criterion=criterion, confounded_by=confounded_by)
        or _short_of_plan(seeds, planned=planned, dropped=dropped, refused=refused, draw=draw)
        or (None if unfit is None else ("UNFIT_BASELINE", unfit))
    )
    if decided is None:
        assert interval is not None and criterion is not None
        decided = _against(criterion.bound, interval, metric=metric)
    notes = _notes(ours, theirs or {}, seeds, planned=planned, look=look, dropped=dropped, comparisons=comparisons, level=used)
    verdict, reason = decided
    return Judgement(verdict, interval, used, look, len(seeds), planned, comparisons, (reason, *notes))


def judge_together(judges: Sequence[Callable[[int], Judgement]]) -> list[Judgement]:
    """Judge comparisons so that all verdicts hold together; each judge gets the number by which the error is divided.

    Holm's way: by all at first; what passes or fails so is decided, and the error of the others is divided by as many as they
    are, until no more is decided. It holds however the comparisons depend on each other, and decides whatever a division by all
    alone would.
    """
    found = [judge_at(len(judges)) for judge_at in judges]
    left = list(range(len(judges)))
    while (still := [number for number in left if found[number].verdict not in ("PASS", "FAIL")]) and len(still) < len(left):
        left = still
        for number in left:
            found[number] = judges[number](len(left))
    return found


Decision = tuple[Verdict, Reason]


def _without_pairs(ours: Mapping[int, float], theirs: Mapping[int, float] | None, seeds: tuple[int, ...]) -> Decision | None:
    """Decide when nothing can be compared."""
    if not ours:
        return "UNFINISHED", Reason("not_run", {})
    if theirs is None:
        return "NO_BASELINE", Reason("no_baseline", {})
    if not theirs:
        return "NO_BASELINE", Reason("baseline_not_run", {})
    if not seeds:
        return "UNFINISHED", Reason("no_common_seed", {"ours": tuple(sorted(ours)), "theirs": tuple(sorted(theirs))})
    return None


def _without_verdict(
    ours: Mapping[int, float],
    theirs: Mapping[int, float] | None,
    seeds: tuple[int, ...],
    *,
    metric: Metric,
    criterion: Criterion | None,
    confounded_by: tuple[str, ...],
) -> Decision | None:
    """Decide when more seeds would not help, or only one seed exists."""
    if confounded_by:
        return "CONFOUNDED", Reason("confounded", {"settings": confounded_by})
    if criterion is None:
        return "NO_CRITERION", Reason("no_criterion", {})
    if len(seeds) == 1:
        assert theirs is not None
        mine, reference = ours[seeds[0]], theirs[seeds[0]]
        value = mine / reference if metric == "ppl" else mine - reference
        return "ONE_SEED", Reason("one_seed", {"seed": seeds[0], "value": value})
    return None


def _short_of_plan(
    seeds: tuple[int, ...], *, planned: int, dropped: tuple[int, ...], refused: tuple[int, ...], draw: int | None
) -> Decision | None:
    # Who spoils the record of a bad seed would leave it out: the others are no sample either.
    if refused:
        return "EXPLORATORY", Reason("seeds_refused", {"seeds": refused})
    if len(seeds) < planned:
        return "EXPLORATORY", Reason("fewer_seeds", {"found": len(seeds), "planned": planned})
    # Seeds chosen after their results were seen prove nothing, and no level corrects for that.
    if dropped:
        return "EXPLORATORY", Reason("seeds_dropped", {"seeds": dropped})
    # The best of many draws would pass by luck, and more training seeds would not show it.
    if draw is not None:
        return "EXPLORATORY", Reason("one_draw", {"draw": draw})
    return None


def _against(bound: float, interval: Interval, *, metric: Metric) -> Decision:
    """Compare the whole interval with the bound: a ratio must stay under it, an accuracy difference above it."""
    if metric == "ppl":
        is_inside, is_outside = interval.high <= bound, interval.low > bound
    else:
        is_inside, is_outside = interval.low >= bound, interval.high < bound
    values = {"bound": bound, "low": interval.low, "high": interval.high}
    # Seeds that change nothing count as one seed: their interval has no width and would decide anything.
    if interval.high - interval.low <= _NO_SPREAD * max(1.0, abs(interval.value)):
        return "INCONCLUSIVE", Reason("no_spread", {"bound": bound, "value": interval.value})
    if is_inside:
        return "PASS", Reason("interval_inside", values)
    if is_outside:
        return "FAIL", Reason("interval_outside", values)
    return "INCONCLUSIVE", Reason("interval_across", values)


def _notes(
    ours: Mapping[int, float],
    theirs: Mapping[int, float],
    seeds: tuple[int, ...],
    *,
    planned: int,
    look: int,
    dropped: tuple[int, ...],
    comparisons: int,
    level: float,
) -> list[Reason]:
    """Return what a reader must know in addition to the verdict."""
    notes: list[Reason] = []
    mine, reference = (tuple(sorted(arm.keys() - set(seeds))) for arm in (ours, theirs))
    if seeds and (mine or reference):
        notes.append(Reason("unpaired_seeds", {"ours": mine, "theirs": reference}))
    if dropped and len(seeds) < planned:
        notes.append(Reason("seeds_gone", {"seeds": dropped}))
    elif look > 1 and not dropped:
        notes.append(Reason("later_look", {"look": look, "level": level}))
    # Somebody may have looked before these were added, for instance if looks.json was not copied.
    elif len(seeds) > planned:
        notes.append(Reason("beyond_plan", {"found": len(seeds), "planned": planned}))
    if comparisons > 1 and len(seeds) > 1:
        notes.append(Reason("many_comparisons", {"comparisons": comparisons, "level": level}))
    return notes


def comparison_key(experiment: str, budget: str, variant: str) -> str:
    """Return the name under which looks at one try of a question are kept; tries of one question are counted together."""
    return f"{experiment}|{budget}|{variant}"


class Look(Strict):
    """One look: the seeds it saw, in order, and when; its question, and which look at it this was, if known."""

    seeds: tuple[int, ...] = Field(min_length=2)
    date: datetime.date
    question: str = ""
    number: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if list(self.seeds) != sorted(set(self.seeds)):
            raise ValueError("seeds must be in order, each once")
        return self


class _LooksFile(Strict):
    """`looks.json`."""

    looks: dict[str, list[Look]]

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        for key, looks in self.looks.items():
            if len({look.seeds for look in looks}) != len(looks):
                raise ValueError(f"{key} has the same seeds twice")
        return self


@dataclass(frozen=True)
class Looks:
    """At which seeds each comparison of an outputs folder was given a verdict, in order."""

    root: Path
    entries: Mapping[str, tuple[Look, ...]]

    @classmethod
    def read(cls, root: Path) -> Looks:
        """Read `looks.json` of an outputs folder, none where there is no such file; DataError where it is damaged."""
        path = root / LOOKS
        if not path.exists():
            return cls(root, {})
        try:
            stored = read_as(_LooksFile, path)
        except DataError as problem:
            raise DataError(
                f"{problem}. It counts how often each comparison was judged: restore it from a copy of the folder. "
                "Without it the next verdicts count as first looks, so delete it only if no seeds were added after a report"
            ) from None
        return cls(root, {key: tuple(looks) for key, looks in stored.looks.items()})

    def look_number(self, key: str, seeds: Collection[int], questions: Mapping[str, str] = NO_QUESTIONS) -> int:
        """Return which look at its question, from 1, a verdict on these seeds is: an earlier one's where it saw the same.

        `questions` has what the tries that are there ask, by key. Another setting, tried for the same question, was a look
        like any other, also where nothing is left of it but the look, which then counts unless it says what it asked.
        """
        earlier = [(other, look.seeds) for other, look in self._at_question(key, questions)]
        wanted = (key, tuple(sorted(seeds)))
        return earlier.index(wanted) + 1 if wanted in earlier else len(earlier) + 1

    def _at_question(self, key: str, questions: Mapping[str, str]) -> list[tuple[str, Look]]:
        """Return the looks at the question of a try, including those of other tries, in order."""
        asked = questions.get(key)

        def is_ours(other: str, look: Look) -> bool:
            is_near = bool(asked) and _place(other) == _place(key)
            return other == key or (is_near and (questions.get(other) or look.question or asked) == asked)

        found = [(other, look) for other, looks in self.entries.items() for look in looks if is_ours(other, look)]
        # Looks of before they were numbered come first; a clock that was set back changes no order.
        return sorted(found, key=lambda entry: (entry[1].number, entry[1].date))

    def seen(
        self, key: str, seeds: Collection[int], *, date: datetime.date, questions: Mapping[str, str] = NO_QUESTIONS
    ) -> Looks:
        """Return these looks with one more, unless it is among them."""
        wanted = tuple(sorted(seeds))
        if wanted in [look.seeds for look in self.entries.get(key, ())]:
            return self
        question = questions.get(key, "")
        number = self.look_number(key, seeds, questions) if question else 0
        look = Look(seeds=wanted, date=date, question=question, number=number)
        return Looks(self.root, {**self.entries, key: (*self.entries.get(key, ()), look)})

    def dropped(self, key: str, seeds: Collection[int]) -> tuple[int, ...]:
        """Return the seeds that earlier looks saw and these lack; none where these are an earlier look's."""
        earlier = [look.seeds for look in self.entries.get(key, ())]
        if tuple(sorted(seeds)) in earlier:
            return ()
        return tuple(sorted({seed for look in earlier for seed in look} - set(seeds)))

    def record(
        self, judged: Mapping[str, Collection[int]], *, date: datetime.date, questions: Mapping[str, str] = NO_QUESTIONS
    ) -> Looks:
        """Add the seeds at which comparisons were given a verdict, and return what the file then holds.

        Give only judgements that are looks. Seeds recorded before are not recorded again; the file is then left alone.
        """
        with room_checked(self.root / LOOKS):
            self.root.mkdir(parents=True, exist_ok=True)
            # Two reports at once must not forget each other's looks.
            with held(self.root / _LOCK):
                now = after = Looks.read(self.root)
                for key, seeds in judged.items():
                    after = after.seen(key, seeds, date=date, questions=questions)
                if after != now:
                    stored = _LooksFile(looks={key: list(looks) for key, looks in after.entries.items()})
                    write_json(self.root / LOOKS, stored.model_dump(mode="json", exclude_defaults=True))
        return after


def _place(key: str) -> str:
    """Return the experiment and the budget of a try."""
    return key.rpartition("|")[0]
