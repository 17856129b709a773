"""A mirror in tests: made by the real command, used by the real pip and uv, and nothing else."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

from tests.support.index_server import run_server
from tests.support.processes import run

UV = str(Path(sys.executable).with_name("uv"))
JSON_TYPE = "application/vnd.pypi.simple.v1+json"


def plain_environment(folder: Path) -> dict[str, str]:
    """Variables without any setting of pip, uv or stager; caches and the home are in a folder."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(folder / "home"),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "UV_CACHE_DIR": str(folder / "uv-cache"),
        "UV_NO_CONFIG": "1",
    }


def installed_by(tool: str, index: str, folder: Path, *names: str) -> list[str]:
    pip = [sys.executable, "-m", "pip", "install", "--no-cache-dir", "--index-url", index]
    uv = [UV, "pip", "install", "--python", sys.executable, "--default-index", index]
    target = folder / f"by-{tool}"
    argv = [*(pip if tool == "pip" else uv), "--target", target, *names]
    done = run(argv, env=plain_environment(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(path.name.lower() for path in target.glob("*.dist-info"))


class _Handler(SimpleHTTPRequestHandler):
    """The standard library's server, which says nothing here but keeps what it was asked for."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        super().do_GET()

    def log_message(self, *args: object) -> None:
        """Say nothing."""


class _JsonHandler(_Handler):
    def send_head(self) -> Any:
        if self.path.endswith("/"):
            self.path += "index.json"
        return super().send_head()

    def guess_type(self, path: str | os.PathLike[str]) -> str:
        return JSON_TYPE if str(path).endswith(".json") else super().guess_type(path)


@contextlib.contextmanager
def served(folder: Path, *, as_json: bool = False) -> Iterator[tuple[str, list[str]]]:
    """Serve a folder on the loopback; yields its address, and the paths that are asked for."""
    asked: list[str] = []
    kind = type("Handler", (_JsonHandler if as_json else _Handler,), {"asked": asked})
    with run_server(functools.partial(kind, directory=str(folder))) as port:
        yield f"http://127.0.0.1:{port}", asked
