"""A real browser without a window, told over two pipes what to do (the DevTools protocol)."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.needs import needs
from tests.support.requirements import BROWSERS

# Tests may run as root: without a sandbox.
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-breakpad", "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
_SECONDS = 300.0  # a guard: a machine may be busy with other tests
# Puts the two pipes where Chromium expects them, wherever they are now.
_AT_3_AND_4 = """\
import fcntl, os, sys
ends = [fcntl.fcntl(int(word), fcntl.F_DUPFD, 10) for word in sys.argv[1:3]]
for number, end in zip((3, 4), ends):
    os.dup2(end, number)
os.execvp(sys.argv[3], sys.argv[3:])
"""


class Page:
    """One page that is open, and what happened on it."""

    def __init__(self, browser: Browser, path: Path, width: int, scheme: str) -> None:
        self._browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        said = browser.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session, self._target = said["sessionId"], target
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=path.as_uri())
        browser.wait(lambda: "Page.loadEventFired" in self.told())

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def told(self) -> list[str]:
        return [event["method"] for event in self._events()]

    def errors(self) -> list[str]:
        kinds = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        return [json.dumps(one["params"]) for one in self._events() if one["method"] in kinds]

    def requests(self) -> list[str]:
        sent = [one for one in self._events() if one["method"] == "Network.requestWillBeSent"]
        return [one["params"]["request"]["url"] for one in sent]

    def value(self, expression: str) -> Any:
        """What JavaScript, or a promise in it, comes to; a strict policy allows that, too."""
        asked = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        said = self.call("Runtime.evaluate", **asked)
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    def press(self, key: str, code: int) -> None:
        named = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **named, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)

    def _events(self) -> list[dict[str, Any]]:
        return [one for one in self._browser.events if one.get("sessionId") == self._session]


class Browser:
    def __init__(self, program: str, folder: Path) -> None:
        self.events: list[dict[str, Any]] = []  # what it told without being asked
        self._answers: dict[int, dict[str, Any]] = {}
        self._rest, self._number = b"", 0
        reads, self._in = os.pipe()
        self._out, writes = os.pipe()
        argv = [program, *QUIET, f"--user-data-dir={folder}", "about:blank"]
        start, env = [sys.executable, "-c", _AT_3_AND_4], {**os.environ, "HOME": str(folder)}
        none = subprocess.DEVNULL
        self._process = subprocess.Popen(
            [*start, str(reads), str(writes), *argv], pass_fds=(reads, writes), env=env,
            stdin=none, stdout=none, stderr=none, start_new_session=True,
        )  # fmt: skip
        os.close(reads)
        os.close(writes)

    def open(self, path: Path, width: int = 1200, scheme: str = "light") -> Page:
        return Page(self, path, width, scheme)

    def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """Ask the browser, or one of its pages, for something; returns the answer."""
        self._number += 1
        number = self._number
        asked = {"id": number, "method": method, "params": params}
        if session:
            asked["sessionId"] = session
        os.write(self._in, json.dumps(asked).encode() + b"\0")
        self.wait(lambda: number in self._answers)
        answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return dict(answer["result"])

    def wait(self, done: Callable[[], bool]) -> None:
        until = time.monotonic() + _SECONDS
        while not done():
            left = until - time.monotonic()
            ready, _, _ = select.select([self._out], [], [], max(0.0, left))
            data = os.read(self._out, 1 << 16) if ready else b""
            if not data:
                pytest.fail(f"the browser says no more; exit status {self._process.poll()}")
            *whole, self._rest = (self._rest + data).split(b"\0")
            for raw in whole:
                message = json.loads(raw)
                if "id" in message:
                    self._answers[message["id"]] = message
                elif "method" in message:
                    self.events.append(message)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._in, json.dumps({"id": 0, "method": "Browser.close"}).encode() + b"\0")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._in)
        os.close(self._out)


@contextlib.contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """A browser for as long as the block runs; its profile lies in a new folder."""
    needs("browser")
    browser = Browser(str(next(filter(None, map(shutil.which, BROWSERS)))), folder)
    try:
        yield browser
    finally:
        browser.close()
        shutil.rmtree(folder, ignore_errors=True)
