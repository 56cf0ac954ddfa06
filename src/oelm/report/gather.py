"""Blocks as formats set them: notes that follow each other in one box, and warnings too, so that many are said calmly."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from oelm.report.document import Block, Text


def gather(blocks: Sequence[Block]) -> list[tuple[str, list[Block]]]:
    """Return neighbours of one kind together, in order; the kinds are those of texts, and 'figure' for tables and charts."""
    return [(kind, list(group)) for kind, group in itertools.groupby(blocks, key=_kind)]


def _kind(block: Block) -> str:
    return block.kind if isinstance(block, Text) else "figure"
