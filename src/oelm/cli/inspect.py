"""`oelm inspect`: what is in a run's model, what is frozen, and what its heads do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oelm.cli.options import Checkpoint, RunFolder
from oelm.cli.shell import TerminalWatch, out, print_table, reported, say
from oelm.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from oelm.method.audit import Audit
    from oelm.models.heads import HeadSummary


@reported
def inspect(
    run: RunFolder,
    heads: Annotated[bool, typer.Option("--heads", help="Also show what each head does, as a table and a picture.")] = False,
    checkpoint: Checkpoint = "best",
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
        raise ConfigError("--heads looks at language models of ours; of a classifier the table above is all there is yet")
    if heads and isinstance(loaded, LoadedRun):
        from oelm.models.heads import summarize_heads
        from oelm.report.charts import head_grid, save_chart
        from oelm.train.score import probe_windows

        with TerminalWatch() as watch:
            windows = probe_windows(loaded, watch=watch)
        summaries = summarize_heads(loaded.model, windows)
        _print_heads(summaries, windows.numel())
        target = _without_kind(picture) if picture else loaded.path / f"heads-step-{loaded.step}"
        try:
            svg, png = save_chart(head_grid([summary.as_dict() for summary in summaries]), target)
            say(f"picture: {svg} and {png.name}")
        except MissingExtraError as problem:
            out.print(f"no picture: {problem}")


def _without_kind(picture: Path) -> Path:
    """Return the name that both kinds of picture have in common, whichever of them was named."""
    return picture.with_suffix("") if picture.suffix.lower() in (".svg", ".png") else picture


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
