"""What is prepared on this machine: token sets and example sets, found by name or by path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from oelm.data.encoded import ExampleMeta, ExampleSet, open_examples, read_example_meta
from oelm.data.tokens import TokenMeta, TokenSet, open_tokens, read_meta
from oelm.errors import DataError
from oelm.files import cache_root, read_json


def read_any_meta(folder: Path) -> TokenMeta | ExampleMeta:
    """Read the record of a prepared set of either kind."""
    return read_example_meta(folder / "meta.json") if _holds_examples(folder) else read_meta(folder / "meta.json")


def open_any(folder: Path) -> TokenSet | ExampleSet:
    """Open a prepared set of either kind, with all its checks."""
    return open_examples(folder) if _holds_examples(folder) else open_tokens(folder)


def _holds_examples(folder: Path) -> bool:
    if not (folder / "meta.json").is_file():
        return folder.parent.name == "tasks"
    record = read_json(folder / "meta.json")
    return isinstance(record, dict) and str(record.get("format", "")).startswith("oelm-examples")


def _folders() -> list[Path]:
    return sorted(path for kind in ("tokens", "tasks") for path in (cache_root() / kind).glob("[!.]*") if path.is_dir())


def prepared_sets() -> Iterator[tuple[Path, TokenMeta | ExampleMeta]]:
    """Yield every prepared set in the cache with its record; one whose record cannot be read is passed over."""
    for path in _folders():
        try:
            yield path, read_any_meta(path)
        except DataError:
            continue


def find_sets(wanted: list[str]) -> list[Path]:
    """Return the folders of prepared sets given by path or name, or all in the cache; DataError when one is not there."""
    if not wanted:
        return _folders()
    found: list[Path] = []
    for what in wanted:
        # A folder of the user's may be called like a data set: it is meant where it holds a record.
        named = [] if (Path(what) / "meta.json").is_file() else _named(what)
        if not named and not Path(what).is_dir():
            raise DataError(f"nothing is prepared under the name or path {what!r}; `oelm data list` shows what there is")
        found += named or [Path(what)]
    return found


def _named(name: str) -> list[Path]:
    names = {path: meta.name for path, meta in prepared_sets()}
    exact = [path for path in names if names[path] == name]
    # A damaged record tells no name, but the folder's own begins with it; 'xnli' stands for 'xnli-en' and its like.
    alike = [path for path in _folders() if path.name.startswith(f"{name}-") and (path not in names or not exact)]
    return sorted(exact + alike)


def find_tokens(name: str, label: str, *, known: str = "") -> Path | None:
    """Return the token set prepared under this name with this tokenizer.

    Of several, the one with the fingerprint `known`; DataError when that does not tell, or when the name was prepared
    with other tokenizers only.
    """
    sets = [(path, meta) for path, meta in prepared_sets() if isinstance(meta, TokenMeta) and meta.name == name]
    found = [(path, meta) for path, meta in sets if meta.tokenizer == label]
    if sets and not found:
        others = ", ".join(sorted({meta.tokenizer for _, meta in sets}))
        raise DataError(
            f"{name} is prepared here with tokenizer {others}, not {label}: say --tokenizer {others}, or prepare it with "
            f"this one too: oelm data prepare {name} --tokenizer {label}"
        )
    if len(found) > 1:
        found = [(path, meta) for path, meta in found if meta.fingerprint == known] or found
    if len(found) > 1:
        raise DataError(
            f"{name} was prepared {len(found)} times with tokenizer {label}, from different sources or to different limits: "
            f"say which with --data PATH: {', '.join(str(path) for path, _ in found)} (`oelm data info PATH` tells them apart)"
        )
    return found[0][0] if found else None
