"""Which ranks of a node have begun, finished and ended, and when.

Each rank writes a JSON line into a named pipe (:mod:`bundle.launch.watch`): as it begins
(``started``),
when it has left its process group (``left``) or joined one (``joined``), when its program has come
to its end (``finished``), and when its process still goes on a while later (``lingers``).
That a process has ended is seen by its pidfd, at once, and whatever its launcher says of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

PIPE = "ranks"
"""The name of the pipe beside those of the ranks' output; :mod:`bundle.launch.watch` has it too."""
SECONDS = "STAGER_LINGER_SECONDS"
"""How long a process may go on after its program has finished, or after another rank has ended."""
_SECONDS = 30.0
_CHUNK = 1 << 16
_SOON = 1.0
"""What a signal to all processes of a step has ended, shortly before this one heard of it."""
_TOLD = (-15, -2, 143, 130)
_STAT_EXIT_CODE = 49
"""The place of exit_code in /proc/PID/stat, counted from the state; see proc(5)."""


@dataclass(frozen=True)
class Rank:
    """One rank, as far as it is known."""

    rank: int
    local_rank: int
    pid: int
    finished: float | None = None
    """When its program had come to its end, in seconds since the epoch; None while it runs."""
    status: int = 0
    """The exit status that its program asked for, once it has finished."""
    left: float | None = None
    """When it left its process group, if it has not joined one since."""
    joined: bool | None = None
    """Whether it has ever been in a process group of PyTorch's; None where nothing tells."""
    ended: float | None = None
    """When its process ended; None while it is there."""
    code: int | None = None
    """The exit status of its process, negative for a signal; None where it was not to be seen."""
    lingers: tuple[str, ...] | None = None
    """What keeps its process, by name, once it has gone on for too long; None before."""

    @property
    def ended_well(self) -> bool:
        """Whether its program has come to a good end, whatever became of its process since."""
        return self.status == 0 if self.finished is not None else self.code == 0


class RankMonitor:
    """Watches the ranks of a node. Its descriptor is readable when there is something to take.

    Attributes:
        ranks: what is known, by rank.
        until: when the launcher had ended, or was to be ended; None while it runs.
        stopped: whether it was to be ended.
        on_lingering: called with each rank that goes on for too long, once.
    """

    def __init__(self, folder: str) -> None:
        """Make the pipe in a directory.

        Raises:
            OSError: it cannot be made.
        """
        self.ranks: dict[int, Rank] = {}
        self.until: float | None = None
        self.stopped = False
        self.on_lingering: Callable[[Rank], None] = _ignore
        self._seconds = linger_seconds(os.environ)
        self._rest = b""
        path = os.path.join(folder, PIPE)
        os.mkfifo(path, 0o600)
        # Open both ways: it then has no end, however many ranks come and go.
        self._pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._waiting = selectors.EpollSelector()
        self._waiting.register(self._pipe, selectors.EVENT_READ, None)

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._waiting.fileno()

    def close(self) -> None:
        """Close all descriptors; may be called again."""
        for key in list((self._waiting.get_map() or {}).values()):
            os.close(key.fd)
        self._waiting.close()

    def take(self) -> None:
        """Take what has been told since, without waiting; nothing once the launcher has ended."""
        if self.until is not None:
            return
        for key, _ in self._waiting.select(0):
            if key.data is None:
                self._hear()
            else:
                self._note_end(key.fd, int(key.data))
        self._look_for_lingering()

    def over(self, *, stopped: bool) -> None:
        """Note that the launcher has ended, or is to be ended: what follows is our own doing."""
        if self.until is None:
            self.take()
            self.until, self.stopped = time.time(), stopped

    def finished_well(self) -> int:
        """Count the ranks whose programs have come to a good end."""
        return sum(one.finished is not None and one.status == 0 for one in self.ranks.values())

    def left(self, failed: Mapping[int, object]) -> list[tuple[float, Rank]]:
        """Return the ranks that others may have missed by then, since when; the earliest first.

        They had left their process group, or come to a good end.

        Args:
            failed: the ranks that have failed, which a launcher tells if the kernel did not.
        """
        good = (0,) if self.stopped else (0, None)
        found = []
        for one in self.ranks.values():
            if one.left is not None:
                found.append((one.left, one))
            elif one.finished is not None and one.status == 0:  # whatever became of its process
                found.append((one.finished, one))
            elif one.ended is not None and one.code in good and one.rank not in failed:
                found.append((one.ended, one))
        return sorted(found, key=lambda pair: pair[0])

    def unreported(self, failed: Mapping[int, object]) -> list[Rank]:
        """Return the ranks that had failed before their launcher was ended, untold by it."""
        until = self.until if self.stopped and self.until is not None else 0.0
        return [
            one
            for one in self.ranks.values()
            if one.code
            and one.ended is not None
            and one.ended < (until - _SOON if one.code in _TOLD else until)
            and one.rank not in failed
        ]

    def vanished(self, failed: Mapping[int, object]) -> list[Rank]:
        """Return the ranks that had ended by then, with a status that nobody saw.

        Where their launcher had told others to end, it was no good one.
        """
        until = self.until if self.stopped and self.until is not None else 0.0
        return [
            one
            for one in self.ranks.values()
            if one.ended is not None
            and one.ended < until
            and one.code is None
            and not (one.finished is not None and one.status == 0)
            and one.rank not in failed
        ]

    def lingering(self) -> list[Rank]:
        """Return the ranks that went on for too long, and still do."""
        return [
            one
            for one in self.ranks.values()
            if one.ended is None and (one.lingers is not None or self._is_long_out(one))
        ]

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            *lines, self._rest = (self._rest + os.read(self._pipe, _CHUNK)).split(b"\n")
            for line in lines:
                # The program may write there as well: what is no message counts for nothing.
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    self._learn(json.loads(line))

    def _learn(self, told: Mapping[str, Any]) -> None:
        rank, pid = int(told["rank"]), int(told["pid"])
        if told["event"] == "started":
            self.ranks[rank] = Rank(rank, int(told["local_rank"]), pid)
            self._watch(rank, pid)
            return
        known = self.ranks[rank]
        if known.pid != pid:
            return
        if told["event"] == "finished":
            time, status = float(told["time"]), int(told["status"])
            self.ranks[rank] = replace(
                known, finished=time, status=status, joined=told.get("joined")
            )
        elif told["event"] == "left":
            self.ranks[rank] = replace(known, left=float(told["time"]))
        elif told["event"] == "joined":
            self.ranks[rank] = replace(known, left=None, lingers=None)
        elif told["event"] == "lingers":
            self._linger(known, tuple(map(str, told["threads"])))

    def _watch(self, rank: int, pid: int) -> None:
        open_pidfd = getattr(os, "pidfd_open", None)  # a Python may be built without it
        if open_pidfd is None:
            return
        try:
            handle = open_pidfd(pid)
        except ProcessLookupError:  # it was quicker
            self.ranks[rank] = replace(self.ranks[rank], ended=time.time())
        except OSError:  # a kernel before 5.3, or a sandbox: its launcher alone tells its end
            return
        else:
            self._waiting.register(handle, selectors.EVENT_READ, pid)

    def _note_end(self, handle: int, pid: int) -> None:
        self._waiting.unregister(handle)
        os.close(handle)
        for rank, known in self.ranks.items():
            if known.pid == pid:
                self.ranks[rank] = replace(known, ended=time.time(), code=_exit_code(pid))
                return

    def _linger(self, rank: Rank, names: tuple[str, ...]) -> None:
        if rank.lingers is None:
            self.ranks[rank.rank] = replace(rank, lingers=names)
            self.on_lingering(self.ranks[rank.rank])

    def _look_for_lingering(self) -> None:
        """Find ranks that go on long after another one of this node has ended well, or without it.

        Where all ranks of a node have left their group, that is how their program is made; only one
        rank on a node may be waited for by those of other nodes.
        """
        known = list(self.ranks.values())
        running = [one for one in known if one.ended is None and one.finished is None]
        ended = [one.ended for one in known if one.ended is not None and not one.code]
        alone = bool(ended) and min(ended) < time.time() - self._seconds
        missed = len(known) == 1 or any(one.left is None for one in running)
        for one in running:
            if alone or (missed and self._is_long_out(one)):
                self._linger(one, ())

    def _is_long_out(self, rank: Rank) -> bool:
        return rank.left is not None and rank.left < time.time() - self._seconds


def linger_seconds(env: Mapping[str, str]) -> float:
    """Return how long a process may go on, as the environment has it."""
    try:
        return float(env.get(SECONDS, _SECONDS))
    except ValueError:
        return _SECONDS


def _exit_code(pid: int) -> int | None:
    """Return the exit status of a process that has ended and that nobody has waited for yet."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as handle:
            fields = handle.read().rpartition(")")[2].split()
        status = int(fields[_STAT_EXIT_CODE])
    except (OSError, ValueError, IndexError):  # its launcher was quicker
        return None
    if fields[0] not in "ZX":
        return None
    return -(status & 0x7F) if status & 0x7F else status >> 8


def _ignore(rank: Rank) -> None:
    """Nobody wants to know."""
