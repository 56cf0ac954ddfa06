"""Text to token files: ours against a plain script that maps tiktoken over the same documents with two processes."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from record import keep, parse_options
from tiktoken_ext.openai_public import r50k_pat_str

from oelm.bench.interleave import interleave
from oelm.data.prepare import prepare_corpus
from oelm.data.python_source import stdlib_corpus
from oelm.data.sources import documents, file_corpus
from oelm.data.tokenizer import END_OF_TEXT, byte_characters, find_gpt2, folder_tokenizer, is_gpt2, num_cores
from oelm.stats import Ratio, mean_ratio

_worker: tiktoken.Encoding


def gpt2_encoding(tokenizer_json: str) -> tiktoken.Encoding:
    """Return tiktoken's GPT-2 encoding, which a plain script would download."""
    vocab: dict[str, int] = json.loads(Path(tokenizer_json).read_text())["model"]["vocab"]
    as_byte = {character: byte for byte, character in byte_characters().items()}
    ranks = {bytes(as_byte[c] for c in word): rank for word, rank in vocab.items() if word != END_OF_TEXT}
    return tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 50256})


def start_worker(tokenizer_json: str) -> None:
    global _worker
    _worker = gpt2_encoding(tokenizer_json)


def encode_one(line: str) -> list[int]:
    return [*_worker.encode_ordinary(json.loads(line)["text"]), 50256]


def plain_script(source: Path, tokenizer_json: Path, target: Path) -> None:
    """The ten-line version: a pool of two, one document at a time, ids to one file."""
    with (
        multiprocessing.Pool(2, start_worker, (str(tokenizer_json),)) as pool,
        source.open() as lines,
        target.open("wb") as file,
    ):
        for ids in pool.imap(encode_one, lines, chunksize=32):
            file.write(np.array(ids, dtype=np.uint16).tobytes())


def ours(source: Path, tokenizer_json: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    prepare_corpus(file_corpus(source), tokenizer=str(tokenizer_json), out=target)


def peak_of(source: Path, tokenizer_json: Path, target: Path) -> int:
    """Return the peak memory in bytes of a separate process that prepares one file."""
    argv = [sys.executable, __file__, "--one", str(source), str(tokenizer_json), str(target)]
    return int(subprocess.run(argv, check=True, capture_output=True, text=True).stdout.split()[-1])


def write_documents(path: Path, *, copies: int) -> int:
    texts = list(documents(stdlib_corpus()))
    with path.open("w", encoding="utf-8") as file:
        for copy in range(copies):
            # Each copy begins differently, so that the split by the hash of the text sees other documents.
            file.writelines(json.dumps({"text": f"# {copy}\n{text}"}) + "\n" for text in texts)
    return path.stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    measured = [parser.add_argument("--copies", type=int, default=16, help="copies of the standard library's text")]
    parser.add_argument("--tokenizer", type=Path, help="a folder with GPT-2's files, unless they are cached")
    parser.add_argument("--one", nargs=3, type=Path, help=argparse.SUPPRESS)
    options = parse_options(parser, measured=measured)
    if options.one:
        ours(*options.one)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        return
    tokenizer = folder_tokenizer(options.tokenizer) if options.tokenizer else find_gpt2()
    if options.record and not is_gpt2(tokenizer):
        parser.error(f"--record keeps the figures of GPT-2's vocabulary; {options.tokenizer} holds another")
    with tempfile.TemporaryDirectory() as name:
        compare(Path(name), tokenizer.to_str(), options)


def compare(folder: Path, tokenizer: str, options: Any) -> None:
    tokenizer_json = folder / "tokenizer.json"
    tokenizer_json.write_text(tokenizer)
    source = folder / "documents.jsonl"
    size = write_documents(source, copies=options.copies)
    figures: dict[str, Ratio | float] = {"input": size / 1e6}
    print(f"{size / 1e6:.0f} MB of JSONL, GPT-2's vocabulary, rounds interleaved")
    seconds = interleave(
        {
            "ours": lambda: ours(source, tokenizer_json, folder / "ours"),
            "plain": lambda: plain_script(source, tokenizer_json, folder / "plain.bin"),
        },
        rounds=options.rounds,
    )
    for who, values in seconds.items():
        print(f"  {who:6} {size / 1e6 / sorted(values)[len(values) // 2]:6.1f} MB/s (median)")
    figures["ours"] = mean_ratio(seconds["plain"], seconds["ours"])
    print(f"  ours prepares {figures['ours']} as fast as the plain script on two processes")
    for copies in (1, 10):
        size = write_documents(source, copies=copies)
        figures[f"input_{copies}"] = size / 1e6
        peak = figures[f"memory_{copies}"] = peak_of(source, tokenizer_json, folder / f"peak-{copies}") / 2**20
        print(f"  peak memory with {size / 1e6:5.0f} MB of input: {peak:.0f} MiB")
    if options.record:
        keep("preparation", figures, rounds=options.rounds, threads=num_cores())


if __name__ == "__main__":
    main()
