"""How gaps go with the size of the model and the length of its training: a row for each that a data set was tried at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oelm.report.collect import Arm
from oelm.report.document import Cell, Section, Table, Text
from oelm.report.findings import Findings, Pair, has_short_conv, label, on_architecture
from oelm.report.kinds import pair_text
from oelm.report.ladder import compared
from oelm.report.words import Words


@dataclass(frozen=True)
class _Family:
    """A baseline of one size and length, and the arms that can be compared with it."""

    baseline: Arm
    pairs: tuple[Pair, ...]

    @property
    def kind(self) -> tuple[str, bool]:
        """What families must share for their sizes to make a row of numbers: the data, and the architecture."""
        manifest = self.baseline.runs[0].manifest
        assert manifest is not None
        return manifest.data.name, has_short_conv(self.baseline)

    @property
    def size(self) -> tuple[int, int]:
        """Parameters, and steps."""
        audit = self.baseline.runs[0].audit
        assert audit is not None
        return audit.total, int(self._config["steps"])

    @property
    def shape(self) -> str:
        model = self._config["model"]
        return f"{model['num_layers']} x {model['model_dim']}"

    @property
    def _config(self) -> dict[str, Any]:
        config = self.baseline.runs[0].config
        assert config is not None
        return config


def sizes_section(findings: Findings, words: Words) -> Section | None:
    """Return the gaps at every size and length of those data sets that were tried at more than one."""
    families = _tried_at_several(_families(findings))
    methods = _tried_again(families, findings, words)
    families = [each for each in families if any(pair_text(pair, findings.catalog, words) in methods for pair in each.pairs)]
    if not families:
        return None
    alike = Counter((each.kind, each.size) for each in families)
    rows = tuple(
        (*_about(each, words, is_alone=alike[each.kind, each.size] == 1), *_gaps(each, methods, findings, words))
        for each in families
    )
    names = ("data", "shape", "parameters", "steps", "seeds", "ppl")
    columns = (*(words(f"sizes.{name}") for name in names), *methods)
    table = Table("sizes", words("sizes.caption"), columns, rows, frozenset(range(2, len(columns))))
    return Section("sizes", words("sizes.title"), (Text(words("sizes.text")), table))


def _families(findings: Findings) -> list[_Family]:
    """Return the language models that are results, each with its fair comparisons, smallest and shortest first."""
    found = []
    for baseline, pairs in findings.families():
        fair = tuple(pair for pair in pairs if not pair.confounded)
        if fair and baseline.metric == "ppl" and baseline.budget != "smoke":
            found.append(_Family(baseline, fair))
    return sorted(found, key=lambda family: (family.kind, family.size, family.baseline.key))


def _tried_at_several(families: Sequence[_Family]) -> list[_Family]:
    sizes: dict[tuple[str, bool], set[tuple[int, int]]] = {}
    for family in families:
        sizes.setdefault(family.kind, set()).add(family.size)
    return [family for family in families if len(sizes[family.kind]) > 1]


def _tried_again(families: Sequence[_Family], findings: Findings, words: Words) -> list[str]:
    """Return the methods that were tried at several sizes of one data set: of the others there is nothing to follow."""
    sizes: dict[tuple[str, tuple[str, bool]], set[tuple[int, int]]] = {}
    for family in families:
        for pair in family.pairs:
            sizes.setdefault((pair_text(pair, findings.catalog, words), family.kind), set()).add(family.size)
    return list(dict.fromkeys(method for (method, _), found in sizes.items() if len(found) > 1))


def _about(family: _Family, words: Words, *, is_alone: bool) -> tuple[Cell, ...]:
    """Return what a row is about; of two families of one size the runs' own names tell which is which."""
    data, (parameters, steps) = family.kind[0], family.size
    seeds = sorted({len(pair.seeds) for pair in family.pairs})
    # What the first comparison stands on; the others of its family have the same data.
    mean = family.baseline.mean(family.pairs[0].split)
    return (
        Cell(data if is_alone else f"{data} ({label(family.baseline)})"),
        Cell(on_architecture(family.baseline, family.shape, words)),
        Cell(f"{parameters:,}", parameters),
        Cell(f"{steps:,}", steps),
        Cell(words.listed(seeds), seeds[0]),
        Cell(f"{mean:.2f}", mean),
    )


def _gaps(family: _Family, methods: Sequence[str], findings: Findings, words: Words) -> list[Cell]:
    """Return a family's gap by each method, empty where it was not tried; of several arms of one, that of most seeds."""
    found: dict[str, Cell] = {}
    for pair in sorted(family.pairs, key=lambda pair: len(pair.seeds)):
        gap, text = compared(pair.arm, pair.baseline, pair.split)
        told = words("across.on_test", gap=text) if pair.split == "test" and text else text
        found[pair_text(pair, findings.catalog, words)] = Cell(told, gap.value if gap is not None else None)
    return [found.get(method, Cell("")) for method in methods]
