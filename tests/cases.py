"""Cases of a table that one test goes through: where one fails, it is named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def case(*of: object) -> Iterator[None]:
    """Name the case in whatever fails inside."""
    try:
        yield
    except BaseException as failure:
        failure.add_note(f"in the case {', '.join(map(str, of))}")
        raise
