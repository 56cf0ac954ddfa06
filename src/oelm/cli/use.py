"""`oelm generate`, `eval`, `inspect` and `export`: use a trained run."""

from __future__ import annotations

import html
import re
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oelm.cli.options import CheckpointOption, RunArgument
from oelm.cli.shell import TerminalWatch, err, out, path_option, print_table, printable, reported, say
from oelm.errors import ConfigError, DataError, MissingExtraError, StoppedError
from oelm.runs.layout import MANIFEST, heads_picture
from oelm.text import counted, fixed

if TYPE_CHECKING:
    from oelm.config import RunConfig
    from oelm.method.audit import Audit
    from oelm.models.heads import HeadSummary
    from oelm.train.classify import ClassifierEvaluation
    from oelm.train.evaluate import TokenEvaluation


@reported
def generate(
    run: RunArgument,
    prompt: Annotated[str, typer.Option(help="What to continue; nothing starts a new document.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="How many tokens to write at most.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token every time.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among the k likeliest; 0 among all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Choose among the likeliest that hold this share; 1 among all.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Another seed, another text.")] = 0,
    checkpoint: CheckpointOption = "best",
) -> None:
    """Generate text with a trained model, streamed to the terminal; stops at the end of a document."""
    from pydantic import ValidationError

    from oelm.data.tokenizer import end_of_text_id
    from oelm.models.generate import Sampling, lay_out_by_columns
    from oelm.models.generate import generate as tokens_of
    from oelm.train.load import load_run

    try:
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    except ValidationError as problem:
        first = problem.errors()[0]
        raise ConfigError(f"--{str(first['loc'][0]).replace('_', '-')}: {first['msg']} (given: {first['input']})") from None

    try:
        prompt.encode()
    except UnicodeEncodeError as problem:
        raise ConfigError(
            f"--prompt: is not valid Unicode (character {problem.start + 1} is {prompt[problem.start]!r}); give it in UTF-8"
        ) from None

    def show(text: str) -> None:
        # What a model writes is data: it must not drive a terminal.
        out.file.write(printable(text) if out.file.isatty() else text)

    loaded = load_run(run, which=checkpoint)
    # Nothing to adjust at every token, and no product where a slice will do.
    model = loaded.folded(keep_slices=True)
    lay_out_by_columns(model)
    tokenizer = loaded.tokenizer()
    end = end_of_text_id(tokenizer)
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids or [end]
    show(prompt)
    written: list[int] = []
    shown = ""
    started = time.perf_counter()
    for token in islice(tokens_of(model, ids, sampling=sampling), max_tokens):
        if token == end:
            break
        written.append(token)
        text = tokenizer.decode(written)
        # A character may be cut between two tokens: hold it back until it is whole.
        if not text.endswith("\ufffd"):
            show(text[len(shown) :])
            out.file.flush()
            shown = text
    show(tokenizer.decode(written)[len(shown) :] + "\n")
    speed = len(written) / (time.perf_counter() - started)
    err.print(f"{len(written)} tokens, {speed:,.0f} tokens/s, step {loaded.step}", style="dim")


@reported
def evaluate(
    run: RunArgument,
    data: Annotated[str | None, typer.Option(help="A token set; by default the run's own.")] = None,
    text: Annotated[Path | None, path_option("A text file or folder, tokenized as the run's own text was.")] = None,
    split: Annotated[str, typer.Option(help="train, val or test, where the token set has it.")] = "val",
    checkpoint: CheckpointOption = "best",
    documents: Annotated[
        Path | None, typer.Option(help="Write each document's loss, or example's prediction, to this file, as JSON lines.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="A classifier: another task with the same labels, or a table.")] = None,
    folder: Annotated[Path | None, typer.Option("--from", help="Local copies of that task.")] = None,
    language: Annotated[str | None, typer.Option(help="Which language of xnli.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows at a time; changes speed only.")] = 16,
) -> None:
    """Print a language model's loss, perplexity and bits per byte, or a classifier's accuracy, over a whole split."""
    from oelm.process import StopFlag
    from oelm.runs.records import write_records
    from oelm.train.load import LoadedRun, load_any
    from oelm.train.score import score_run

    if data is not None and text is not None:
        raise ConfigError("--data and --text both name what to score on; give one of them")
    loaded = load_any(run, which=checkpoint)
    is_model = isinstance(loaded, LoadedRun)
    unfit = {"--task": task, "--from": folder, "--language": language} if is_model else {"--data": data, "--text": text}
    for option, value in unfit.items():
        if value is not None:
            kind = "a language model's" if is_model else "a classifier's"
            raise ConfigError(f"{option} has no meaning for {kind} run; leave it out")
    if task is None and (folder is not None or language is not None):
        raise ConfigError("--from and --language say more about --task; give that too")
    evaluation: TokenEvaluation | ClassifierEvaluation | None
    with StopFlag() as stop, TerminalWatch() as watch:
        if isinstance(loaded, LoadedRun):
            name, evaluation = score_run(
                loaded, data=data, text=text, split=split, batch_size=batch_size, stop=stop, watch=watch
            )
        else:
            from oelm.config import ExamplesConfig
            from oelm.train.classify import judge_run

            examples = None
            if task is not None:
                # A table is judged whole: it is its own dev split, and reads as the run's own did.
                dev = str(Path(task).absolute()) if Path(task).is_file() else None
                examples = ExamplesConfig(
                    task=dev or task,
                    folder=str(folder.absolute()) if folder else None,
                    dev=dev,
                    columns=loaded.config.examples.columns if dev else None,
                    labels=",".join(loaded.labels()) if dev else None,
                    language=language or "en",
                )
            name, _, evaluation = judge_run(loaded, examples, split=split, stop=stop, watch=watch)
    if evaluation is None:
        raise StoppedError("stopped before the end, so there is no figure; repeat the same command")
    if documents is not None:
        write_records(documents, evaluation.predictions)
    _print(name, loaded.step, evaluation, documents)


def _print(name: str, step: int, evaluation: TokenEvaluation | ClassifierEvaluation, documents: Path | None) -> None:
    from oelm.train.evaluate import TokenEvaluation

    if not isinstance(evaluation, TokenEvaluation):
        say(f"{name}, model of step {step:,}: {evaluation.headline()}")
        if documents is not None:
            say(f"predictions by example: {documents}")
        return
    tokens = sum(row.tokens for row in evaluation.documents)
    lines = [
        f"{name}: {tokens:,} tokens in {counted(len(evaluation.documents), 'document')}, model of step {step:,}",
        f"loss {evaluation.loss:.4f} nats per token, PPL {fixed(evaluation.perplexity, 3)}, "
        f"{evaluation.bits_per_byte:.4f} bits per byte",
    ]
    if documents is not None:
        lines.append(f"losses by document: {documents}")
    say("\n".join(lines))


@reported
def inspect(
    run: RunArgument,
    heads: Annotated[bool, typer.Option("--heads", help="Also show what each head does, as a table and a picture.")] = False,
    checkpoint: CheckpointOption = "best",
    picture: Annotated[Path | None, typer.Option(help="Where it goes, as .svg and .png; by default into the run.")] = None,
) -> None:
    """Count parameters by role, check every frozen weight by its digest, and look at the heads."""
    from oelm.method.audit import audit
    from oelm.method.method import method_name
    from oelm.train.load import LoadedRun, load_any

    loaded = load_any(run, which=checkpoint)
    report = audit(loaded.model)
    say(f"{loaded.path}, step {loaded.step}, method: {method_name(loaded.config.method)}")
    out.print(str(report))
    _print_roles(report)
    _print_projections(report)
    if heads and not isinstance(loaded, LoadedRun):
        raise ConfigError("--heads is for language models trained by oelm, not for classifiers; leave it out")
    if heads and isinstance(loaded, LoadedRun):
        from oelm.models.heads import summarize_heads
        from oelm.report.charts import head_grid, save_chart
        from oelm.train.score import probe_windows

        with TerminalWatch() as watch:
            windows = probe_windows(loaded, watch=watch)
        summaries = summarize_heads(loaded.model, windows)
        _print_heads(summaries, windows.numel())
        target = picture or loaded.path / heads_picture(loaded.step)
        # Whichever of the two pictures was named.
        target = target.with_suffix("") if target.suffix.lower() in (".svg", ".png") else target
        try:
            svg, png = save_chart(head_grid([summary.as_dict() for summary in summaries]), target)
            say(f"picture: {svg} and {png.name}")
        except MissingExtraError as problem:
            out.print(f"no picture: {problem}")


def _print_roles(report: Audit) -> None:
    rows = [(role, f"{counts['trainable']:,}", f"{counts['frozen']:,}") for role, counts in report.by_role.items()]
    print_table(("role", "trainable", "frozen"), rows, left=("role",), title="parameters by role", boxed=True)


def _print_projections(report: Audit) -> None:
    rows = []
    for projection in report.projections:
        held = "slice, unmoved" if projection.is_selection else "frozen, unmoved"
        state = held if projection.is_frozen else "trains"
        rows.append((projection.name, state, f"{projection.orthonormality_error:.1e}", (projection.digest or "")[:12]))
    title = "attention's maps; every digest was checked"
    print_table(("Q or K", "state", "max |W W^T - I|", "sha256"), rows, left=("Q or K", "state"), title=title, boxed=True)


def _print_heads(summaries: list[HeadSummary], num_tokens: int) -> None:
    rows = [
        (
            f"{head.layer}.{head.head}",
            f"{head.entropy:.2f} ({100 * head.entropy / max(head.uniform_entropy, 1e-9):.0f}%)",
            f"{head.effective_rank:.1f}",
            f"{head.logit_std:.2f}",
            f"{head.mean_distance:.1f}",
            f"{head.induction:.3f}",
        )
        for head in summaries
    ]
    title = f"heads, on {num_tokens:,} tokens of the validation split"
    headings = ("layer.head", "entropy (of uniform)", "effective rank", "logit std", "mean distance", "induction")
    print_table(headings, rows, left=("layer.head",), title=title, boxed=True)


@reported
def export(
    run: RunArgument,
    folder: Annotated[Path, typer.Argument(help="A new folder to write to.")],
    checkpoint: CheckpointOption = "best",
) -> None:
    """Write a run as a folder that `transformers` loads: GPT-2, a classifier's own kind, or a class of `oelm.hf`."""
    from oelm.data.tokenizer import end_of_text_id
    from oelm.method.audit import audit
    from oelm.models.export import export_gpt, fits_gpt2
    from oelm.runs.records import read_manifest
    from oelm.train.load import LoadedRun, load_any

    loaded = load_any(run, which=checkpoint)
    if not isinstance(loaded, LoadedRun):
        from oelm.models.hub import export_classifier

        export_classifier(loaded.folded(), loaded.tokenizer_path(), folder)
        say(
            f"exported step {loaded.step} to {folder}\n"
            f'  from transformers import pipeline; pipeline("text-classification", model="{folder}")'
        )
        return
    tokenizer = loaded.tokenizer()
    data = read_manifest(loaded.path).get("data")
    if data is None:
        raise DataError(
            f"{loaded.path / MANIFEST}: is missing or names no data, and the model card says what the run was trained on; "
            "restore the file from a copy"
        )
    state = loaded.checkpoint.saved.state
    card = _model_card(
        loaded.config,
        audit(loaded.model),
        data=data,
        step=loaded.step,
        loss=state.best_value if state.is_best_here else None,
        is_gpt2=(is_gpt2 := fits_gpt2(loaded.config.model)),
    )
    export_gpt(loaded.folded(), tokenizer, folder, end_of_text=end_of_text_id(tokenizer), card=card)
    first = "" if is_gpt2 else "import oelm.hf; "
    say(
        f"exported step {loaded.step} to {folder}{'' if is_gpt2 else '; GPT-2 has no short convolution, so it needs oelm'}\n"
        f'  {first}from transformers import pipeline; pipeline("text-generation", model="{folder}")'
    )


_OWN = """weights. GPT-2 has no place for the short convolution, so `transformers` needs `oelm` here: `import oelm.hf`
registers the model's class. No code of this folder is run."""


def _model_card(config: RunConfig, audit: Audit, *, data: dict[str, Any], step: int, loss: float | None, is_gpt2: bool) -> str:
    """Return a Hugging Face model card in Markdown; a loss that was not measured is not mentioned."""
    from importlib.resources import files

    from oelm.method.method import method_name
    from oelm.stats import exp_or_inf

    model, on_top = config.model, _on_top(audit)
    shape = f"{model.num_layers} layers, {model.num_heads} heads, {model.model_dim} wide, context {model.seq_len}"
    measured = ""
    if loss is not None:
        measured = f"| validation loss and perplexity at that step | {loss:.4f}, {fixed(exp_or_inf(loss), 3)} |\n"
    return (
        files("oelm.cli")
        .joinpath("model_card.md")
        .read_text(encoding="utf-8")
        .format(
            tags="gpt2, frozen-attention, oelm" if is_gpt2 else "frozen-attention, oelm",
            method=method_name(config.method),
            shape=shape if is_gpt2 else f"{shape}, short convolution of {model.short_conv}",
            total=audit.total,
            frozen=f"{audit.frozen:,} of {audit.total:,} ({100 * audit.frozen / audit.total:.2f}%)",
            on_top=on_top,
            source=_plain(data.get("source", "not recorded")),
            fingerprint=str(data.get("fingerprint", ""))[:12],
            step=step,
            config=config,
            measured=measured,
            folded="What learnt on top is folded into Q and K: these" if on_top else "These",
            weights="weights of GPT-2." if is_gpt2 else _OWN,
            imports="" if is_gpt2 else "import oelm.hf  # registers the class\n",
            new_tokens=min(40, model.seq_len // 2),
        )
    )


def _on_top(audit: Audit) -> str:
    """Return a row for what learnt on top of the frozen weights; nothing where nothing did."""
    counts = {role: audit.by_role[role]["trainable"] for role in ("gain", "correction") if role in audit.by_role}
    shown = ", ".join(f"{role} {count:,}" for role, count in counts.items())
    return f"| learnt on top of them | {shown} |\n" if shown else ""


def _plain(value: object) -> str:
    """Return text that cannot end a table cell or become markup: a folder's name may hold anything."""
    escaped = html.escape(str(value), quote=False)
    return re.sub(r"([\\`*_{}\[\]()#+!|])", r"\\\1", " ".join(escaped.split()))
