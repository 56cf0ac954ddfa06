"""Token files: raw uint16 or uint32 `train.bin` and `val.bin`, as nanoGPT reads them, described by `meta.json`."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from oelm.errors import DataError, OelmError
from oelm.files import Strict, cache_root, dump_json, lock_at, read_as, read_json, room_checked, sha256_file, take, write_json

FORMAT = "oelm-tokens-1"
Tokens = NDArray[np.unsignedinteger[Any]]
Split = Literal["train", "val", "test"]
# Every token set has these two; a test split only where the source has one.
SPLITS: tuple[Split, ...] = ("train", "val")
# Called with the current work, how many of how many bytes of text are done, and how many tokens they gave.
OnProgress = Callable[[str, int, int, int], None]
_WAIT_S = 1.0
_BLOCK_BYTES = 2**23
# File systems may keep times to two seconds: a file changed later than this may change again without a new time.
_SETTLED_S = 2.0


class SplitMeta(Strict):
    """Counts and digest of one split's file."""

    tokens: int = Field(gt=0)
    documents: int = Field(gt=0)
    text_bytes: int = Field(gt=0)
    sha256: str


class LeftOut(Strict):
    """Number and size of the source files that were left out for one reason."""

    files: int = Field(ge=0)
    text_bytes: int = Field(ge=0)


class TokenMeta(Strict):
    """`meta.json`: enough to open, check, decode and cite a token set."""

    format: Literal["oelm-tokens-1"]
    name: str
    source: str
    # What pins the text: the hub's commit, or the digest of every document.
    revision: str = ""
    dtype: Literal["uint16", "uint32"]
    vocab_size: int = Field(gt=0)
    end_of_text: int = Field(ge=0)
    tokenizer: str
    tokenizer_sha256: str
    max_documents: int | None = None
    max_tokens: int | None = None
    # Digest of text, tokenizer and limits; names the folder in the cache.
    key: str = ""
    splits: dict[Split, SplitMeta]
    # By reason.
    left_out: dict[str, LeftOut] = {}

    @model_validator(mode="after")
    def _end_is_a_token(self) -> Self:
        if self.end_of_text >= self.vocab_size:
            raise ValueError(f"end_of_text {self.end_of_text} is outside the vocabulary of {self.vocab_size}")
        return self

    @property
    def is_extract(self) -> bool:
        """Whether limits were set, so that this is not all of the source."""
        return self.max_documents is not None or self.max_tokens is not None

    @property
    def fingerprint(self) -> str:
        """A digest of the tokens and their meaning; two sets with the same one train the same."""
        meaning: list[Any] = [self.dtype, self.vocab_size, self.end_of_text, self.tokenizer_sha256]
        meaning += [self.splits[split].sha256 for split in sorted(self.splits)]
        return hashlib.sha256(dump_json(meaning).encode()).hexdigest()


@dataclass(frozen=True)
class TokenSet:
    """An opened, verified token set."""

    path: Path
    meta: TokenMeta
    splits: dict[Split, Tokens]

    @property
    def train(self) -> Tokens:
        return self.splits["train"]

    @property
    def val(self) -> Tokens:
        return self.splits["val"]


def dtype_for(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Return the smallest of the two dtypes that holds every id of the vocabulary."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def no_progress(what: str, done: int, total: int, tokens: int) -> None:
    """Show nothing."""


@contextlib.contextmanager
def held_alone(target: Path, progress: OnProgress) -> Iterator[None]:
    """Hold the lock on a set while it is prepared. `progress` is called while another process holds it, and may raise."""
    lock = lock_at(target.parent / f".{target.name}.lock")
    with room_checked(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        while not take(lock, timeout_s=_WAIT_S):
            progress("waiting for another process that prepares this", 0, 0, 0)
    try:
        yield
    finally:
        lock.release()


def computed_once(what: str, files: Iterable[Path], compute: Callable[[], Any]) -> Any:
    """Return the JSON value that `compute` gave for these files, from the cache unless one of them changed since.

    A file is unchanged while its inode, size and both times are. `what` says what is computed, and how.
    """
    began = time.time()
    facts = [(str(file.absolute()), file.stat()) for file in files]
    state = [[path, f.st_dev, f.st_ino, f.st_size, f.st_mtime_ns, f.st_ctime_ns] for path, f in facts]
    kept = cache_root() / "computed" / f"{_digest([what, *(path for path, _ in facts)])[:32]}.json"
    with contextlib.suppress(DataError, KeyError, TypeError):
        record = read_json(kept)
        if record["sha256"] == _digest([state, record["value"]]):
            return record["value"]
    value = compute()
    if all(max(f.st_mtime, f.st_ctime) < began - _SETTLED_S for _, f in facts):
        # Without room for it, the value is computed again next time.
        with contextlib.suppress(OelmError):
            write_json(kept, {"value": value, "sha256": _digest([state, value])}, durable=False)
    return value


def _digest(value: Any) -> str:
    return hashlib.sha256(dump_json(value, indent=None).encode()).hexdigest()


def open_tokens(path: Path, *, is_known: bool = True) -> TokenSet:
    """Open a token set; raise DataError naming what differs from its record.

    Checks the size of every file; and digest and range of ids, unless the same files passed before and did not change
    since. With `is_known` False, always.
    """
    with advised(path):
        meta = read_meta(path / "meta.json")
        names = ("meta.json", "tokenizer.json", *(f"{split}.bin" for split in meta.splits))
        for split in meta.splits:
            _check_size(path / f"{split}.bin", meta, split)
        if is_known and all((path / name).is_file() for name in names):
            computed_once("token set", [path / name for name in names], lambda: _check_content(path, meta))
        else:
            _check_content(path, meta)
    return TokenSet(path, meta, {split: np.memmap(path / f"{split}.bin", _dtype(meta), mode="r") for split in meta.splits})


@contextlib.contextmanager
def advised(path: Path) -> Iterator[None]:
    """Add to a DataError about a prepared set what to do: a set in the cache can be deleted, a user's own must not be."""
    try:
        yield
    except DataError as problem:
        fix = "restore the files, or prepare the set again"
        if path.resolve().is_relative_to(cache_root().resolve()):
            fix = f"delete the folder {path} and repeat the command to prepare it again"
        raise DataError(f"{problem}; {fix}") from None


def read_meta(path: Path) -> TokenMeta:
    """Read the record of a token set; raise DataError naming what is wrong with it."""
    if not path.is_file():
        raise DataError(f"{path.parent}: no meta.json, so this is no complete token set")
    meta = read_as(TokenMeta, path)
    for split in SPLITS:
        if split not in meta.splits:
            raise DataError(f"{path}: nothing recorded for the {split} split")
    return meta


def check_tokenizer(path: Path, sha256: str) -> None:
    """Raise DataError unless the tokenizer.json of a prepared set exists and has this digest."""
    if not path.is_file():
        raise missing_file(path, "a tokenizer")
    compare_digests(path, sha256_file(path), sha256)


def missing_file(path: Path, holds: str) -> DataError:
    return DataError(f"{path}: missing, though meta.json records {holds}")


def compare_digests(path: Path, found: str, expected: str) -> None:
    """Raise DataError where a file's digest is not the recorded one."""
    if found != expected:
        raise DataError(f"{path}: sha256 {found[:12]}..., expected {expected[:12]}...: damaged")


def _check_size(path: Path, meta: TokenMeta, split: Split) -> None:
    # Before anything maps the file: reading a map beyond the file's end would kill the process with SIGBUS.
    known = meta.splits[split]
    if not path.is_file():
        raise missing_file(path, f"{known.tokens:,} tokens")
    expected_bytes = known.tokens * _dtype(meta).itemsize
    if (size_bytes := path.stat().st_size) != expected_bytes:
        raise DataError(f"{path}: {size_bytes:,} bytes, expected {expected_bytes:,} ({meta.dtype})")


def _check_content(path: Path, meta: TokenMeta) -> bool:
    check_tokenizer(path / "tokenizer.json", meta.tokenizer_sha256)
    for split, known in meta.splits.items():
        file = path / f"{split}.bin"
        digest, largest = _digest_and_largest(file, _dtype(meta))
        compare_digests(file, digest, known.sha256)
        if largest >= meta.vocab_size:
            raise DataError(f"{file}: holds token id {largest}, but the vocabulary has {meta.vocab_size}")
    return True


def _digest_and_largest(path: Path, dtype: np.dtype[Any]) -> tuple[str, int]:
    # Read in blocks, not through a map: pages of a map count as memory of this process.
    state, largest = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            state.update(block)
            largest = max(largest, int(np.frombuffer(block, dtype).max()))
    return state.hexdigest(), largest


def _dtype(meta: TokenMeta) -> np.dtype[Any]:
    return np.dtype(meta.dtype).newbyteorder("<")
