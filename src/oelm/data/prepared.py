"""The sets prepared on this machine: token sets and example sets, found by name or by path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from oelm.data.example_sets import ExampleMeta, ExampleSet, open_examples
from oelm.data.tokenizer import tokenizer_label, tokenizer_sha256
from oelm.data.tokens import TokenMeta, TokenSet, open_tokens, read_meta
from oelm.errors import DataError
from oelm.files import cache_root, read_as, read_json


def read_any_meta(folder: Path) -> TokenMeta | ExampleMeta:
    """Read the record of a prepared set of either kind."""
    return read_as(ExampleMeta, folder / "meta.json") if _holds_examples(folder) else read_meta(folder / "meta.json")


def verify_any(folder: Path) -> TokenSet | ExampleSet:
    """Open a prepared set of either kind after hashing all its files again."""
    return open_examples(folder) if _holds_examples(folder) else open_tokens(folder, is_known=False)


def _holds_examples(folder: Path) -> bool:
    if not (folder / "meta.json").is_file():
        return folder.parent.name == "tasks"
    record = read_json(folder / "meta.json")
    return isinstance(record, dict) and str(record.get("format", "")).startswith("oelm-examples")


def _folders() -> list[Path]:
    return sorted(path for kind in ("tokens", "tasks") for path in (cache_root() / kind).glob("[!.]*") if path.is_dir())


def prepared_sets() -> Iterator[tuple[Path, TokenMeta | ExampleMeta]]:
    """Yield every prepared set in the cache with its record; skip those whose record cannot be read."""
    for path in _folders():
        try:
            yield path, read_any_meta(path)
        except DataError:
            continue


def find_sets(wanted: list[str]) -> list[Path]:
    """Return the folders of prepared sets given by path or name, or all in the cache; DataError when one is missing."""
    if not wanted:
        return _folders()
    found: list[Path] = []
    for what in wanted:
        # A user's folder may be called like a data set; it is meant when it holds a record.
        named = [] if (Path(what) / "meta.json").is_file() else _named(what)
        if not named and not Path(what).is_dir():
            raise DataError(f"nothing is prepared under the name or path {what!r}; `oelm data list` shows what is")
        found += named or [Path(what)]
    return found


def _named(name: str) -> list[Path]:
    names = {path: meta.name for path, meta in prepared_sets()}
    exact = [path for path in names if names[path] == name]
    # A damaged record has no name, but its folder's name begins with it; 'xnli' means 'xnli-en' and the other languages.
    alike = [path for path in _folders() if path.name.startswith(f"{name}-") and (path not in names or not exact)]
    return sorted(exact + alike)


def find_tokens(name: str, tokenizer: str, *, max_tokens: int | None = None, known: str = "") -> Path | None:
    """Return the token set prepared under this name with this tokenizer, and to this limit where one is given.

    Of several, the one with the fingerprint `known`. DataError when none has it and their contents differ, or when the
    name was prepared only with other tokenizers or to other limits.
    """
    label = tokenizer_label(tokenizer)
    sets = [(path, meta) for path, meta in prepared_sets() if isinstance(meta, TokenMeta) and meta.name == name]
    found = [(path, meta) for path, meta in sets if meta.tokenizer == label and _is_to_limit(meta, max_tokens)]
    if sets and not found:
        raise _prepared_otherwise(name, f"--tokenizer {tokenizer}{_limits(None, max_tokens)}", [meta for _, meta in sets])
    alike = _distinct([(path, meta.fingerprint, meta.fingerprint) for path, meta in found], known)
    if len(alike) > 1:
        raise DataError(
            f"{name} was prepared {len(alike)} times with tokenizer {label}, from different sources or to different limits: "
            f"choose one with --data PATH: {', '.join(map(str, alike))} (`oelm data info PATH` describes each)"
        )
    return alike[0] if alike else None


def _is_to_limit(meta: TokenMeta, max_tokens: int | None) -> bool:
    return max_tokens is None or (meta.max_tokens == max_tokens and meta.max_documents is None)


def _prepared_otherwise(name: str, asked: str, there: list[TokenMeta]) -> DataError:
    others = sorted({f"--tokenizer {meta.tokenizer}{_limits(meta.max_documents, meta.max_tokens)}" for meta in there})
    return DataError(
        f"{name} is prepared here with {' and with '.join(others)}, not with {asked}: use one of these (--tokenizer T, "
        f"--set data.max_tokens=N), or prepare this too: oelm data prepare {name} {asked}"
    )


def _limits(max_documents: int | None, max_tokens: int | None) -> str:
    limits = (("--max-documents", max_documents), ("--max-tokens", max_tokens))
    return "".join(f" {option} {limit}" for option, limit in limits if limit is not None)


def find_examples(
    name: str, tokenizer: str, *, max_length: int, labels: tuple[str, ...], splits: tuple[str, ...], known: str = ""
) -> Path | None:
    """Return the example set prepared under this name with this tokenizer, cut at this length, that has these splits.

    Of several, the one with the fingerprint `known`; DataError when none has it and these splits differ.
    """
    digest = tokenizer_sha256(tokenizer)
    found = [
        (path, meta.fingerprint, str([(meta.splits[split].ids_sha256, meta.splits[split].rows_sha256) for split in splits]))
        for path, meta in prepared_sets()
        if isinstance(meta, ExampleMeta)
        and (meta.name, meta.tokenizer_sha256, meta.max_length, meta.labels) == (name, digest, max_length, labels)
        and all(split in meta.splits for split in splits)
    ]
    alike = _distinct(found, known)
    if len(alike) > 1:
        raise DataError(
            f"{name} was prepared {len(alike)} times for this model, from different sources: choose one with --from FOLDER, "
            f"or delete all but one: {', '.join(map(str, alike))} (`oelm data info PATH` describes each)"
        )
    return alike[0] if alike else None


def examples_there(name: str, tokenizer: str) -> str:
    """Describe the example sets prepared under this name: their splits, tokenizer and length; "" for none."""
    digest = tokenizer_sha256(tokenizer)
    sets = [meta for _, meta in prepared_sets() if isinstance(meta, ExampleMeta) and meta.name == name]
    whose = {True: "this tokenizer", False: "another tokenizer"}
    found = {f"{', '.join(m.splits)} with {whose[m.tokenizer_sha256 == digest]}, cut at {m.max_length} tokens" for m in sets}
    return "; ".join(sorted(found))


def _distinct(found: list[tuple[Path, str, str]], known: str) -> list[Path]:
    """Of (path, fingerprint, content), return the path whose fingerprint is known, else one path per content."""
    for path, fingerprint, _ in found:
        if fingerprint == known:
            return [path]
    first: dict[str, Path] = {}
    for path, _, content in found:
        first.setdefault(content, path)
    return list(first.values())
