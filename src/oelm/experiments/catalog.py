"""The catalog: named experiments as data, from the package and from a user's YAML, read without code."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from oelm.budget import BUDGETS
from oelm.config import flatten
from oelm.errors import ConfigError, suggest
from oelm.files import Strict, dump_json
from oelm.text import is_device, is_safe

MAX_BYTES = 2**20
# Seven times as fast, if libyaml is available; the other parser gives better errors.
FAST_LOADER: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MAX_DEPTH = 20
# YAML 1.1 reads 1e-3 as text, because it has no dot.
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*(\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+")
_TAG = "tag:yaml.org,2002:"
_LOOSE_BOOLEANS = ("yes", "no", "on", "off", "y", "n")


@dataclass(frozen=True)
class YamlFile:
    """A parsed file: plain data, and the line of each key by its path."""

    path: str
    data: dict[str, Any]
    lines: dict[tuple[str, ...], int]

    def where(self, *keys: str) -> str:
        """Return 'file:line' of a key, or of its nearest parent that has a line."""
        while keys and keys not in self.lines:
            keys = keys[:-1]
        return f"{self.path}:{self.lines[keys]}" if keys else self.path


def read_yaml(path: Path) -> YamlFile:
    """Read a YAML mapping; ConfigError names the file, the line and the reason."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"{path}: too large; the limit is {MAX_BYTES:,} bytes")
        text = content.decode("utf-8")
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{path}: cannot be read ({problem})") from problem
    return parse_yaml(text, where=str(path))


def parse_yaml(text: str, *, where: str, loader: type[Any] = yaml.SafeLoader) -> YamlFile:
    """Parse a YAML mapping from text; `where` stands for the file in errors."""
    lines: dict[tuple[str, ...], int] = {}
    try:
        _check_plain(text, where, loader)
        node = yaml.compose(text, Loader=loader)
    except yaml.MarkedYAMLError as problem:
        line = problem.problem_mark.line + 1 if problem.problem_mark else 1
        raise ConfigError(f"{where}:{line}: not YAML ({problem.problem or problem.context})") from None
    except yaml.reader.ReaderError as problem:
        line = text.count("\n", 0, problem.position) + 1
        raise ConfigError(f"{where}:{line}: not YAML ({problem.reason})") from None
    if node is None:
        return YamlFile(where, {}, {})
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{where}:{_line(node)}: must be a mapping (NAME: ...) at the top")
    return YamlFile(where, _mapping(node, (), lines, where), lines)


def _check_plain(text: str, where: str, kind: type[Any]) -> None:
    """Refuse aliases, tags and depth event by event: before anything is built, and before depth costs time or stack."""
    loader, depth = kind(text), 0
    try:
        while loader.check_event():
            event = loader.get_event()
            line = event.start_mark.line + 1
            if isinstance(event, yaml.AliasEvent):
                raise ConfigError(f"{where}:{line}: aliases (*{event.anchor}) are not supported; use extends:")
            if (tag := getattr(event, "tag", None)) is not None:
                raise ConfigError(f"{where}:{line}: the tag {tag[:60]} is not plain data; nothing in a catalog may name code")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                raise ConfigError(f"{where}:{line}: more than {_MAX_DEPTH} levels deep")
    # Raised by the library itself: an escape beyond Unicode, a version of thousands of digits.
    except (ValueError, OverflowError) as problem:
        raise ConfigError(f"{where}:{loader.line + 1}: not YAML ({problem})") from None
    finally:
        loader.dispose()


def _mapping(node: yaml.MappingNode, at: tuple[str, ...], lines: dict[tuple[str, ...], int], where: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = _value(key_node, at, lines, where)
        if not isinstance(key, str):
            raise ConfigError(f"{where}:{_line(key_node)}: the key {key!r} must be text; write it in quotes")
        if key in found:
            raise ConfigError(f"{where}:{_line(key_node)}: '{key}' is given twice")
        lines[(*at, key)] = _line(key_node)
        found[key] = _value(value_node, (*at, key), lines, where)
    return found


def _value(node: yaml.Node, at: tuple[str, ...], lines: dict[tuple[str, ...], int], where: str) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, at, lines, where)
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, (*at, str(number)), lines, where) for number, item in enumerate(node.value)]
    assert isinstance(node, yaml.ScalarNode)
    return _scalar(node, where)


def _scalar(node: yaml.ScalarNode, where: str) -> Any:
    text, kind = node.value, node.tag.removeprefix(_TAG)
    if kind == "str" and not node.style and _FLOAT.fullmatch(text):
        kind = "float"
    match kind:
        case "str" | "timestamp":
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise ConfigError(f"{where}:{_line(node)}: half a surrogate pair (\\ud800 to \\udfff) is not text")
            return text
        case "null":
            return None
        case "bool":
            if text.lower() in _LOOSE_BOOLEANS:
                raise ConfigError(f"{where}:{_line(node)}: write true or false, or quote the word ({text})")
            return text.lower() == "true"
        case "int" if re.fullmatch(r"[-+]?(0|[1-9][0-9_]*)", text) and len(text) <= 30:
            return int(text.replace("_", ""))
        case "float" if _is_plain_float(text):
            return float(text.replace("_", ""))
        case "int" | "float":
            raise ConfigError(f"{where}:{_line(node)}: {text[:40]} is not a finite decimal number; quote it if it is text")
    # YAML's merge key << and its default key =.
    raise ConfigError(f"{where}:{_line(node)}: {text} has a special meaning in YAML; use extends:, or quote it")


def _is_plain_float(text: str) -> bool:
    try:
        return math.isfinite(float(text.replace("_", "")))
    except ValueError:
        return False


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


# Read by default if it is in the working folder.
OWN_CATALOG = "experiments.yaml"
ALL = "all"
_TAKEN = {"train", "finetune", "demo", "imported", "bench"}
# Not inherited by `extends`.
_OWN = ("title", "reported", "note", "extends")
_MAX_EXTENDS = 20
# Settings that are given elsewhere.
_GIVEN_BY = {"method": "give it as the entry's `method:`", "seed": "give it with --seeds"}
# Settings that may be paths.
_PATHS = ("model.source", "examples.dev", "examples.folder")


class Criterion(Strict):
    """What counts as success compared with the baseline: a bound on the PPL ratio, or on the accuracy lost."""

    ppl_ratio_at_most: float | None = Field(default=None, gt=0)
    # 0.05 is five points.
    accuracy_loss_at_most: float | None = Field(default=None, ge=0, lt=1)

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.ppl_ratio_at_most is None) == (self.accuracy_loss_at_most is None):
            raise ValueError("give one of ppl_ratio_at_most and accuracy_loss_at_most")
        return self

    @property
    def bound(self) -> float:
        """Where a gap must stay under, as a ratio, or above, as a difference of shares."""
        return self.ppl_ratio_at_most if self.ppl_ratio_at_most is not None else -(self.accuracy_loss_at_most or 0.0)

    def __str__(self) -> str:
        if self.ppl_ratio_at_most is not None:
            return f"PPL at most {self.bound:g}x the baseline's"
        return f"accuracy at most {-100 * self.bound:g} points below the baseline's"


class Reported(Strict):
    """Figures that others reported for this experiment; never our results."""

    source: str
    figures: dict[str, float]


class Experiment(Strict):
    """One entry of the catalog. `settings` apply at every budget, `at` at one; see docs/experiments.md."""

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
        """Return the ids in each group; `all` holds every experiment."""
        found: dict[str, list[str]] = {}
        for experiment in self:
            for group in dict.fromkeys((*experiment.groups, ALL)):
                found.setdefault(group, []).append(experiment.id)
        return found

    def named_groups(self) -> dict[str, list[str]]:
        """Return the groups, except those of a single arm or data set."""
        return {name: ids for name, ids in self.groups().items() if "." not in name and not ids[0].startswith(f"{name}.")}

    def baselines(self) -> dict[str, str]:
        """Return the baseline's id for each experiment that has one."""
        return {experiment.id: experiment.baseline for experiment in self if experiment.baseline is not None}

    def get(self, name: str) -> Experiment:
        """Return the experiment with this id, ignoring case; ConfigError suggests the nearest."""
        for experiment in self:
            if experiment.id.lower() == name.lower():
                return experiment
        for group, ids in self.groups().items():
            if group.lower() == name.lower():
                raise ConfigError(f"{name!r} is a group; name one of its experiments: {', '.join(ids)}")
        raise self._unknown(name)

    def select(self, names: Iterable[str]) -> list[Experiment]:
        """Return the experiments that ids and groups name, each once, in the order of the catalog."""
        groups = {name.lower(): ids for name, ids in self.groups().items()}
        known = {experiment.id.lower(): [experiment.id] for experiment in self} | groups
        wanted = set[str]()
        for name in names:
            if name.lower() not in known:
                raise self._unknown(name)
            wanted.update(known[name.lower()])
        return [experiment for experiment in self if experiment.id in wanted]

    def _unknown(self, name: str) -> ConfigError:
        hint, named = suggest(name, [*self.experiments, *self.groups()]), ", ".join(self.named_groups())
        return ConfigError(f"no experiment or group called {name!r}{hint}; `oelm list` shows them, groups are: {named}")


def _leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def load_catalog(extra: Path | None = None) -> Catalog:
    """Return the package's experiments and those in the user's file: `extra`, else experiments.yaml in this folder."""
    sources = [
        parse_yaml(entry.read_text(encoding="utf-8"), where=entry.name, loader=FAST_LOADER)
        for entry in sorted(files("oelm.experiments").joinpath("catalog").iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".yaml")
    ]
    own = extra or (Path(OWN_CATALOG) if Path(OWN_CATALOG).is_file() else None)
    if own is not None:
        sources.append(read_yaml(own))
    return build_catalog(sources, own=own)


def build_catalog(sources: Iterable[YamlFile], *, own: Path | None = None) -> Catalog:
    """Check and join the entries of files. A later file may extend entries of an earlier one, but not replace them."""
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
    """Return an entry by its id. An entry whose `data` is a list becomes one entry `name.set` for each data set.

    Its baseline is the one on the same set; its groups, and its name as a group, also exist for each set.
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
    """Raise ConfigError unless a name can be a folder on every system and stays inside its parent."""
    if not is_safe(name) or is_device(name):
        raise ConfigError(
            f"{where}: the name {name!r} is not allowed: use up to 64 letters, digits, '.', '_' and '-', "
            "beginning with a letter or digit, and no device name of Windows"
        )


def _check_entry(source: YamlFile, name: str, entry: Any, *, taken: dict[str, str]) -> None:
    where = source.where(name)
    check_name(name, where=where)
    if name.lower() in _TAKEN | {ALL}:
        raise ConfigError(f"{where}: {name!r} is reserved by oelm; choose another name")
    if name.lower() in taken:
        raise ConfigError(f"{where}: {name!r} is taken (by {taken[name.lower()]!r}); choose another name")
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: {name} must be a mapping of settings, found {type(entry).__name__}")
    known = [key for key in Experiment.model_fields if key not in ("id", "where")] + ["extends"]
    for key in entry:
        if key not in known:
            hint = suggest(key, known) or f"; known keys: {', '.join(known)}"
            raise ConfigError(f"{source.where(name, key)}: {name}: unknown key '{key}'{hint}")
    at = entry.get("at")
    # Other types are refused with the rest of the entry.
    for budget, settings in at.items() if isinstance(at, dict) else ():
        if isinstance(settings, dict):
            _check_settings(source, (name, "at", budget), settings)
    if isinstance(entry.get("settings"), dict):
        _check_settings(source, (name, "settings"), entry["settings"])


def _check_settings(source: YamlFile, place: tuple[str, ...], settings: dict[str, Any]) -> None:
    seen = set[str]()
    for key, _ in _leaves(settings):
        where = source.where(*place, key)
        if reason := _GIVEN_BY.get(key.split(".")[0]):
            raise ConfigError(f"{where}: {place[0]}: {key} does not belong in {'.'.join(place[1:])}; {reason}")
        if key in seen:
            raise ConfigError(f"{where}: {place[0]}: {key} is given twice in {'.'.join(place[1:])}, in two spellings")
        seen.add(key)


def _extended(name: str, entries: dict[str, tuple[YamlFile, dict[str, Any]]], *, seen: tuple[str, ...]) -> dict[str, Any]:
    """Return an entry with what it inherits: `settings` and `at` key by key, other fields whole."""
    source, entry = entries[name]
    own = {key: value for key, value in entry.items() if key != "extends"}
    parent = entry.get("extends")
    if parent is None:
        return own
    where = source.where(name, "extends")
    if not isinstance(parent, str) or parent not in entries:
        raise ConfigError(f"{where}: {name} extends {parent!r}, which does not exist{suggest(str(parent), entries)}")
    if parent in (*seen, name):
        raise ConfigError(f"{where}: extends is circular: {' -> '.join((*seen, name, parent))}")
    if len(seen) == _MAX_EXTENDS:
        raise ConfigError(f"{where}: {seen[0]} extends a chain of more than {_MAX_EXTENDS} entries")
    above = {key: value for key, value in _extended(parent, entries, seen=(*seen, name)).items() if key not in _OWN}
    merged = above | own
    if "settings" in own:
        merged["settings"] = _over(above.get("settings"), own["settings"])
    if isinstance(own.get("at"), dict) and isinstance(above.get("at"), dict):
        budgets = {budget: _over(above["at"].get(budget), settings) for budget, settings in own["at"].items()}
        merged["at"] = above["at"] | budgets
    return merged


def _over(above: Any, own: Any) -> Any:
    """Return settings on top of inherited ones; what is not a mapping is refused later, by its type."""
    if not isinstance(above, dict) or not isinstance(own, dict):
        return own
    # By dotted path: `optim.lr` and `optim: {lr:}` are one setting.
    inherited, added = flatten(above), flatten(own)
    if "model.source" in added and "model.sha256" not in added:
        # Other weights, other digest.
        inherited.pop("model.sha256", None)
    return inherited | added


def _with_whole_paths(entry: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return an entry of the user's file with paths resolved from that file's folder."""
    # Imported here because it is slow and `oelm status` does not need it.
    from oelm.data.public_sets import BUILT_IN, CORPORA, TASKS

    whole = dict(entry)
    data = entry.get("data")
    # The name of a data set wins over a folder of that name. os.path: unlike Path, it returns False for an impossible name.
    if (
        isinstance(data, str)
        and data not in ("", *BUILT_IN, *CORPORA, *TASKS)
        and ("/" in data or os.path.exists(folder / data))
    ):
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
        if key in _PATHS and isinstance(value, str) and value and os.path.exists(folder / value)
        else value
        for key, value in flatten(settings).items()
    }


def _parse(source: YamlFile, name: str, merged: dict[str, Any]) -> Experiment:
    data = {"id": name, "where": source.where(name), **merged}
    try:
        return Experiment.model_validate_json(dump_json(data))
    except ValidationError as problem:
        errors = problem.errors()
        # A misspelt key is also a missing one; report the misspelling.
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
            message, keys = f"unknown budget {keys[1]!r}; choose one of {', '.join(BUDGETS)}", keys[:2]
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
    """Raise ConfigError unless each name, ignoring case, is one experiment or one group."""
    order = {name: number for number, name in enumerate(experiments)}
    ids = {name.lower(): name for name in experiments}
    spelled: dict[str, str] = {}
    for experiment in experiments.values():
        for group in experiment.groups:
            check_name(group, where=experiment.where)
            if group.lower() == ALL:
                raise ConfigError(f"{experiment.where}: every experiment is in the group {ALL!r}; leave it out")
            if (name := ids.get(group.lower())) is not None:
                # Report the later one: the earlier may be the package's.
                later = max((experiment, experiments[name]), key=lambda found: order[found.id])
                raise ConfigError(f"{later.where}: {name!r} is also the name of a group; rename one of them")
            if (known := spelled.setdefault(group.lower(), group)) != group:
                raise ConfigError(f"{experiment.where}: the group {group!r} is also spelled {known!r}; choose one spelling")
