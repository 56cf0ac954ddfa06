"""`oelm report`, `compare` and `import`: from recorded runs, ours or others', to a verdict."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oelm.cli.options import CatalogFile, grouped
from oelm.cli.shell import ReaderLeftError, echo, err, out, print_table, printable, reported, say
from oelm.errors import ConfigError, one_of, suggest
from oelm.text import counted

if TYPE_CHECKING:
    from oelm.experiments.importer import ImportedRun
    from oelm.report.build import Report
    from oelm.report.document import Document, Table
    from oelm.report.foreign import Question


# In a terminal narrower than this, the matrix has no intervals: the verdicts below it have them.
_WIDE = 120

Roots = Annotated[list[Path] | None, typer.Option("--out", help="Where runs are; may be repeated. Default: outputs.")]


@dataclass(frozen=True)
class Asked:
    """What is asked of imported runs: the options that `oelm report`, `oelm compare` and `oelm watch` share."""

    metric: Annotated[str | None, typer.Option(help="Imported runs: the metric to compare, such as eval_loss.")] = None
    baseline: Annotated[str | None, typer.Option(help="Imported runs: the arm that the others are compared with.")] = None
    at_most: Annotated[
        str | None, typer.Option(help="Imported runs: the bound, 1.05x (perplexity) or 2pt (points of accuracy lost).")
    ] = None
    scale: Annotated[
        str | None, typer.Option("--as", help="How to compare it: loss, perplexity, accuracy or percent; else by its name.")
    ] = None
    take: Annotated[str, typer.Option(help="Of each imported run: its best value, or its last.")] = "best"
    planned: Annotated[int, typer.Option(min=1, help="Seeds planned for a verdict on imported runs.")] = 5

    def question(self) -> Question | None:
        """Return what is asked; None where nothing is."""
        from oelm.report.foreign import parse_question

        if self.metric is not None:
            return parse_question(**asdict(self))
        if (self.baseline, self.at_most, self.scale) != (None, None, None):
            raise ConfigError(
                "--baseline, --at-most and --as are about imported runs: add --metric, such as --metric eval_loss"
            )
        return None


@reported
@grouped
def report(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID...]", help="Experiments, groups, train or finetune; default: all runs.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write Markdown, with its pictures in the same folder.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write every table as a file into this folder.")] = None,
    latex: Annotated[Path | None, typer.Option(help="Write the tables for LaTeX (booktabs).")] = None,
    table: Annotated[str | None, typer.Option(help="Print this one table as Markdown, and nothing else.")] = None,
    picture: Annotated[str | None, typer.Option(help="Print this one chart as SVG, and nothing else.")] = None,
    lang: Annotated[str, typer.Option(help="en or zh.")] = "en",
    budget: Annotated[list[str] | None, typer.Option(help="Only this budget; may be repeated.")] = None,
    roots: Roots = None,
    catalog: CatalogFile = None,
    *,
    asked: Asked,
) -> None:
    """Report on recorded runs: verdicts with intervals, what freezing costs and saves, and what was claimed before."""
    from oelm.experiments.catalog import load_catalog
    from oelm.report.build import build_report
    from oelm.runs.find import OWN

    _check_language(lang)
    question = asked.question()
    if question is not None and question.baseline is None:
        raise ConfigError("--metric judges imported runs against one of them: add --baseline ARM")
    files = {"--html": html, "--markdown": markdown, "--csv": csv, "--latex": latex}
    if (table or picture) and (given := next((name for name, path in files.items() if path is not None), None)):
        raise ConfigError(f"{given}: --table and --picture print one thing and write no file; leave one of the two out")
    _check_files(files)
    places = _places(roots)
    found = load_catalog(catalog)
    # Runs of these commands are in no catalog.
    own = [name for name in ids or () if name in OWN]
    named = [name for name in ids or () if name not in OWN]
    only = own + ([experiment.id for experiment in found.select(named)] if named else [])
    made = build_report(places, found, only=only, budgets=budget or (), question=question)
    if not made.findings.arms and not made.imported:
        _refuse_if_elsewhere(places, ids or (), only, budget or ())
    document = made.document(lang)
    one = _one(document, table=table, picture=picture) if table is not None or picture is not None else None
    # Before anything is shown: a verdict that was seen counts, whatever happens next.
    _record_looks(made, places)
    if one is not None:
        echo(one)
        _print_damages(made)
        return
    # A reader that leaves after the first lines still wants the files.
    with contextlib.suppress(ReaderLeftError):
        _print_answer(document)
    _write(document, html=html, markdown=markdown, csv=csv, latex=latex)
    if not made.findings.arms and not made.imported:
        say(f"No runs under {', '.join(map(str, places))} yet; start with `oelm demo`")
    elif not any((html, markdown, csv, latex)):
        say("\nwrite it: --html report.html, --markdown report.md, --csv FOLDER, --latex report.tex")


def _refuse_if_elsewhere(places: list[Path], ids: Sequence[str], only: Sequence[str], budgets: Sequence[str]) -> None:
    """Raise ConfigError where runs exist, but not those asked for, or not where a report looks for them."""
    from oelm.runs.find import misplaced, scan

    if remark := next(filter(None, map(misplaced, places)), ""):
        raise ConfigError(remark)
    views = [view for place in places for view in scan(place)]
    if not views:
        return
    of = f" of {', '.join(ids)}" if ids else ""
    at = f" at budget {', '.join(budgets)}" if budgets else ""
    others = {view.budget for view in views if view.experiment in only or not only}
    hint = f"the runs{of} are at {', '.join(sorted(others))}" if others else "`oelm status` shows all that are there"
    raise ConfigError(f"no runs{of}{at} under {', '.join(map(str, places))}; {hint}")


def _check_language(lang: str) -> None:
    from oelm.report.words import LANGUAGES

    one_of("--lang", lang, LANGUAGES)


def _print_damages(made: Report) -> None:
    """Warn of records that are not used: the whole report has this among its remarks, one table alone has no place for it."""
    for damage in made.findings.damages():
        err.print(f"warning: not used: {printable(damage)}", style="yellow", soft_wrap=True)


def _record_looks(made: Report, places: list[Path]) -> None:
    from oelm.report.foreign import record_imported_looks
    from oelm.report.sections.verdicts import record_looks

    record_looks(made.judged, places)
    record_imported_looks(made.judged_imported)


def _check_files(files: Mapping[str, Path | None]) -> None:
    """Raise ConfigError where a file is expected and a folder given, or the reverse, before anything is read."""
    for option, path in files.items():
        if path is not None and path.is_dir() and option != "--csv":
            raise ConfigError(f"{option} {path}: this is a folder; name a file in it")
        if path is not None and path.is_file() and option == "--csv":
            raise ConfigError(f"{option} {path}: this is a file; name a folder for the tables")


def _one(document: Document, *, table: str | None, picture: str | None) -> str:
    from oelm.report.build import TABLES
    from oelm.report.document import Chart, Table
    from oelm.report.markdown import picture_text, table_text

    if table is not None and picture is not None:
        raise ConfigError("--table and --picture: one of them at a time")
    blocks = [block for section in document.sections for block in section.blocks]
    tables = {block.name: block for block in blocks if isinstance(block, Table)}
    charts = {block.name: block for block in blocks if isinstance(block, Chart)}
    # Most tables and all pictures are of comparisons.
    nothing = "" if "verdicts" in tables else "; no arm in it has finished runs together with its baseline"
    for option, name, there in (("--table", table, list(tables)), ("--picture", picture, list(charts))):
        if name is not None and name not in there:
            # A table that other reports have is not misspelt.
            hint = "" if name in TABLES else suggest(name, there)
            kind, found = option.removeprefix("--"), ", ".join(there) or "none"
            raise ConfigError(f"{option} {name!r}{hint}: this report has no such {kind}; it has {found}{nothing}")
    return table_text(tables[table]) if table is not None else picture_text(charts[picture or ""])


def _places(roots: list[Path] | None) -> list[Path]:
    """Return the folders of runs, each once, however it is spelled."""
    if roots is None and not Path("outputs").is_dir():
        raise ConfigError("no runs here yet: this folder has no outputs/. Start with `oelm demo`, or give --out FOLDER")
    return list({path.resolve(): path for path in roots or [Path("outputs")]}.values())


def _print_answer(document: Document) -> None:
    """Print the sections that open a report: texts and tables in the order of the page."""
    from oelm.report.document import Table, Text

    for section in document.sections:
        for block in section.blocks if section.name in ("answer", "verdicts", "imported") else ():
            if isinstance(block, Text):
                style = {"warning": "yellow", "note": "dim"}.get(block.kind)
                # A terminal would break lines anywhere.
                out.print(printable(block.text), style=style, soft_wrap=not out.is_terminal)
            elif isinstance(block, Table) and section.name == "imported":
                out.print(printable(block.caption), soft_wrap=not out.is_terminal)
                _print_table(block)
            elif isinstance(block, Table) and block.name in ("classes", "verdicts"):
                _print_table(_without_intervals(block) if block.name == "classes" and out.width < _WIDE else block)


def _without_intervals(table: Table) -> Table:
    """Return methods by data sets with each gap alone and the sign of its verdict."""
    from oelm.report.markdown import SIGNS

    gaps = range(4, len(table.columns))
    rows = [
        tuple(replace(cell, text=SIGNS.get(cell.mark, "") + cell.text.split(" ")[0]) if n in gaps else cell for n, cell in row)
        for row in map(enumerate, table.rows)
    ]
    return replace(table, rows=tuple(rows))


def _print_table(table: Table) -> None:
    names = [table.columns[number] for number in table.shown]
    left = [table.columns[number] for number in table.shown if number not in table.numeric]
    print_table(names, [[row[number].text for number in table.shown] for row in table.rows], left=left)


def _write(document: Document, *, html: Path | None, markdown: Path | None, csv: Path | None, latex: Path | None) -> None:
    from oelm.files import write_text

    if html is not None:
        from oelm.report.html import render_html

        write_text(html, render_html(document))
        out.print(f"wrote {html} ({html.stat().st_size:,} bytes)", soft_wrap=True)
    if markdown is not None:
        from oelm.report.markdown import render_markdown

        folder = markdown.with_name(f"{markdown.stem}-pictures")
        text, pictures = render_markdown(document, folder.name)
        for name, picture in pictures.items():
            write_text(folder / name, picture)
        write_text(markdown, text)
        out.print(f"wrote {markdown} and {len(pictures)} pictures in {folder}", soft_wrap=True)
    if csv is not None:
        from oelm.report.tables import render_csv

        files = render_csv(document)
        for name, text in files.items():
            write_text(csv / name, text)
        out.print(f"wrote {counted(len(files), 'table')} into {csv}", soft_wrap=True)
    if latex is not None:
        from oelm.report.tables import render_latex

        write_text(latex, render_latex(document))
        out.print(f"wrote {latex}", soft_wrap=True)


@reported
@grouped
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders; the first is the reference.")],
    asked: Asked,
) -> None:
    """Set runs side by side: figures, what their configs differ in, and the gap to the first, with an interval over seeds.

    One run, or one folder of seeds, is compared with its baseline.

    Imported runs: give outputs/imported/NAME, or arms in it, with --metric, and --at-most for a verdict.
    """
    from oelm.report.compare import compare_runs
    from oelm.report.foreign import compare_imported, named_study, record_imported_looks
    from oelm.report.words import Words

    named = named_study(runs)
    if named is None:
        if asked.question() is not None:
            raise ConfigError(
                "--metric and --at-most are for imported runs; our own are judged by `oelm report`, by the catalog"
            )
        table, remarks = compare_runs(runs if len(runs) > 1 else [_baseline_of(runs[0]), *runs])
    else:
        study, arms = named
        if (metric := asked.metric) not in study.metrics:
            found = "" if metric is None else f", and {metric!r} is none of them{suggest(metric, study.metrics)}"
            raise ConfigError(f"imported runs are compared by --metric, one of {', '.join(study.metrics)}{found}")
        question = replace(asked, baseline=asked.baseline or (arms[0] if len(runs) > 1 else None)).question()
        assert question is not None
        judged, table, remarks = compare_imported(study, question, Words("en"), only=arms)
        out.print(table.caption, soft_wrap=True)
        record_imported_looks([judged])
    _print_table(table)
    for remark in remarks:
        out.print(printable(remark), style="yellow", soft_wrap=not out.is_terminal)


def _baseline_of(run: Path) -> Path:
    """Return the folder of a run's baseline; ConfigError where the run cannot be compared, or has none."""
    from oelm.experiments.catalog import load_catalog
    from oelm.report.compare import read_folder
    from oelm.runs.find import baseline_folder

    read_folder(run)
    return baseline_folder(run, load_catalog().baselines())


@reported
def import_runs(
    sources: Annotated[list[Path], typer.Argument(metavar="SOURCE...", help="Files or folders of runs.")],
    name: Annotated[str, typer.Option(help="The study's name: runs go to OUT/imported/NAME.")],
    format: Annotated[
        str | None, typer.Option(help="table, tensorboard, wandb, trackio, trainer or study; default: by the files.")
    ] = None,
    columns: Annotated[
        str | None, typer.Option(help="Columns of a table, as arm=A,seed=B,step=C (also run, metric, value).")
    ] = None,
    metric: Annotated[list[str] | None, typer.Option(help="Import this metric only; may be repeated.")] = None,
    runs: Annotated[
        str | None, typer.Option(help="How run names tell arm and seed, as '{arm}-s{seed}'; * matches anything.")
    ] = None,
    arm: Annotated[str | None, typer.Option(help="The arm of every run read here, whatever the source says.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The seed of the run read here, whatever the source says.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace runs of the same arm and seed.")] = False,
    root: Annotated[Path, typer.Option("--out", help="Where runs are kept.")] = Path("outputs"),
) -> None:
    """Import runs that other tools made, so that they can be compared and judged over seeds.

    Reads CSV, TSV, JSON and JSONL tables, TensorBoard event files, W&B offline runs and exported charts, trackio databases,
    trainer_state.json of transformers, and the earlier study's folders. Then:

    oelm compare outputs/imported/NAME --metric eval_loss --baseline A --at-most 1.05x
    """
    from oelm.experiments.importer import FORMATS, Columns, Placing, imported_runs, read_sources, write_imported

    chosen = None if format is None else one_of("--format", format, FORMATS)
    found = read_sources(sources, format=chosen, columns=Columns.parse(columns))
    read = imported_runs(found, study=name, placing=Placing(runs, arm, seed), metrics=metric or ())
    written, already = write_imported(read, root, replace=replace)
    _print_arms(read)
    out.print(
        f"{counted(len(written), 'run')} written to {root / 'imported' / name}, {len(already)} were there already",
        soft_wrap=True,
    )


def _print_arms(runs: list[ImportedRun]) -> None:
    arms: dict[str, list[ImportedRun]] = {}
    for run in runs:
        arms.setdefault(run.arm, []).append(run)
    for arm, own in arms.items():
        seeds = ", ".join(str(run.seed) for run in sorted(own, key=lambda run: run.seed))
        metrics = ", ".join(sorted({metric for run in own for metric in run.curves}))
        out.print(printable(f"{arm}: {own[0].format}, seeds {seeds}; {metrics}"), soft_wrap=True)
