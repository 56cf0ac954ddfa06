"""From experiments, a budget and seeds to runs, each with its config and folder; and what confounds a comparison."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from oelm.budget import EXTRACT_TOKENS, budget_settings, classifier_settings
from oelm.config import FinetuneConfig, RunConfig, TrainConfig, flatten, nearest_key, parse_as, with_overrides
from oelm.data.prepare import check_tokenizer_asked, is_token_set
from oelm.data.public_sets import BUILT_IN, CORPORA, TASKS
from oelm.data.tokenizer import vocab_size_of
from oelm.errors import ConfigError, RunDirError
from oelm.experiments.catalog import Catalog, Experiment
from oelm.files import dump_json
from oelm.method.method import Method, resolve_method
from oelm.runs.layout import CONFIG
from oelm.runs.records import read_any_config

# Prefix of the variant of runs with the best settings of their sweep.
TUNED = "tuned-"
_TUNED_ALONE = re.compile(rf"{TUNED}[0-9a-f]{{8}}")
# What the lean and thin controls have less of. Starting weights, dropout and context are not shape.
SHAPE = {"model.model_dim", "model.num_layers", "model.num_heads", "model.ff_dim", "model.qk_dim"}
# A hundredth of a nat, one percent of perplexity or a point of accuracy: the spread of a plain baseline over seeds at
# `laptop` (docs/study.md). One seed cannot tell closer points of a sweep apart. Frozen arms spread more.
CLOSE = 0.01
_METHOD = "method."
# Fields of a method that set how fast an arm learns: a gain from these is not a gain from freezing.
PACE = ("method.layer_lr_decay", "method.warmup_steps")
# What may be tuned for each arm: how it learns, but not how long, on what data, or with how large a model.
TUNABLE = ("optim.", "schedule.", "model.dropout", "precision", *PACE)


def confounding(differing: Collection[str], *, tuned: Collection[str] = (), is_larger: Callable[[], bool]) -> list[str]:
    """Return which of the differing settings, by dotted path, confound the gap between an arm and its baseline.

    The method may differ, but not its pace. An arm with its baseline's method is a control: its shape may differ if it has
    no more parameters than the baseline (`is_larger` is called only then). Settings in `tuned`, which each arm has from the
    same sweep, may differ if they set how a model learns; a larger model or more text would win unfairly.
    """
    method = {key for key in differing if key.startswith(_METHOD)}
    shape = SHAPE.intersection(differing)
    may_be_smaller = bool(shape) and not method and not is_larger()
    allowed = (method - set(PACE)) | {key for key in tuned if key.startswith(TUNABLE)} | (shape if may_be_smaller else set())
    return [key for key in differing if key not in allowed]


def is_tuned_alone(variant: str) -> bool:
    """Whether a variant has only the best of its sweep on top of its budget."""
    return _TUNED_ALONE.fullmatch(variant) is not None


def tuned_alike(arm: str, baseline: str, baseline_of: Mapping[str, str]) -> bool:
    """Whether the experiments that were swept for an arm and for its baseline are themselves an arm and its baseline.

    Otherwise one could win by its tuning.
    """
    return baseline_of.get(arm) == baseline


# Filled in from data and model when a run begins; until then a plan has placeholders.
_FILLED_IN = {"model.vocab_size", "model.num_labels", "model.sha256", "steps", "epochs", "eval_every", "save_every"}
# A model is its weights, wherever they were read from.
_PLACE = "model.source"
_SLUG_LENGTH = 40


@dataclass(frozen=True)
class PlannedRun:
    """One run to make: an experiment at a budget and a seed, with the user's changes.

    `tuned` are the settings that each arm has from its sweep: arms of a fair comparison may differ in these.
    """

    experiment: Experiment
    budget: str
    variant: str
    seed: int
    config: RunConfig | FinetuneConfig
    path: Path
    tuned: tuple[str, ...] = ()

    @cached_property
    def config_text(self) -> str:
        """The config as JSON: what config.json holds and what the run's process reads."""
        return dump_json(self.config.as_dict()) + "\n"

    @property
    def name(self) -> str:
        variant = "" if self.variant == "default" else f" {self.variant}"
        return f"{self.experiment.id} {self.budget}{variant} seed {self.seed}"


def check_changes(changes: Iterable[str]) -> None:
    """Raise ConfigError if the user's changes would give all arms one method."""
    harmless = ("method.seed", *PACE)
    for given in (key for key in changes if key.split(".")[0] == "method" and key not in harmless):
        check_method_key(given, option="--set")
        raise ConfigError(
            f"--set {given}: it would change the method of every arm, the baseline's too; only {', '.join(harmless)} may be "
            "set for all. Define an experiment with the other method (docs/experiments.md), or use `oelm train`"
        )


def check_method_key(key: str, *, option: str) -> None:
    """Raise ConfigError if a key names a field that a method does not have."""
    outer, _, rest = key.partition(".")
    if outer == "method" and rest and (name := rest.split(".")[0]) not in Method.model_fields:
        raise ConfigError(f"{option} {key}: method: unknown key '{name}'{nearest_key(RunConfig, ['method', name])}")


def make_config(
    experiment: Experiment,
    budget: str,
    *,
    seed: int,
    changes: Mapping[str, Any] | None = None,
    grid: Collection[str] = (),
) -> RunConfig | FinetuneConfig:
    """Return the config of an experiment at a budget and a seed, with the user's changes by dotted path.

    ConfigError names the option at fault (--grid for the keys in `grid`, --set for other changes), else the entry.
    """
    changes = dict(changes or {})
    name = f"{experiment.id} at {budget}"
    if any(key.split(".")[0] == "seed" for key in changes):
        raise ConfigError("seed cannot be set; give seeds with --seeds, for example --seeds 5-9")
    own = flatten(experiment.settings) | flatten(experiment.at.get(budget, {}))  # type: ignore[call-overload]
    base = _base(experiment, budget, model={**own, **changes}.get(_PLACE))
    try:
        base["method"] = _as_data(experiment.method)
        # The catalog's digest is not that of the user's weights.
        unknown = {"model.sha256": ""} if _PLACE in changes and experiment.kind == "classifier" else {}
        settings = with_overrides(base, {**own, **unknown, **changes, "seed": seed})
        settings["method"] = _as_data(settings["method"])
        if experiment.kind == "language_model":
            parsed = parse_as(RunConfig, settings, where=name)
            if "data.tokenizer" in changes:
                check_tokenizer_asked(parsed.data.source, parsed.data.tokenizer)
            return parsed
        return parse_as(FinetuneConfig, settings, where=name)
    except ConfigError as problem:
        text = str(problem).removeprefix(f"{name}: ")
        if (key := next((key for key in changes if _is_about(text, key)), None)) is not None:
            where = f"{'--grid' if key in grid else '--set'} {key} ({name})"
        else:
            where = f"{name} with your options (its entry: {experiment.where})" if changes else f"{experiment.where} ({name})"
        raise ConfigError(f"{where}: {text}") from None


def _is_about(text: str, key: str) -> bool:
    """Whether an error message is about this setting, known or not."""
    is_unknown = f"unknown key '{key.rpartition('.')[2]}'" in text
    return is_unknown or re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", text) is not None


def _base(experiment: Experiment, budget: str, *, model: Any) -> dict[str, Any]:
    """Return the budget's settings with the experiment's data; `model` is where a pretrained model is."""
    # A smoke test uses data that every machine has; the user's own text is one.
    is_named = experiment.data in (*BUILT_IN, *CORPORA, *TASKS)
    data = "stdlib" if budget == "smoke" and is_named else experiment.data
    if experiment.data in (TASKS if experiment.kind == "language_model" else CORPORA):
        raise ConfigError(f"{experiment.where}: {experiment.id}: {experiment.data} is not data for a {experiment.kind}")
    if experiment.kind == "language_model":
        settings = budget_settings(budget)
        settings["data"]["source"] = data
        if data in CORPORA or budget == "smoke":
            settings["data"]["max_tokens"] = EXTRACT_TOKENS[budget]
        return settings
    settings = classifier_settings(budget, model=model)
    settings["examples"]["task"] = data
    return settings


def _as_data(method: Any) -> Any:
    """Return a preset as data, so that --set method.KEY=VALUE can change part of it."""
    return resolve_method(method).model_dump(mode="json") if isinstance(method, str) else method


def variant_name(changes: Mapping[str, Any]) -> str:
    """Return 'default', or a slug and eight hex digits of the changes; every arm of a comparison has the same."""
    if not changes:
        return "default"
    words = "-".join(f"{key.rsplit('.', 1)[-1]}-{value}" for key, value in sorted(changes.items()))
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", words).strip("-.")[:_SLUG_LENGTH].rstrip("-.") or "changed"
    try:
        digest = hashlib.sha256(dump_json(dict(sorted(changes.items()))).encode()).hexdigest()
    except ValueError as problem:
        raise ConfigError(f"--set {words!r}: numbers must be finite and text must be Unicode ({problem})") from None
    return f"{slug}-{digest[:8]}"


def parse_seeds(text: str) -> list[int]:
    """Read '5' (the seeds 0 to 4), '5-9' or '0,3,7'."""
    text = text.strip()
    if re.fullmatch(r"[0-9]+", text):
        # A number alone is always a count of seeds.
        if not re.fullmatch(r"[1-9][0-9]{0,3}", text):
            raise ConfigError(f"--seeds {text[:40]}: a number of seeds from 1 to 9,999; write a single seed as 7-7")
        return list(range(int(text)))
    seeds: list[int] = []
    for part in text.split(","):
        if not (found := re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part.strip())):
            raise ConfigError(f"--seeds {text!r}: a number of seeds (5: 0 to 4), a range (5-9) or a list (0,3,7)")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise ConfigError(f"--seeds {text!r}: {part.strip()} ends before it begins; write {last}-{first}")
        if last - first >= 10_000:
            raise ConfigError(f"--seeds {text!r}: {part.strip()} has more than 10,000 seeds")
        seeds += range(first, last + 1)
    if len(seeds) != len(set(seeds)):
        raise ConfigError(f"--seeds {text!r}: a seed is given twice")
    return seeds


def with_baselines(catalog: Catalog, chosen: Iterable[Experiment]) -> list[Experiment]:
    """Return the chosen experiments and their baselines, in the catalog's order, baselines first."""
    wanted = {experiment.id for experiment in chosen}
    wanted |= {experiment.baseline for experiment in catalog if experiment.id in wanted and experiment.baseline}
    ordered = [experiment for experiment in catalog if experiment.id in wanted]
    return sorted(ordered, key=lambda experiment: experiment.baseline is not None)


def plan_runs(
    experiments: Iterable[Experiment],
    *,
    budget: str,
    seeds: list[int] | None,
    root: Path,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    variant: str = "default",
    variants: Mapping[str, str] | None = None,
    grid: Collection[str] = (),
) -> list[PlannedRun]:
    """Return the runs of experiments, seed by seed, so that whole comparisons finish early.

    `changes` and `variants` are by experiment id; `variant` is the default. `grid` are the keys that a sweep tries. `seeds`
    None means as many as the catalog plans, and one at smoke.
    """
    planned: list[PlannedRun] = []
    for experiment in experiments:
        own = seeds if seeds is not None else list(range(1 if budget == "smoke" else experiment.seeds))
        for seed in own:
            config = make_config(experiment, budget, seed=seed, changes=(changes or {}).get(experiment.id), grid=grid)
            named = (variants or {}).get(experiment.id, variant)
            path = root / experiment.id / budget / named / f"seed-{seed}"
            planned.append(PlannedRun(experiment, budget, named, seed, config, path))
    order = {seed: number for number, seed in enumerate(seeds or [])}
    return sorted(planned, key=lambda run: order.get(run.seed, run.seed))


def check_same_recipe(run: PlannedRun) -> None:
    """Raise RunDirError if the folder holds a run of another config, because the catalog or the budget changed."""
    if not (run.path / CONFIG).is_file():
        return
    try:
        held = read_any_config(run.path)
    except ConfigError as problem:
        raise RunDirError(f"{problem}. Move {run.path} aside, or give another --out") from None
    if changes := recipe_changes(run.config, held):
        raise RunDirError(
            f"{run.path} holds a run of another recipe ({'; '.join(changes[:4])}): the catalog has changed since. Move it "
            f"aside, remove it with `oelm clean {run.experiment.id}`, or give another --out"
        )


def recipe_changes(planned: TrainConfig, held: TrainConfig) -> list[str]:
    """Return the settings in which a run on disk differs from the plan, apart from placeholders."""
    if type(planned) is not type(held):
        return ["it is of another kind"]
    old, new = flatten(held.as_dict()), flatten(planned.as_dict())
    differing = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    changes = []
    for key in differing:
        is_open = key in _FILLED_IN and (new.get(key) in (0, "", None) or (key == "epochs" and _as_long(old, new)))
        is_moved = key == _PLACE and old.get(key) is not None and new.get("model.sha256") not in ("", None)
        # A token set has its own tokenizer.
        is_brought = key == "data.tokenizer" and is_token_set(str(new.get("data.source")))
        if not (is_open or is_moved or is_brought):
            changes.append(f"{key}: {old.get(key)!r} there, {new.get(key)!r} planned")
    return changes


def _as_long(held: Mapping[str, Any], planned: Mapping[str, Any]) -> bool:
    """Whether the steps of a run may be the planned epochs."""
    if held.get("epochs") is not None:
        return False
    # If evaluations follow the epochs, eval_every is the steps of one epoch; for less than an epoch it is not.
    is_known = planned.get("eval_every") == 0 and planned["epochs"] >= 1
    return not is_known or bool(held["steps"] == math.ceil(planned["epochs"] * held["eval_every"]))


def config_confounds(
    arm: RunConfig | FinetuneConfig, baseline: RunConfig | FinetuneConfig, *, tuned: Iterable[str] = ()
) -> list[str]:
    """Return the settings, apart from the method or a control's shape, that confound an arm's gap to its baseline.

    They may differ in `tuned`, because each has its own from the same sweep.
    """
    ours, theirs = flatten(arm.as_dict()), flatten(baseline.as_dict())
    differing = [key for key in {**ours, **theirs} if key != "seed" and ours.get(key) != theirs.get(key)]
    keys = confounding(differing, tuned=set(tuned), is_larger=lambda: _is_larger(arm, baseline))
    return [f"{key} {ours.get(key)} against {theirs.get(key)}" for key in keys]


def known_vocabulary(config: RunConfig) -> RunConfig:
    """Return the config with the size of the vocabulary that its tokenizer will have."""
    size = config.model.vocab_size or vocab_size_of(config.data.tokenizer)
    return config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": size})})


def _is_larger(arm: RunConfig | FinetuneConfig, baseline: RunConfig | FinetuneConfig) -> bool:
    """Whether an arm has more parameters than its baseline, or nobody here can count them."""
    if isinstance(arm, RunConfig) and isinstance(baseline, RunConfig):
        return known_vocabulary(arm).weight_counts().total > known_vocabulary(baseline).weight_counts().total
    # Imported here because it estimates what this module plans.
    from oelm.experiments.forecast import count_parameters

    ours, theirs = count_parameters(arm), count_parameters(baseline)
    return ours is None or theirs is None or ours.total > theirs.total
