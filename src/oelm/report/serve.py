"""A live page by HTTP for one reader: GET only, on 127.0.0.1 or a private Unix socket, and nothing but the page."""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
import socket
import socketserver
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from oelm.errors import OelmError
from oelm.files import dump_json
from oelm.report.html import LivePage

ADDRESS = "127.0.0.1"
# With `ssh -L` the port in the address is the reader's own. Another name is another site's, which a browser was led to.
_HOST = re.compile(r"(127\.0\.0\.1|localhost)(:[0-9]{1,5})?")
# Each connection has one request, one thread, and no more than so long for both.
_MOST_CONNECTIONS, _SILENCE_S, _LONGEST_S, _POLL_S = 16, 10.0, 30.0, 0.2
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "frame-ancestors 'none'",
}


@dataclass(frozen=True)
class Served:
    """A page as it is handed out. `updated` is a time of `time.monotonic`."""

    page: LivePage
    subtitle: str
    every_s: float
    updated: float
    is_over: bool = False

    def news(self) -> str:
        """Return what a browser needs to see which parts are new."""
        age = round(time.monotonic() - self.updated, 1)
        facts = {"parts": dict(self.page.digests), "subtitle": self.subtitle, "every": self.every_s}
        return dump_json(facts | {"age": age, "over": self.is_over}, indent=None)


class _Handler(BaseHTTPRequestHandler):
    timeout = _SILENCE_S
    server: PageServer

    def do_GET(self) -> None:
        """Answer with the page, the list of its parts, or one part; all else is not found."""
        if not _HOST.fullmatch(self.headers.get("Host", "")):
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, "wrong host", "text/plain")
            return
        # Bytes: compare_digest refuses text beyond ASCII.
        _, token, *rest = [part.encode("utf-8", "surrogateescape") for part in self.path.split("/", 2)] + [b""] * 2
        served = self.server.served
        if served is None or not hmac.compare_digest(token, self.server.token.encode()):
            self._not_found()
            return
        name = rest[0].decode("ascii", "replace")
        if self.path == f"/{self.server.token}/":
            self._answer(HTTPStatus.OK, served.page.html, "text/html")
        elif name == "parts":
            self._answer(HTTPStatus.OK, served.news(), "application/json")
        elif name in served.page.parts:
            self._answer(HTTPStatus.OK, served.page.parts[name], "text/html")
        else:
            self._not_found()

    def _refused(self) -> None:
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED, "GET only", "text/plain")

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = _refused

    def _not_found(self) -> None:
        self._answer(HTTPStatus.NOT_FOUND, "not found", "text/plain")

    def _answer(self, code: HTTPStatus, text: str, kind: str) -> None:
        content = text.encode()
        self.send_response(code)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)
        self.close_connection = True

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that is no HTTP, without repeating any of it."""
        self._answer(HTTPStatus(code), "refused", "text/plain")

    def version_string(self) -> str:
        return "oelm"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log nothing: the address holds the token."""


class PageServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Hands out the page in `served` under an address with a random token; at most a few connections at once, each briefly."""

    daemon_threads = True
    request_queue_size = 64
    allow_reuse_address = True

    def __init__(self, *, port: int = 0, path: Path | None = None) -> None:
        self.token = secrets.token_urlsafe(24)
        self.served: Served | None = None
        self._open: dict[socket.socket, float] = {}
        self._guard = threading.Lock()
        self._path = path
        if path is None:
            self.address_family = socket.AF_INET
            super().__init__((ADDRESS, port), _Handler)
        else:
            self.address_family = socket.AF_UNIX
            super().__init__(str(path), _Handler)  # type: ignore[arg-type]

    def server_bind(self) -> None:
        """Bind a Unix socket with mode 0600 from its first moment on; another process's is not touched."""
        if self._path is None:
            super().server_bind()
            return
        _remove_dead(self._path)
        mask = os.umask(0o177)
        try:
            super().server_bind()
        finally:
            os.umask(mask)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def address(self) -> str:
        """The page's address on this machine."""
        return f"http://{ADDRESS}:{self.port}/{self.token}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection, or close it where too many are open."""
        with self._guard:
            is_full = len(self._open) >= _MOST_CONNECTIONS
            if not is_full:
                self._open[request] = time.monotonic()
        if is_full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection and count it no more."""
        with self._guard:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cut connections that take too long: a slow client keeps its place for a moment only."""
        with self._guard:
            late = [request for request, began in self._open.items() if time.monotonic() - began > _LONGEST_S]
            for request in late:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: a client that disconnects is not an error."""


def _remove_dead(path: Path) -> None:
    """Remove a socket that nobody listens at; OelmError where the path is anything else."""
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise OelmError(f"--socket {path}: exists and is no socket, so it was not touched; give another path")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink()
            return
    raise OelmError(f"--socket {path}: another process listens there; end it or give another path")


@contextlib.contextmanager
def serving(*, port: int = 0, path: Path | None = None) -> Iterator[PageServer]:
    """Yield a server that answers from its own thread until the block ends; its socket is removed then."""
    try:
        server = PageServer(port=port, path=path)
    except OSError as problem:
        where = f"--port {port}" if path is None else f"--socket {path}"
        raise OelmError(f"{where}: cannot listen there ({problem}); give another") from problem
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_S,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        if path is not None:
            path.unlink(missing_ok=True)
