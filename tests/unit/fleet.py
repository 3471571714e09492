"""Remote stores for tests: a loopback HTTP server that misbehaves as told, and the variables that name a store."""

from __future__ import annotations

import contextlib
import socketserver
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from cutlass_ops.base import env


def name_store(
    patch, url: str, public: Path | None, private: Path | None = None, timeout: float = 60, wait: float = 600
) -> None:
    """Set the variables of a remote store."""
    values = {
        env.REMOTE_STORE: url,
        env.REMOTE_STORE_KEY: public,
        env.REMOTE_STORE_SIGNING_KEY: private,
        env.REMOTE_STORE_TIMEOUT: timeout,
        env.REMOTE_STORE_WAIT: wait,
    }
    for variable, value in values.items():
        if value is None:
            patch.delenv(variable.name, raising=False)
        else:
            patch.setenv(variable.name, str(value))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"

    def do_GET(self):
        server = self.server.owner
        server.asked.append(self.path)
        how = server.how
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._answer(server, how)

    def _answer(self, server, how):
        if how == "silent":
            server.stopped.wait(60)
            return
        if how == "failing":
            self.send_response(500)
            self.end_headers()
            return
        path = server.root / self.path.lstrip("/")
        if how == "garbage" and "claims" not in self.path:
            data = b"\0garbage" * 1000
        elif how == "endless" and "claims" not in self.path:
            self.send_response(200)
            self.end_headers()
            while not server.stopped.is_set():
                self.wfile.write(bytes(1 << 16))
                server.sent += 1 << 16
            return
        elif not path.is_file():
            self.send_response(404)
            self.end_headers()
            return
        else:
            data = path.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if how == "truncated":
            data = data[: len(data) // 2]
        if how != "trickling":
            self.wfile.write(data)
            return
        for place in range(len(data)):
            self.wfile.write(data[place : place + 1])
            if server.stopped.wait(0.2):
                return

    def log_message(self, *_args):
        pass


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    allow_reuse_address = True


class Server:
    """Serves a folder at ``url``. ``how`` says in which way: well, silent, failing, garbage, endless, truncated, ..."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.how = "well"
        self.asked: list[str] = []
        self.sent = 0
        self.stopped = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.owner = self
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Close the port. Requests that are answered end."""
        self.stopped.set()
        self._server.shutdown()
        self._server.server_close()


def seconds(do) -> float:
    """How long a function takes."""
    began = time.monotonic()
    do()
    return time.monotonic() - began
