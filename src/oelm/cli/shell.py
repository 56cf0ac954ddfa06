"""What every command shares: errors without a traceback, a view of a run, and output whose reader may leave."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import shlex
import shutil
import sys
import time
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, cast

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from oelm.errors import STOPPED, OelmError
from oelm.process import own_rank
from oelm.text import column_bands, duration, shortened

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from oelm.process import StopFlag
    from oelm.train.evaluate import Evaluation
    from oelm.train.run import Result
    from oelm.train.watch import StepReport


Broken = Callable[[str], None]


# Not a BrokenPipeError: rich turns one into its own exit code.
class ReaderLeftError(Exception):
    """Whoever read standard output needs no more of it (`oelm report | head -1`)."""


class Stream(io.TextIOBase):
    """A standard stream, looked up again for each write, whose errors are passed to a listener.

    The first error silences the stream for good: what is written later goes nowhere, and Python's own flush at the end
    does not turn the exit code into another. Without a listener, standard output raises it, and standard error drops it:
    the exit code still says how the command ended.
    """

    def __init__(self, name: Literal["stdout", "stderr"]) -> None:
        super().__init__()
        self._name: Literal["stdout", "stderr"] = name
        self._listener: Broken | None = None

    @contextlib.contextmanager
    def heard_by(self, listener: Broken) -> Iterator[None]:
        """Tell `listener` why the stream broke, instead of raising it, while the block runs."""
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None

    def write(self, text: str) -> int:
        self._try(lambda file: file.write(_encodable(text, file)))
        return len(text)

    def flush(self) -> None:
        self._try(lambda file: file.flush())

    def isatty(self) -> bool:
        return self._file is not None and bool(self._file.isatty())

    def fileno(self) -> int:
        if self._file is None:
            raise io.UnsupportedOperation("fileno")
        return int(self._file.fileno())

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._file, "encoding", None) or "utf-8"

    @property
    def _file(self) -> Any:
        # None where the command was started with this stream closed.
        file = getattr(sys, self._name)
        # A bar on the screen takes the stream's place meanwhile, to print above itself.
        return getattr(file, "rich_proxied_file", file)

    def _try(self, act: Callable[[Any], object]) -> None:
        if (file := self._file) is None:
            return
        try:
            act(file)
        except OSError as problem:
            text = _why(file, problem)
            _silence(file)
            if self._listener is not None:
                self._listener(text)
            elif self._name == "stdout" and isinstance(problem, BrokenPipeError):
                raise ReaderLeftError(text) from None
            elif self._name == "stdout":
                raise OelmError(text) from problem


def _encodable(text: str, file: Any) -> str:
    """Return text as a stream can write it: what its encoding lacks is written as an escape, such as \\u2026."""
    encoding = getattr(file, "encoding", None) or "utf-8"
    try:
        text.encode(encoding, getattr(file, "errors", None) or "strict")
    except UnicodeEncodeError:
        return text.encode(encoding, "backslashreplace").decode(encoding)
    return text


def _why(file: Any, problem: OSError) -> str:
    """Return why a stream cannot be written, with its file and the free bytes of that disk where they can be known."""
    where, room = "standard output", ""
    with contextlib.suppress(OSError, AttributeError):
        facts = os.fstatvfs(file.fileno())
        room = f"; {facts.f_bavail * facts.f_frsize:,} bytes free on that disk"
        path = os.readlink(f"/proc/self/fd/{file.fileno()}")
        # A pipe has no path, and no disk.
        where, room = (f"{where} {path}", room) if path.startswith("/") else (where, "")
    return f"{where} cannot be written ({problem}{room})"


def _silence(file: Any) -> None:
    """Let everything that is written to a stream from here on go nowhere."""
    with contextlib.suppress(OSError):
        target = file.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, target)
        os.close(nowhere)


# No markup, no emoji: paths, names and values of users may hold brackets and colons.
_STDOUT, _STDERR = Stream("stdout"), Stream("stderr")
out = Console(file=cast(IO[str], _STDOUT), markup=False, highlight=False, emoji=False)
err = Console(file=cast(IO[str], _STDERR), stderr=True, markup=False, highlight=False, emoji=False)
_PLAIN_EVERY_S = 10.0
_BAR_EVERY_S = 0.1


def _without_types(params: list[Any]) -> list[Any]:
    """Return parameters, flags without a type in their help: they take no value."""
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


class Command(TyperCommand):
    """A command whose help shows no type for flags."""

    def get_params(self, ctx: Any) -> Any:
        return _without_types(super().get_params(ctx))


class Group(TyperGroup):
    """A group of commands whose help shows no type for flags."""

    def get_params(self, ctx: Any) -> Any:
        return _without_types(super().get_params(ctx))


def reported(command: Callable[..., Any]) -> Callable[..., Any]:
    """Print what a user caused as one paragraph and leave with its exit code; only our own faults show a traceback."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except OelmError as problem:
            print_problem(problem)
            raise typer.Exit(problem.exit_code) from None
        except ReaderLeftError:
            # It has what it wanted.
            raise typer.Exit(0) from None
        except KeyboardInterrupt:
            err.print("stopped at once; nothing that was saved is lost", style="bold yellow")
            raise typer.Exit(STOPPED) from None

    return run


def say(text: str, *, style: str | None = None) -> None:
    """Print text without wrapping it and without terminal control codes."""
    out.print(printable(text), style=style, soft_wrap=True)


def warn(text: str, *, style: str = "bold yellow") -> None:
    """Print text to standard error without wrapping it and without terminal control codes."""
    err.print(printable(text), style=style, soft_wrap=True)


def print_problem(problem: OelmError) -> None:
    """Print why a command ends, as one paragraph."""
    is_stop, text = problem.exit_code == STOPPED, str(problem)
    word = "" if is_stop and text.startswith("stopped") else "stopped: " if is_stop else "error: "
    warn(f"{word}{text}", style="bold yellow" if is_stop else "bold red")


def print_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[str] = (), title: str = "", boxed: bool = False
) -> None:
    """Print a table whose columns are aligned to the right, but for those named in `left`.

    Where it is wider than the terminal, cells break at spaces, long paths are shortened, and what still does not fit follows
    below, next to the first columns again: no word is broken and no column left out.
    """
    from rich.table import Table

    columns = [[name, *cells] for name, *cells in zip(headings, *([*map(printable, row)] for row in rows), strict=True)]
    is_left = [name in left for name in headings]
    keys = max(is_left.index(False) if False in is_left else 1, 1)
    looks: dict[str, Any] = {} if boxed else {"box": None, "pad_edge": False}
    room, gap = (out.width - 4, 3) if boxed else (out.width, 2)
    whole = [number for number, is_text in enumerate(is_left) if not is_text]
    for number, widths in enumerate(column_bands(columns, room, gap=gap, keys=keys, whole=whole)):
        table = Table(title=title if title and not number else None, title_justify="left", title_style="bold yellow", **looks)
        for column, width in widths.items():
            table.add_column(headings[column], justify="left" if is_left[column] else "right", width=width, overflow="fold")
        for cells in zip(*(columns[column][1:] for column in widths), strict=True):
            table.add_row(*map(shortened, cells, widths.values()))
        out.print(*[""] * bool(number), table, sep="\n")


def echo(text: str = "") -> None:
    """Print text as it is, neither wrapped nor styled."""
    _STDOUT.write(text + "\n")
    _STDOUT.flush()


def path_option(help_text: str) -> Any:
    """Return an option that names a path to read and refuses an empty one."""
    return typer.Option(parser=_given_path, metavar="PATH", help=help_text)


def _given_path(text: str) -> Path:
    """Parse a path. An empty one (of an unset variable, say) would be the current folder."""
    if not text:
        raise typer.BadParameter("the path is empty; give a file or a folder, '.' for the current one")
    return Path(text)


def printable(text: str) -> str:
    """Return text without what could drive a terminal or turn its writing round: such characters become a mark."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf") else "\ufffd" for c in text)


@contextlib.contextmanager
def stoppable() -> Iterator[StopFlag]:
    """Yield the flag that stops a command at the next step boundary: SIGINT, SIGTERM and SIGHUP set it, and a broken stdout.

    A run whose output nobody reads any more saves and leaves with the exit code of a stop, as after a signal.
    """
    from oelm.process import StopFlag

    with StopFlag() as stop:

        def on_broken(why: str) -> None:
            stop.request(why)
            warn(f"{why}; saving and stopping at the next step")

        with _STDOUT.heard_by(on_broken):
            yield stop


@contextlib.contextmanager
def shown_warnings() -> Iterator[None]:
    """Let warnings of the library reach the terminal while a command runs."""
    handler = logging.StreamHandler(_STDERR)
    # Errors end the command and are printed by `reported`, once.
    handler.addFilter(lambda record: record.levelno == logging.WARNING and not err.quiet)
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    logging.getLogger("oelm").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("oelm").removeHandler(handler)


def roughly(seconds: float | None) -> str:
    """Return seconds in the unit that an estimate deserves."""
    if seconds is None:
        return "unknown"
    for unit, size in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size or (unit == "min" and seconds >= size):
            return f"{seconds / size:.0f} {unit}" if seconds >= 10 * size else f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def print_result(result: Result, headline: Callable[[dict[str, Any]], str]) -> None:
    """Say how a run ended, with what `headline` makes of its figures; leave with the exit code of a stop where it was one."""
    if result.status == "stopped":
        out.print(f"stopped at step {result.step}, saved; repeat the same command to continue")
        raise typer.Exit(STOPPED)
    assert result.figures is not None
    word = "already done" if result.status == "found done" else "done"
    pace = f"{(result.figures['step_s'].get('median') or 0.0) * 1000:.0f} ms a step"
    total = duration(result.figures["wall_s"]["total"])
    say(f"{word}: {headline(result.figures)}, {pace}, {total} in all")


def print_next(folder: Path, commands: Sequence[str]) -> None:
    """Print where something was written, and commands to paste, with the path by which this one was started."""
    say(f"folder: {folder}")
    if commands:
        say("\n".join(["next:", *(f"  {program()}{command.removeprefix('oelm')}" for command in commands)]))


def program() -> str:
    """Return what to type for `oelm`: a path where the shell would not find this one by its name."""
    started = Path(sys.argv[0])
    if started.parts[-2:] == ("oelm", "__main__.py"):
        return f"{shlex.quote(sys.executable)} -m oelm"
    found = shutil.which("oelm")
    is_by_path = started.name == "oelm" and started.exists() and (found is None or not started.samefile(found))
    return shlex.quote(str(started)) if is_by_path else "oelm"


def quiet_unless_first() -> None:
    """Of the processes that torchrun started, let only the first speak from here on."""
    if own_rank() > 0:
        out.quiet = err.quiet = True


def same_command(context: typer.Context, *, without: Sequence[str] = ()) -> list[str]:
    """Return the present command's arguments as they were given, but for the options named."""
    options: list[str] = []
    arguments: list[str] = []
    for parameter in context.command.params:
        value = context.params.get(str(parameter.name))
        if parameter.name in without or value is None or value == parameter.get_default(context):
            continue
        if parameter.param_type_name == "argument":
            arguments += [str(item) for item in value]
        elif isinstance(value, bool):
            options.append(parameter.opts[0])
        else:
            for item in value if isinstance(value, list | tuple) else [value]:
                # One word: a value may begin with a dash.
                options.append(f"{parameter.opts[0]}={item}")
    return [str(context.command.name), *options, "--", *arguments]


class TerminalWatch:
    """A `Watch` that shows a progress bar on a terminal and plain lines elsewhere."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._last_line = time.monotonic()
        self._preparing = ""
        self._began = (0.0, 0, 0)

    def __enter__(self) -> TerminalWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar off the screen; what was printed above it stays."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def on_remark(self, text: str) -> None:
        say(text)

    def on_preparing(self, what: str, done: int, total: int, tokens: int) -> None:
        now = time.monotonic()
        if what != self._preparing:
            self._preparing, self._began = what, (now, done, tokens)
            self._last_line = now
            if not out.is_terminal:
                self.on_remark(f"{what} ...")
        is_last = total > 0 and done >= total
        if now - self._last_line < (_BAR_EVERY_S if out.is_terminal else _PLAIN_EVERY_S) and not is_last:
            return
        self._last_line = now
        text = self._preparing_text(now, done, total, tokens)
        if not out.is_terminal:
            self.on_remark(f"{what}: {text}")
            return
        self._show(what, done, max(total, done, 1), text, counted=False)
        if is_last:
            self.close()

    def _preparing_text(self, now: float, done: int, total: int, tokens: int) -> str:
        began, done_then, tokens_then = self._began
        seconds = max(now - began, 1e-9)
        text = f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB" if total > 1 else f"{done / 1e6:,.1f} MB"
        if tokens:
            text += f"  {tokens:,} tokens"
        if tokens > tokens_then:
            text += f"  {(tokens - tokens_then) / seconds:,.0f} tokens/s"
        if total > 1 and done > done_then:
            text += f"  ETA {duration((total - done) * seconds / (done - done_then))}"
        return text

    def on_step(self, report: StepReport) -> None:
        text = f"loss {report.loss:.3f}  lr {report.lr:.1e}  {report.tokens_per_s:,.0f} tokens/s  ETA {duration(report.eta_s)}"
        if out.is_terminal:
            self._show("training", report.step, report.steps, text)
            if report.step == report.steps:
                self.close()
        elif time.monotonic() - self._last_line >= _PLAIN_EVERY_S or report.step == report.steps:
            self._last_line = time.monotonic()
            self.on_remark(f"step {report.step}/{report.steps}  {text}")

    def on_validating(self, done: int, total: int) -> None:
        if out.is_terminal:
            self._show("validating", done, total, f"{100 * done // total}%")
            if done == total:
                self.close()

    def on_evaluation(self, step: int, evaluation: Evaluation, *, is_best: bool) -> None:
        mark = "  (best so far)" if is_best else ""
        self.on_remark(f"step {step}: {evaluation.headline()}{mark}")

    def _show(self, what: str, done: int, total: int, text: str, *, counted: bool = True) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        if self._bar is None or self._task is None:
            count = (MofNCompleteColumn(),) if counted else ()
            columns = (TextColumn("{task.description}"), BarColumn(), *count, TextColumn("{task.fields[text]}"))
            self._bar = Progress(*columns, console=out, transient=True)
            self._task = self._bar.add_task(what, total=total, text=text)
            self._bar.start()
        self._bar.update(self._task, description=what, completed=done, total=total, text=text)
