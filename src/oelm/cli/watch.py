"""`oelm watch`: one page about runs under way, kept up to date in a file or by a server for one reader."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oelm.cli.options import CatalogFile, Notify, grouped
from oelm.cli.report import Asked
from oelm.cli.shell import err, out, printable, reported, shown_warnings, stoppable
from oelm.errors import ConfigError, OelmError

if TYPE_CHECKING:
    from oelm.experiments.notify import Notifier
    from oelm.report.foreign import Question
    from oelm.report.live import LiveRuns, Moment
    from oelm.report.serve import PageServer
    from oelm.report.words import Words

PAGE = Path("watch.html")
# Updates take at most this share of one core, however many runs there are. Threads of a step wait for the slowest, so a run on
# all cores loses more than that: 1.25 times as much by benchmarks/watching.py, 1.8 times by the upper end of its interval.
SHARE = 0.005
_POLL_S = 0.2


@reported
@grouped
def watch(
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID...", help="Experiments or groups; all by default.")] = None,
    root: Annotated[Path, typer.Option("--out", help="Where the runs are.")] = Path("outputs"),
    budget: Annotated[str | None, typer.Option(help="Only runs of this budget.")] = None,
    html: Annotated[Path | None, typer.Option(help=f"The page; {PAGE} by default, unless it is served.")] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Serve the page on 127.0.0.1, under a secret address.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port for --serve; 0 takes a free one.")] = 0,
    socket: Annotated[Path | None, typer.Option(help="Serve on a Unix socket that only you can open, for ssh -L.")] = None,
    every: Annotated[float, typer.Option(min=1.0, max=3600.0, help="Seconds between updates; longer for many runs.")] = 5.0,
    until_done: Annotated[bool, typer.Option("--until-done", help="End once nothing runs or waits.")] = False,
    lang: Annotated[str, typer.Option(help="en or zh.")] = "en",
    notify: Notify = None,
    catalog: CatalogFile = None,
    *,
    asked: Asked,
) -> None:
    """Keep one page about runs up to date: queue, learning curves, preliminary verdicts, failures, machine load.

    Imported runs are on it as well; --metric, --baseline and --at-most give them preliminary verdicts.
    """
    if port and not serve:
        raise ConfigError(f"--port {port}: only --serve has a port; add --serve, or leave --port out")
    if serve and socket is not None:
        raise ConfigError("--serve and --socket: the page is served in one place; give one of them")
    with stoppable() as stop, shown_warnings(), contextlib.ExitStack() as stack:
        from oelm.experiments.notify import notifying
        from oelm.report.serve import serving
        from oelm.report.words import Words

        words = Words(lang)
        question = asked.question()
        runs = _runs(ids or [], root, budget, catalog, question)
        if hasattr(os, "nice"):
            # Runs come first: on a busy machine the page waits for them.
            os.nice(10)
        server = stack.enter_context(serving(port=port, path=socket)) if serve or socket is not None else None
        file = html or (PAGE if server is None else None)
        page = _Page(runs, words, file, server, every_s=every, notifier=stack.enter_context(notifying(notify)))
        page.update()
        # Whoever follows the address finds a page.
        _announce(file, server, socket)
        while not stop.requested() and not (until_done and page.is_over):
            _wait(page.every_s, stop.requested)
            page.try_update()
        page.close(stop.requested)


def _runs(ids: list[str], root: Path, budget: str | None, catalog: Path | None, question: Question | None) -> LiveRuns:
    from oelm.experiments.catalog import load_catalog
    from oelm.report.live import LiveRuns
    from oelm.runs.find import choose

    if root.exists() and not root.is_dir():
        raise ConfigError(f"--out {root}: is a file; give the folder that holds the runs")
    known = load_catalog(catalog)
    only: set[str] = set()
    for name in ids:
        try:
            only |= set(choose(root, [name], groups=known.groups()))
        except ConfigError:
            # Before its first run an experiment has no folder yet, and may be watched all the same.
            only |= {experiment.id for experiment in known.select([name])}
    only |= {baseline for name, baseline in known.baselines().items() if name in only}
    options = () if catalog is None else ("--catalog", str(catalog))
    return LiveRuns(root, known, only=only, budget=budget, options=options, question=question)


def _announce(file: Path | None, server: PageServer | None, path: Path | None) -> None:
    if file is not None:
        out.print(f"{printable(str(file))} is kept up to date; Ctrl-C ends", soft_wrap=True)
    if server is not None and path is None:
        out.print(f"{server.address} shows the page; Ctrl-C ends", soft_wrap=True)
    elif server is not None and path is not None:
        out.print(f"on your machine: ssh -N -L 8000:{printable(str(path.absolute()))} HOST", soft_wrap=True)
        out.print(f"then open http://localhost:8000/{server.token}/; Ctrl-C ends", soft_wrap=True)


def _wait(seconds: float, is_stopped: Callable[[], bool]) -> None:
    until = time.monotonic() + seconds
    while not is_stopped() and (left := until - time.monotonic()) > 0:
        time.sleep(min(_POLL_S, left))


class _Page:
    """The page wherever it is shown. `every_s` is the time to the next update, longer where one takes long."""

    def __init__(
        self,
        runs: LiveRuns,
        words: Words,
        file: Path | None,
        server: PageServer | None,
        *,
        every_s: float,
        notifier: Notifier | None,
    ) -> None:
        self._runs, self._words, self._file, self._server, self._notifier = runs, words, file, server, notifier
        self._least_s = self.every_s = every_s
        self._moment: Moment | None = None
        self._problem = ""

    @property
    def is_over(self) -> bool:
        return self._moment is not None and self._moment.is_over

    def update(self) -> None:
        """Look at the runs, show what they are doing, and notify of what is new."""
        from oelm.report.live import news

        began = time.process_time()
        before, self._moment = self._moment, self._runs.look()
        if self._notifier is not None and before is not None:
            for event in news(before, self._moment):
                self._notifier.send(*event)
        self._show(self._moment)
        # The first update reads every finished run, and later ones do not.
        if before is not None:
            self.every_s = max(self._least_s, round((time.process_time() - began) / SHARE, 1))

    def try_update(self) -> None:
        """Update the page; what goes wrong is reported once, and tried again the next time."""
        try:
            self.update()
            self._problem = ""
        except OelmError as problem:
            if str(problem) != self._problem:
                err.print(f"warning: the page was not updated: {printable(str(problem))}", style="yellow", soft_wrap=True)
            self._problem = str(problem)

    def close(self, is_stopped: Callable[[], bool]) -> None:
        """Show that the page is no longer updated, and leave a reader of the server time to see it."""
        assert self._moment is not None
        self._show(self._moment, is_over=True)
        if self._server is not None:
            _wait(self.every_s + 1.0, is_stopped)

    def _show(self, moment: Moment, *, is_over: bool = False) -> None:
        from oelm.files import write_text
        from oelm.report.html import Live, render_live
        from oelm.report.live import live_document
        from oelm.report.serve import Served

        document = live_document(moment, self._words)
        times = (self.every_s, round(time.time(), 1))
        if self._file is not None:
            page = render_live(document, Live("over" if is_over else "file", *times))
            write_text(self._file, page.html, durable=False)
        if self._server is not None:
            page = render_live(document, Live("over" if is_over else "server", *times))
            self._server.served = Served(page, document.subtitle, self.every_s, time.monotonic(), is_over=is_over)
