"""Read YAML as plain data with line numbers; tags, aliases and duplicate keys are refused."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from oelm.errors import ConfigError

MAX_BYTES = 2**20
# Seven times as fast, where the library was built with it; of what is wrong in a file the other tells more.
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
