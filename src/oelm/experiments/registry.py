"""The catalog: named experiments as data, from the package and from a file of the user's own."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from oelm.errors import ConfigError, suggest
from oelm.experiments.budget import BUDGETS
from oelm.experiments.yamlfile import YamlFile, parse_yaml, read_yaml
from oelm.files import dump_json
from oelm.names import is_device, is_safe
from oelm.strict import Strict

# A file of this name in the working folder is read without being asked for.
OWN_CATALOG = "experiments.yaml"
ALL = "all"
# What `oelm train`, `oelm finetune`, earlier versions of `oelm demo` and the import of others' runs keep beside experiments.
_TAKEN = {"train", "finetune", "demo", "imported", "bench"}
# What an entry says of itself alone, so that `extends` does not hand it on.
_OWN = ("title", "reported", "note", "extends")
_MAX_EXTENDS = 20
# What no setting can say, because something else does.
_SAID_BY = {"method": "the entry's own `method:` says it", "seed": "--seeds gives it"}
# Settings that may be paths.
_PATHS = ("model.source", "examples.dev", "examples.folder")


class Criterion(Strict):
    """What counts as success against the baseline: one of a bound on the PPL ratio or on the accuracy lost."""

    ppl_ratio_at_most: float | None = Field(default=None, gt=0)
    # A difference of shares: 0.05 is five points.
    accuracy_loss_at_most: float | None = Field(default=None, ge=0, lt=1)

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.ppl_ratio_at_most is None) == (self.accuracy_loss_at_most is None):
            raise ValueError("give one of ppl_ratio_at_most and accuracy_loss_at_most")
        return self

    def __str__(self) -> str:
        if self.ppl_ratio_at_most is not None:
            return f"PPL at most {self.ppl_ratio_at_most:g}x the baseline's"
        assert self.accuracy_loss_at_most is not None
        return f"accuracy at most {100 * self.accuracy_loss_at_most:g} points below the baseline's"


class Reported(Strict):
    """What others reported for this experiment: figures by name, never results of ours."""

    source: str
    figures: dict[str, float]


class Experiment(Strict):
    """One entry of the catalog. `settings` hold at every budget, `at` at one; docs/experiments.md describes the rest."""

    id: str
    title: str = ""
    kind: Literal["language_model", "classifier"]
    groups: tuple[str, ...] = ()
    data: str = Field(min_length=1)
    method: str | dict[str, Any] = "baseline"
    baseline: str | None = None
    criterion: Criterion | None = None
    seeds: int = Field(default=5, ge=1, le=1000)
    settings: dict[str, Any] = {}
    at: dict[Literal["paper", "workstation", "laptop", "smoke"], dict[str, Any]] = {}
    reported: Reported | None = None
    note: str = ""
    where: str

    @model_validator(mode="after")
    def _comparable(self) -> Self:
        if self.criterion is not None and self.baseline is None:
            raise ValueError("a criterion compares with a baseline; name one, or leave the criterion out")
        if self.criterion is not None and (self.criterion.ppl_ratio_at_most is not None) != (self.kind == "language_model"):
            raise ValueError(f"the criterion does not fit a {self.kind}")
        return self


@dataclass(frozen=True)
class Catalog:
    """All experiments by id, in the order of the files."""

    experiments: dict[str, Experiment]

    def __iter__(self) -> Iterator[Experiment]:
        return iter(self.experiments.values())

    def groups(self) -> dict[str, list[str]]:
        """Return the ids of each group; `all` has every experiment."""
        found: dict[str, list[str]] = {}
        for experiment in self:
            for group in dict.fromkeys((*experiment.groups, ALL)):
                found.setdefault(group, []).append(experiment.id)
        return found

    def named_groups(self) -> dict[str, list[str]]:
        """Return the groups without those that stand for one arm, or for one data set."""
        return {name: ids for name, ids in self.groups().items() if "." not in name and not ids[0].startswith(f"{name}.")}

    def baselines(self) -> dict[str, str]:
        """Return the baseline's id for each experiment that has one."""
        return {experiment.id: experiment.baseline for experiment in self if experiment.baseline is not None}

    def get(self, name: str) -> Experiment:
        """Return the experiment of this id, whatever its case; ConfigError suggests the nearest."""
        for experiment in self:
            if experiment.id.lower() == name.lower():
                return experiment
        for group, ids in self.groups().items():
            if group.lower() == name.lower():
                raise ConfigError(f"{name!r} is a group; name one of its experiments: {', '.join(ids)}")
        raise self._unknown(name)

    def select(self, names: Iterable[str]) -> list[Experiment]:
        """Return the experiments that ids and groups stand for, each once, in the order of the catalog."""
        groups, wanted = self.groups(), set[str]()
        for name in names:
            by_case = {group.lower(): group for group in groups}
            if name.lower() in by_case:
                wanted |= set(groups[by_case[name.lower()]])
                continue
            known = {experiment.id.lower(): experiment.id for experiment in self}
            if name.lower() not in known:
                raise self._unknown(name)
            wanted.add(known[name.lower()])
        return [experiment for experiment in self if experiment.id in wanted]

    def _unknown(self, name: str) -> ConfigError:
        groups = self.groups()
        hint = suggest(name, [*self.experiments, *groups])
        named = ", ".join(self.named_groups())
        return ConfigError(f"no experiment or group called {name!r}{hint}; `oelm list` shows them, groups are: {named}")


def dotted(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings by dotted path, each value that is not a mapping once."""
    return dict(_leaves(data))


def _leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def load_catalog(extra: Path | None = None) -> Catalog:
    """Return the package's experiments and those of the user's file: `extra`, or experiments.yaml in this folder."""
    sources = [
        parse_yaml(entry.read_text(encoding="utf-8"), where=entry.name)
        for entry in sorted(files("oelm.experiments").joinpath("catalog").iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".yaml")
    ]
    own = extra or (Path(OWN_CATALOG) if Path(OWN_CATALOG).is_file() else None)
    if own is not None:
        sources.append(read_yaml(own))
    return build_catalog(sources, own=own)


def build_catalog(sources: Iterable[YamlFile], *, own: Path | None = None) -> Catalog:
    """Check and join the entries of files; a later file may extend an earlier one's entries, never replace them."""
    entries: dict[str, tuple[YamlFile, dict[str, Any]]] = {}
    taken: dict[str, str] = {}
    for source in sources:
        for name, entry in source.data.items():
            _check_entry(source, name, entry, taken=taken)
            entries[name], taken[name.lower()] = (source, entry), name
    merged = {name: _extended(name, entries, seen=()) for name in entries}
    experiments: dict[str, Experiment] = {}
    for name, (source, _) in entries.items():
        for found, entry in _on_each_set(source, name, merged).items():
            if own is not None and source.path == str(own):
                entry = _with_whole_paths(entry, own.parent)
            experiments[found] = _parse(source, found, entry)
    _check_references(experiments)
    return Catalog(experiments)


def _on_each_set(source: YamlFile, name: str, merged: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return an entry by its id; one whose `data` is a list becomes an entry per data set, called `name.set`.

    Its baseline is the one on the same set, and its groups, its name among them, also exist per set.
    """
    entry = merged[name]
    if not isinstance(sets := entry.get("data"), list):
        return {name: entry}
    if not sets:
        raise ConfigError(f"{source.where(name, 'data')}: {name}: `data` is an empty list; name at least one data set")
    for each in sets:
        if not isinstance(each, str) or not is_safe(f"{name}.{each}"):
            raise ConfigError(f"{source.where(name, 'data')}: {name}: a list of data takes names of data sets, not {each!r}")
    baseline, groups = entry.get("baseline"), [*entry.get("groups", []), name]
    is_each = isinstance(baseline, str) and isinstance(merged.get(baseline, {}).get("data"), list)
    return {
        f"{name}.{each}": entry
        | {"data": each, "title": f"{each}: {entry.get('title', '')}"}
        | {"groups": groups + [f"{group}.{each}" for group in groups[:-1]]}
        | ({"baseline": f"{baseline}.{each}"} if is_each else {})
        for each in sets
    }


def check_name(name: str, *, where: str) -> None:
    """Raise ConfigError unless a name can be a folder's on every system and stays inside its parent."""
    if not is_safe(name) or is_device(name):
        raise ConfigError(
            f"{where}: the name {name!r} is not allowed: up to 64 letters, digits, '.', '_' and '-', "
            "beginning with a letter or digit, and none of the names that Windows keeps for devices"
        )


def _check_entry(source: YamlFile, name: str, entry: Any, *, taken: dict[str, str]) -> None:
    where = source.where(name)
    check_name(name, where=where)
    if name.lower() in _TAKEN | {ALL}:
        raise ConfigError(f"{where}: {name!r} is kept for oelm's own use; choose another name")
    if name.lower() in taken:
        raise ConfigError(f"{where}: {name!r} is taken (by {taken[name.lower()]!r}); give yours a name of its own")
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: {name} must be a mapping of settings, found {type(entry).__name__}")
    known = [key for key in Experiment.model_fields if key not in ("id", "where")] + ["extends"]
    for key in entry:
        if key not in known:
            hint = suggest(key, known) or f"; known keys: {', '.join(known)}"
            raise ConfigError(f"{source.where(name, key)}: {name}: unknown key '{key}'{hint}")
    at = entry.get("at")
    # Of another type, they are refused with the rest of the entry.
    for budget, settings in at.items() if isinstance(at, dict) else ():
        if isinstance(settings, dict):
            _check_settings(source, (name, "at", budget), settings)
    if isinstance(entry.get("settings"), dict):
        _check_settings(source, (name, "settings"), entry["settings"])


def _check_settings(source: YamlFile, place: tuple[str, ...], settings: dict[str, Any]) -> None:
    seen = set[str]()
    for key, _ in _leaves(settings):
        where = source.where(*place, key)
        if reason := _SAID_BY.get(key.split(".")[0]):
            raise ConfigError(f"{where}: {place[0]}: {key} is not for {'.'.join(place[1:])}; {reason}")
        if key in seen:
            raise ConfigError(f"{where}: {place[0]}: {key} stands twice in {'.'.join(place[1:])}, in two spellings")
        seen.add(key)


def _extended(name: str, entries: dict[str, tuple[YamlFile, dict[str, Any]]], *, seen: tuple[str, ...]) -> dict[str, Any]:
    """Return an entry with what it inherits: `settings` and `at` key by key, everything else whole."""
    source, entry = entries[name]
    own = {key: value for key, value in entry.items() if key != "extends"}
    parent = entry.get("extends")
    if parent is None:
        return own
    where = source.where(name, "extends")
    if not isinstance(parent, str) or parent not in entries:
        raise ConfigError(f"{where}: {name} extends {parent!r}, which is not there{suggest(str(parent), entries)}")
    if parent in (*seen, name):
        raise ConfigError(f"{where}: extends goes in a circle: {' -> '.join((*seen, name, parent))}")
    if len(seen) == _MAX_EXTENDS:
        raise ConfigError(f"{where}: {seen[0]} extends more than {_MAX_EXTENDS} entries, one behind the other")
    above = {key: value for key, value in _extended(parent, entries, seen=(*seen, name)).items() if key not in _OWN}
    merged = above | own
    if "settings" in own:
        merged["settings"] = _over(above.get("settings"), own["settings"])
    if isinstance(own.get("at"), dict) and isinstance(above.get("at"), dict):
        budgets = {budget: _over(above["at"].get(budget), settings) for budget, settings in own["at"].items()}
        merged["at"] = above["at"] | budgets
    return merged


def _over(above: Any, own: Any) -> Any:
    """Return settings on top of inherited ones; what is no mapping is left for the type to refuse."""
    if not isinstance(above, dict) or not isinstance(own, dict):
        return own
    # By dotted path: `optim.lr` and `optim: {lr:}` are one setting.
    inherited, added = dotted(above), dotted(own)
    if "model.source" in added and "model.sha256" not in added:
        # Other weights have another digest.
        inherited.pop("model.sha256", None)
    return inherited | added


def _with_whole_paths(entry: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return an entry of a user's file with its paths as seen from that file's folder."""
    # Not above: it takes longer to import than all the rest, and `oelm status` has no use for it.
    from oelm.data.sets import BUILT_IN, CORPORA, TASKS

    whole = dict(entry)
    data = entry.get("data")
    # A name of a data set stays one, even beside a folder of that name.
    if isinstance(data, str) and data not in ("", *BUILT_IN, *CORPORA, *TASKS) and ("/" in data or _exists(folder / data)):
        whole["data"] = str((folder / data).absolute())
    if isinstance(entry.get("settings"), dict):
        whole["settings"] = _whole_settings(entry["settings"], folder)
    if isinstance(entry.get("at"), dict):
        whole["at"] = {
            budget: _whole_settings(settings, folder) if isinstance(settings, dict) else settings
            for budget, settings in entry["at"].items()
        }
    return whole


def _whole_settings(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    return {
        key: str((folder / value).absolute())
        if key in _PATHS and isinstance(value, str) and value and _exists(folder / value)
        else value
        for key, value in dotted(settings).items()
    }


def _exists(path: Path) -> bool:
    # os.path, which takes a name that no file can have for one that is not there.
    return os.path.exists(path)


def _parse(source: YamlFile, name: str, merged: dict[str, Any]) -> Experiment:
    data = {"id": name, "where": source.where(name), **merged}
    try:
        return Experiment.model_validate_json(dump_json(data))
    except ValidationError as problem:
        errors = problem.errors()
        # A key misspelt is also one that is missing; the first is what to mend.
        error = next((error for error in errors if error["type"] == "extra_forbidden"), errors[0])
        keys = tuple(str(part) for part in error["loc"])
        message = str(error["msg"]).removeprefix("Value error, ")
        if error["type"] == "missing":
            message = "missing, and it has no default"
        if error["type"] == "extra_forbidden":
            known = (Criterion if keys[0] == "criterion" else Reported).model_fields
            message = f"unknown key{suggest(keys[-1], known) or '; known keys: ' + ', '.join(known)}"
        if keys[:1] == ("method",):
            message, keys = "must be the name of a preset, or a mapping", keys[:1]
        if error["loc"][:1] == ("at",) and len(keys) > 1 and keys[1] not in BUDGETS:
            message, keys = f"unknown budget {keys[1]!r}; there are: {', '.join(BUDGETS)}", keys[:2]
        raise ConfigError(f"{source.where(name, *keys)}: {name}: {'.'.join(keys) or 'entry'}: {message}") from None


def _check_references(experiments: dict[str, Experiment]) -> None:
    _check_groups(experiments)
    for experiment in experiments.values():
        if experiment.baseline is None:
            continue
        if experiment.baseline not in experiments:
            hint = suggest(experiment.baseline, experiments)
            raise ConfigError(f"{experiment.where}: {experiment.id}: no baseline called {experiment.baseline!r}{hint}")
        other = experiments[experiment.baseline]
        if other.kind != experiment.kind or other.baseline is not None:
            reason = "is of another kind" if other.kind != experiment.kind else f"has a baseline itself ({other.baseline})"
            raise ConfigError(f"{experiment.where}: {experiment.id}: its baseline {other.id} {reason}")


def _check_groups(experiments: dict[str, Experiment]) -> None:
    """Raise ConfigError unless each name, whatever its case, stands for one experiment or one group."""
    order = {name: number for number, name in enumerate(experiments)}
    ids = {name.lower(): name for name in experiments}
    spelled: dict[str, str] = {}
    for experiment in experiments.values():
        for group in experiment.groups:
            check_name(group, where=experiment.where)
            if group.lower() == ALL:
                raise ConfigError(f"{experiment.where}: every experiment is in the group {ALL!r}; leave it out")
            if (name := ids.get(group.lower())) is not None:
                # Who came second is told: the other may be the package's own.
                later = max((experiment, experiments[name]), key=lambda found: order[found.id])
                raise ConfigError(f"{later.where}: {name!r} is also the name of a group; rename one of them")
            if (known := spelled.setdefault(group.lower(), group)) != group:
                raise ConfigError(f"{experiment.where}: the group {group!r} is also spelled {known!r}; choose one spelling")
