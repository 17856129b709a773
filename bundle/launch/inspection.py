"""Where the ranks of a node are: their processes, the stacks of their threads, their collectives.

A rank answers through a socket in the directory ``watch`` of the job's, and where it cannot, to a
signal (:mod:`bundle.launch.wrapper`). Nothing of it makes a rank fail, and whatever comes from one
is checked.
"""

from __future__ import annotations

import collections
import json
import os
import queue
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import IO

from ..protocol.codec import AnyText, decode
from ..protocol.messages import (
    UNASKED,
    CollectiveState,
    ProcessState,
    RankState,
    RankStates,
    ThreadStack,
)

WATCH = "watch"  # the directory in the job's directory; the wrapper has it, too
_LOOK_SECONDS = 10.0  # for all ranks of a node
STACKS = signal.SIGRTMAX - 3  # asks for a stack; the wrapper has it, too
_RANK_SECONDS = 2.0  # for the answer of a rank, and again for its stack where there was none
_CHILDREN_SECONDS = 1.0  # for the stacks of all its children
_AT_ONCE = 8  # ranks that are asked at once; each takes three descriptors, of few that are spare
_CHILDREN, _CHILD_STACKS = 32, 8
_THREADS, _FRAMES, _GROUPS, _TENSORS, _TEXT = 32, 40, 256, 4, 300
_FILE_BYTES, _ANSWER_BYTES, _LINES = 4 << 20, 16 << 20, 8
_POLL_SECONDS = 0.01
_STILL_SECONDS = 0.3  # after which a stack whose end is not known has all come


class RankInspector:
    """Looks at the ranks of a node in a thread of its own, so that nothing waits for it.

    Args:
        folder: the directory ``watch`` of the job.
        list_pids: returns the process of each rank that has not ended, by rank.
        send: called with what was found.
    """

    def __init__(
        self,
        folder: str,
        list_pids: Callable[[], Mapping[int, int]],
        send: Callable[[RankStates], None],
    ) -> None:
        self._folder, self._list_pids, self._send = folder, list_pids, send
        self._questions: queue.Queue[int | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def ask(self, number: int = UNASKED) -> None:
        """Look at the ranks soon, and send what they do as the answer to a question."""
        self._questions.put(number)

    def close(self) -> None:
        """End, after the look that has begun; those that have not are left out."""
        self._questions.put(None)
        self._thread.join(_LOOK_SECONDS + 2 * _RANK_SECONDS + _CHILDREN_SECONDS)

    def _run(self) -> None:
        while True:
            numbers = [self._questions.get()]
            with suppress(queue.Empty):
                while True:
                    numbers.append(self._questions.get_nowait())
            if None in numbers:
                return
            with suppress(OSError, RuntimeError):  # the driver has gone; no descriptors, no threads
                states = inspect_ranks(self._folder, self._list_pids())
                for number in dict.fromkeys(filter(None, numbers)):
                    self._send(RankStates(ranks=states, number=number))
                if UNASKED in numbers and states:
                    self._send(RankStates(ranks=states))


def inspect_ranks(folder: str, pids: Mapping[int, int]) -> tuple[RankState, ...]:
    """Return what each rank does whose process has not ended."""
    processes = _Processes()
    until = time.monotonic() + _LOOK_SECONDS
    ranks = [rank for rank, pid in sorted(pids.items()) if not processes.has_ended(pid)]

    def inspect(rank: int) -> RankState:
        return _inspect_rank(folder, rank, pids[rank], processes, until)

    with ThreadPoolExecutor(max_workers=min(_AT_ONCE, len(ranks) or 1)) as pool:
        return tuple(pool.map(inspect, ranks))


def _inspect_rank(
    folder: str, rank: int, pid: int, processes: _Processes, until: float
) -> RankState:
    process = processes.describe(pid)
    children = processes.list_descendants(pid)
    path = os.path.join(folder, str(rank))
    if time.monotonic() > until:
        why = "other ranks have not answered in time"
        return RankState(rank, process, children=children, no_answer=why)
    is_stopped, why = process.state in _STOPPED, ""
    threads, groups = ((), ()) if is_stopped else ask_rank(f"{path}.sock", _RANK_SECONDS)
    if not threads:
        frames, why = read_stack(f"{path}.stacks", pid, _RANK_SECONDS)
        threads = (ThreadStack("main", frames),) if frames else ()
    if threads:  # else the stack of the rank may still come, and be taken for that of a child
        threads += _read_child_stacks(f"{path}.stacks", children)
    return RankState(rank, process, threads, groups, children, why)


def _read_child_stacks(path: str, children: Sequence[ProcessState]) -> tuple[ThreadStack, ...]:
    stacks: list[ThreadStack] = []
    until = time.monotonic() + _CHILDREN_SECONDS
    for child in children[:_CHILD_STACKS]:
        left = until - time.monotonic()
        frames, _ = read_stack(path, child.pid, left) if left > 0 else ((), "")
        if frames:
            stacks.append(ThreadStack(f"process {child.pid}", frames))
    return tuple(stacks)


# --- Processes, as the kernel shows them ---------------------------------------------------------

_TICKS = os.sysconf("SC_CLK_TCK")
_ENDED, _STOPPED = ("", "Z", "X"), "Tt"
_STATES = {"D": "waits in the kernel (state D)", "T": "is stopped", "t": "is traced"}
_INTERESTING = "DTtZR"  # states of children that come first


class _Processes:
    """All processes at one moment."""

    def __init__(self) -> None:
        self._states: dict[int, ProcessState] = {}
        self._children: dict[int, list[int]] = collections.defaultdict(list)
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            # proc(5): the name, in parentheses, may hold anything
            head, _, tail = _read_text(f"/proc/{pid}/stat").rpartition(")")
            fields = tail.split()
            if len(fields) > 12:
                seconds = (int(fields[11]) + int(fields[12])) / _TICKS
                name = head.partition("(")[2]
                self._states[pid] = ProcessState(pid, name, fields[0], "", round(seconds, 2))
                self._children[int(fields[1])].append(pid)

    def has_ended(self, pid: int) -> bool:
        return pid not in self._states or self._states[pid].state in _ENDED

    def describe(self, pid: int) -> ProcessState:
        """Return a process with what it waits in."""
        place = _read_text(f"/proc/{pid}/wchan").strip()
        return replace(self._states[pid], waits_in="" if place == "0" else place)

    def list_descendants(self, pid: int) -> tuple[ProcessState, ...]:
        """Return the processes that one has started, and theirs; those in trouble first."""
        found = [pid]
        for parent in found:  # it grows meanwhile
            found += self._children.get(parent, ())
        states = [self._states[child] for child in found[1:]]
        states.sort(key=lambda child: child.state not in _INTERESTING)
        return tuple(self.describe(child.pid) for child in states[:_CHILDREN])


def _read_text(path: str) -> str:
    try:
        with _open_plainly(path) as file:
            return file.read(_FILE_BYTES).decode(errors="replace")
    except OSError:  # it has ended, or this kernel does not show it
        return ""


def _open_plainly(path: str) -> IO[bytes]:
    """Open a file that a rank may have made: of a pipe, nobody waits for the other end."""
    return open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")


# --- The stack of a process's main thread, which faulthandler writes at a signal -----------------

_BEGIN = "Stack (most recent call first):"
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_OUTERMOST = re.compile(r'/run_wrapper\.py", line \d+ in <module>\n\Z|\n  \.\.\.\n\Z')
_FORKED = re.compile(r".*/multiprocessing/popen_fork\.py:\d+ _launch$")
_BELOW_PROGRAM = re.compile(r"<frozen runpy>:|.*/runpy\.py:|.*/run_wrapper\.py:")


def read_stack(path: str, pid: int, seconds: float) -> tuple[tuple[str, ...], str]:
    """Ask a process for the stack of its main thread; return why there is none, or an empty text.

    The signal would end a process that has no handler of it, so that is looked at just before.
    """
    try:
        with _open_plainly(path) as file:
            descriptor = int(file.readline(100))
            start = file.seek(0, os.SEEK_END)
            why = _find_obstacle(pid, file, descriptor)
            if why:
                return (), why
            os.kill(pid, STACKS)
            text = _await_stack(file, start, pid, time.monotonic() + seconds)
    except (OSError, ValueError):  # it has ended, or began without the watch
        return (), "it cannot be asked for its stack"
    frames = _FRAME.findall(text.rpartition(_BEGIN)[2])
    found = _trim([f"{place}:{line} {name}" for place, line, name in frames])
    why = "it has ended" if _has_ended(pid) else f"no stack within {seconds:g} s"
    return found, "" if found else why


def _find_obstacle(pid: int, file: IO[bytes], descriptor: int) -> str:
    """Return why a process must not be signalled; empty if it may.

    It may have become another program. Or it has closed the file, and its stacks would go into
    whatever has that descriptor now.
    """
    status = _read_status(pid)
    state = status.get("State", "")[:1]
    if state in _ENDED:
        return "it has ended"
    if state in _STATES:
        return f"it {_STATES[state]}"
    if not _has_signal(status, "SigCgt"):
        return "it is another program, or has removed the handler"
    if _has_signal(status, "SigBlk"):
        return "it blocks signals"
    try:  # not stat: what the descriptor is now may be on a file server that hangs
        place = os.readlink(f"/proc/{pid}/fd/{descriptor}")
    except OSError:
        place = ""
    is_open = place == os.readlink(f"/proc/self/fd/{file.fileno()}")
    return "" if is_open else "it has closed the file for its stacks"


def _read_status(pid: int) -> dict[str, str]:
    lines = _read_text(f"/proc/{pid}/status").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _has_ended(pid: int) -> bool:
    return _read_status(pid).get("State", "")[:1] in _ENDED


def _has_signal(status: Mapping[str, str], mask: str) -> bool:
    return bool(int(status.get(mask, "0"), 16) >> (STACKS - 1) & 1)


def _await_stack(file: IO[bytes], start: int, pid: int, until: float) -> str:
    """Return what a process writes; the outermost frame comes last."""
    text, changed = "", time.monotonic()
    while (now := time.monotonic()) < until and not _OUTERMOST.search(text):
        file.seek(start)
        more = file.read(_FILE_BYTES).decode(errors="replace")
        if len(more) > len(text):
            text, changed = more, now
        elif _has_ended(pid) or (text and now > changed + _STILL_SECONDS):
            break
        time.sleep(_POLL_SECONDS)
    return text


def _trim(frames: Sequence[str]) -> tuple[str, ...]:
    """Drop the frames below the program's own, or its parent's, and the middle of very many."""
    forked = [at for at, frame in enumerate(frames) if _FORKED.match(frame)]
    count = forked[0] if forked else len(frames)
    while count > 1 and _BELOW_PROGRAM.match(frames[count - 1]):
        count -= 1
    half = _FRAMES // 2
    kept = [*frames[:half], *frames[count - half : count]] if count > _FRAMES else frames[:count]
    return tuple(frame[:_TEXT] for frame in kept)


# --- The answer of a rank: its stacks, and its collectives as PyTorch's flight recorder has them --

# The numbers of ``pg_status`` are not used: those of Gloo count ``send`` and ``recv``, too, which
# are not the same for all ranks (``seq_`` in ProcessGroupGloo.cpp, torch 2.13), and those of NCCL
# are behind while a rank is in the call (``workEnqueue`` in ProcessGroupNCCL.cpp).

_NO_DESCRIPTIONS = ("", "undefined")  # torch has the second one for a group without


@dataclass(frozen=True)
class _Stack:
    """A thread; this and the following are parts of :class:`_Line`."""

    name: AnyText
    frames: tuple[AnyText, ...] = ()


@dataclass(frozen=True)
class _Group:
    """A process group."""

    name: AnyText
    desc: AnyText = ""
    ranks: tuple[int, ...] = ()
    backends: AnyText = ""
    """``cpu:gloo,cuda:nccl``"""

    def list_backends(self) -> list[str]:
        return sorted({pair.partition(":")[2] for pair in self.backends.split(",")})


@dataclass(frozen=True)
class _Entry:
    """A collective, as the flight recorder keeps it (FlightRecorder.hpp, version 2.10)."""

    pg_id: int
    process_group: tuple[AnyText, AnyText]
    collective_seq_id: int
    profiling_name: AnyText
    is_p2p: bool = False
    state: AnyText = ""
    retired: bool = False
    input_sizes: tuple[tuple[int, ...], ...] = ()
    input_dtypes: tuple[AnyText, ...] = ()
    output_sizes: tuple[tuple[int, ...], ...] = ()
    output_dtypes: tuple[AnyText, ...] = ()

    @property
    def backend(self) -> str:
        return self.profiling_name.partition(":")[0]

    @property
    def is_complete(self) -> bool:
        """True if it is done; of Gloo's only that they are retired is recorded."""
        return self.state == "completed" or (self.retired and self.backend != "nccl")


@dataclass(frozen=True)
class _Line:
    """A line of an answer; each has one of these, see :mod:`bundle.launch.wrapper`."""

    stacks: tuple[_Stack, ...] = ()
    groups: tuple[_Group, ...] = ()
    entries: tuple[_Entry, ...] = ()


def ask_rank(
    path: str, seconds: float
) -> tuple[tuple[ThreadStack, ...], tuple[CollectiveState, ...]]:
    """Ask a rank through its socket for its stacks, the main thread's first, and collectives.

    There is nothing while one of its threads holds the GIL. Of a group without collectives, all
    numbers are unknown.
    """
    lines = list(_read_lines(_ask(path, seconds)))
    stacks = [
        ThreadStack(one.name[:_TEXT], _trim(one.frames)) for line in lines for one in line.stacks
    ]
    groups = {group.name: group for line in lines for group in line.groups}
    states: dict[tuple[str, str], CollectiveState] = {}
    for group in groups.values():
        for backend in group.list_backends():
            states[group.name, backend] = _describe_group(group, groups, backend)
    for line in lines:
        entries: dict[int, list[_Entry]] = {}
        for entry in line.entries:
            if not entry.is_p2p:
                entries.setdefault(entry.pg_id, []).append(entry)
        for _, found in sorted(entries.items()):  # a later group may have the name of an older one
            name, backend = found[0].process_group[0], found[0].backend
            if name in groups:  # it has not been destroyed
                state = _describe_group(groups[name], groups, backend)
                states[name, backend] = _add_numbers(state, found)
    return tuple(stacks[:_THREADS]), tuple(states.values())[:_GROUPS]


def _describe_group(group: _Group, groups: Mapping[str, _Group], backend: str) -> CollectiveState:
    world = max((len(other.ranks) for other in groups.values()), default=0)
    ranks = group.ranks if len(group.ranks) < world else ()
    return CollectiveState(_choose_label(group, groups, backend)[:_TEXT], ranks)


def _add_numbers(state: CollectiveState, entries: Sequence[_Entry]) -> CollectiveState:
    last = max(entries, key=lambda entry: entry.collective_seq_id)
    pending = [entry.collective_seq_id for entry in entries if not entry.is_complete]
    started = [entry.collective_seq_id for entry in entries if entry.state != "scheduled"]
    inputs = _describe_tensors(last.input_sizes, last.input_dtypes)
    outputs = _describe_tensors(last.output_sizes, last.output_dtypes)
    return replace(
        state,
        enqueued=last.collective_seq_id,
        started=max(started, default=-1),
        completed=min(pending) - 1 if pending else last.collective_seq_id,
        operation=last.profiling_name.partition(":")[2].lstrip("_")[:_TEXT],
        shapes=f"{inputs} -> {outputs}" if inputs or outputs else "",
    )


def _choose_label(group: _Group, groups: Mapping[str, _Group], backend: str) -> str:
    """Return what a group is called by all its ranks, whichever of its collectives they are in."""
    if group.desc in _NO_DESCRIPTIONS:
        label = group.name
    else:
        same = [other for other in groups.values() if other.desc == group.desc]
        is_only = sum(other.ranks == group.ranks for other in same) <= 1
        label = group.desc if is_only else f"{group.desc} {group.name}"
    return f"{label} ({backend})" if len(group.list_backends()) > 1 else label


def _describe_tensors(sizes: Sequence[Sequence[int]], kinds: Sequence[str]) -> str:
    """Return ``[32, 10] Float, [10] Float, 5 more``."""
    shown = [f"{list(size)} {kind}" for size, kind in zip(sizes[:_TENSORS], kinds)]
    more = [f"{len(sizes) - _TENSORS} more"] if len(sizes) > _TENSORS else []
    return ", ".join([*shown, *more])[:_TEXT]


def _read_lines(answer: bytes) -> Iterator[_Line]:
    """Read the lines of an answer; what is something else is passed over."""
    for line in answer.split(b"\n")[:-1][:_LINES]:
        with suppress(ValueError, RecursionError):
            yield decode(_Line, json.loads(line, parse_int=_read_number), strict=False)


def _read_number(text: str) -> int:
    return int(text) if len(text) < 20 else -1  # reading a very long one takes very long


def _ask(path: str, seconds: float) -> bytes:
    """Return what comes from a socket in some seconds, or until it is too much.

    The address is relative to a descriptor: a path may be longer than an address can be.
    """
    folder, name = os.path.split(path)
    until = time.monotonic() + seconds
    answer = bytearray()
    with suppress(OSError):  # nobody listens, or answers in time
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(seconds)
                client.connect(f"/proc/self/fd/{place}/{name}")
                while len(answer) < _ANSWER_BYTES and time.monotonic() < until:
                    chunk = client.recv(1 << 16)
                    if not chunk:
                        break
                    answer += chunk
                    client.settimeout(max(0.001, until - time.monotonic()))
        finally:
            os.close(place)
    return bytes(answer)
