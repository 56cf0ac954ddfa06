"""Notifications: call the user's command or webhook when a run fails, a queue ends or a verdict is decided."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import shutil
import signal
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from oelm.errors import STOPPED, ConfigError
from oelm.experiments.catalog import read_yaml
from oelm.experiments.portable import this_machine
from oelm.experiments.queue import Job, RunnerWatch
from oelm.files import Strict

log = logging.getLogger(__name__)

Event = Literal["failed", "ended", "verdict"]
_LONGEST_TEXT = 500
# Of a queue that fails altogether, the first of so many are enough.
_MOST_WAITING = 100


class NotifyConfig(Strict):
    """The file of --notify, described in docs/experiments.md. `{text}`, `{event}` and `{name}` stand for what happened."""

    events: tuple[Event, ...] = ("failed", "ended", "verdict")
    command: tuple[str, ...] = ()
    webhook: str = ""
    # The name of an environment variable that holds the webhook: the file then has no secret in it.
    webhook_env: str = ""
    headers: dict[str, str] = Field(default_factory=dict)
    body: dict[str, Any] = Field(default_factory=lambda: {"text": "{text}"})
    timeout_s: float = Field(default=10.0, gt=0, le=60)

    @model_validator(mode="after")
    def _somewhere(self) -> Self:
        if not self.command and not self.address:
            raise ValueError("needs a command (a list of words), a webhook, or a webhook_env that is set in the environment")
        if self.command and shutil.which(self.command[0]) is None:
            raise ValueError(f"command: no program {self.command[0]!r} on the PATH")
        # Not named: an address may hold a secret.
        if self.address and urllib.parse.urlsplit(self.address).scheme not in ("http", "https"):
            raise ValueError("the webhook must begin with https:// or http://")
        return self

    @property
    def address(self) -> str:
        return self.webhook or os.environ.get(self.webhook_env, "")


def read_notify(path: Path) -> NotifyConfig:
    """Read a file of --notify; ConfigError names the file and the line, never a value."""
    file = read_yaml(path)
    data = {key: tuple(value) if isinstance(value, list) else value for key, value in file.data.items()}
    if "command" in data and not isinstance(data["command"], tuple):
        raise ConfigError(
            f"--notify {file.where('command')}: must be a list of words, such as [mail, -s, oelm, me@example.org]"
        )
    try:
        return NotifyConfig.model_validate(data)
    except ValidationError as problem:
        error = problem.errors()[0]
        key = str(error["loc"][0]) if error["loc"] else ""
        where = f"{file.where(key)}: {key}" if key in data else str(path)
        if error["type"] == "extra_forbidden":
            raise ConfigError(f"--notify {where}: unknown key; keys are: {', '.join(NotifyConfig.model_fields)}") from None
        raise ConfigError(f"--notify {where}: {str(error['msg']).removeprefix('Value error, ')}") from None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follow no redirect: it would carry what was meant for one host to another."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class Notifier:
    """Sends notifications from a separate thread: nothing waits for it, and its failures are warnings."""

    def __init__(self, config: NotifyConfig) -> None:
        self._config = config
        self._waiting: queue.Queue[tuple[Event, str, str] | None] = queue.Queue(_MOST_WAITING)
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._warned: set[str] = set()
        self._thread = threading.Thread(target=self._send_all, daemon=True)
        self._thread.start()

    @property
    def events(self) -> tuple[Event, ...]:
        return self._config.events

    def send(self, event: Event, name: str, text: str) -> None:
        """Send one event, if the user asked for its kind; returns at once."""
        if event in self._config.events:
            told = " ".join(this_machine().stripped(f"oelm: {text}").split())[:_LONGEST_TEXT]
            with contextlib.suppress(queue.Full):
                self._waiting.put_nowait((event, name, told))

    def close(self) -> None:
        """Wait until all is sent, but for no longer than two of them may take."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(2 * self._config.timeout_s + 1)
        if self._thread.is_alive():
            log.warning("--notify: some notifications were not sent in time")

    def _send_all(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            event, name, text = waiting
            values = {"{event}": event, "{name}": name, "{text}": text}
            for send in [self._run] * bool(self._config.command) + [self._post] * bool(self._config.address):
                try:
                    send(values)
                except (OSError, ValueError, subprocess.SubprocessError) as problem:
                    self._warn(_reason(problem))

    def _run(self, values: dict[str, str]) -> None:
        # Words, never a shell: nothing in a message can become a command.
        words = [_filled(word, values) for word in self._config.command]
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True)
        try:
            process.communicate(f"{values['{text}']}\n".encode(), timeout=self._config.timeout_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        if process.returncode:
            self._warn(f"the command ended with code {process.returncode}")

    def _post(self, values: dict[str, str]) -> None:
        content = json.dumps(_filled(self._config.body, values)).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "oelm", **self._config.headers}
        request = urllib.request.Request(self._config.address, data=content, headers=headers, method="POST")
        with self._opener.open(request, timeout=self._config.timeout_s) as answer:
            answer.read(1024)

    def _warn(self, reason: str) -> None:
        if reason not in self._warned:
            log.warning("--notify: not sent: %s; runs continue", reason)
        self._warned.add(reason)


def _reason(problem: Exception) -> str:
    """Return why a notification was not sent, without the address, the headers or the words of the command."""
    if isinstance(problem, urllib.error.HTTPError):
        problem.close()
        return f"the webhook answered {problem.code}"
    if isinstance(problem, subprocess.TimeoutExpired | TimeoutError):
        return "no answer in time"
    if isinstance(problem, urllib.error.URLError):
        return f"the webhook cannot be reached ({type(problem.reason).__name__})"
    return type(problem).__name__


def _filled(value: Any, values: dict[str, str]) -> Any:
    """Return text, or JSON with texts in it, with its places filled; plain replacement, no format language."""
    if isinstance(value, str):
        for place, text in values.items():
            value = value.replace(place, text)
        return value
    if isinstance(value, dict):
        return {key: _filled(inner, values) for key, inner in value.items()}
    return [_filled(inner, values) for inner in value] if isinstance(value, list | tuple) else value


@contextlib.contextmanager
def notifying(path: Path | None) -> Iterator[Notifier | None]:
    """Yield a notifier by the user's file, None without one; what it still has to send is sent when the block ends."""
    if path is None:
        yield None
        return
    notifier = Notifier(read_notify(path))
    try:
        yield notifier
    finally:
        notifier.close()


@contextlib.contextmanager
def notifying_of(run: Path, path: Path | None) -> Iterator[None]:
    """Notify of the end of one run, however it ends."""
    with notifying(path) as notifier:
        try:
            yield
        except Exception as problem:
            if notifier is not None:
                is_stop = getattr(problem, "exit_code", None) == STOPPED
                told = "stopped; repeat the command to continue" if is_stop else f"failed: {problem or type(problem).__name__}"
                notifier.send("ended" if is_stop else "failed", str(run), f"{run} {told}")
            raise
        if notifier is not None:
            notifier.send("ended", str(run), f"{run} is done")


class NotifyingWatch:
    """A `RunnerWatch` that passes everything on, and notifies of failures, of the end and of what `decided` returns."""

    def __init__(self, inner: RunnerWatch, notifier: Notifier, decided: Callable[[], Iterable[tuple[str, str]]]) -> None:
        self._inner, self._notifier, self._decided = inner, notifier, decided

    def on_start(self, job: Job) -> None:
        self._inner.on_start(job)

    def on_tick(self, jobs: Sequence[Job]) -> None:
        self._inner.on_tick(jobs)

    def on_end(self, job: Job) -> None:
        self._inner.on_end(job)
        notify_failed(self._notifier, job)
        if job.state == "done" and "verdict" in self._notifier.events:
            for name, text in self._decided():
                self._notifier.send("verdict", name, text)


def notify_failed(notifier: Notifier, job: Job) -> None:
    """Notify of a job that failed or was killed."""
    if job.state in ("failed", "killed"):
        notifier.send("failed", job.run.name, f"{job.run.name} {job.state}: {job.message or 'no message'}")


def notify_ended(notifier: Notifier, jobs: Sequence[Job]) -> None:
    """Notify of a queue's end: how many of its runs ended how."""
    counts = Counter("done" if job.state == "found done" else job.state for job in jobs)
    notifier.send("ended", "queue", f"the queue has ended: {', '.join(f'{count} {state}' for state, count in counts.items())}")
