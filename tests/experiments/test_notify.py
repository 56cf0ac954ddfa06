"""Notifications: the user's command or webhook hears of what happened; its failures stop nothing, its secrets stay secret."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from oelm.errors import STOPPED, ConfigError, OelmError
from oelm.experiments.notify import Notifier, NotifyConfig, NotifyingWatch, notify_ended, notifying, notifying_of, read_notify
from oelm.experiments.plan import plan_runs
from oelm.experiments.queue import Job
from tests.experiments.planned import PAIR, catalog_of

SECRET = "hooks-secret-4711"
# Writes its arguments and what it is given to read, as JSON, one line each time.
PROGRAM = "import json, sys; open(sys.argv[1], 'a').write(json.dumps([sys.argv[2:], sys.stdin.read()]) + '\\n')"


class Hook(HTTPServer):
    """A webhook on this machine; `code` is its answer, `received` what it was sent."""

    code = 200
    delay_s = 0.0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.received: list[tuple[str, dict[str, str], Any]] = []
        self.may_answer = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append((self.path, dict(self.headers.items()), json.loads(content)))
        self.server.may_answer.wait(self.server.delay_s)
        self.send_response(self.server.code)
        self.send_header("Location", f"http://127.0.0.1:{self.server.server_port}/elsewhere")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hook() -> Iterator[Hook]:
    with Hook() as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


def config_file(folder: Path, **settings: Any) -> Path:
    path = folder / "notify.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def written(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def command(folder: Path) -> list[str]:
    return [sys.executable, "-c", PROGRAM, str(folder / "told"), "{event}", "{name}", "{text}"]


def test_a_command_gets_words_and_the_text_to_read_and_no_shell_sees_them(tmp_path: Path) -> None:
    hostile = "it failed; $(touch pwned) `touch pwned` | & > x \"'"
    with notifying(config_file(tmp_path, command=command(tmp_path))) as notifier:
        assert notifier is not None
        notifier.send("failed", "GPT-02", hostile)
    text = f"oelm: {hostile}"
    assert written(tmp_path / "told") == [[["failed", "GPT-02", text], f"{text}\n"]]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["notify.yaml", "told"]


def test_a_webhook_gets_json_in_the_users_own_form(tmp_path: Path, hook: Hook) -> None:
    body = {"topic": "runs", "message": "{text}", "tags": ["{event}"], "priority": 4}
    address = f"http://127.0.0.1:{hook.server_port}/{SECRET}"
    file = config_file(tmp_path, webhook=address, headers={"Authorization": "Bearer x"}, body=body)
    with notifying(file) as notifier:
        assert notifier is not None
        notifier.send("ended", "queue", "all done")
    ((path, headers, sent),) = hook.received
    assert path == f"/{SECRET}" and headers["Authorization"] == "Bearer x" and headers["Content-Type"] == "application/json"
    assert sent == {"topic": "runs", "message": "oelm: all done", "tags": ["ended"], "priority": 4}


def test_the_default_body_is_what_slack_takes(tmp_path: Path, hook: Hook) -> None:
    with notifying(config_file(tmp_path, webhook=f"http://127.0.0.1:{hook.server_port}/")) as notifier:
        assert notifier is not None
        notifier.send("failed", "x", "x failed")
    assert hook.received[0][2] == {"text": "oelm: x failed"}


def test_an_address_may_come_from_the_environment(tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    file = config_file(tmp_path, webhook_env="MY_HOOK")
    with pytest.raises(ConfigError, match="set in the environment"):
        read_notify(file)
    monkeypatch.setenv("MY_HOOK", f"http://127.0.0.1:{hook.server_port}/{SECRET}")
    with notifying(file) as notifier:
        assert notifier is not None
        notifier.send("failed", "x", "x failed")
    assert len(hook.received) == 1


def test_only_the_events_that_are_wanted_are_sent(tmp_path: Path) -> None:
    with notifying(config_file(tmp_path, command=command(tmp_path), events=["verdict"])) as notifier:
        assert notifier is not None
        notifier.send("failed", "x", "no")
        notifier.send("verdict", "x", "yes")
    assert [row[0][0] for row in written(tmp_path / "told")] == ["verdict"]


@pytest.mark.parametrize("code", [301, 403, 500])
def test_an_answer_that_is_no_success_is_a_warning_without_the_address(
    tmp_path: Path, hook: Hook, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    hook.code = code
    with notifying(config_file(tmp_path, webhook=f"http://127.0.0.1:{hook.server_port}/{SECRET}")) as notifier:
        assert notifier is not None
        notifier.send("failed", "x", "one")
        notifier.send("failed", "y", "two")
    assert len(hook.received) == 2, "a redirect is not followed"
    assert [record.getMessage() for record in caplog.records] == [
        f"--notify: not sent: the webhook answered {code}; runs continue"
    ]
    assert SECRET not in caplog.text


def test_nobody_waits_for_a_webhook_that_hangs(tmp_path: Path, hook: Hook, caplog: pytest.LogCaptureFixture) -> None:
    hook.delay_s = 3.0
    notifier = Notifier(NotifyConfig(webhook=f"http://127.0.0.1:{hook.server_port}/{SECRET}", timeout_s=0.2))
    began = time.monotonic()
    notifier.send("failed", "x", "x failed")
    assert time.monotonic() - began < 0.2
    notifier.close()
    assert time.monotonic() - began < 2.5
    hook.may_answer.set()
    assert "no answer in time" in caplog.text and SECRET not in caplog.text


def test_a_webhook_that_is_not_there_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as closed:
        port = closed.server_port
    notifier = Notifier(NotifyConfig(webhook=f"http://127.0.0.1:{port}/{SECRET}"))
    notifier.send("failed", "x", "x failed")
    notifier.close()
    assert "cannot be reached" in caplog.text and SECRET not in caplog.text


def test_a_command_that_hangs_is_ended_and_one_that_fails_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    for program, timeout_s, message in (
        ("import time; time.sleep(60)", 0.3, "no answer in time"),
        ("raise SystemExit(3)", 20.0, "ended with code 3"),
    ):
        notifier = Notifier(NotifyConfig(command=(sys.executable, "-c", program, SECRET), timeout_s=timeout_s))
        notifier.send("failed", "x", "x failed")
        notifier.close()
        assert message in caplog.text and SECRET not in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs a command"),
        ({"command": "mail -s oelm me"}, "must be a list of words"),
        ({"command": ["no-such-program-here"]}, "no program 'no-such-program-here' on the PATH"),
        ({"webhook": f"ftp://{SECRET}"}, "must begin with https:// or http://"),
        ({"webhook": f"file:///{SECRET}"}, "must begin with https:// or http://"),
        ({"webhok": f"https://{SECRET}"}, "keys are: events, command, webhook"),
        ({"command": ["true"], "timeout_s": 0}, "greater than 0"),
        ({"command": ["true"], "events": ["fail"]}, "'failed', 'ended' or 'verdict'"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_runs_without_its_values(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        read_notify(config_file(tmp_path, **settings))
    assert "notify.yaml" in str(refused.value) and SECRET not in str(refused.value)


def test_json_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "notify.json").write_text(json.dumps({"command": ["true", "{text}"], "timeout_s": 3}))
    assert read_notify(tmp_path / "notify.json").command == ("true", "{text}")


class _Silent:
    """A watch that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_start(self, job: Job) -> None:
        self.heard.append("start")

    def on_end(self, job: Job) -> None:
        self.heard.append(job.state)

    def on_tick(self, jobs: Any) -> None:
        self.heard.append("tick")


def test_a_queue_tells_of_failures_verdicts_and_its_end_and_passes_all_on(tmp_path: Path) -> None:
    catalog = catalog_of(PAIR)
    runs = plan_runs(list(catalog), budget="smoke", seeds=[0, 1], root=tmp_path / "outputs", changes={})
    jobs = [Job(run) for run in runs]
    states = ("done", "failed", "killed", "found done")
    inner = _Silent()
    with notifying(config_file(tmp_path, command=command(tmp_path))) as notifier:
        assert notifier is not None
        watch = NotifyingWatch(inner, notifier, lambda: [("arm", "arm: preliminary verdict PASS")])
        for job, state in zip(jobs, states, strict=False):
            job.state, job.message = state, "why"  # type: ignore[assignment]
            watch.on_start(job)
            watch.on_end(job)
        watch.on_tick(jobs)
        notify_ended(notifier, jobs[:4])
    told = [row[0] for row in written(tmp_path / "told")]
    assert [event for event, _, _ in told] == ["verdict", "failed", "failed", "ended"]
    assert told[1][2] == f"oelm: {jobs[1].run.name} failed: why"
    assert told[3][2] == "oelm: the queue has ended: 2 done, 1 failed, 1 killed"
    assert inner.heard == ["start", "done", "start", "failed", "start", "killed", "start", "found done", "tick"]


class _Stopped(OelmError):
    exit_code = STOPPED


@pytest.mark.parametrize(
    ("problem", "event", "text"),
    [
        (None, "ended", "run is done"),
        (OelmError("out of disk"), "failed", "run failed: out of disk"),
        (_Stopped("asked"), "ended", "run stopped; repeat the command to continue"),
    ],
)
def test_one_run_is_told_of_however_it_ends(tmp_path: Path, problem: Exception | None, event: str, text: str) -> None:
    def work() -> None:
        with notifying_of(Path("run"), config_file(tmp_path, command=command(tmp_path))):
            if problem is not None:
                raise problem

    if problem is None:
        work()
    else:
        with pytest.raises(type(problem)):
            work()
    assert written(tmp_path / "told") == [[[event, "run", f"oelm: {text}"], f"oelm: {text}\n"]]


def test_no_path_of_this_machine_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with notifying(config_file(tmp_path, command=command(tmp_path))) as notifier:
        assert notifier is not None
        notifier.send("failed", "x", f"no room in {tmp_path}/outputs\nnext line")
    assert written(tmp_path / "told")[0][1] == "oelm: no room in ./outputs next line\n"


def test_without_a_file_there_is_no_notifier() -> None:
    with notifying(None) as notifier:
        assert notifier is None
    logging.getLogger("oelm").info("nothing was started")
