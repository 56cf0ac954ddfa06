"""Tables of cases that are alike, in one test: each costs its own run, not a test's collection and set-up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def case(*values: object) -> Iterator[None]:
    """Name the case in whatever a failure in this block says."""
    try:
        yield
    except BaseException as problem:
        problem.add_note(f"the case: {', '.join(map(ascii, values))}")
        raise
