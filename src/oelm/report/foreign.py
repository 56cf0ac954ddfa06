"""Others' runs, and any table in Python, judged by our rules: pairs by seed, intervals, a bound, Holm, planned seeds."""

from __future__ import annotations

import datetime
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ValidationError

from oelm.errors import ConfigError, DataError, one_of, suggest
from oelm.experiments.catalog import Criterion
from oelm.experiments.importer import IMPORTED, ImportedRun, record_path
from oelm.report.arms import ImportedStudy, collect_imported, mean_figure
from oelm.report.charts import forest_by_set
from oelm.report.document import Block, Cell, Chart, Section, Table, Text
from oelm.report.judge import Judgement, Looks, Reason, Verdict, comparison_key, judge, judge_together
from oelm.report.sections.learning import small_chart
from oelm.report.sections.verdicts import MARKS, levelled, reason_text, target_of, told_bound
from oelm.report.words import Words
from oelm.runs.layout import CONFIG
from oelm.stats import LEVEL, interval_text, level_text
from oelm.text import fixed

Scale = Literal["loss", "perplexity", "accuracy", "percent"]
SCALES: tuple[Scale, ...] = get_args(Scale)
Take = Literal["best", "last"]
TAKES: tuple[Take, ...] = get_args(Take)
_BOUND = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(x|pt|pts|points?)\s*", re.IGNORECASE)
# The scale of a metric, by the last word of its name that determines one.
_SCALE_OF: tuple[tuple[str, Scale], ...] = (
    (r"loss|nll|cross_?entropy|xent", "loss"),
    (r"ppl|perplexity", "perplexity"),
    (r"acc|accuracy|f1|exact_match|bleu|rouge", "accuracy"),
)
# exp of a larger loss is no float.
_MAX_LOSS = 700.0
# A page of more is read by nobody, and a live one is sent again and again.
MOST_ROWS, _MOST_CHARTS, _MOST_EXPLAINED = 70, 2, 30
_COMMAND, _AGAIN = "oelm report --metric eval_loss --baseline ARM --at-most 1.05x", "oelm import SOURCE --name NAME --replace"
FiguresBySeed = Mapping[str, Mapping[int, float]]


@dataclass(frozen=True)
class Question:
    """How imported runs are judged: metric, scale, baseline, bound and number of seeds."""

    metric: str
    scale: Scale
    take: Take = "best"
    baseline: str | None = None
    criterion: Criterion | None = None
    planned: int = 5

    @property
    def is_ratio(self) -> bool:
        return self.scale in ("loss", "perplexity")

    @property
    def kind(self) -> Literal["ppl", "accuracy"]:
        """Whether gaps are ratios, as of perplexities, or differences, as of accuracies."""
        return "ppl" if self.is_ratio else "accuracy"

    @property
    def bound(self) -> float | None:
        """That of the criterion, if there is one."""
        return None if self.criterion is None else self.criterion.bound

    @property
    def bound_text(self) -> str:
        """The bound as it is typed."""
        return "-" if self.bound is None else f"{self.bound:g}x" if self.is_ratio else f"{-100 * self.bound:g}pt"


def parse_question(
    metric: str,
    *,
    baseline: str | None = None,
    at_most: str | None = None,
    scale: str | None = None,
    take: str = "best",
    planned: int = 5,
) -> Question:
    """Return the question given by a command line's options; ConfigError if they contradict each other."""
    criterion = None if at_most is None else parse_bound(at_most)
    named = _scale_of(metric) if scale is None else one_of("--as", scale, SCALES)
    if named is None:
        raise ConfigError(f"--metric {metric!r}: its name does not say how to compare it; add --as {', '.join(SCALES)}")
    question = Question(metric, named, one_of("--take", take, TAKES), baseline, criterion, planned)
    if criterion is not None and question.is_ratio != (criterion.ppl_ratio_at_most is not None):
        wanted = "a ratio of perplexities, such as 1.05x" if question.is_ratio else "points, such as 2pt"
        raise ConfigError(f"--at-most {at_most!r}: {metric} is compared as {named}, which takes {wanted}")
    return question


def parse_bound(text: str) -> Criterion:
    """Parse '1.05x', a ratio of perplexities, or '2pt', points of accuracy that may be lost."""
    found = _BOUND.fullmatch(text)
    try:
        if found is not None and found[2].lower() == "x":
            return Criterion(ppl_ratio_at_most=float(found[1]))
        if found is not None:
            return Criterion(accuracy_loss_at_most=float(found[1]) / 100)
    except ValidationError:
        pass
    raise ConfigError(f"--at-most {text!r}: write a ratio above 0 such as 1.05x, or points below 100 such as 2pt")


def _scale_of(metric: str) -> Scale | None:
    words = re.split(r"[^a-z0-9_]+|_", metric.lower())
    for word in reversed(words):
        for pattern, scale in _SCALE_OF:
            if re.fullmatch(pattern, word):
                return scale
    return next((scale for pattern, scale in _SCALE_OF if re.search(pattern, metric.lower())), None)


def figures_of(study: ImportedStudy, question: Question) -> dict[str, dict[int, float]]:
    """Return each arm's figures by seed, perplexities or accuracies as shares, of the arms that have the metric.

    Raises DataError where some runs of an arm have it and others lack it: what is left would be no fair sample.
    """
    measured = {arm: runs for arm, runs in study.arms.items() if any(question.metric in run.curves for run in runs.values())}
    return {arm: {seed: _figure(run, question) for seed, run in runs.items()} for arm, runs in measured.items()}


def _figure(run: ImportedRun, question: Question) -> float:
    where = f"{run.study}: {run.arm}, seed {run.seed}"
    if question.metric not in run.curves:
        raise DataError(f"{where}, has no metric {question.metric!r}; it has {', '.join(run.curves)}")
    values = [value for _, value in run.curves[question.metric]]
    best = min(values) if question.is_ratio else max(values)
    return _on_scale(best if question.take == "best" else values[-1], question.scale, f"{where}: {question.metric}")


def _on_scale(value: float, scale: Scale, where: str) -> float:
    """Return a value as it is compared: a perplexity, or a share."""
    if scale == "loss":
        if value > _MAX_LOSS:
            raise DataError(f"{where} is {value:g}, too large for a loss in nats; if it is a perplexity, use --as perplexity")
        return math.exp(value)
    if scale == "perplexity":
        if value <= 0:
            raise DataError(f"{where} is {value:g}; a perplexity is above 0; if it is a loss, use --as loss")
        return value
    share = value / 100 if scale == "percent" else value
    if not 0 <= share <= 1:
        raise DataError(f"{where} is {value:g}; an accuracy is between 0 and 1; if it is in percent, use --as percent")
    return share


def judge_arms(
    figures: FiguresBySeed,
    question: Question,
    *,
    looks: Mapping[str, tuple[int, tuple[int, ...]]] | None = None,
    confounded: Mapping[str, tuple[str, ...]] | None = None,
    level: float = LEVEL,
) -> dict[str, Judgement]:
    """Judge every arm against the baseline, together by Holm's rule; what only our own records prove is among the reasons."""
    baseline = _known(question.baseline, figures)
    others = [arm for arm in figures if arm != baseline]
    looks, confounded = looks or {}, confounded or {}

    def judged(arm: str, comparisons: int, share: int) -> Judgement:
        look, dropped = looks.get(arm, (1, ()))
        return judge(
            figures[arm],
            figures[baseline],
            metric=question.kind,
            criterion=question.criterion,
            planned=question.planned,
            look=look,
            comparisons=comparisons,
            share=share,
            confounded_by=confounded.get(arm, ()),
            dropped=dropped,
            level=level,
        )

    def counts(arm: str) -> bool:
        is_enough = len(figures[arm].keys() & figures[baseline].keys()) >= max(2, question.planned)
        return question.criterion is not None and is_enough and not confounded.get(arm)

    counted = [arm for arm in others if counts(arm)]
    together = judge_together([partial(judged, arm, len(counted)) for arm in counted])
    found = dict(zip(counted, together, strict=True)) | {arm: judged(arm, 1, 1) for arm in others if arm not in counted}
    return {arm: replace(found[arm], reasons=(*found[arm].reasons, Reason("unproven", {}))) for arm in others}


def _known(baseline: str | None, figures: FiguresBySeed) -> str:
    if baseline is not None and baseline in figures:
        return baseline
    arms = ", ".join(figures)
    if baseline is None:
        raise ConfigError(f"name the arm that the others are compared with: --baseline, one of {arms}")
    raise ConfigError(f"no arm is called {baseline!r}{suggest(baseline, figures)}; the arms are: {arms}")


@dataclass(frozen=True)
class JudgedStudy:
    """One study's arms against its baseline; `keys` names each comparison where looks are counted, `seeds` has its seeds."""

    study: ImportedStudy
    question: Question
    figures: FiguresBySeed
    judgements: Mapping[str, Judgement]
    keys: Mapping[str, str]
    seeds: Mapping[str, list[int]]


def judge_study(study: ImportedStudy, question: Question) -> JudgedStudy:
    """Judge one study's arms; earlier looks at an arm count, whatever its metric, baseline or bound was then."""
    figures = figures_of(study, question)
    baseline = _known(question.baseline, figures)
    asked = f"{question.metric} {question.take} {baseline} {question.criterion}"
    keys = {arm: comparison_key(IMPORTED, study.name, f"{arm} {asked}") for arm in figures if arm != baseline}
    looks = Looks.read(study.root)
    # What each comparison asks: whether its arm is good enough, by whatever metric and bound.
    questions = {key: arm for arm, key in keys.items()}
    seeds = {arm: sorted(figures[arm].keys() & figures[baseline].keys()) for arm in keys}
    seen = {arm: (looks.look_number(key, seeds[arm], questions), looks.dropped(key, seeds[arm])) for arm, key in keys.items()}
    confounded = {arm: _lengths_apart(study, arm, baseline, question.metric) for arm in keys}
    judgements = judge_arms(figures, question, looks=seen, confounded=confounded)
    return JudgedStudy(study, question, figures, judgements, keys, seeds)


def _lengths_apart(study: ImportedStudy, arm: str, baseline: str, metric: str) -> tuple[str, ...]:
    """Return that an arm and its baseline were not measured up to the same step, where that is so."""
    ours, theirs = ({run.curves[metric][-1][0] for run in study.arms[name].values()} for name in (arm, baseline))
    if len(ours | theirs) == 1:
        return ()
    return (f"steps ({', '.join(map(str, sorted(ours)))} / {', '.join(map(str, sorted(theirs)))})",)


def record_imported_looks(judged: Sequence[JudgedStudy]) -> None:
    """Count the verdicts that were given, next to the runs that were looked at."""
    today = datetime.datetime.now(datetime.UTC).date()
    for row in judged:
        seen = {row.keys[arm]: row.seeds[arm] for arm, judgement in row.judgements.items() if judgement.is_look}
        if seen:
            questions = {key: arm for arm, key in row.keys.items()}
            Looks.read(row.study.root).record(seen, date=today, questions=questions)


def judge_studies(studies: Sequence[ImportedStudy], question: Question | None) -> list[JudgedStudy]:
    """Judge the studies that the question fits: those with its baseline and its metric; ConfigError where it fits none."""
    if question is None:
        return []
    if question.baseline is None:
        raise ConfigError("--metric judges imported runs against one of them: add --baseline ARM")
    fitting = [study for study in studies if question.baseline in study.arms and question.metric in study.metrics]
    if not fitting:
        known = "; ".join(f"{study.name} has {', '.join(study.arms)} with {', '.join(study.metrics)}" for study in studies)
        raise ConfigError(
            f"no imported study has an arm {question.baseline!r} and a metric {question.metric!r}: "
            f"{known or 'nothing is imported'}"
        )
    return [judge_study(study, question) for study in fitting]


def imported_section(
    studies: Sequence[ImportedStudy], judged: Sequence[JudgedStudy], words: Words, *, is_live: bool = False
) -> Section | None:
    """Return what was imported: verdicts where a question was asked, curves, and the arms of every study.

    On a live page verdicts are preliminary, and the section says how old its runs are.
    """
    if not studies:
        return None
    runs = sum(len(own) for study in studies for own in study.arms.values())
    blocks: list[Block] = [Text(words("imported.state", runs=runs, command=_AGAIN) if is_live else words("imported.text"))]
    if is_live and judged:
        blocks.append(Text(words("live.preliminary"), "warning"))
    for row in judged:
        is_long = is_live and len(row.judgements) > _MOST_EXPLAINED
        table = _verdicts(row, words, is_live=is_live)
        blocks += first_rows(table, words) if is_live else [table]
        blocks += [] if is_long else _forest(row, words)
        blocks += [Text(text, "note") for text in reasons_of(row, words)[-1 if is_long else 0 :]]
    asked = {row.study.name: row.question for row in judged}
    charts = [_curves(study, asked.get(study.name), words) for study in studies[:_MOST_CHARTS]]
    blocks += [chart for chart in charts if chart is not None]
    if left_out := len(studies[_MOST_CHARTS:]):
        blocks.append(Text(words("pictures.left_out", count=left_out), "note"))
    arms = _arms(studies, words)
    blocks += first_rows(arms, words) if is_live else [arms]
    if not judged:
        blocks.append(Text(words("imported.ask", command=_COMMAND), "note"))
    return Section("imported", words("imported.title"), tuple(blocks))


def first_rows(table: Table, words: Words, *, command: str = "oelm report", total: int = 0) -> list[Block]:
    """Return a table of at most as many rows as a live page has room for, and what shows those that are left out.

    `total` is how many there are where the table has not been given them all.
    """
    left_out = max(total, len(table.rows)) - MOST_ROWS
    note = Text(words("live.rows_left_out", count=left_out, command=command), "note")
    return [replace(table, rows=table.rows[:MOST_ROWS]), *([note] if left_out > 0 else [])]


def _arms(studies: Sequence[ImportedStudy], words: Words) -> Table:
    """Return what each arm of each study holds: seeds, the last step, metrics."""
    rows = []
    for study in studies:
        for arm, runs in study.arms.items():
            metrics = sorted({metric for run in runs.values() for metric in run.curves})
            last = max(points[-1][0] for run in runs.values() for points in run.curves.values())
            seeds = Cell(words.listed(runs), len(runs))
            formats = Cell(words.listed(sorted({run.format for run in runs.values()})))
            rows.append((Cell(study.name), Cell(arm), seeds, Cell(str(last), last), formats, Cell(words.listed(metrics))))
    columns = tuple(words(f"imported.{name}") for name in ("study", "arm", "seeds", "step", "format", "metrics"))
    return Table("imported", words("imported.caption"), columns, tuple(rows), frozenset({3}))


def _curves(study: ImportedStudy, question: Question | None, words: Words) -> Chart | None:
    """Return the curves of the metric that is asked about, or of the first that a model is judged by; none of single values."""
    judging = [metric for metric in study.metrics if re.search("eval|val|test", metric.lower()) and _scale_of(metric)]
    metric = question.metric if question is not None else (judging or study.metrics)[0]
    arms = {arm: [dict(run.curves.get(metric, ())) for run in runs.values()] for arm, runs in study.arms.items()}
    drawn = {arm: own for arm, own in arms.items() if any(len(curve) > 1 for curve in own)}
    if question is not None and question.baseline in drawn:
        # Its colour is the palette's first.
        drawn = {question.baseline: drawn[question.baseline]} | drawn
    caption = words("imported.curves", study=study.name, metric=metric)
    return small_chart(f"curves-{study.name}", drawn, words, caption=caption, y=metric)


def _forest(row: JudgedStudy, words: Words) -> list[Block]:
    """Return the intervals against the bound, where one was given."""
    bound, kind, points = row.question.bound, row.question.kind, []
    for arm, judgement in row.judgements.items():
        if (gap := judgement.interval) is not None:
            shown = {"text": levelled(gap, kind, words), "verdict": words(f"verdict.{judgement.verdict}")}
            place = {"name": arm, "arm": row.study.name}
            points.append({**place, "value": gap.value, "low": gap.low, "high": gap.high, **shown})
    if bound is None or not points:
        return []
    spec = forest_by_set(points, [row.study.name], target=target_of(kind, bound, words), title=words(f"forest.{kind}"))
    caption = words(f"forest.caption.{kind}", bound=told_bound(kind, bound))
    alt = words("forest.alt", arms=words.listed(point["name"] for point in points))
    return [Chart(f"forest-{row.study.name}", caption, spec, alt)]


def _verdicts(row: JudgedStudy, words: Words, *, is_live: bool = False) -> Table:
    question = row.question
    assert question.baseline is not None
    columns = [words(f"imported.{name}") for name in ("arm", "seeds", "mean", "gap", "level")]
    columns.append(words("live.verdict") if is_live else words("imported.verdict"))

    def first(name: str, seeds: int, figures: Mapping[int, float]) -> tuple[Cell, ...]:
        mean = mean_figure(figures.values(), question.kind)
        shown = fixed(mean, 3) if question.is_ratio else f"{100 * mean:.2f}%"
        return Cell(name), Cell(f"{seeds}/{question.planned}", seeds), Cell(shown, mean)

    own, nothing = row.figures[question.baseline], Cell("")
    rows: list[tuple[Cell, ...]] = [
        (*first(words("imported.baseline", arm=question.baseline), len(own), own), nothing, nothing, nothing)
    ]
    for arm, judgement in row.judgements.items():
        gap = judgement.interval
        shown = (nothing, nothing)
        if gap is not None:
            shown = Cell(interval_text(gap, question.kind), gap.value), Cell(level_text(gap.level), gap.level)
        decided = Cell(words(f"verdict.{judgement.verdict}"), judgement.verdict, MARKS.get(judgement.verdict, ""))
        rows.append((*first(arm, judgement.num_seeds, row.figures[arm]), *shown, decided))
    given = {"study": row.study.name, "baseline": question.baseline, "metric": question.metric, "bound": question.bound_text}
    scale, take = words(f"imported.as.{question.scale}"), words(f"imported.take.{question.take}")
    caption = words("sentence.separator").join([words("imported.verdicts", **given), take, scale])
    return Table(f"imported-{row.study.name}", caption, tuple(columns), tuple(rows), frozenset({1, 2, 3, 4}))


def reasons_of(row: JudgedStudy, words: Words) -> list[str]:
    """Return each arm's reasons in words, and once what no imported record proves."""
    lines = []
    for arm, judgement in row.judgements.items():
        shown = words("sentence.separator").join(_reasons(judgement, words, is_ratio=row.question.is_ratio))
        lines.append(words("imported.note", arm=arm, reasons=shown))
    return [*lines, words("reason.unproven")] if lines else lines


def _reasons(judgement: Judgement, words: Words, *, is_ratio: bool) -> list[str]:
    """Return a judgement's own reasons in words, without what is true of every imported run."""
    texts = []
    for reason in judgement.reasons:
        if reason.code == "many_comparisons":
            level = level_text(judgement.level)
            texts.append(words("imported.together", comparisons=judgement.comparisons, level=level))
        elif reason.code == "no_criterion":
            texts.append(words("imported.no_bound"))
        elif reason.code != "unproven":
            texts.append(reason_text(reason, words, is_ratio=is_ratio))
    return texts


@dataclass(frozen=True)
class ArmVerdict:
    """What `oelm.verdict` finds of one arm: the gap to the baseline with its interval, and whether it meets the bound.

    `value`, `low` and `high` are ratios of perplexities, or differences of accuracies as shares; None for a single seed.
    """

    arm: str
    verdict: Verdict
    value: float | None
    low: float | None
    high: float | None
    level: float
    seeds: int
    planned: int
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        gap = "" if self.value is None else f", {self.value:.4g} [{self.low:.4g}, {self.high:.4g}] at {level_text(self.level)}"
        return f"{self.arm}: {self.verdict}{gap}, {self.seeds} of {self.planned} planned seeds"


def verdict(
    frame: Any,
    *,
    baseline: str,
    arm: str = "arm",
    seed: str = "seed",
    value: str = "eval_loss",
    at_most: str | None = "1.05x",
    scale: Scale | None = None,
    planned: int = 5,
    look: int = 1,
) -> list[ArmVerdict]:
    """Judge every arm of a table against its baseline, paired by seed; one row for each arm and seed.

    `frame` is a list of dicts, a dict of lists, or a pandas DataFrame; `arm`, `seed` and `value` name its columns, `baseline`
    an arm. Losses are compared as ratios of exp(loss), accuracies in points: `at_most` is '1.05x' or '2pt'. Arms are judged
    together by Holm's rule; PASS, FAIL and INCONCLUSIVE need the `planned` seeds. `look` is 2 where seeds were added after a
    first look. Raises ConfigError or DataError where the table does not fit.
    """
    question = parse_question(value, baseline=baseline, at_most=at_most, scale=scale, planned=planned)
    figures: dict[str, dict[int, float]] = {}
    for number, row in enumerate(_rows(frame, (arm, seed, value)), start=1):
        name, own, where = str(row[arm]), _seed(row[seed], number), f"row {number}: {value}"
        if own in figures.setdefault(name, {}):
            raise DataError(f"row {number}: {name} has seed {own} twice; give one row for each arm and seed")
        try:
            figure = float(row[value])
        except (TypeError, ValueError):
            raise DataError(f"{where} is {row[value]!r}, not a number") from None
        if not math.isfinite(figure):
            raise DataError(f"{where} is {figure}: a run that diverged has no figure to compare")
        figures[name][own] = _on_scale(figure, question.scale, where)
    if look < 1:
        raise ConfigError(f"look {look}: it is counted from 1")
    words, rows = Words("en"), []
    for name, judged in judge_arms(figures, question, looks={name: (look, ()) for name in figures}).items():
        gap = judged.interval
        mean, low, high = (None, None, None) if gap is None else (gap.value, gap.low, gap.high)
        reasons = (*_reasons(judged, words, is_ratio=question.is_ratio), words("reason.unproven"))
        rows.append(ArmVerdict(name, judged.verdict, mean, low, high, judged.level, judged.num_seeds, judged.planned, reasons))
    return rows


def _rows(frame: Any, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of any table; ConfigError where a column is not in it."""
    if hasattr(frame, "columns") and hasattr(frame, "to_dict"):
        frame = frame.to_dict("list")
    if isinstance(frame, Mapping):
        lists = {name: list(values) for name, values in frame.items()}
        if len({len(values) for values in lists.values()}) > 1:
            raise DataError("the columns of the table have different lengths")
        frame = [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
    rows = list(frame) if isinstance(frame, Iterable) and not isinstance(frame, str) else []
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise ConfigError("give a list of dicts, a dict of lists or a pandas DataFrame with at least one row")
    for number, row in enumerate(rows, start=1):
        if missing := next((column for column in columns if column not in row), None):
            there = [str(name) for name in row]
            raise ConfigError(f"row {number}: no column {missing!r}{suggest(missing, there)}; it has: {', '.join(there)}")
    return [dict(row) for row in rows]


def _seed(value: Any, number: int) -> int:
    try:
        # pandas makes floats of whole numbers where a cell is empty.
        return int(value) if isinstance(value, float) and value.is_integer() else operator.index(value)
    except (TypeError, ValueError):
        raise DataError(f"row {number}: the seed is {value!r}, not a whole number") from None


def named_study(paths: Sequence[Path]) -> tuple[ImportedStudy, list[str]] | None:
    """Return the study at paths, `<outputs>/imported/<study>` or `.../<arm>`, and the arms that they name, or all.

    None if the first is no such path; ConfigError if the others belong to another study.
    """
    places = [_place_of(path) for path in paths]
    if places[0] is None:
        return None
    studies = {place and place[:2] for place in places}
    if len(studies) > 1:
        raise ConfigError(
            "runs of several studies, or imported ones and our own, are not compared; import them under one --name"
        )
    root, name = places[0][:2]
    study = next((study for study in collect_imported([root]) if study.name == name), None)
    if study is None:
        raise ConfigError(f"{paths[0]}: nothing is imported there")
    folders = {record_path(root, run).parent.name: arm for arm, runs in study.arms.items() for run in runs.values()}
    wanted = [place[2] for place in places if place is not None]
    for folder, path in zip(wanted, paths, strict=True):
        if folder is not None and folder not in folders:
            raise ConfigError(f"{path}: no such arm{suggest(folder, folders)}; the arms are: {', '.join(folders)}")
    return study, list(study.arms) if None in wanted else [folders[folder] for folder in wanted if folder is not None]


def _place_of(path: Path) -> tuple[Path, str, str | None] | None:
    """Return the outputs folder, the study and the arm's folder of an imported path; None where it is none."""
    parts = path.resolve().parts
    # A folder of that name may hold runs of ours, too.
    is_ours = (path / CONFIG).is_file() or any(path.glob(f"seed-*/{CONFIG}"))
    if IMPORTED not in parts[:-1] or is_ours:
        return None
    place = len(parts) - 1 - parts[::-1].index(IMPORTED)
    rest = parts[place + 1 :]
    return (Path(*parts[:place]), rest[0], rest[1] if len(rest) == 2 else None) if len(rest) <= 2 else None


def compare_imported(
    study: ImportedStudy, question: Question, words: Words, *, only: Sequence[str]
) -> tuple[JudgedStudy, Table, list[str]]:
    """Return arms of a study against its baseline, as a table and what to know about it.

    A verdict is the same whichever arms are named: all of the study are judged together.
    """
    judged = judge_study(study, question)
    judged = replace(judged, judgements={arm: found for arm, found in judged.judgements.items() if arm in only})
    return judged, _verdicts(judged, words), reasons_of(judged, words)
