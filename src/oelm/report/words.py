"""A report's sentences in the reader's language: one file of templates for each, with the same keys and places."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any

from oelm.errors import one_of
from oelm.experiments.catalog import parse_yaml

LANGUAGES = ("en", "zh")


class Words:
    """Looks up texts in one language: `words("verdict.pass", name="GPT-02")`."""

    def __init__(self, lang: str) -> None:
        self.lang = one_of("--lang", lang, LANGUAGES)
        self._templates = templates(lang)

    def __call__(self, key: str, **values: Any) -> str:
        return self._templates[key].format(**values)

    def optional(self, key: str) -> str:
        """Return a text that takes no values, or an empty one if the language has none."""
        return self._templates.get(key, "")

    def listed(self, parts: Iterable[object]) -> str:
        """Return the parts one after another, as the language separates them."""
        return self("list.separator").join(str(part) for part in parts)


@cache
def templates(lang: str) -> dict[str, str]:
    """Return a language's templates by key."""
    name = f"{lang}.yaml"
    text = files("oelm.report").joinpath("words").joinpath(name).read_text(encoding="utf-8")
    found = parse_yaml(text, where=name).data
    return {key: str(value) for key, value in found.items()}
