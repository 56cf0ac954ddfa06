"""Every interval: Student's, of ratios and differences over seeds and examples, of shares, for many looks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from oelm.errors import DataError
from oelm.text import fixed

if TYPE_CHECKING:
    import numpy.typing as npt

Metric = Literal["ppl", "accuracy"]
LEVEL = 0.95
# How probable it shall be that a true difference is seen; the usual convention (Cohen 1988).
POWER = 0.8
# The largest logarithm of a double: beyond it an end of an interval is infinite.
_MAX_LOG = math.log(1.7e308)
# Of documents; the ends of an interval then move by about a fiftieth of its width.
_RESAMPLES = 4000
# Beyond this many errors the normal part of a noncentral t is less than a thousandth of it.
_FAR = 1000.0
# Some fifty looks on, a level would round to certainty, which has no interval.
_HIGHEST_LEVEL = math.nextafter(1.0, 0.0)
_UNITS = {"ppl": "%", "accuracy": ""}
# The largest power whose exponential is a float.
_MAX_POWER = 709.0


def student_quantile(freedom: float, level: float) -> float:
    """Return the two-sided quantile of Student's t at a level."""
    # Loaded on first use; scipy.stats has the same under another name and takes four times as long to import.
    from scipy.special import stdtrit

    return -float(stdtrit(freedom, (1 - level) / 2))


def exp_or_inf(power: float) -> float:
    """Return e to a power; infinity where that overflows a float."""
    return math.exp(power) if power <= _MAX_POWER else math.inf


@dataclass(frozen=True)
class Ratio:
    """The geometric mean of paired ratios with its 95% interval; a single pair has an infinite one."""

    value: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.value:.3f}x [{self.low:.3f}, {self.high:.3f}]"


def mean_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Return the geometric mean of paired ratios with a t interval on their logarithms."""
    logs = [math.log(above / below) for above, below in zip(numerators, denominators, strict=True)]
    mean, half = statistics.fmean(logs), math.inf
    if len(logs) > 1:
        half = student_quantile(len(logs) - 1, LEVEL) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(exp_or_inf(mean), exp_or_inf(mean - half), exp_or_inf(mean + half), len(logs))


@dataclass(frozen=True)
class Interval:
    """An estimate with its two-sided interval at a level; `freedom` are the degrees behind the sd, whole or effective."""

    value: float
    low: float
    high: float
    level: float
    freedom: float

    @property
    def half_width(self) -> float:
        """Half the distance between the ends; an interval of a ratio is not symmetric about its value."""
        return (self.high - self.low) / 2


def paired_log_ratio(ours: Mapping[int, float], theirs: Mapping[int, float], *, level: float = LEVEL) -> Interval | None:
    """Return the geometric mean of PPL ratios, paired by seed, with a t interval on their logarithms.

    The primary analysis. It covers seeds drawn anew, on the same text. Ends are ratios. None for fewer than two
    common seeds.
    """
    logs = list(_log_ratios(ours, theirs).values())
    return _on_ratios(_t_interval(logs, level=level)) if len(logs) > 1 else None


def paired_interval(
    ours: Mapping[int, float], theirs: Mapping[int, float], metric: str, *, level: float = LEVEL
) -> Interval | None:
    """Return the interval by which figures of a metric are compared: of the ratio of PPLs, of the difference of accuracies."""
    return (paired_log_ratio if metric == "ppl" else paired_difference)(ours, theirs, level=level)


@dataclass(frozen=True)
class PairedGap:
    """The gap between two arms over their common seeds; no interval with fewer than two of them, no text without one."""

    interval: Interval | None
    text: str

    @property
    def value(self) -> float | None:
        return None if self.interval is None else self.interval.value


def paired_gap(ours: Mapping[int, float], theirs: Mapping[int, float], metric: str) -> PairedGap:
    """Return the gap between figures of two arms, paired by seed, at the usual level."""
    interval = paired_interval(ours, theirs, metric)
    if interval is not None:
        return PairedGap(interval, interval_text(interval, metric))
    seed = min(ours.keys() & theirs.keys(), default=None)
    return PairedGap(None, "" if seed is None else gap_text(ours[seed], theirs[seed], metric))


def pooled_log_ratio(
    arms: Mapping[str, Mapping[int, float]], arm: str, baseline: str, *, level: float = LEVEL
) -> Interval | None:
    """Return `paired_log_ratio` of an arm with the sd pooled over all arms against this baseline.

    The sensitivity analysis: narrower where seeds are few, and right only if all arms vary alike. None where the arm has
    fewer than two seeds in common with the baseline.
    """
    logs = {name: _log_ratios(seeds, arms[baseline]) for name, seeds in arms.items() if name != baseline}
    pairs = {name: ratios for name, ratios in logs.items() if len(ratios) > 1}
    if arm not in pairs:
        return None
    own = list(pairs[arm].values())
    variance, freedom = _pooled_variance(list(pairs.values()))
    error = math.sqrt(variance / len(own))
    return _on_ratios(_student(_mean(own), error, freedom=freedom, level=level))


def share_kept(
    ours: Mapping[int, float], theirs: Mapping[int, float], floor: Mapping[int, float], *, level: float = LEVEL
) -> Interval | None:
    """Return which share of attention's worth an arm keeps: 1 - log(PPL / baseline's) / log(floor's / baseline's).

    `floor` is the PPL without Q and K by seed. The interval is Fieller's, for a quotient of two means over the same seeds.
    None for fewer than two common seeds, and where the quotient is unbounded: the floor may be no worse than the baseline.
    """
    costs, worths = _log_ratios(ours, theirs), _log_ratios(floor, theirs)
    seeds = common_seeds(costs, worths)
    if len(seeds) < 2:
        return None
    lost = _fieller([costs[seed] for seed in seeds], [worths[seed] for seed in seeds], level=level)
    return lost and Interval(1 - lost.value, 1 - lost.high, 1 - lost.low, lost.level, lost.freedom)


def _fieller(above: Sequence[float], below: Sequence[float], *, level: float) -> Interval | None:
    """Return the quotient of two means of paired values with Fieller's interval (1954); None where it is unbounded."""
    count, freedom = len(above), len(above) - 1
    quantile = student_quantile(freedom, level)
    # Loaded on first use: `oelm status` needs no arrays.
    import numpy as np

    (own, shared), (_, error) = np.cov(above, below) / count
    mean = _mean(below)
    # How many of its own errors the divisor is from zero, squared and inverted.
    doubt = quantile**2 * error / mean**2 if mean else math.inf
    if doubt >= 1:
        return None
    value = _mean(above) / mean
    slope = shared / error if error else 0.0
    spread = own - 2 * value * shared + value**2 * error - doubt * (own - slope * shared)
    middle = (value - doubt * slope) / (1 - doubt)
    half = quantile * math.sqrt(max(0.0, spread)) / (abs(mean) * (1 - doubt))
    return Interval(value, middle - half, middle + half, level, freedom)


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float], *, level: float = LEVEL) -> Interval | None:
    """Return the mean difference of accuracies (shares), paired by seed, with a t interval.

    It covers seeds drawn anew, on the same examples. None for fewer than two common seeds.
    """
    differences = [_figure(ours, seed) - _figure(theirs, seed) for seed in common_seeds(ours, theirs)]
    return _t_interval(differences, level=level) if len(differences) > 1 else None


def example_difference(ours: npt.ArrayLike, theirs: npt.ArrayLike, *, level: float = LEVEL) -> Interval | None:
    """Return the difference of accuracies with a t interval over examples.

    Both hold, for each common seed, whether each of the same examples was right; an example counts with its mean over seeds.
    Of one seed it is the interval to McNemar's test: only examples on which the two differ count.
    It covers examples drawn anew and judged by these very models. It does not cover other seeds: that is what
    `paired_difference` is for, and neither covers both. None for fewer than two examples or no seed.
    """
    import numpy as np

    right, reference = np.asarray(ours, dtype=float), np.asarray(theirs, dtype=float)
    if right.shape != reference.shape or right.ndim != 2:
        raise DataError(
            f"outcomes by seed and example have the shapes {right.shape} and {reference.shape}: both arms need the same seeds "
            "and the same examples; compare runs that were judged on the same data"
        )
    if not (np.isfinite(right).all() and np.isfinite(reference).all()):
        raise DataError("outcomes by seed and example hold NaN or infinity; each must be 0 (wrong) or 1 (right)")
    num_seeds, num_examples = right.shape
    if num_seeds < 1 or num_examples < 2:
        return None
    differences = (right - reference).mean(axis=0)
    error = float(differences.std(ddof=1)) / math.sqrt(num_examples)
    return _student(float(differences.mean()), error, freedom=num_examples - 1, level=level)


def document_log_ratio(ours: npt.ArrayLike, theirs: npt.ArrayLike, tokens: npt.ArrayLike) -> Interval | None:
    """Return the PPL ratio with a bootstrap interval over documents: percentiles of resampled sets of whole documents.

    `ours` and `theirs` hold, for each common seed, the nats of the same documents, which have so many `tokens`. It covers
    documents drawn anew and judged by these very models, not other seeds. None for fewer than two documents or no seed.
    """
    import numpy as np

    sizes = np.asarray(tokens, dtype=float)
    gains = np.asarray(ours, dtype=float) - np.asarray(theirs, dtype=float)
    if gains.ndim != 2 or not len(gains) or len(sizes) < 2:
        return None
    mean = gains.mean(axis=0)
    drawn = np.random.default_rng(0).multinomial(len(sizes), np.full(len(sizes), 1 / len(sizes)), size=_RESAMPLES)
    low, high = np.quantile((drawn @ mean) / (drawn @ sizes), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return _on_ratios(Interval(float(mean.sum() / sizes.sum()), float(low), float(high), LEVEL, len(sizes) - 1))


def detectable(interval: Interval, *, power: float = POWER) -> float:
    """Return the smallest true difference that an interval of this kind would exclude zero at, with probability `power`.

    The spread is taken to be the one that was seen. The interval must be one of a difference, not of a ratio.
    """
    quantile = student_quantile(interval.freedom, interval.level)
    from scipy.special import gammaincinv, nctdtrinc

    # Student's t of a true difference d is noncentral by d / error; the chance of the wrong sign is left out.
    if quantile < _FAR:
        shift = float(nctdtrinc(interval.freedom, 1 - power, quantile))
    else:
        # So far out only the spread's own chance counts, a root of chi squared; the exact search would not end.
        shift = quantile * math.sqrt(2 * float(gammaincinv(interval.freedom / 2, power)) / interval.freedom)
    return shift * interval.half_width / quantile


def detectable_text(interval: Interval | None) -> str | None:
    """Return in points what a comparison could have seen; None where it has no interval, or one of no width."""
    return None if interval is None or interval.half_width == 0 else f"{100 * detectable(interval):.2f}"


def interval_text(interval: Interval, metric: str) -> str:
    """Return a ratio of PPLs as a change in percent, or a difference of accuracies in points, with its interval."""
    value, low, high = (_end_text(end, metric) for end in (interval.value, interval.low, interval.high))
    return f"{value}{_UNITS[metric]} [{low}, {high}]"


def gap_text(ours: float, theirs: float, metric: str) -> str:
    """Return the gap between two figures, without an interval."""
    return _end_text(ours / theirs if metric == "ppl" else ours - theirs, metric) + _UNITS[metric]


def _end_text(value: float, metric: str) -> str:
    return fixed(100 * (value - 1), 1, sign=True) if metric == "ppl" else f"{100 * value:+.2f}"


def level_text(level: float) -> str:
    """Return a level in percent, with as many decimals as it takes not to look like certainty."""
    for decimals in range(2, 15):
        text = f"{100 * level:.{decimals}f}"
        if float(text) < 100:
            break
    return f"{text.rstrip('0').rstrip('.')}%"


def corrected_level(level: float, comparisons: int) -> float:
    """Return the level each of several comparisons needs so that all their intervals hold together at `level`.

    Bonferroni's: an equal share of the error each. It holds however the comparisons depend on each other, and ours do:
    arms share a baseline.
    """
    assert comparisons >= 1
    return 1 - (1 - level) / comparisons


def look_level(level: float, look: int) -> float:
    """Return the level of the `look`-th analysis of one comparison, counted from 1, after seeds were added.

    Over any number of looks a comparison at its bound passes falsely with a probability under 1 - `level`.
    """
    # Look j has the two-sided error alpha / 2**(j-1). A false PASS is an interval wholly on one side of the truth, which
    # takes half of that: alpha / 2**j. Over all looks: alpha * (1/2 + 1/4 + 1/8 + ...) < alpha. A sum bounds the
    # probability of a union whatever the looks share, so adding seeds may depend on what was seen before. The first look
    # pays nothing: it is the plain interval.
    assert look >= 1
    return min(1 - (1 - level) / 2 ** (look - 1), _HIGHEST_LEVEL)


def common_seeds(ours: Mapping[int, float], theirs: Mapping[int, float]) -> tuple[int, ...]:
    """Return the seeds that both arms have, in order."""
    return tuple(sorted(ours.keys() & theirs.keys()))


def _log_ratios(ours: Mapping[int, float], theirs: Mapping[int, float]) -> dict[int, float]:
    # A difference of logarithms: the ratio itself could overflow where a run diverged.
    return {
        seed: math.log(_figure(ours, seed, is_ratio=True)) - math.log(_figure(theirs, seed, is_ratio=True))
        for seed in common_seeds(ours, theirs)
    }


def _figure(arm: Mapping[int, float], seed: int, *, is_ratio: bool = False) -> float:
    """Return a seed's figure; raise DataError where no interval can hold it: it would be neither right nor wrong."""
    value = arm[seed]
    if not math.isfinite(value) or (is_ratio and value <= 0):
        raise DataError(
            f"seed {seed} has the figure {value}: an interval needs finite numbers{' above zero' if is_ratio else ''}. Report "
            "a run that diverged by itself; without it the other seeds are no sample either"
        )
    return value


def _pooled_variance(arms: Sequence[Mapping[int, float]]) -> tuple[float, float]:
    """Return the variance pooled over arms, and how many degrees of freedom it is worth."""
    means = [_mean(arm.values()) for arm in arms]
    residuals = [{seed: value - mean for seed, value in arm.items()} for arm, mean in zip(arms, means, strict=True)]
    total = math.fsum(value**2 for arm in residuals for value in arm.values())
    nominal = sum(len(arm) - 1 for arm in arms)
    if total == 0:
        return 0.0, nominal
    # All arms are divided by the same baseline runs, so their spreads are not independent and the sum of the degrees of
    # freedom promises too much: as little as 88% for 95% where the baseline varies most. A variance v with Var(v) is worth
    # 2 v**2 / Var(v) degrees (Box 1954, Satterthwaite), and products of two arms' residuals estimate their covariance.
    shared = math.fsum(_shared_error(one, other) for one in residuals for other in residuals)
    return total / nominal, total**2 / shared


def _shared_error(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    seeds = common_seeds(one, other)
    return math.fsum(one[seed] * other[seed] for seed in seeds) ** 2 / (len(seeds) - 1) if len(seeds) > 1 else 0.0


def _mean(values: Collection[float]) -> float:
    return math.fsum(values) / len(values)


def _t_interval(values: Sequence[float], *, level: float) -> Interval:
    mean, freedom = _mean(values), len(values) - 1
    variance = math.fsum((value - mean) ** 2 for value in values) / freedom
    return _student(mean, math.sqrt(variance / len(values)), freedom=freedom, level=level)


def _student(mean: float, error: float, *, freedom: float, level: float) -> Interval:
    assert 0 < level < 1
    half = student_quantile(freedom, level) * error
    return Interval(mean, mean - half, mean + half, level, freedom)


def _on_ratios(logs: Interval) -> Interval:
    low, value, high = (math.exp(end) if end < _MAX_LOG else math.inf for end in (logs.low, logs.value, logs.high))
    return Interval(value, low, high, logs.level, logs.freedom)
