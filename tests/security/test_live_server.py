"""The server of the live page: one reader gets one page; everybody and everything else is refused, and it stays up."""

from __future__ import annotations

import http.client
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from oelm.errors import OelmError
from oelm.report.html import LivePage
from oelm.report.serve import _MOST_CONNECTIONS, PageServer, Served, serving
from tests.cases import case

PARTS = {"part-queue": '<section id="part-queue">queue</section>', "part-machine": '<section id="part-machine">m</section>'}
PAGE = LivePage(f"<!doctype html>{''.join(PARTS.values())}", PARTS, {"part-queue": "aa", "part-machine": "bb"})


def served(**changes: object) -> Served:
    facts = {"page": PAGE, "subtitle": "now", "every_s": 5.0, "updated": time.monotonic()}
    return Served(**(facts | changes))  # type: ignore[arg-type]


@pytest.fixture
def server() -> Iterator[PageServer]:
    with serving() as running:
        running.served = served()
        yield running


def ask(server: PageServer, path: str, *, method: str = "GET", host: str | None = None) -> tuple[int, str]:
    """Send one request; `host` is what its Host header says."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    connection.putheader("Host", f"127.0.0.1:{server.port}" if host is None else host)
    connection.endheaders()
    answer = connection.getresponse()
    try:
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def raw(server: PageServer, content: bytes) -> bytes:
    """Send bytes as they are and return all that comes back."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as line:
        line.sendall(content)
        answer = b""
        while chunk := line.recv(65536):
            answer += chunk
    return answer


def test_the_page_its_list_of_parts_and_each_part_are_there(server: PageServer) -> None:
    assert ask(server, f"/{server.token}/") == (200, PAGE.html)
    assert ask(server, f"/{server.token}/part-queue") == (200, PARTS["part-queue"])
    code, news = ask(server, f"/{server.token}/parts")
    assert code == 200 and '"part-queue": "aa"' in news and '"subtitle": "now"' in news


def test_a_tunnel_may_have_another_port_and_call_itself_localhost(server: PageServer) -> None:
    assert ask(server, f"/{server.token}/", host="localhost:9000")[0] == 200


HOSTS = (
    "evil.example",
    "127.0.0.1.evil.example",
    "",
    "evil.example:127.0.0.1",
    "[::1]",
    "localhost@evil.example",
    "127.0.0.1:x",
)


def test_another_host_is_refused_even_with_the_token(server: PageServer) -> None:
    for host in HOSTS:
        with case(host):
            code, text = ask(server, f"/{server.token}/", host=host)
            assert code == 421 and "queue" not in text


def test_a_request_without_a_host_is_refused(server: PageServer) -> None:
    answer = raw(server, f"GET /{server.token}/ HTTP/1.0\r\n\r\n".encode())
    assert b"421" in answer.split(b"\r\n")[0] and b"queue" not in answer


WRONG = (
    "/", "/x/", "/{token}", "/{token}x/", "/{short}/", "/{token}/..", "/{token}/../", "/{token}/../../etc/passwd",
    "/{token}/%2e%2e/%2e%2e/etc/passwd", "/{token}/part-queue/", "/{token}/part-queue/../../../etc/passwd",
    "/{token}//etc/passwd", "/{token}/?x", "/{token}/parts?x", "/{token}/outputs", "/{token}/served", "/{token}/part-queue%00",
    "/favicon.ico", "/%7Btoken%7D/", "http://127.0.0.1/{token}/", "/{upper}/", "/{token}/\\..\\x", "/a/{token}/",
)  # fmt: skip


def test_every_other_address_is_not_found(server: PageServer) -> None:
    for path in WRONG:
        with case(path):
            token = server.token
            named = path.format(token=token, short=token[:-1], upper=token.swapcase())
            answer = raw(server, f"GET {named} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
            assert b"queue" not in answer and b"root:" not in answer and answer.split(b" ")[1] in (b"404", b"400")


def test_a_token_beyond_ascii_is_not_found(server: PageServer) -> None:
    assert b" 404 " in raw(server, b"GET /\xff\xfe/ HTTP/1.0\r\nHost: localhost\r\n\r\n")


def test_only_get_is_answered(server: PageServer) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "HEAD", "CONNECT", "BREW"):
        with case(method):
            answer = raw(server, f"{method} /{server.token}/ HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
            assert answer.split(b" ")[1] in (b"405", b"501") and b"part-queue" not in answer


def test_the_token_cannot_be_guessed_and_is_another_each_time() -> None:
    with serving() as one, serving() as other:
        assert one.token != other.token and len(one.token) >= 32


def test_an_answer_forbids_frames_caches_sniffing_and_referrers(server: PageServer) -> None:
    head = raw(server, f"GET /{server.token}/ HTTP/1.0\r\nHost: localhost\r\n\r\n".encode()).split(b"\r\n\r\n")[0].decode()
    for line in ("no-store", "nosniff", "no-referrer", "frame-ancestors 'none'", "same-origin"):
        assert line in head
    assert "Python" not in head and "BaseHTTP" not in head and server.token not in head


def test_nothing_is_logged(server: PageServer, capfd: pytest.CaptureFixture[str]) -> None:
    ask(server, f"/{server.token}/")
    ask(server, "/wrong")
    raw(server, b"\x16\x03\x01 nonsense\r\n\r\n")
    assert capfd.readouterr() == ("", "")


def test_it_listens_on_this_machine_alone(server: PageServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    bound = Path("/proc/net/tcp").read_text() if Path("/proc/net/tcp").exists() else f"0100007F:{server.port:04X}"
    assert f"0100007F:{server.port:04X}" in bound and f"00000000:{server.port:04X}" not in bound


@pytest.mark.slow
def test_ten_thousand_requests_leave_it_as_it_was(server: PageServer) -> None:
    paths = [f"/{server.token}/", f"/{server.token}/parts", "/wrong", f"/{server.token}/part-queue"]
    wrong: list[int] = []

    def ask_often() -> None:
        for number in range(2500):
            code, _ = ask(server, paths[number % 4])
            wrong.extend([code] if code != (404 if number % 4 == 2 else 200) else [])

    before = threading.active_count()
    clients = [threading.Thread(target=ask_often) for _ in range(4)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    deadline = time.monotonic() + 20
    while (threading.active_count() > before or server._open) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert wrong == [] and threading.active_count() <= before and server._open == {}


def test_clients_that_say_nothing_lose_their_place_to_one_that_does(
    server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oelm.report.serve._LONGEST_S", 1.0)
    lines = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(3 * _MOST_CONNECTIONS)]
    try:
        for line in lines:
            # A byte now and then, as slow clients do; those beyond the limit are closed already.
            try:
                line.sendall(b"G")
            except OSError:
                continue
        assert len(server._open) <= _MOST_CONNECTIONS
        deadline = time.monotonic() + 30
        while True:
            try:
                assert ask(server, f"/{server.token}/") == (200, PAGE.html)
                break
            except (OSError, http.client.HTTPException):
                assert time.monotonic() < deadline, "slow clients keep everybody out"
                time.sleep(0.1)
    finally:
        for line in lines:
            line.close()


def test_a_client_that_goes_away_in_the_middle_is_survived(server: PageServer) -> None:
    for _ in range(20):
        line = socket.create_connection(("127.0.0.1", server.port))
        line.sendall(f"GET /{server.token}/ HT".encode())
        line.close()
    assert ask(server, f"/{server.token}/")[0] == 200


@pytest.mark.parametrize("content", [b"A" * 100_000, b"GET / HTTP/9.9\r\n\r\n", b"\0\0\0\0\r\n\r\n", b"GET /" + b"a" * 70_000])
def test_what_is_no_request_is_refused_without_an_echo(server: PageServer, content: bytes) -> None:
    try:
        answer = raw(server, content + b" HTTP/1.0\r\n" + b"X: y\r\n" * 200 + b"\r\n")
    except OSError:
        answer = b""  # cut off while it was still talking
    assert b"aaaa" not in answer and b"AAAA" not in answer
    assert ask(server, f"/{server.token}/")[0] == 200


def test_nothing_is_found_before_the_first_page_is_made() -> None:
    with serving() as running:
        assert ask(running, f"/{running.token}/")[0] == 404


def test_a_socket_is_its_owners_alone_and_goes_with_the_server(tmp_path: Path) -> None:
    path = tmp_path / "page.sock"
    before = os.umask(0)
    try:
        with serving(path=path) as running:
            running.served = served()
            assert stat.S_IMODE(path.lstat().st_mode) == 0o600
            with socket.socket(socket.AF_UNIX) as line:
                line.connect(str(path))
                line.sendall(f"GET /{running.token}/part-queue HTTP/1.0\r\nHost: localhost:8000\r\n\r\n".encode())
                assert line.makefile("rb").read().endswith(PARTS["part-queue"].encode())
    finally:
        os.umask(before)
    assert not path.exists()


def test_a_socket_that_a_killed_server_left_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "page.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with serving(path=path):
        assert path.is_socket()


def test_a_path_that_is_somebody_elses_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(OelmError, match="exists and is no socket"), serving(path=path):
        pass
    assert path.read_text() == "mine"
    with (
        serving(path=tmp_path / "one.sock"),
        pytest.raises(OelmError, match="another process listens there"),
        serving(path=tmp_path / "one.sock"),
    ):
        pass


def test_a_port_in_use_is_an_error_that_names_it(server: PageServer) -> None:
    with pytest.raises(OelmError, match=f"--port {server.port}: cannot listen there"), serving(port=server.port):
        pass
