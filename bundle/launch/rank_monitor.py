"""Watching the ranks of a node: when each of them began, finished and ended.

Each rank writes JSON lines into a named pipe (:mod:`bundle.launch.wrapper`). The end of its process
is noticed at once through its pidfd.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import time
from collections.abc import Callable, Collection

from ..channel.frames import Lines
from ..protocol.codec import AnyText, decode
from ..protocol.dataclass import dataclass
from ..system import processes
from ..system.files import read_file

PIPE = "ranks"  # the name of the pipe beside those of the ranks' output; the wrapper has it too
SECONDS = "STAGER_LINGER_SECONDS"  # that a process may go on after its program has ended
_SECONDS = 30.0
_CHUNK = 1 << 16
_SOON = 1.0  # seconds between the ends of processes that one signal to a whole step has ended
_SIGNALLED = (-15, -2, 143, 130)
_STAT_EXIT_CODE = 49  # the index of exit_code in /proc/PID/stat, counted from the state


def make_pipe(path: str) -> int:
    """Make a named pipe; opened both ways, it has no end, however many ranks come and go."""
    os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


@dataclass
class Rank:
    """The known state of one rank; times are in seconds since the epoch."""

    rank: int
    local_rank: int
    pid: int
    began: float = 0.0
    finished: float | None = None  # the time when its program finished, with ``status``
    status: int = 0
    left: float | None = None  # when it left its process group, if it has not joined one since
    joined: bool | None = None
    """True if it was ever in a process group of PyTorch's; None if that is unknown."""
    ended: float | None = None  # the time when its process ended
    code: int | None = None  # its exit status, negative for a signal; None if nobody saw it
    lingers: tuple[str, ...] | None = None  # names of what keeps it running for too long

    @property
    def has_finished_well(self) -> bool:
        """True if its program has finished with status 0."""
        return self.finished is not None and self.status == 0

    @property
    def has_left_and_gone_on(self) -> bool:
        """True if it left its process group without having ended well."""
        status = self.code if self.finished is None else self.status
        return self.left is not None and status != 0


@dataclass(frozen=True)
class _Message:
    event: str
    rank: int
    local_rank: int
    pid: int
    time: float
    status: int = 0
    joined: bool | None = None
    threads: tuple[AnyText, ...] = ()


class RankMonitor:
    """Watches the ranks of a node. Its descriptor is readable when there is something to read."""

    def __init__(self, folder: str) -> None:
        self.ranks: dict[int, Rank] = {}
        self.launcher_end: float | None = None  # when it ended, or was stopped; None while it runs
        self.stopped = False
        self.on_lingering: Callable[[Rank], None] = lambda rank: None  # called once for each
        self._seconds = _SECONDS
        with contextlib.suppress(ValueError):
            self._seconds = float(os.environ.get(SECONDS, _SECONDS))
        self._lines = Lines()
        self._pipe = make_pipe(os.path.join(folder, PIPE))
        self._waiting = selectors.EpollSelector()
        self._waiting.register(self._pipe, selectors.EVENT_READ, None)

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._waiting.fileno()

    def list_pids(self) -> dict[int, int]:
        """Return the process of each rank that is not known to have ended; any thread may ask."""
        ranks = list(self.ranks.values())
        return {rank.rank: rank.pid for rank in ranks if rank.ended is None}

    def send_signal(self, number: int) -> list[int]:
        """Send a signal to each rank that runs; return their numbers."""
        reached = []
        for rank in self.ranks.values():
            with contextlib.suppress(OSError):
                if rank.ended is None:
                    os.kill(rank.pid, number)
                    reached.append(rank.rank)
        return reached

    def close(self) -> None:
        """Close all descriptors; may be called again."""
        for key in list((self._waiting.get_map() or {}).values()):
            os.close(key.fd)
        self._waiting.close()

    def take(self) -> None:
        """Take the news since, without waiting; none once the launcher has ended."""
        if self.launcher_end is not None:
            return
        for key, _ in self._waiting.select(0):
            if key.data is None:
                self._read_messages()
            else:
                self._note_end(key.fd, int(key.data))
        self._look_for_lingering()

    def note_launcher_end(self, *, stopped: bool) -> None:
        """Note that the launcher has ended, or is being stopped; ranks end because of that."""
        if self.launcher_end is None:
            self.take()
            self.launcher_end = time.time()
            self.stopped = stopped

    def count_finished_well(self) -> int:
        """Count the ranks whose programs have ended well."""
        return sum(rank.has_finished_well for rank in self.ranks.values())

    def has_stopped_before(self, time: float) -> bool:
        """Tell whether the launcher had been stopped before a time."""
        return self.stopped and (self.launcher_end or time) < time

    def list_departed(self, failed: Collection[int]) -> list[tuple[float, Rank]]:
        """Return the ranks that left their group, or ended well, with the time; the first first."""
        departed = []
        good_codes = (0,) if self.stopped else (0, None)
        for rank in self.ranks.values():
            finished = rank.finished if rank.has_finished_well else None
            is_well = rank.code in good_codes and rank.rank not in failed
            if since := rank.left or finished or (rank.ended if is_well else None):
                departed.append((since, rank))
        return sorted(departed, key=lambda pair: pair[0])

    def list_unreported(self, failed: Collection[int]) -> list[Rank]:
        """Return the ranks that had failed before their launcher was stopped, unreported by it.

        One that ended by a signal just before was ended by the same signal to all processes.
        """
        soon, ended = (self.launcher_end or 0.0) - _SOON, self._list_ended_before_stop(failed)
        early = (rank for rank in ended if rank.code not in _SIGNALLED or (rank.ended or 0) < soon)
        return [rank for rank in early if rank.code]

    def list_vanished(self, failed: Collection[int]) -> list[Rank]:
        """Return the ranks that had ended before the stop, with a status that nobody saw."""
        ended = self._list_ended_before_stop(failed)
        return [rank for rank in ended if rank.code is None and not rank.has_finished_well]

    def list_joined(self, *, joined: bool) -> tuple[int, ...]:
        """Return the ranks that have ever been in a process group, or that surely have not."""
        return tuple(rank.rank for rank in self.ranks.values() if rank.joined is joined)

    def list_lingering(self) -> list[Rank]:
        """Return the ranks that went on for too long, and still do."""
        running = [rank for rank in self.ranks.values() if rank.ended is None]
        return [rank for rank in running if rank.lingers is not None or self._is_long_out(rank)]

    def _list_ended_before_stop(self, failed: Collection[int]) -> list[Rank]:
        end = self.launcher_end if self.stopped else None
        ranks = [rank for rank in self.ranks.values() if rank.rank not in failed]
        return [rank for rank in ranks if end and rank.ended and rank.ended < end]

    def _read_messages(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for line in self._lines.feed(os.read(self._pipe, _CHUNK)):
                # The program may write there as well: any other line is ignored.
                with contextlib.suppress(ValueError):
                    self._note_message(decode(_Message, json.loads(line)))

    def _note_message(self, message: _Message) -> None:
        if message.event == "started":
            self._watch(Rank(message.rank, message.local_rank, message.pid, time.time()))
            return
        known = self.ranks.get(message.rank)
        if known is None or known.pid != message.pid:
            return
        if message.event == "lingers":
            self._note_lingering(known, message.threads)
        elif message.event == "finished":
            known.finished, known.status = message.time, message.status
            known.joined = message.joined
        elif message.event == "left":
            known.left = message.time
        elif message.event == "joined":
            known.left = known.lingers = None

    def _watch(self, rank: Rank) -> None:
        self.ranks[rank.rank] = rank
        try:
            handle = processes.open_pidfd(rank.pid)
            if handle is not None:  # else only its launcher reports its end
                self._waiting.register(handle, selectors.EVENT_READ, rank.pid)
        except ProcessLookupError:  # it has ended already
            rank.ended = time.time()

    def _note_end(self, handle: int, pid: int) -> None:
        self._waiting.unregister(handle)
        os.close(handle)
        for rank in self.ranks.values():
            if rank.pid == pid:
                rank.ended, rank.code = time.time(), _read_exit_code(pid)

    def _note_lingering(self, rank: Rank, names: tuple[str, ...]) -> None:
        if rank.lingers is None:
            rank.lingers = names
            self.on_lingering(rank)

    def _look_for_lingering(self) -> None:
        """Find ranks that go on long after they left their group, or another rank ended well."""
        ranks = list(self.ranks.values())
        running = [rank for rank in ranks if rank.ended is None and rank.finished is None]
        is_left_alone = any(map(self._has_long_succeeded, ranks))
        # If all ranks of a node have left their group, the program is made that way.
        may_be_missed = len(ranks) == 1 or None in [rank.left for rank in running]
        for rank in running:
            if is_left_alone or (may_be_missed and self._is_long_out(rank)):
                self._note_lingering(rank, ())

    def _has_long_succeeded(self, rank: Rank) -> bool:
        return bool(rank.ended and rank.ended < time.time() - self._seconds and not rank.code)

    def _is_long_out(self, rank: Rank) -> bool:
        return rank.left is not None and rank.left < time.time() - self._seconds


def _read_exit_code(pid: int) -> int | None:
    # Else its launcher has waited for it already.
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = read_file(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        status = int(fields[_STAT_EXIT_CODE])
        if fields[0] in (b"Z", b"X"):
            return os.waitstatus_to_exitcode(status)
    return None
