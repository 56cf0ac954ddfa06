"""From a corpus to a token set on disk, once: cached by content, whole or absent, resumed after a kill."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import shutil
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from tokenizers import Tokenizer

from oelm.data.prepared import find_tokens
from oelm.data.public_sets import CORPORA, unknown_set
from oelm.data.python_source import site_packages_corpus, stdlib_corpus
from oelm.data.sources import Corpus, Item, batches, file_corpus, hub_corpus, items, train_texts
from oelm.data.survey import Survey, survey
from oelm.data.tokenizer import (
    Encode,
    Ids,
    TokenizerRecipe,
    encoder,
    end_of_text_id,
    in_order,
    load_tokenizer,
    num_cores,
    num_ids,
    tokenizer_label,
    tokenizer_recipe,
    train_bpe,
)
from oelm.data.tokens import (
    FORMAT,
    SPLITS,
    OnProgress,
    Split,
    SplitMeta,
    TokenMeta,
    TokenSet,
    dtype_for,
    held_alone,
    no_progress,
    open_tokens,
    read_meta,
)
from oelm.errors import ConfigError, DataError, DiskFullError
from oelm.files import (
    cache_root,
    check_can_hold,
    dump_json,
    fsync_dir,
    read_json,
    room_checked,
    sha256_file,
    sweep_staging,
    write_json,
    write_text,
)

log = logging.getLogger(__name__)
JOURNAL = "journal.json"
SHARD_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Limits:
    """How much of each split to take: at most `max_documents`, and no further document after `max_tokens`."""

    max_documents: int | None = None
    max_tokens: int | None = None

    def about_bytes(self) -> float:
        """Return about how much text the limits allow: five bytes a token, five thousand a document."""
        by_tokens = math.inf if self.max_tokens is None else 5.0 * self.max_tokens
        return min(by_tokens, math.inf if self.max_documents is None else 5000.0 * self.max_documents)

    def reached(self, documents: int, tokens: int) -> bool:
        by_documents = self.max_documents is not None and documents >= self.max_documents
        return by_documents or (self.max_tokens is not None and tokens >= self.max_tokens)


NO_LIMITS = Limits()


class Grown(BaseModel):
    """Contents of one split's file so far; `shards` are size and digest of each stretch. `is_open`: mid-document."""

    model_config = ConfigDict(strict=True, extra="forbid")

    tokens: int = 0
    documents: int = 0
    text_bytes: int = 0
    is_open: bool = False
    shards: list[tuple[int, str]] = []

    @property
    def size_bytes(self) -> int:
        return sum(size for size, _ in self.shards)


class Journal(BaseModel):
    """Progress of a preparation: the last piece whose tokens are on disk, and the contents of each file."""

    model_config = ConfigDict(strict=True, extra="forbid")

    at: tuple[int, int] = (-1, 0)
    splits: dict[Split, Grown] = {}


def read_journal(folder: Path) -> Journal:
    """Return the journal of the preparation in a folder; an empty one where the files do not agree with it."""
    path = folder / JOURNAL
    if not path.is_file():
        return Journal()
    try:
        record = read_json(path)
        journal = Journal.model_validate_json(dump_json(record["journal"]))
        if record != _signed(journal):
            raise DataError(f"{path}: does not have the digest it was written with")
        for split, grown in journal.splits.items():
            _check_shards(folder / f"{split}.bin", grown)
    except (DataError, ValidationError, OSError, KeyError, TypeError) as problem:
        log.warning("what was prepared before in %s is damaged (%s): starting over", folder, problem)
        return Journal()
    return journal


def _signed(journal: Journal) -> dict[str, Any]:
    content = journal.model_dump(mode="json")
    return {"journal": content, "sha256": hashlib.sha256(dump_json(content).encode()).hexdigest()}


def _check_shards(path: Path, grown: Grown) -> None:
    with path.open("rb") as file:
        for size, expected in grown.shards:
            if hashlib.sha256(file.read(size)).hexdigest() != expected:
                raise DataError(f"{path}: a shard does not have the digest it was written with")


@dataclass
class ShardWriter:
    """Appends documents to `<split>.bin` in a folder; what was committed survives a kill."""

    folder: Path
    dtype: np.dtype[np.unsignedinteger]
    end_of_text: int
    limits: Limits
    journal: Journal
    # Splits that take no more. None: no more documents are split by hash, as training is full and validation has some.
    full: set[Split | None] = field(default_factory=set)
    pending_bytes: int = 0
    _pending: dict[Split, list[bytes]] = field(default_factory=dict)
    _files: dict[Split, BinaryIO] = field(default_factory=dict)

    def __enter__(self) -> Self:
        for split in self.journal.splits:
            self._note_if_full(split)
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            # After a full disk, closing tries to write again and fails again; only committed shards count.
            with contextlib.suppress(OSError):
                file.close()

    def append(self, item: Item, ids: Ids) -> None:
        """Add a piece's tokens, and the end mark after a document's last; skip what exceeds the limits."""
        split = item.split
        self.journal.at = item.at
        if split in self.full or (item.by_hash and None in self.full):
            return
        grown = self.journal.splits.setdefault(split, Grown())
        chunk = ids.astype(self.dtype).tobytes()
        if item.piece.ends:
            chunk += self.dtype.type(self.end_of_text).tobytes()
        self._pending.setdefault(split, []).append(chunk)
        grown.tokens += len(chunk) // self.dtype.itemsize
        grown.documents += item.piece.ends
        grown.is_open = not item.piece.ends
        grown.text_bytes += (text_bytes := len(item.piece.text.encode()))
        self.pending_bytes += text_bytes
        self._note_if_full(split)
        if self.pending_bytes >= SHARD_BYTES:
            self.commit()

    def commit(self) -> None:
        """Write the pending tokens to disk, then record them in the journal."""
        for split, chunks in self._pending.items():
            path, content = self.folder / f"{split}.bin", b"".join(chunks)
            with room_checked(path):
                file = self._file(path, split)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            self.journal.splits[split].shards.append((len(content), hashlib.sha256(content).hexdigest()))
        self._pending, self.pending_bytes = {}, 0
        write_json(self.folder / JOURNAL, _signed(self.journal))

    def _file(self, path: Path, split: Split) -> BinaryIO:
        if split not in self._files:
            file = path.open("r+b" if path.is_file() else "xb")
            file.truncate(self.journal.splits[split].size_bytes)
            file.seek(0, os.SEEK_END)
            self._files[split] = file
        return self._files[split]

    def _note_if_full(self, split: Split) -> None:
        grown, val = self.journal.splits[split], self.journal.splits.get("val")
        if not grown.is_open and self.limits.reached(grown.documents, grown.tokens):
            self.full.add(split)
        if "train" in self.full and val is not None and val.documents:
            self.full.add(None)


_BATCH_CHARS = 2**20
_SAMPLE_BYTES = 2**18
# A vocabulary of any size we train no longer changes after this much text.
_TOKENIZER_BYTES = 64 * 2**20
_PARTIAL_PREFIX = ".partial-"


def prepare(
    data: str, *, tokenizer: str, max_tokens: int | None = None, known: str = "", progress: OnProgress = no_progress
) -> TokenSet:
    """Return the token set of `data`: a named corpus, a file or folder of text, or a folder that holds a token set.

    Prepares what is missing and keeps it in the cache, named by the content of text and tokenizer. A named corpus that
    was prepared before, from any source, is found by its name; of several, the one with the fingerprint `known`. With
    `max_tokens`, only a set prepared to that limit is taken; without, one prepared to any limit.
    """
    if is_token_set(data):
        return _checked_limit(open_tokens(Path(data)), max_tokens)
    if data in CORPORA and (found := find_tokens(data, tokenizer, max_tokens=max_tokens, known=known)) is not None:
        return open_tokens(found)
    return prepare_corpus(corpus_of(data, progress), tokenizer=tokenizer, limits=Limits(None, max_tokens), progress=progress)


def is_token_set(data: str) -> bool:
    """Whether `data` is a folder that holds a token set; DataError where it cannot be read."""
    path = Path(data)
    try:
        return (path / "meta.json").is_file() and any(path.glob("*.bin"))
    except OSError as problem:
        raise DataError(f"{data[:200]}: cannot be read ({problem.strerror}); give a file or folder that you may read") from None


def is_made_with(label: str, tokenizer: str) -> bool:
    """Whether `tokenizer`, as a user gives it, is the one that a token set records as `label`."""
    try:
        return label in (tokenizer, tokenizer_label(tokenizer))
    except (ConfigError, DataError):
        return False


def check_tokenizer_asked(data: str, tokenizer: str) -> None:
    """Raise DataError where `data` is a token set made with another tokenizer than the user asks for."""
    if is_token_set(data) and not is_made_with(label := read_meta(Path(data) / "meta.json").tokenizer, tokenizer):
        raise DataError(
            f"{data} was made with the tokenizer {label}, not with {tokenizer}: leave the tokenizer out, or prepare "
            f"the text again (oelm data prepare ... --tokenizer {tokenizer})"
        )


def _checked_limit(tokens: TokenSet, max_tokens: int | None) -> TokenSet:
    if max_tokens not in (None, tokens.meta.max_tokens):
        raise DataError(
            f"{tokens.path} was prepared with a limit of {tokens.meta.max_tokens} tokens, the config has data.max_tokens "
            f"{max_tokens}: remove that, or give a set with this limit (oelm data prepare ... --max-tokens {max_tokens})"
        )
    return tokens


def corpus_of(data: str, progress: OnProgress = no_progress) -> Corpus:
    """Return the corpus that a name or a path means."""
    if data == "stdlib":
        return stdlib_corpus()
    if data == "site-packages":
        return site_packages_corpus(tell=lambda what, done, total: progress(what, done, total, 0))
    if data in CORPORA:
        return hub_corpus(CORPORA[data])
    if Path(data).exists() or "/" in data:
        return file_corpus(Path(data))
    raise unknown_set(data)


def prepare_corpus(
    corpus: Corpus,
    *,
    tokenizer: str,
    limits: Limits = NO_LIMITS,
    workers: int | None = None,
    out: Path | None = None,
    progress: OnProgress = no_progress,
) -> TokenSet:
    """Return the token set of a corpus, from the cache (or `out`) where its content was prepared before.

    The bytes depend on text, tokenizer and limits alone. A preparation that was killed continues after its last shard.
    """
    recipe = tokenizer_recipe(tokenizer)
    if out is not None:
        _check_free(out)
    corpus, look = survey(corpus, tell=lambda done: progress("reading", done, 0, 0))
    look = look.for_extract(limits.about_bytes())
    key = hashlib.sha256(f"{FORMAT}\0{recipe.label}\0{look.fingerprint}\0{limits}".encode()).hexdigest()[:12]
    target = out or cache_root() / "tokens" / f"{corpus.name}-{recipe.label.replace(':', '')}-{key}"
    with held_alone(target, progress):
        if out is not None and out.is_dir() and not any(out.iterdir()):
            out.rmdir()
        if not target.exists():
            _Job(corpus, look, recipe, limits, workers or num_cores(), progress, key).build(target)
    opened = open_tokens(target)
    if opened.meta.key != key:
        raise DataError(
            f"--out {target} holds another token set ({opened.meta.name}, {opened.meta.tokenizer}); give a new folder"
        )
    return opened


def _check_free(out: Path) -> None:
    """Raise an error, before any text is read, where --out is not for a token set."""
    check_can_hold("--out", out)
    if out.is_dir() and (names := {path.name for path in out.iterdir()}) and not names & {"meta.json", "train.bin"}:
        raise DataError(f"--out {out} holds other files ({min(names)}); choose a new folder")


@dataclass(frozen=True)
class _Job:
    """One preparation: its inputs, and the steps that turn a partial folder into the target."""

    corpus: Corpus
    look: Survey
    recipe: TokenizerRecipe
    limits: Limits
    workers: int
    progress: OnProgress
    key: str

    def build(self, target: Path) -> None:
        # Named by the content as well: another text under the same --out must not continue these shards.
        folder = target.parent / f"{_PARTIAL_PREFIX}{self.key}-{target.name}"
        with room_checked(folder):
            folder.mkdir(exist_ok=True)
        sweep_staging(folder)
        # The record is written last: once it exists, so does everything else.
        if not (folder / "meta.json").is_file():
            tokenizer = self._tokenizer(folder)
            self._record(folder, tokenizer, self._tokenize(folder, tokenizer))
        with room_checked(target):
            (folder / JOURNAL).unlink(missing_ok=True)
            fsync_dir(folder)
            os.rename(folder, target)
            fsync_dir(target.parent)

    def _tokenizer(self, folder: Path) -> Tokenizer:
        path = folder / "tokenizer.json"
        if not path.is_file():
            text = self.recipe.text
            if text is None:
                self.progress("training the tokenizer", 0, 1, 0)
                texts = train_texts(
                    self.corpus, self.look.threshold, most_bytes=_TOKENIZER_BYTES, most_documents=self.limits.max_documents
                )
                text = train_bpe(texts, vocab_size=self.recipe.vocab_size).to_str(pretty=True)
            write_text(path, text)
        return load_tokenizer(folder)

    def _tokenize(self, folder: Path, tokenizer: Tokenizer) -> Journal:
        encode = encoder(tokenizer)
        journal = read_journal(folder)
        dtype = np.dtype(dtype_for(num_ids(tokenizer))).newbyteorder("<")
        with ShardWriter(folder, dtype, end_of_text_id(tokenizer), self.limits, journal) as writer:
            self._check_room(folder, encode, dtype.itemsize, already=sum(g.size_bytes for g in journal.splits.values()))
            stream = items(self.corpus, self.look.threshold, after=journal.at, full=writer.full)

            def encode_batch(batch: list[Item]) -> list[Ids]:
                return encode([item.piece.text for item in batch])

            for batch, ids in in_order(encode_batch, batches(stream, size_chars=_BATCH_CHARS), workers=self.workers):
                for item, tokens in zip(batch, ids, strict=True):
                    writer.append(item, tokens)
                done = sum(grown.text_bytes for grown in journal.splits.values())
                count = sum(grown.tokens for grown in journal.splits.values())
                self.progress("tokenizing", min(done, self.look.text_bytes), self.look.text_bytes, count)
            writer.commit()
        return journal

    def _check_room(self, folder: Path, encode: Encode, itemsize: int, *, already: int) -> None:
        """Raise DiskFullError when the files will not fit, estimated from the first documents."""
        texts = train_texts(self.corpus, self.look.threshold, most_bytes=_SAMPLE_BYTES, most_documents=None)
        sample = list(islice(texts, 1000))
        size, count = sum(len(text.encode()) for text in sample), sum(len(ids) + 1 for ids in encode(sample))
        tokens = count * self.look.text_bytes / max(1, size)
        # A limit holds for each of up to three splits, and the document that reaches it may be long.
        if self.limits.max_tokens is not None:
            tokens = min(tokens, 4 * self.limits.max_tokens)
        if self.limits.max_documents is not None:
            tokens = min(tokens, 4 * self.limits.max_documents * count / max(1, len(sample)))
        needed, free = int(1.05 * tokens * itemsize) - already, shutil.disk_usage(folder).free
        if needed > free:
            raise DiskFullError(
                f"{self.corpus.name} needs about {needed:,} bytes under {folder.parent}, {free:,} are free: make room, "
                "set OELM_CACHE to a larger disk, or take less (--max-tokens N)"
            )

    def _record(self, folder: Path, tokenizer: Tokenizer, journal: Journal) -> None:
        if missing := [split for split in SPLITS if split not in journal.splits]:
            raise DataError(
                f"{self.corpus.source}: nothing in it for the {missing[0]} split; give more text, or more different text"
            )
        splits = {
            split: SplitMeta(
                tokens=grown.tokens,
                documents=grown.documents,
                text_bytes=grown.text_bytes,
                sha256=sha256_file(folder / f"{split}.bin"),
            )
            for split, grown in journal.splits.items()
        }
        meta = TokenMeta(
            format="oelm-tokens-1",
            name=self.corpus.name,
            source=self.corpus.source,
            revision=self.corpus.revision or f"sha256:{self.look.fingerprint}",
            dtype=dtype_for(num_ids(tokenizer)),
            vocab_size=num_ids(tokenizer),
            end_of_text=end_of_text_id(tokenizer),
            tokenizer=self.recipe.label,
            tokenizer_sha256=sha256_file(folder / "tokenizer.json"),
            max_documents=self.limits.max_documents,
            max_tokens=self.limits.max_tokens,
            key=self.key,
            splits=splits,
            left_out=self.corpus.left_out,
        )
        write_json(folder / "meta.json", meta.model_dump())
