"""Architectures by what is different about them for whoever freezes; their twins run under `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.method.tiny_models import ARCHITECTURES, Tiny

# One of each kind: separate maps, the three layouts of a fused one, grouped queries, cross-attention, and ours.
KINDS = {"bert", "gpt2", "gpt_neox", "torch", "llama", "gpt2_cross", "our_gpt"}
# Two more for what differs within a kind: encoder and decoder with separate maps, and torch's attention with separate maps.
FAST = KINDS | {"t5", "torch_separate"}
assert FAST <= {tiny.name for tiny in ARCHITECTURES}


def of_each_kind(tinies: Iterable[Tiny]) -> pytest.MarkDecorator:
    """Take those that differ, and under `make test-all` their twins too."""
    cases = [pytest.param(tiny, id=tiny.name, marks=() if tiny.name in FAST else pytest.mark.slow) for tiny in tinies]
    return pytest.mark.parametrize("tiny", cases)
