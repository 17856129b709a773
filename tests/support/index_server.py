"""A package index (PEP 503) on this machine's loopback, with a password if wanted."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote

from packaging.utils import canonicalize_name


@dataclass(kw_only=True)
class Index:
    folder: Path  # the distribution files it offers, as they are at each request
    user: str = ""
    password: str = ""
    hashes: bool = True
    lengths: bool = True
    uploaded: Mapping[str, str] = field(default_factory=dict)  # times; makes pages JSON (PEP 691)
    port: int = 0
    asked: list[str] = field(default_factory=list)  # the paths asked for, in order, with the method

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/simple"

    @property
    def url_with_password(self) -> str:
        return f"http://{self.user}:{self.password}@127.0.0.1:{self.port}/simple"

    def page(self, name: str) -> str:
        files = sorted(self.folder.iterdir())
        own = [file for file in files if canonicalize_name(file.name.split("-")[0]) == name]
        digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in own}
        if not own:
            return ""
        if not self.uploaded:
            ends = {file: f"#sha256={digest}" * self.hashes for file, digest in digests.items()}
            links = [f'<a href="/files/{quote(file)}{ends[file]}">{file}</a><br>' for file in ends]
            return f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>"
        entries = [
            {"filename": file, "url": f"/files/{quote(file)}", "hashes": {"sha256": digest},
             "upload-time": self.uploaded[file]}
            for file, digest in digests.items()
        ]  # fmt: skip
        page = {"meta": {"api-version": "1.1"}, "name": name, "versions": [], "files": entries}
        return json.dumps(page)


class Server(ThreadingHTTPServer):
    """A server that many may ask at a time: with a short queue some would be told to come later."""

    request_queue_size = 256


@contextlib.contextmanager
def run_server(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[int]:
    server = Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def serve(index: Index) -> Iterator[Index]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            index.asked.append(f"{self.command} {self.path}")
            allowed = base64.b64encode(f"{index.user}:{index.password}".encode()).decode()
            if index.user and self.headers.get("Authorization") != f"Basic {allowed}":
                self.answer(401, b"", [("WWW-Authenticate", 'Basic realm="index"')])
                return
            path = unquote(self.path.partition("?")[0])
            if path.startswith("/files/"):
                file = index.folder / path.removeprefix("/files/")
                found = file.read_bytes() if file.is_file() else b""
            elif path.strip("/") == "simple":
                found = b"<html></html>"
            else:
                found = index.page(path.strip("/").removeprefix("simple/")).encode()
            kind = "application/octet-stream" if "/files/" in path else "text/html"
            if index.uploaded and kind == "text/html":
                kind = "application/vnd.pypi.simple.v1+json"
            self.answer(200 if found else 404, found, [("Content-Type", kind)])

        do_HEAD = do_GET

        def answer(self, status: int, body: bytes, headers: list[tuple[str, str]]) -> None:
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            if index.lengths or status != 200:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    with run_server(Handler) as index.port:
        yield index
