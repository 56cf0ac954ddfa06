"""Errors that users can cause. Every message gives what happened, the value, the place, and what to do next."""

from __future__ import annotations

import contextlib
import difflib
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

Name = TypeVar("Name", bound=str)
# Exit codes of the command line.
DONE, USAGE, REFUSED, STOPPED = 0, 2, 3, 75


class OelmError(Exception):
    """Base of every error `oelm` raises on purpose; the command line prints it without a traceback."""

    exit_code = REFUSED


class ConfigError(OelmError):
    """A setting that is unknown, of the wrong type, or in conflict with another."""

    exit_code = USAGE


class MethodError(ConfigError):
    """A method that does not exist or does not fit the model."""


class SiteError(OelmError):
    """A model whose attention was not found."""


class FrozenMovedError(OelmError):
    """A frozen tensor is not what it was when it was frozen."""


class DataError(OelmError):
    """Text or token files that are missing, empty, damaged or other than recorded."""


class CheckpointError(OelmError):
    """A checkpoint that is missing, damaged or does not fit."""


class RunDirError(OelmError):
    """A run directory in use, or one that holds another run."""


class RunDirLostError(OelmError):
    """A run directory that was removed, renamed or replaced during its run; the run can resume from its new place."""

    exit_code = STOPPED


class NonFiniteError(OelmError):
    """A loss or gradient that is NaN or infinite; raised before the update."""


class OutOfMemoryError(OelmError):
    """The run needs more memory than the machine has."""


class MissingExtraError(OelmError):
    """An optional dependency that a command needs."""

    exit_code = USAGE

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"this needs the package '{package}' (of the extra oelm[{extra}]), which is not installed: "
            f"{install_command(extra) or f'pip install {package}'}"
        )


@contextlib.contextmanager
def needing(package: str, extra: str) -> Iterator[None]:
    """Import an optional dependency in the block, or raise MissingExtraError."""
    try:
        yield
    except ImportError:
        raise MissingExtraError(package, extra) from None


class DiskFullError(OelmError):
    """No room to write; everything written before is intact and the run can resume."""

    exit_code = STOPPED


class StoppedError(OelmError):
    """A stop was requested before anything could be saved."""

    exit_code = STOPPED


class RankLostError(OelmError):
    """A process of a multi-process run ended, hangs or never started; the run can resume from its last checkpoint."""

    exit_code = STOPPED


class ClusterError(OelmError):
    """SLURM is missing, or refused the request."""


def install_command(extra: str) -> str:
    """Return the command that adds an extra's packages to this Python, however `oelm` was installed; '' where unknown."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        listed = requires("oelm") or []
    except PackageNotFoundError:
        return ""
    # By their own names: 'oelm[...]' works for a checkout only in its folder, and for a wheel not at all.
    wanted = [line.partition(";")[0].strip() for line in listed if re.search(f"extra == ['\"]{extra}['\"]", line)]
    return shlex.join([sys.executable, "-m", "pip", "install", *wanted]) if wanted else ""


def suggest(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'X'?)" with the nearest of known names, whatever its case; '' if none is near."""
    by_case = {text.lower(): text for text in known}
    # GPT2 is GPT-02.
    alike = [text for text in by_case if _plain(text) == _plain(name)]
    near = alike or difflib.get_close_matches(name.lower(), by_case, n=1, cutoff=0.5)
    return f" (did you mean '{by_case[near[0]]}'?)" if near else ""


def one_of(option: str, value: str, known: Iterable[Name]) -> Name:
    """Return the value of an option as one of the known names; raise ConfigError that lists them where it is none."""
    names = tuple(known)
    if value in names:
        return names[names.index(value)]
    raise ConfigError(f"{option} {value!r}: choose one of {', '.join(names)}")


def _plain(name: str) -> str:
    """Return a name without signs, and without zeros before a number."""
    return re.sub(r"[^a-z0-9]|(?<![0-9])0+(?=[0-9])", "", name.lower())
