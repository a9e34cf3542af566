"""A small HTTP server for one page that others read now and then: GET and HEAD, and a bound on everything."""

from __future__ import annotations

import io
import os
import socket
import socketserver
import threading
import time
import weakref
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

import msgspec

MOST_HEAD = 8192
"""Bytes of a request, which has no body."""
REQUEST_SECONDS = 2.0
"""For a request to arrive whole, and again for its answer to be taken."""
MOST_AT_ONCE = 8
"""Connections; more are closed at once."""


class Reply(msgspec.Struct, frozen=True):
    status: HTTPStatus
    text: str
    content_type: str = "text/plain; charset=utf-8"
    challenge: str = ""


Answer = Callable[[str, str], Reply]
"""(path without query, Authorization header or "") to a reply. Called in any thread."""


class ScrapeServer:
    """Listens from when it is made until `close()`, in threads of its own. OSError if the port cannot be had."""

    def __init__(self, host: str, port: int, answer: Answer, *, family: socket.AddressFamily = socket.AF_INET) -> None:
        self._server = _Server(host, port, answer, family)
        self.port = int(self._server.server_address[1])
        _close_in_children(self._server.socket)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="shoal-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and wait for answers in progress: twice `REQUEST_SECONDS` at most."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    allow_reuse_address = True
    # so that close() waits for the threads of requests: they end by their deadline
    daemon_threads = False
    block_on_close = True
    request_queue_size = MOST_AT_ONCE

    def __init__(self, host: str, port: int, answer: Answer, family: socket.AddressFamily) -> None:
        self.address_family = family
        self.answer = answer
        self._free = threading.BoundedSemaphore(MOST_AT_ONCE)
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that went away is no event of the run."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "shoal"
    sys_version = ""
    # the answer's end is the connection's: no reader holds one open

    def setup(self) -> None:
        super().setup()
        head = _read_head(self.connection, time.monotonic() + REQUEST_SECONDS)
        self.connection.settimeout(REQUEST_SECONDS)
        self.rfile = io.BufferedReader(io.BytesIO(head))

    def do_GET(self) -> None:
        self._send(body=True)

    def do_HEAD(self) -> None:
        self._send(body=False)

    def _send(self, *, body: bool) -> None:
        reply = self.server.answer(self.path.partition("?")[0], self.headers.get("Authorization", ""))
        data = reply.text.encode()
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.content_type)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        if reply.challenge:
            self.send_header("WWW-Authenticate", reply.challenge)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: requests come every few seconds, and carry keys."""


def _read_head(connection: socket.socket, deadline: float) -> bytes:
    """A request up to its empty line; nothing if it is too long or too late."""
    head = b""
    while b"\r\n\r\n" not in head and b"\n\n" not in head:
        left = deadline - time.monotonic()
        if left <= 0 or len(head) >= MOST_HEAD:
            return b""
        connection.settimeout(left)
        try:
            part = connection.recv(MOST_HEAD - len(head))
        except OSError:
            return b""
        if not part:
            return b""
        head += part
    return head


_listening: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_watching_forks = False


def _close_in_children(listener: socket.socket) -> None:
    """A process forked from here must not keep the port: it would stay taken after `close()`."""
    global _watching_forks
    _listening.add(listener)
    if not _watching_forks:
        _watching_forks = True
        os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for listener in list(_listening):
        listener.close()
