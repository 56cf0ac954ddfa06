"""`oelm logs`: what a run wrote of itself, and what it goes on to write."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oelm.cli.shell import echo, err, printable, reported
from oelm.cli.status import find_runs, load_known, no_answer
from oelm.errors import RunDirError
from oelm.runs.layout import CONFIG, CONSOLE, LOG, STATUS

if TYPE_CHECKING:
    from oelm.runs.find import RunView

_POLL_S = 0.5
_BLOCK_BYTES = 1 << 16


@reported
def logs(
    target: Annotated[str, typer.Argument(metavar="ID_OR_PATH", help="An experiment, or a run's folder.")],
    seed: Annotated[int | None, typer.Option(min=0, help="Only the run of this seed.")] = None,
    budget: Annotated[str | None, typer.Option(help="Only runs of this budget.")] = None,
    variant: Annotated[str | None, typer.Option(help="Only runs of this variant.")] = None,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="How many of the last lines.")] = 40,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with what comes, until the run ends or Ctrl-C.")] = False,
    out_dir: Annotated[Path, typer.Option("--out", help="Where the runs are.")] = Path("outputs"),
) -> None:
    """Print the last lines of a run's log; of several runs, of the one that was alive last."""
    view = _chosen(target, out_dir, seed=seed, budget=budget, variant=variant)
    try:
        path = _log_of(view)
        end = _print_tail(path, lines, hold_back=follow) if path is not None else 0
        if path is None and not follow:
            missing = "its log was not kept here" if view.state == "done" else f"no log yet; the run is {view.state}"
            err.print(f"{view.path}: {missing}", soft_wrap=True)
        if follow:
            _follow(view, path, end)
    except KeyboardInterrupt:
        # How one leaves a log, and no failure.
        return


def _chosen(target: str, root: Path, *, seed: int | None, budget: str | None, variant: str | None) -> RunView:
    from oelm.runs.find import look_at

    folder = Path(target)
    if any((folder / name).is_file() for name in (STATUS, CONFIG, LOG, CONSOLE)):
        return look_at(folder)
    _, groups = load_known()
    runs = find_runs(root, [target], budget=budget, groups=groups)
    matching = [view for view in runs if (seed is None or view.seed == seed) and (variant is None or view.variant == variant)]
    if not matching:
        there = "; there are: " + ", ".join(view.name for view in runs[:5]) + (", ..." if len(runs) > 5 else "")
        raise RunDirError(f"no run of {target} as asked for{there}" if runs else no_answer(root, [target], budget))
    newest = max(matching, key=_last_alive)
    others = f"; {len(matching) - 1} more match (--seed, --budget, --variant choose)" if len(matching) > 1 else ""
    err.print(f"{newest.path}, {newest.state}{others}", style="dim", soft_wrap=True)
    return newest


def _last_alive(view: RunView) -> tuple[bool, bool, float]:
    from oelm.runs.find import ALIVE, silent_s

    # A queued run has not lived yet, whenever it was planned.
    return view.state in ALIVE, view.state != "queued", -silent_s(view.status, now=time.time())


def _log_of(view: RunView) -> Path | None:
    """Return the file that tells most: the run's own log, or its process's output where it failed before it began."""
    own, console = view.path / LOG, view.path / CONSOLE
    never_began = view.state in ("failed", "dead") and (view.status is None or view.status.step == 0)
    order = (console, own) if never_began else (own, console)
    return next((path for path in order if _size(path) > 0), None)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0


def _print_tail(path: Path, lines: int, *, hold_back: bool) -> int:
    """Print the last lines of a file; return how far. Half a line at the end may be held back: its rest is yet to come."""
    with path.open("rb") as file:
        position = file.seek(0, os.SEEK_END)
        end, content = position, b""
        # From the end, in blocks: a log may be far larger than what is asked of it.
        while position > 0 and content.count(b"\n") <= lines:
            block = min(_BLOCK_BYTES, position)
            position = file.seek(position - block)
            content = file.read(block) + content
    shown = content[: content.rfind(b"\n") + 1] if hold_back else content
    _print_lines(shown.splitlines()[-lines:] if lines else [])
    return end - len(content) + len(shown)


def _print_lines(lines: Sequence[bytes]) -> None:
    if lines:
        echo("\n".join(printable(line.decode("utf-8", errors="replace")) for line in lines))


def _follow(view: RunView, path: Path | None, position: int) -> None:
    from oelm.runs.find import ALIVE, look

    while True:
        # Looked at before the file is read: what a run wrote before it ended is printed before this ends.
        view = look(view)
        now = _log_of(view) or path
        path, position = now, position if now == path else 0
        is_over = view.state not in (*ALIVE, "queued")
        if path is not None:
            position = _print_new(path, position, hold_back=not is_over)
        if is_over:
            err.print(f"the run is {view.state}", style="dim")
            return
        time.sleep(_POLL_S)


def _print_new(path: Path, position: int, *, hold_back: bool) -> int:
    """Print the lines that were added since; begin again where the file was replaced by a shorter one."""
    size = _size(path)
    if size == position:
        return position
    with path.open("rb") as file:
        file.seek(position if size > position else 0)
        content = file.read()
        start = file.tell() - len(content)
    shown = content[: content.rfind(b"\n") + 1] if hold_back else content
    _print_lines(shown.splitlines())
    return start + len(shown)
