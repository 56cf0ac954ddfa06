"""How a queue of runs looks while it works: bars on a terminal, a line for each event elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.live import Live
from rich.text import Text

from oelm.cli.shell import out, say
from oelm.text import duration, figure_text

if TYPE_CHECKING:
    from oelm.experiments.queue import Job
    from oelm.runs.status import Status

_EVERY_S = 1.0
_PLAIN_EVERY_S = 30.0
_BAR = 24
_UNDER_WAY = ("running", "elsewhere")


class QueueView:
    """A `RunnerWatch` for people. `expected` is how long each run will take, by its path, where that is known."""

    def __init__(self, total: int, slots: int, expected: dict[str, float]) -> None:
        self._total, self._slots, self._expected = total, max(1, slots), expected
        self._live: Live | None = None
        self._shown = time.monotonic() - _EVERY_S
        self._ended = 0
        self._lengths: list[float] = []

    def __enter__(self) -> QueueView:
        if out.is_terminal:
            self._live = Live(console=out, transient=True, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def on_start(self, job: Job) -> None:
        if not out.is_terminal:
            say(f"started {job.run.name}{f' on {job.slot.name}' if job.slot else ''}")

    def on_end(self, job: Job) -> None:
        self._ended += 1
        if job.state == "done":
            from oelm.runs.records import recorded_figure

            # Earlier sessions included.
            self._lengths.append(max(job.seconds, recorded_figure(job.run.path, "wall_s", "total") or 0.0))
        if job.state == "found done" and not job.message:
            return
        self._line(f"[{self._ended}/{self._total}] {job.run.name}: {_outcome(job)}", failed=job.state in ("failed", "killed"))

    def _line(self, text: str, *, failed: bool) -> None:
        say(text, style="bold red" if failed else None)

    def on_tick(self, jobs: Sequence[Job]) -> None:
        now = time.monotonic()
        if now - self._shown < (_EVERY_S if self._live is not None else _PLAIN_EVERY_S):
            return
        self._shown = now
        lines = [_progress(job) for job in jobs if job.state in _UNDER_WAY]
        states = Counter(job.state for job in jobs)
        rest = [f"{states[state]} {state}" for state in ("failed", "killed", "stopped") if states[state]]
        done = f"{states['done'] + states['found done']} of {self._total} runs done"
        counts = ", ".join([done, *rest, f"{len(lines)} running", f"ETA {duration(self.eta_s(jobs))}"])
        if self._live is not None:
            self._live.update(Text("\n".join([*lines, counts]), no_wrap=True, overflow="ellipsis"), refresh=True)
        else:
            say("; ".join([counts, *lines]))

    def eta_s(self, jobs: Sequence[Job]) -> float | None:
        """Return the seconds that are left, by what runs say of themselves and by how long earlier ones took."""
        from oelm.experiments.slots import queue_seconds

        typical = sum(self._lengths) / len(self._lengths) if self._lengths else None
        # Those under way first: each has a slot.
        open_ = sorted((job for job in jobs if not job.has_ended), key=lambda job: job.state not in _UNDER_WAY)
        left = []
        for job in open_:
            own = _status_eta(job)
            length = own if own is not None else typical or self._expected.get(str(job.run.path))
            if length is None:
                return None
            left.append(length)
        # As many as there are now, for others may have the rest.
        return queue_seconds(left, sum(job.state in _UNDER_WAY for job in open_) or self._slots)


def _status_eta(job: Job) -> float | None:
    from oelm.runs.status import read_status

    status = read_status(job.run.path) if job.state in _UNDER_WAY else None
    return status.eta_s if status is not None and status.status == "running" else None


def _progress(job: Job) -> str:
    from oelm.runs.status import read_status

    status = read_status(job.run.path)
    if status is None or status.status != "running":
        doing = "ending" if status is not None and status.status == "done" else "starting"
        return f"{job.run.name}: {doing if job.state == 'running' else 'in another process'}"
    filled = round(_BAR * status.step / max(1, status.steps))
    loss = "" if status.loss is None else f"  loss {status.loss:.3f}"
    best = "" if status.best is None else f"  best {figure_text(status.metric, status.best)}"
    bar = "#" * filled + "-" * (_BAR - filled)
    where = "" if job.state == "running" else " (another process)"
    return f"{job.run.name}{where} {bar} {status.step}/{status.steps}{loss}{best}  ETA {duration(status.eta_s)}"


def _outcome(job: Job) -> str:
    from oelm.runs.status import read_status

    status = read_status(job.run.path)
    if job.state == "done" and status is not None:
        return f"{_best(status)}, {duration(job.seconds)}"
    if job.state == "found done" and status is not None:
        return f"{_best(status)} ({job.message})"
    if job.state == "failed":
        return f"failed: {job.message}"
    if job.state == "killed":
        return f"{job.message}; repeat the command to resume from its last checkpoint"
    if job.state == "left":
        return "still running in another process (`oelm stop` ends it)"
    return f"stopped{f' at step {status.step}' if status else ''} ({job.message})" if job.message else "stopped"


def _best(status: Status) -> str:
    return f"best {'PPL' if status.metric == 'ppl' else 'accuracy'} {figure_text(status.metric, status.best)}"
