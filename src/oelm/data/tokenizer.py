"""Tokenizers: trained on the corpus, GPT-2's, or from files; and encoding on all cores."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers.normalizers import Normalizer

from oelm.errors import ConfigError, DataError
from oelm.files import cache_root, dump_json, read_json, write_text

END_OF_TEXT = "<|endoftext|>"
GPT2 = "gpt2"
GPT2_VOCAB = 50_257
# Of vocabulary and merges as canonical JSON, so that the file format does not matter.
_GPT2_SHA256 = "0488518c307313c2abb06ff17a1d57415eb2f76f520efc5bc50b141f763919d7"
_GPT2_REPO, _GPT2_REVISION = "openai-community/gpt2", "607a30d783dfa663caf39e06633721c8d4cfcd7e"
# tiktoken names a cached file by the SHA-1 of the address it came from: vocab.bpe and encoder.json of GPT-2.
_TIKTOKEN_FILES = ("6d1cbeee0f20b3d9449abfede4726ed8212e3aee", "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6")
BERT_MARKS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_BPE_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))


def is_gpt2(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer gives GPT-2's ids: the same vocabulary, merges and split into words, and nothing more."""
    return _is_gpt2(tokenizer.to_str())


# Asked repeatedly about the same few tokenizers, each with megabytes of JSON.
@functools.lru_cache(maxsize=4)
def _is_gpt2(text: str) -> bool:
    state = json.loads(text)
    model, words = state["model"], state["pre_tokenizer"] or {}
    if not model.get("merges") or state["normalizer"] or {t["content"] for t in state["added_tokens"]} - {END_OF_TEXT}:
        return False
    if words.get("type") != "ByteLevel" or words["add_prefix_space"] or not words["use_regex"]:
        return False
    pairs = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    canonical = dump_json([sorted(model["vocab"].items(), key=lambda item: item[1]), pairs], indent=None)
    return hashlib.sha256(canonical.encode()).hexdigest() == _GPT2_SHA256


def find_gpt2() -> Tokenizer:
    """Return GPT-2's tokenizer from our cache, tiktoken's, or the hub, and keep it in ours."""
    # A missing or damaged copy is looked for elsewhere.
    with contextlib.suppress(DataError):
        if is_gpt2(known := read_tokenizer(_gpt2_copy())):
            return known
    for tokenizer in _gpt2_candidates():
        if tokenizer is not None and is_gpt2(tokenizer):
            write_text(_gpt2_copy(), tokenizer.to_str())
            return tokenizer
    raise DataError(
        "GPT-2's vocabulary is not on this machine, and the Hugging Face hub cannot be reached. Give a folder that holds "
        "encoder.json and vocab.bpe (or vocab.json and merges.txt): --tokenizer FOLDER; or train one: --tokenizer bpe:4096"
    )


def _gpt2_copy() -> Path:
    return cache_root() / "gpt2" / "tokenizer.json"


def _gpt2_candidates() -> Iterator[Tokenizer | None]:
    folder = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    merges, vocab = (Path(folder or Path(tempfile.gettempdir()) / "data-gym-cache") / name for name in _TIKTOKEN_FILES)
    yield byte_level_bpe(vocab, merges) if vocab.is_file() and merges.is_file() else None
    yield _from_hub()


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json."""
    try:
        return Tokenizer.from_str(path.read_bytes().decode())
    except Exception as problem:  # the library raises bare Exception
        raise DataError(f"{path}: cannot be read as a tokenizer ({problem})") from None


def _from_hub() -> Tokenizer | None:
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        return None
    from oelm.data.sources import hub_has_an_address

    try:
        # Earlier downloads are found without a network.
        only_local = not hub_has_an_address()
        names = ("vocab.json", "merges.txt")
        vocab, merges = (
            Path(hf_hub_download(_GPT2_REPO, name, revision=_GPT2_REVISION, local_files_only=only_local)) for name in names
        )
    # What an unreachable hub raises differs by version.
    except Exception:
        return None
    return byte_level_bpe(vocab, merges)


def folder_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a folder: tokenizer.json, byte pairs (GPT-2's is kept in the cache), or WordPiece."""
    if (folder / "tokenizer.json").is_file():
        return read_tokenizer(folder / "tokenizer.json")
    for vocab, merges in _BPE_FILES:
        if (folder / vocab).is_file() and (folder / merges).is_file():
            tokenizer = byte_level_bpe(folder / vocab, folder / merges)
            if is_gpt2(tokenizer) and not _gpt2_copy().is_file():
                write_text(_gpt2_copy(), tokenizer.to_str())
            return tokenizer
    if (folder / "vocab.txt").is_file():
        return wordpiece(folder)
    raise DataError(
        f"{folder}: no tokenizer in it; expected tokenizer.json, encoder.json and vocab.bpe, vocab.json and merges.txt, "
        "or vocab.txt"
    )


def byte_level_bpe(vocab_path: Path, merges_path: Path) -> Tokenizer:
    """Return the tokenizer of a vocabulary (JSON) and its merges (one pair a line), in GPT-2's format."""
    try:
        vocab: dict[str, int] = json.loads(vocab_path.read_text(encoding="utf-8"))
        lines = merges_path.read_text(encoding="utf-8").split("\n")
        merges = [
            (left, right) for left, right in (line.split(" ") for line in lines if line and not line.startswith("#version"))
        ]
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    except Exception as problem:  # bad JSON, a line that is no pair, or a merge that the library refuses
        raise DataError(f"{vocab_path} and {merges_path.name}: not a byte-pair vocabulary ({problem})") from None
    split_bytes(tokenizer)
    if END_OF_TEXT in vocab:
        tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    return tokenizer


def split_bytes(tokenizer: Tokenizer) -> None:
    """Let a BPE work on bytes, as GPT-2's does."""
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()


def add_bert_marks(tokenizer: Tokenizer) -> None:
    """Let a tokenizer enclose texts and pairs in BERT's marks."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(mark, tokenizer.token_to_id(mark)) for mark in ("[CLS]", "[SEP]")],
    )


def wordpiece(folder: Path) -> Tokenizer:
    """Return BERT's WordPiece tokenizer of a folder: vocab.txt, lower case unless tokenizer_config.json says otherwise."""
    try:
        # Not splitlines(): some words of a vocabulary are characters at which it would end a line.
        words = (folder / "vocab.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as problem:
        raise DataError(f"{folder / 'vocab.txt'}: not UTF-8 at byte {problem.start:,}; fetch it again") from None
    vocab = {word: number for number, word in enumerate(words)}
    if missing := [word for word in ("[UNK]", "[CLS]", "[SEP]", "[PAD]") if word not in vocab]:
        raise DataError(f"{folder / 'vocab.txt'}: no {missing[0]} in it, so it is not BERT's; give a tokenizer.json instead")
    config_path = folder / "tokenizer_config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=bool(config.get("do_lower_case", True)))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    add_bert_marks(tokenizer)
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in BERT_MARKS if mark in vocab])
    return tokenizer


_BPE = re.compile(r"bpe:([1-9][0-9]{0,6})")
_SMALLEST_VOCAB = 257  # 256 bytes and the end-of-text mark


@dataclass(frozen=True)
class TokenizerRecipe:
    """A tokenizer: to be trained to `vocab_size`, or given as the `text` of a tokenizer.json."""

    label: str
    vocab_size: int
    text: str | None


def tokenizer_recipe(spec: str) -> TokenizerRecipe:
    """Return the recipe of 'bpe:4096', 'gpt2', or the path of a tokenizer.json or of a folder of tokenizer files."""
    if spec == GPT2:
        return _given(find_gpt2())
    if spec.endswith(".json"):
        return _given(read_tokenizer(Path(spec)), text=Path(spec).read_bytes().decode())
    if spec and Path(spec).is_dir():
        return _given(folder_tokenizer(Path(spec)))
    match = _BPE.fullmatch(spec)
    if match is None or int(match[1]) < _SMALLEST_VOCAB:
        raise ConfigError(
            f"tokenizer {spec!r}: must be 'gpt2', 'bpe:N' with N >= {_SMALLEST_VOCAB}, for example bpe:4096, "
            "or the path of a tokenizer.json or of a folder with a tokenizer's files"
        )
    return TokenizerRecipe(spec, int(match[1]), None)


def vocab_size_of(spec: str) -> int:
    """Return the size of a tokenizer's vocabulary; for GPT-2's without its files."""
    return GPT2_VOCAB if spec == GPT2 else tokenizer_recipe(spec).vocab_size


def tokenizer_label(spec: str) -> str:
    """Return the name of a tokenizer in records; for GPT-2's without its files."""
    return GPT2 if spec == GPT2 else tokenizer_recipe(spec).label


def tokenizer_sha256(spec: str) -> str:
    """Return the digest of a given tokenizer's tokenizer.json; "" for one to be trained."""
    text = tokenizer_recipe(spec).text
    return "" if text is None else hashlib.sha256(text.encode()).hexdigest()


def _given(tokenizer: Tokenizer, *, text: str | None = None) -> TokenizerRecipe:
    text = text or tokenizer.to_str()
    label = GPT2 if is_gpt2(tokenizer) else f"file-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    return TokenizerRecipe(label, tokenizer.get_vocab_size(), text)


def train_bpe(
    texts: Iterable[str], *, vocab_size: int, marks: tuple[str, ...] = (END_OF_TEXT,), normalizer: Normalizer | None = None
) -> Tokenizer:
    """Train a byte-level BPE on the given texts; without a normalizer it decodes any text back exactly."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    split_bytes(tokenizer)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(marks),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def num_ids(tokenizer: Tokenizer) -> int:
    """Return one more than the largest id; some vocabularies have gaps."""
    return 1 + max(tokenizer.get_vocab().values())


def end_of_text_id(tokenizer: Tokenizer) -> int:
    """Return the id of the mark between documents."""
    token = tokenizer.token_to_id(END_OF_TEXT)
    if token is None:
        raise DataError(f"the tokenizer has no {END_OF_TEXT} token to put between documents")
    return int(token)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer of a token set or a run."""
    return read_tokenizer(folder / "tokenizer.json")


Ids = NDArray[Any]
Encode = Callable[[list[str]], list[Ids]]
Item = TypeVar("Item")
Made = TypeVar("Made")


def encoder(tokenizer: Tokenizer) -> Encode:
    """Return the function that encodes texts with this tokenizer; special tokens written in a text stay text.

    GPT-2's uses tiktoken where that is installed: the same ids, several times as fast.
    """
    if is_gpt2(tokenizer) and (fast := _tiktoken_encoder(tokenizer)) is not None:
        return fast
    return _plain_encoder(tokenizer)


def _plain_encoder(tokenizer: Tokenizer) -> Encode:
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.encode_special_tokens = True
    plain.no_truncation()
    plain.no_padding()

    def encode(texts: list[str]) -> list[Ids]:
        encodings = plain.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    return encode


def _tiktoken_encoder(tokenizer: Tokenizer) -> Encode | None:
    try:
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str
    except ImportError:
        return None
    as_byte = {character: byte for byte, character in byte_characters().items()}
    vocab: dict[str, int] = json.loads(tokenizer.to_str())["model"]["vocab"]
    end = vocab[END_OF_TEXT]
    ranks = {bytes(as_byte[c] for c in word): rank for word, rank in vocab.items() if rank != end}
    encoding = tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: end})

    def encode_one(text: str) -> Ids:
        try:
            return encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError:
            # A million spaces in a row are too many for its regular expression.
            return _plain_encoder(tokenizer)([text])[0]

    def encode(texts: list[str]) -> list[Ids]:
        return [encode_one(text) for text in texts]

    return encode


def byte_characters() -> dict[int, str]:
    """Return the character that byte-level BPE writes for each byte: itself if visible, else one from 256 up."""
    visible = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(work: Callable[[Item], Made], items: Iterable[Item], *, workers: int) -> Iterator[tuple[Item, Made]]:
    """Yield every item with the result of `work`, in order, with a few in progress at a time.

    Uses threads: the tokenizers release Python's lock, and nothing is copied between processes.
    """
    waiting: deque[tuple[Item, Future[Made]]] = deque()
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="encode") as pool:
        try:
            for item in items:
                waiting.append((item, pool.submit(work, item)))
                if len(waiting) > 2 * workers:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        finally:
            for _, future in waiting:
                future.cancel()
