"""A hub on the loopback that speaks the protocol of the real one, as far as it is used."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qs, unquote

from tests.support.index_server import run_server

PATIENT = {"HF_HUB_ETAG_TIMEOUT": "120", "HF_HUB_DOWNLOAD_TIMEOUT": "120"}  # else ten seconds
LARGE = 1 << 10  # files of more bytes are in large file storage, with their sha256


@dataclass(kw_only=True)
class Repository:
    name: str
    kind: str = "model"
    files: dict[str, bytes] = field(default_factory=dict)
    card: dict[str, Any] = field(default_factory=dict)
    gated: bool = False
    tags: tuple[str, ...] = ()
    # What the hub says about files, sends, and calls small ones, where that is not true.
    listed: dict[str, dict[str, Any]] = field(default_factory=dict)
    served: dict[str, bytes] = field(default_factory=dict)
    etags: dict[str, str] = field(default_factory=dict)

    @property
    def commit(self) -> str:
        state = hashlib.sha1(self.name.encode())
        for path, data in sorted(self.files.items()):
            state.update(path.encode() + data)
        return state.hexdigest()


@dataclass(kw_only=True)
class HubServer:
    repositories: list[Repository] = field(default_factory=list)
    token: str = "hf_let-me-in-0123456789"  # the token that opens gated repositories
    cut: set[str] = field(default_factory=set)  # files whose next answer ends in the middle
    port: int = 0
    asked: list[str] = field(default_factory=list)  # method, path and Range of each request

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def find(self, kind: str, name: str, revision: str) -> Repository | None:
        for one in self.repositories:
            known = (one.kind, one.name) == (kind, name)
            if known and revision in ("main", one.commit, *one.tags):
                return one
        return None


def _info(one: Repository) -> dict[str, Any]:
    siblings = []
    for path, data in one.files.items():
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        entry: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": blob}
        if len(data) > LARGE:
            digest = hashlib.sha256(data).hexdigest()
            entry["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 130}
        siblings.append({**entry, **one.listed.get(path, {})})
    time = "2026-01-01T00:00:00.000Z"
    return {
        "_id": "1", "id": one.name, "modelId": one.name, "sha": one.commit, "private": False,
        "gated": "manual" if one.gated else False, "disabled": False, "downloads": 1, "likes": 0,
        "tags": [], "siblings": siblings, "cardData": one.card or None, "lastModified": time,
        "createdAt": time,
    }  # fmt: skip


def _tree(one: Repository) -> list[dict[str, Any]]:
    entries = []
    for sibling in _info(one)["siblings"]:
        entry = {"type": "file", "path": sibling["rfilename"], "size": sibling["size"],
                 "oid": sibling["blobId"]}  # fmt: skip
        if "lfs" in sibling:
            lfs = sibling["lfs"]
            entry["lfs"] = {"oid": lfs["sha256"], "size": lfs["size"], "pointerSize": 130}
        entries.append(entry)
    return entries


def _below(one: Repository, folder: str, *, deep: bool) -> list[dict[str, Any]]:
    """The entries of a folder, or of all folders in it: files, and the folders themselves."""
    start = f"{folder}/" if folder else ""
    entries: dict[str, dict[str, Any]] = {}
    for entry in _tree(one):
        parts = entry["path"].removeprefix(start).split("/")
        if not entry["path"].startswith(start):
            continue
        for depth in range(1, len(parts) if deep else min(len(parts), 2)):
            path = start + "/".join(parts[:depth])
            entries[path] = {"type": "directory", "path": path, "size": 0, "oid": "0" * 40}
        if deep or len(parts) == 1:
            entries[entry["path"]] = entry
    return list(entries.values())


_TREE = re.compile(r"/api/(model|dataset|space)s/(.+?)/tree/([^/]+)(?:/(.*))?$")
_PATHS = re.compile(r"/api/(model|dataset|space)s/(.+?)/paths-info/([^/]+)$")
_API = re.compile(r"/api/(model|dataset|space)s/(.+?)(?:/revision/([^/]+))?$")
_RESOLVE = re.compile(r"/(datasets/|spaces/)?((?:[^/]+/)?[^/]+)/resolve/([^/]+)/(.+)$")


@contextlib.contextmanager
def serve_hub(hub: HubServer) -> Iterator[HubServer]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            wanted = self.headers.get("Range", "")
            hub.asked.append(f"{self.command} {self.path} {wanted}".strip())
            path = unquote(self.path.partition("?")[0])
            for pattern, answer in ((_TREE, self.tree), (_API, self.api), (_RESOLVE, self.resolve)):
                match = pattern.match(path)
                if match:
                    answer(*match.groups())
                    return
            if path.startswith("/storage/"):
                self.storage(path.removeprefix("/storage/"))
                return
            self.answer(404, b"{}")

        do_HEAD = do_GET

        def api(self, kind: str, name: str, revision: str | None) -> None:
            one = self.found(kind, name, revision or "main", open_to_all=True)
            if one is not None:
                self.say(_info(one))

        def tree(self, kind: str, name: str, revision: str, folder: str | None) -> None:
            one = self.found(kind, name, revision, open_to_all=True)
            if one is not None:
                deep = "recursive=true" in self.path.lower()
                self.say(_below(one, folder or "", deep=deep))

        def do_POST(self) -> None:
            hub.asked.append(f"POST {self.path}")
            body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
            match = _PATHS.match(unquote(self.path))
            if match is None:
                self.answer(404, b"{}")
                return
            one = self.found(*match.groups(), open_to_all=True)
            if one is not None:
                asked = json.loads(body) if body.startswith("{") else parse_qs(body)
                self.say([e for e in _below(one, "", deep=True) if e["path"] in asked["paths"]])

        def resolve(self, kinds: str | None, name: str, revision: str, path: str) -> None:
            kind = (kinds or "models/").removesuffix("s/")
            one = self.found(kind, name, revision)
            if one is None:
                return
            data = one.files.get(path)
            if data is None:
                self.answer(404, b"", {"X-Error-Code": "EntryNotFound"}, one)
                return
            digest = hashlib.sha256(data).hexdigest()
            if len(data) <= LARGE:
                blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
                blob = one.etags.get(path, blob)
                self.content(one.served.get(path, data), {"ETag": f'"{blob}"'}, one)
                return
            headers = {"ETag": f'"{digest}"', "X-Linked-Etag": f'"{digest}"'}
            headers |= {"X-Linked-Size": str(len(data)), "Location": f"{hub.url}/storage/{digest}"}
            self.answer(302, b"", headers, one)

        def storage(self, digest: str) -> None:
            for one in hub.repositories:
                for path, data in one.files.items():
                    if hashlib.sha256(data).hexdigest() == digest:
                        self.content(data, {"ETag": f'"{digest}"'}, one, path)
                        return
            self.answer(404, b"")

        def found(
            self, kind: str, name: str, revision: str, *, open_to_all: bool = False
        ) -> Repository | None:
            one = hub.find(kind, name, revision)
            if one is None:
                known = any(r.name == name and r.kind == kind for r in hub.repositories)
                code = "RevisionNotFound" if known else "RepoNotFound"
                self.answer(404, b'{"error": "not found"}', {"X-Error-Code": code})
                return None
            shown = self.headers.get("Authorization")
            if one.gated and not open_to_all and shown != f"Bearer {hub.token}":
                headers = {"X-Error-Code": "GatedRepo", "X-Error-Message": f"{name} is restricted"}
                self.answer(403 if shown else 401, b'{"error": "restricted"}', headers)
                return None
            return one

        def content(
            self, data: bytes, headers: dict[str, str], one: Repository, path: str = ""
        ) -> None:
            match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            status, body = 200, data
            if match:
                start = int(match[1])
                end = int(match[2]) + 1 if match[2] else len(data)
                status, body = 206, data[start:end]
                headers = {**headers, "Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}
            length = len(body)
            if path in hub.cut and self.command == "GET":
                hub.cut.discard(path)
                length, self.close_connection = length // 2, True
            self.answer(status, body, {**headers, "Accept-Ranges": "bytes"}, one, length)

        def say(self, value: object) -> None:
            self.answer(200, json.dumps(value).encode())

        def answer(
            self,
            status: int,
            body: bytes,
            headers: Mapping[str, str] = MappingProxyType({}),
            one: Repository | None = None,
            length: int | None = None,
        ) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Type", "application/json" if status != 206 else "x/y")
            if one is not None:
                self.send_header("X-Repo-Commit", one.commit)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body if length is None else body[:length])

        def log_message(self, *arguments: object) -> None:
            pass

    with run_server(Handler) as hub.port:
        yield hub
