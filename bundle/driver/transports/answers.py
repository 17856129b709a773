"""What the agents of one step have said so far, in the order in which it comes."""

from __future__ import annotations

import collections
import json
import time
from collections.abc import Collection, Mapping
from typing import Any

from ...agent.agent import SESSION
from ...protocol import output
from .transport import OnEvent, Requests


class Answers:
    """What the tasks of one step have said so far."""

    def __init__(
        self, requests: Requests, tasks: int, on_event: OnEvent, phase: str = "unpack"
    ) -> None:
        self._requests, self._tasks, self._on_event = requests, tasks, on_event
        self.phase = phase
        self.held = False  # whether those who are ready wait for a word
        self.ready: set[str] = set()
        self.answered: dict[str, int] = {}
        self._done: dict[str, set[int]] = {}
        self.bad: set[str] = set()
        self.step_id = ""
        self._unknown: collections.Counter[str] = collections.Counter()
        self._since: float | None = None  # when the first node had ended well

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes that are asked."""
        return frozenset(self._requests)

    def complete(
        self, lost: Collection[str], gone: Mapping[str, Collection[int]] | None = None
    ) -> bool:
        """Whether no task will say more: each has answered, has gone, or its node is lost.

        Args:
            lost: nodes of which nothing is waited for any more.
            gone: the tasks of each node that are known to have ended.
        """
        return all(
            node in lost
            or len({*self._done.get(node, ()), *(gone or {}).get(node, ())}) >= self._tasks
            for node in self._requests
        )

    def account(self, lost: Mapping[str, int]) -> None:
        """Say what did not come.

        Args:
            lost: how many frames of each source (``node:task``) are given up.
        """
        for source in {**lost, **self._unknown}:
            frames, messages = lost.get(source, 0), self._unknown.get(source, 0)
            node, _, task = source.rpartition(":")
            event = {"v": 1, "event": "lost", "node": node, "task": task, "frames": frames}
            self._on_event({**event, "unknown": messages} if messages else event)
        self._unknown.clear()

    def late(self, patience: int) -> list[str]:
        """The nodes that go on though the first has ended well so long ago; 0 is for ever."""
        if not patience or self._since is None or time.monotonic() < self._since + patience:
            return []
        return [node for node in self._requests if self.answered.get(node, 0) < self._tasks]

    def take(self, source: str, line: str) -> None:
        """One message of one task."""
        node, _, task = source.rpartition(":")
        event = _event(line) or {
            "v": 1,
            "event": "output",
            **output.encoded(line.encode(errors="replace") + b"\n"),
        }
        if node not in self._requests:
            if event["event"] == "output":  # else a late answer of one that is left out already
                self._unknown[source] += 1
            return
        event = {**event, "node": node}
        if event["event"] == SESSION:  # it could not even begin
            event["event"] = self.phase
        if event["event"] == "ready":
            self.ready.add(node)
            self.step_id = str(event.get("step", ""))
            return
        if "ok" in event:
            self.answered[node] = self.answered.get(node, 0) + 1
            self._done.setdefault(node, set()).add(int(task) if task.isdigit() else 0)
            if not event["ok"]:
                self.bad.add(node)
            elif self._since is None and self.answered[node] >= self._tasks:
                self._since = time.monotonic()
            if task.isdigit():
                event["task"] = int(task)
        self._on_event(event)


def _event(line: str) -> dict[str, Any] | None:
    """An agent's event; None for anything else (a traceback, a library's message)."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    known = isinstance(event, dict) and event.get("v") == 1 and "event" in event
    return event if known else None
