"""A run's files without the machine they were made on: no home, no working folder, no host, no process."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from oelm.errors import ArchiveError
from oelm.files import MAX_JSON_BYTES, dump_json, read_json
from oelm.runs.layout import ATTENTION, AUDIT, CONFIG, LOG, MANIFEST, MODEL_CONFIG, STATUS, SWEEP, TIMING
from oelm.runs.status import read_status

# Settings, where a word that happens to be the host's name (a host called 'cpu') is still a setting.
_SETTINGS = (CONFIG, MODEL_CONFIG, AUDIT, ATTENTION, TIMING, SWEEP)
_STRIPPED = (*_SETTINGS, MANIFEST, STATUS, LOG)
_CHUNK_BYTES = 2**20
# A line end or tab as a quoted text shows it: its letter is no part of the word that follows.
_ESCAPE = r"(?<=\\[nrt])"


@dataclass(frozen=True)
class Machine:
    """What must not travel: paths with what stands in for them, and names of the host."""

    paths: tuple[tuple[str, str], ...]
    hosts: tuple[str, ...]

    @cached_property
    def _rules(self) -> tuple[re.Pattern[str], list[str]]:
        # Longest first: a working folder below the home is a working folder.
        ordered = sorted(self.paths, key=lambda pair: len(pair[0]), reverse=True)
        rules = [(_path_pattern(path), stand_in) for path, stand_in in ordered]
        rules += [(_host_pattern(host), "host") for host in sorted(self.hosts, key=len, reverse=True)]
        kept = [(pattern, stand_in) for pattern, stand_in in rules if pattern]
        # One pass over the text, so that nothing put in is replaced again. (?!) matches nothing.
        whole = "|".join(f"({pattern})" for pattern, _ in kept) or "((?!))"
        return re.compile(whole), [stand_in for _, stand_in in kept]

    def stripped(self, text: str) -> str:
        """Return text with every path of this machine shortened to its stand-in, and every name of the host gone."""
        pattern, stand_ins = self._rules
        return pattern.sub(lambda found: stand_ins[(found.lastindex or 1) - 1], text)

    def stripped_json(self, value: Any, *, keep_words: bool) -> Any:
        """Return JSON data with every string stripped; with `keep_words`, one that is the host's name alone stays."""
        if isinstance(value, str):
            is_word = keep_words and value.lower() in {host.lower() for host in self.hosts}
            return value if is_word else self.stripped(value)
        if isinstance(value, list):
            return [self.stripped_json(item, keep_words=keep_words) for item in value]
        if isinstance(value, dict):
            # A key is a name of ours, never a host; but it may be a file's.
            return {
                self.stripped_json(key, keep_words=True): self.stripped_json(item, keep_words=keep_words)
                for key, item in value.items()
            }
        return value


def this_machine() -> Machine:
    """Return what must not travel from here."""
    paths: dict[str, str] = {}
    # A folder may be gone, and a home unknown: then nothing can name it either.
    for find, stand_in in ((Path.cwd, "."), (Path.home, "~")):
        try:
            path = find()
            paths |= {str(path): stand_in, str(path.resolve()): stand_in}
        except (OSError, RuntimeError):
            continue
    host = socket.gethostname()
    return Machine(tuple(paths.items()), tuple({host, host.split(".")[0]} - {"", "localhost"}))


def _path_pattern(path: str) -> str | None:
    """Return a pattern for an absolute path as a whole prefix; None for the root of a disk, which says nothing."""
    parts = [part for part in re.split(r"[/\\]+", path) if part]
    if path.startswith("/"):
        body = "".join(f"/+{re.escape(part)}" for part in parts)
    else:
        body = r"[/\\]+".join(re.escape(part) for part in parts) if len(parts) > 1 else ""
    # Before it no part of a longer path (./root, x/root), after it no longer name (/rootfs, /root-2, /root.old).
    return rf"(?:(?<![\w.~/])|{_ESCAPE}){body}(?![\w+@~%#-]|\.+\w)" if body else None


def _host_pattern(host: str) -> str:
    return rf"(?i:(?:(?<![\w.-])|{_ESCAPE}){re.escape(host)}(?![\w-]|\.\w))"


def portable_chunks(run: Path, name: str, machine: Machine) -> Iterator[bytes]:
    """Yield a run's file as it travels: text without the machine; numbers, tokenizers and weights byte for byte.

    Raises ArchiveError where a file to be stripped cannot be read as what it is.
    """
    path = run / name
    if name in _STRIPPED:
        yield _stripped_bytes(path, name, machine)
        return
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
    except OSError as problem:
        raise ArchiveError(f"{path}: cannot be read ({problem})") from problem


def _stripped_bytes(path: Path, name: str, machine: Machine) -> bytes:
    if name == STATUS:
        return _stripped_status(path, machine)
    if name == LOG:
        return _stripped_log(path, machine)
    value = read_json(path, error=ArchiveError)
    try:
        return (dump_json(machine.stripped_json(value, keep_words=name in _SETTINGS)) + "\n").encode()
    except (ValueError, RecursionError) as problem:  # a number too large for JSON, half a character, or a deep nest
        raise ArchiveError(f"{path}: cannot be written as JSON again ({problem})") from problem


def _stripped_status(path: Path, machine: Machine) -> bytes:
    status = read_status(path.parent) if path.stat().st_size <= MAX_JSON_BYTES else None
    if status is None:
        raise ArchiveError(f"{path}: is not a status of ours")
    plain = status.model_copy(update={"host": "", "pid": 0, "message": machine.stripped(status.message)})
    return (dump_json(plain.model_dump(mode="json")) + "\n").encode()


def _stripped_log(path: Path, machine: Machine) -> bytes:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ArchiveError(f"{path}: {path.stat().st_size:,} bytes is too large for a log to be stripped of this machine")
        # Escaped, so that a byte that is no text stays what it is.
        text = path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as problem:
        raise ArchiveError(f"{path}: cannot be read ({problem})") from problem
    return machine.stripped(text).encode("utf-8", "surrogateescape")
