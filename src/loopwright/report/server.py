"""Serve a run's report on localhost, refreshed whenever the run changes."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from loopwright.errors import InputError
from loopwright.report.output import LiveReport, Stamp

HOST: Final = "127.0.0.1"
PORT: Final = 8642
_MOST_TRIED: Final = 100
_POLL_SECONDS: Final = 0.1  # how long it takes to notice a shutdown
MOST_CONNECTIONS: Final = 16
MOST_SECONDS: Final = 10.0  # of one connection, however slowly it sends or reads


class ReportServer(ThreadingHTTPServer):
    """Serves the page of a run on localhost: `/` is the page, `/stamp` changes when it does. Port 0 takes any free one.

    `option` is how the port was given, up to the value: as a flag, or as an argument in Python. An InputError names the
    next free port if this one is in use.
    """

    daemon_threads = True
    allow_reuse_address = False
    request_queue_size = 64  # a full queue makes browsers wait for seconds
    most_seconds = MOST_SECONDS

    def __init__(self, run_folder: str | Path, port: int = PORT, option: str = "--port ") -> None:
        self._report = LiveReport(run_folder)
        self._lock = threading.Lock()
        self._page: tuple[Stamp, bytes] | None = None
        self._connections: dict[socket.socket, float] = {}  # when each began
        try:
            super().__init__((HOST, port), _Handler)
        except OverflowError:
            what = f"{option}{port} is not between 0 and 65535"
            raise InputError("args.value", what, fix=f"{option}{PORT}") from None
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            why = "is in use" if error.errno == errno.EADDRINUSE else "needs more privileges"
            raise InputError("watch.port", f"port {port} {why}", fix=f"{option}{next_free(port + 1)}") from None

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._connections) >= MOST_CONNECTIONS:
            self.shutdown_request(request)
            return
        self._connections[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End connections that take too long; called several times a second."""
        for request, began in list(self._connections.items()):
            if time.monotonic() - began > self.most_seconds:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a closed browser is not an error
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"

    def stamp(self) -> str:
        return json.dumps(self._report.stamp())

    def page(self) -> bytes:
        """Return the page, rendered again if a file of the run has changed."""
        with self._lock:
            stamp = self._report.stamp()
            if self._page is None or self._page[0] != stamp:
                self._page = (stamp, self._report.page(json.dumps(stamp)).encode())
            return self._page[1]


class Watch:
    """Serves a run's page in a thread, until `close`, or the end of the `with` block or the program.

    Takes the arguments of `ReportServer`, and raises the same errors.
    """

    def __init__(self, run_folder: str | Path, port: int = PORT) -> None:
        self._server = ReportServer(run_folder, port, option="port=")
        self.url = self._server.url
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_POLL_SECONDS,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; idempotent."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def __repr__(self) -> str:
        return f"Watch({self.url}{'' if self._thread.is_alive() else ', closed'})"

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def next_free(port: int) -> int:
    """Return the first free port from this one on; 0, which takes any, if none is near."""
    for candidate in range(max(port, 1024), min(max(port, 1024) + _MOST_TRIED, 65536)):
        with socket.socket() as probe:
            try:
                probe.bind((HOST, candidate))
            except OSError:
                continue
            return candidate
    return 0


class _Handler(BaseHTTPRequestHandler):
    """Answers requests whose Host header names this machine."""

    server: ReportServer
    timeout = MOST_SECONDS

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").rpartition(":")[0]
        if host not in (HOST, "localhost"):
            # Prevent DNS rebinding: another site must not read the run.
            self.send_error(HTTPStatus.FORBIDDEN)
        elif self.path == "/":
            self._send(self.server.page(), "text/html; charset=utf-8")
        elif self.path == "/stamp":
            self._send(self.server.stamp().encode(), "application/json")
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send(self, content: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the terminal belongs to the user."""
