"""`oelm data`: what there is, prepare it, look at it, check it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oelm.cli.shell import (
    Command,
    Group,
    TerminalWatch,
    out,
    path_option,
    print_table,
    reported,
    say,
    shown_warnings,
)
from oelm.errors import REFUSED
from oelm.text import duration

if TYPE_CHECKING:
    from oelm.data.example_sets import ExampleMeta
    from oelm.data.tokens import TokenMeta
    from oelm.runs.layout import EvaluatedSplit
    from oelm.runs.records import TextCounter

data_app = typer.Typer(name="data", cls=Group, help="Data sets: list, prepare, look at, verify.", no_args_is_help=True)


@data_app.command("list", cls=Command)
@reported
def list_sets() -> None:
    """Show the data sets that have a name, and what is prepared on this machine."""
    from oelm.data.prepared import prepared_sets
    from oelm.data.public_sets import BUILT_IN, CORPORA, TASKS, CorpusEntry, TaskEntry

    for name, about in BUILT_IN.items():
        out.print(f"{name:<15}language model: {about}")
    entries: list[CorpusEntry | TaskEntry] = [*CORPORA.values(), *TASKS.values()]
    for entry in entries:
        kind = "language model" if isinstance(entry, CorpusEntry) else "classifier"
        out.print(f"{entry.name:<15}{kind}: {entry.about} ({entry.licence})")
        out.print(f"{'':15}{entry.hub.repo} at {entry.hub.revision[:8]} on the Hugging Face hub, or --from FOLDER", style="dim")
    prepared = [f"{path}  {_in_a_line(meta)}" for path, meta in prepared_sets()]
    out.print(
        "\nprepared on this machine:" if prepared else "\nnothing is prepared on this machine yet: oelm data prepare NAME"
    )
    for line in prepared:
        say(f"  {line}")


@data_app.command(cls=Command)
@reported
def prepare(
    name: Annotated[
        str | None, typer.Argument(help="A name of `oelm data list`; or give a file with one of the options.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--from", help="Take local copies of the named set from this folder, not from the hub.")
    ] = None,
    text: Annotated[Path | None, path_option("Your own text: a UTF-8 file, a .jsonl or .parquet, or a folder of them.")] = None,
    column: Annotated[str, typer.Option(help="The column of a .jsonl or .parquet that holds the text.")] = "text",
    examples: Annotated[Path | None, typer.Option(help="Your own labelled examples: .tsv, .csv, .jsonl or .parquet.")] = None,
    dev: Annotated[
        Path | None, typer.Option(help="Dev examples to go with --examples; default: one in twenty is held out.")
    ] = None,
    columns: Annotated[
        str | None, typer.Option(help="The columns of --examples, as text=A,label=B or text=A,pair=B,label=C.")
    ] = None,
    labels: Annotated[str | None, typer.Option(help="What integer labels 0, 1, ... mean, as A,B,...")] = None,
    language: Annotated[str, typer.Option(help="Which language of xnli.")] = "en",
    tokenizer: Annotated[
        str | None,
        typer.Option(help="gpt2, bpe:N, a tokenizer.json, or a folder with a tokenizer's files (a classifier: its model's)."),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=3, help="Longest example in tokens (128); longer ones are cut, and counted.")
    ] = None,
    max_documents: Annotated[int | None, typer.Option(min=1, help="An extract: so many documents of each split.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="An extract: begin no document after so many tokens.")] = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="Put the token set here instead of the cache.")] = None,
) -> None:
    """Prepare a data set. Rerun the command to resume an interrupted preparation."""
    from oelm.data.request import Request

    request = Request(
        name=name,
        folder=folder,
        text=text,
        column=column,
        examples=examples,
        dev=dev,
        columns=columns,
        labels=labels,
        language=language,
        tokenizer=tokenizer,
        max_length=max_length,
        max_documents=max_documents,
        max_tokens=max_tokens,
        out=out_dir,
    )
    began = time.monotonic()
    with shown_warnings(), TerminalWatch() as watch:
        prepared = request.prepare(watch.on_preparing)
    say(f"ready after {duration(time.monotonic() - began)}: {prepared.path}")
    _print_meta(prepared.meta)


@data_app.command(cls=Command)
@reported
def info(
    what: Annotated[str, typer.Argument(help="A prepared set: its folder, or its name where one was prepared under it.")],
    ngram: Annotated[
        bool, typer.Option("--ngram", help="Count n-grams now, up to the 5-gram, which a real baseline clearly beats.")
    ] = False,
    counters: Annotated[
        bool,
        typer.Option("--counters", help="Also bits per byte of n-grams up to order 8 at vocabularies 512, 2,048 and 8,192."),
    ] = False,
    record: Annotated[
        Path | None, typer.Option(help="With --counters: write the best to this folder of runs, for its report.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="With --ngram: let n-grams look back no further than windows of N tokens.")
    ] = None,
) -> None:
    """Show what a prepared set holds, where it came from, what pins it, and its n-gram reference once that is counted."""
    from oelm.data.prepared import find_sets, read_any_meta
    from oelm.errors import ConfigError

    if context is not None and not ngram:
        raise ConfigError("--context needs --ngram: add it, or leave --context out")
    if record is not None and not counters:
        raise ConfigError("--record needs --counters: add it, or leave --record out")
    if record is not None and not record.is_dir():
        raise ConfigError(f"--record {record}: no such folder; give the folder of the runs, such as outputs")
    for path in find_sets([what]):
        say(str(path))
        meta = read_any_meta(path)
        _print_meta(meta)
        _print_ngram(path, meta, count=ngram, context=context)
        if counters:
            _print_counters(path, meta, record)


def _print_ngram(path: Path, meta: TokenMeta | ExampleMeta, *, count: bool, context: int | None) -> None:
    from oelm.data.ngram import ORDERS, judged_splits, kept_figures, ngram_figures, perplexities
    from oelm.data.tokens import TokenMeta, open_tokens

    if not isinstance(meta, TokenMeta):
        if count:
            out.print("  n-gram PPL  none: these are labelled examples, not text to predict")
        return
    figures = ngram_figures(open_tokens(path)) if count else kept_figures(path, meta)
    if figures is None:
        out.print("  n-gram PPL  not counted yet: add --ngram (seconds), or train on it")
        return
    for split, values in figures.up_to(ORDERS).items():
        say(f"  n-gram PPL  {_by_order(split, values)}")
    if not figures.ppl:
        out.print("  n-gram PPL  none: too few tokens")
    if figures.tokens < meta.splits["train"].tokens:
        out.print(f"              counted on the first {figures.tokens:,} tokens of the training split")
    if context is not None and figures.ppl:
        tokens = open_tokens(path)
        found = perplexities(tokens.train, judged_splits(tokens), vocab_size=meta.vocab_size, context=context)
        for split, values in (found or {}).items():
            say(f"  in windows  {_by_order(split, values)}; windows of {context:,} tokens")


def _by_order(split: str, values: list[float]) -> str:
    return f"{split} {values[-1]:.2f} for order {len(values)} (from order 1: {', '.join(f'{value:.2f}' for value in values)})"


def _print_counters(path: Path, meta: TokenMeta | ExampleMeta, record: Path | None) -> None:
    from oelm.data.ngram import count_vocabularies
    from oelm.data.tokens import TokenMeta, open_tokens
    from oelm.runs.layout import PREDICTIONS
    from oelm.runs.records import TextCounter

    if not isinstance(meta, TokenMeta):
        return
    with shown_warnings(), TerminalWatch() as watch:
        figures = count_vocabularies(open_tokens(path), progress=watch.on_preparing)
    out.print("  counters    bits per byte of n-gram models of the same text, by vocabulary and order:")
    orders = max(len(values) for by_split in figures.counters.values() for values in by_split.values())
    rows = [
        (split, f"{vocabulary:,}", *(f"{value:.3f}" for value in by_split[split]))
        for split in figures.ppl
        for vocabulary, by_split in figures.counters.items()
    ]
    print_table(("split", "vocabulary", *map(str, range(1, orders + 1))), rows, left=("split",))
    best: dict[EvaluatedSplit, TextCounter] = {}
    for split in (split for split in PREDICTIONS if split in figures.ppl):
        found = figures.best_counter(split)
        assert found is not None
        best[split] = TextCounter(vocabulary=found[0], order=found[1], bits_per_byte=found[2])
        out.print(f"  best        {split} {found[2]:.4f} bits per byte: order {found[1]}, vocabulary {found[0]:,}")
    if record is not None:
        _record_counters(record, meta.fingerprint, best)


def _record_counters(folder: Path, fingerprint: str, best: dict[EvaluatedSplit, TextCounter]) -> None:
    from oelm.files import write_json
    from oelm.runs.layout import COUNTERS
    from oelm.runs.records import Counters

    write_json(folder / COUNTERS, Counters.read(folder).with_text(fingerprint, best).model_dump(mode="json"))
    say(f"  recorded    {folder / COUNTERS}; next: oelm report --out {folder} --table baselines")


@data_app.command(cls=Command)
@reported
def verify(
    what: Annotated[list[str] | None, typer.Argument(help="Folders or names of prepared sets; by default all of them.")] = None,
) -> None:
    """Hash every file of prepared sets again; exit code 3 when one is not what was prepared."""
    from oelm.data.prepared import find_sets, verify_any
    from oelm.errors import DataError

    damaged = 0
    found = find_sets(what or [])
    if not found:
        out.print("nothing is prepared on this machine yet: oelm data prepare NAME")
    for path in found:
        try:
            opened = verify_any(path)
            say(f"whole    {path}  {_in_a_line(opened.meta)}")
        except DataError as problem:
            damaged += 1
            say(f"DAMAGED  {problem}")
    if damaged:
        raise typer.Exit(REFUSED)


def _in_a_line(meta: TokenMeta | ExampleMeta) -> str:
    from oelm.data.tokens import TokenMeta

    if isinstance(meta, TokenMeta):
        return f"{sum(split.tokens for split in meta.splits.values()):,} tokens, {meta.tokenizer}"
    return f"{sum(split.examples for split in meta.splits.values()):,} examples, {len(meta.labels)} labels"


def _print_meta(meta: TokenMeta | ExampleMeta) -> None:
    from oelm.data.tokens import TokenMeta

    facts = {"name": meta.name, "source": meta.source, "revision": meta.revision, "tokenizer": meta.tokenizer}
    facts["vocabulary"] = f"{meta.vocab_size:,} ({meta.dtype})"
    if isinstance(meta, TokenMeta):
        limits = (("at most", meta.max_documents, "documents"), ("no document begun after", meta.max_tokens, "tokens"))
        extract = "; ".join(f"{word} {limit:,} {unit} of each split" for word, limit, unit in limits if limit is not None)
        if extract:
            facts["extract"] = extract
    else:
        facts["labels"] = ", ".join(f"{number}={name}" for number, name in enumerate(meta.labels))
        facts["max_length"] = str(meta.max_length)
        facts |= {f"in {file}": f"integer labels mean {meaning}" for file, meaning in meta.integers.items()}
    facts["fingerprint"] = meta.fingerprint
    for fact, value in facts.items():
        say(f"  {fact:<11} {value}")
    if isinstance(meta, TokenMeta):
        _print_left_out(meta)
    columns = _columns(meta)
    print_table(list(columns), list(zip(*columns.values(), strict=True)), left=("split",))


def _print_left_out(meta: TokenMeta) -> None:
    for number, (reason, gone) in enumerate(meta.left_out.items()):
        counts = f"{gone.files:,} files, {gone.text_bytes / 1e6:.2f} MB"
        say(f"  {'' if number else 'left out':<11} {reason}: {counts}")


def _columns(meta: TokenMeta | ExampleMeta) -> dict[str, list[str]]:
    from oelm.data.tokens import TokenMeta

    if isinstance(meta, TokenMeta):
        splits = meta.splits.items()
        return {
            "split": [name for name, _ in splits],
            "documents": [f"{split.documents:,}" for _, split in splits],
            "tokens": [f"{split.tokens:,}" for _, split in splits],
            "text bytes": [f"{split.text_bytes:,}" for _, split in splits],
            "bytes/token": [f"{split.text_bytes / split.tokens:.2f}" for _, split in splits],
            "sha256": [split.sha256[:12] for _, split in splits],
        }
    return {
        "split": list(meta.splits),
        "examples": [f"{split.examples:,}" for split in meta.splits.values()],
        "tokens": [f"{split.tokens:,}" for split in meta.splits.values()],
        "longest": [str(split.longest) for split in meta.splits.values()],
        "cut": [f"{split.cut:,}" for split in meta.splits.values()],
        "unlabelled": [f"{split.unlabelled:,}" for split in meta.splits.values()],
        "by label": [" / ".join(f"{count:,}" for count in split.label_counts) for split in meta.splits.values()],
    }
