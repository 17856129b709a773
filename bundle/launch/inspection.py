"""Where the ranks of a node are: their processes, the stacks of their threads, their collectives.

A rank answers through a socket in the job's directory ``watch``, and where it cannot, to a signal
(:mod:`bundle.launch.wrapper`). It does not make a rank fail, and what comes from one is checked.
"""

from __future__ import annotations

import collections
import functools
import glob
import itertools
import json
import operator
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import field, replace
from typing import IO

from ..node.node_root import close_after
from ..protocol.codec import AnyText, decode
from ..protocol.dataclass import dataclass
from ..protocol.messages import CollectiveState, ProcessState, RankState, RankStates, ThreadStack
from ..regex import compile_lazily
from ..system import files
from ..system.processes import read_task_state
from .wrapper import STACKS

WATCH = "watch"  # the directory in the job's directory; the wrapper has it, too
_LOOK_SECONDS = 10.0  # for all ranks of a node
_RANK_SECONDS = 1.5  # for the answer of a rank, and again for its stack where there was none
_CHILDREN_SECONDS = 1.0  # for the stacks of all its children
_AT_ONCE = 8  # ranks that are asked at once; each takes three descriptors, of few that are spare
_CHILDREN, _CHILD_STACKS = 32, 8
_THREADS, _FRAMES, _GROUPS, _TENSORS, _TEXT = 32, 40, 256, 4, 300
_FILE_BYTES, _ANSWER_BYTES, _LINES = 4 << 20, 16 << 20, 8
_STILL_SECONDS = 0.3  # after which a stack whose end is not known has all come


@contextmanager
def start_inspector(
    folder: str, list_pids: Callable[[], Mapping[int, int]], send: Callable[[RankStates], None]
) -> Iterator[Callable[..., None]]:
    """Yield a function that looks at the ranks of a node, and sends what it finds from a thread."""

    def look(number: int) -> None:
        pids = list_pids()
        states = inspect_ranks(folder, pids)
        nccl = ask_nccl(folder, pids[0]) if number and 0 in pids else ""
        if states or number:
            send(RankStates(ranks=states, number=number, nccl=nccl))

    def ask(number: int = 0) -> None:
        with suppress(RuntimeError):  # it is too late, or there are no more threads
            thread.submit(look, number)

    thread = ThreadPoolExecutor(1)
    try:
        yield ask
    finally:
        thread.shutdown(cancel_futures=True)


def inspect_ranks(folder: str, pids: Mapping[int, int]) -> tuple[RankState, ...]:
    """Return what each rank does whose process has not ended."""
    processes, until = _Processes(), time.monotonic() + _LOOK_SECONDS
    alive = {rank: pid for rank, pid in sorted(pids.items()) if not processes.has_ended(pid)}
    inspect = functools.partial(_inspect_rank, folder, processes, until)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return tuple(pool.map(inspect, alive, alive.values()))


def _inspect_rank(
    folder: str, processes: _Processes, until: float, rank: int, pid: int
) -> RankState:
    path = os.path.join(folder, str(rank))
    state = RankState(rank, processes.describe(pid), children=processes.list_descendants(pid))
    if time.monotonic() > until:
        return replace(state, no_answer="other ranks have not answered in time")
    if state.process.state not in _STOPPED:
        threads, groups = ask_rank(f"{path}.sock", _RANK_SECONDS)
        state = replace(state, threads=threads, groups=groups)
    if not state.threads:
        frames, why = read_stack(f"{path}.stacks", pid, _RANK_SECONDS)
        if not frames:  # it may still come, and be taken for that of a child
            return replace(state, no_answer=why)
        state = replace(state, threads=(ThreadStack("main", frames),))
    of_children = _read_child_stacks(f"{path}.stacks", state.children)
    return replace(state, threads=(*state.threads, *of_children))


def _read_child_stacks(path: str, children: Sequence[ProcessState]) -> Iterator[ThreadStack]:
    until = time.monotonic() + _CHILDREN_SECONDS
    for child in children[:_CHILD_STACKS]:
        left = until - time.monotonic()
        frames, _ = read_stack(path, child.pid, left) if left > 0 else ((), "")
        if frames:
            yield ThreadStack(f"process {child.pid}", frames)


# --- Processes, as the kernel shows them ---------------------------------------------------------

_TICKS = os.sysconf("SC_CLK_TCK")
_ENDED, _STOPPED = ("", "Z", "X"), ("T", "t")
_INTERESTING = "DTtZ"  # states of children that come first


class _Processes:
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
        place = _read_text(f"/proc/{pid}/wchan").strip()
        return replace(self._states[pid], waits_in="" if place == "0" else place)

    def list_descendants(self, pid: int) -> tuple[ProcessState, ...]:
        found = [pid]
        for parent in found:  # it grows meanwhile; a number used again may close a circle
            found += self._children.pop(parent, ())
        found[1:] = sorted(found[1:], key=lambda one: self._states[one].state not in _INTERESTING)
        return tuple(map(self.describe, found[1 : _CHILDREN + 1]))


def _read_text(path: str) -> str:
    with suppress(OSError):  # it has ended, or this kernel does not show it
        return files.read_file(path).decode(errors="replace")
    return ""


# --- The stack of a process's main thread, which faulthandler writes at a signal -----------------

_FRAME = compile_lazily(r'^  File "(.*)", line (\d+) in (.*)', re.MULTILINE)
_OUTERMOST = compile_lazily(r'/run_wrapper\.py", line \d+ in <module>\n\Z|\n  \.\.\.\n\Z')
_FORKED = compile_lazily(r".*/multiprocessing/popen_fork\.py:\d+ _launch$")
_BELOW_PROGRAM = compile_lazily(r"<frozen runpy>:|.*/runpy\.py:|.*/run_wrapper\.py:")


def read_stack(path: str, pid: int, seconds: float) -> tuple[tuple[str, ...], str]:
    """Ask a process for the stack of its main thread; return why there is none, or an empty one."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC  # a rank has made the file
    try:
        with open(os.open(path, flags), "rb") as file:
            descriptor = int(file.readline(100))
            start = file.seek(0, os.SEEK_END)
            if why := _find_obstacle(pid, file, descriptor):
                return (), why
            os.kill(pid, STACKS)
            text = _await_stack(file, start, pid, time.monotonic() + seconds)
    except (OSError, ValueError):  # it has ended, or began without the watch
        return (), "it cannot be asked for its stack"
    frames = _FRAME.findall(text.rpartition("Stack (most recent call first):")[2])
    found = _trim([f"{place}:{line} {name}" for place, line, name in frames])
    why = f"no stack within {seconds:g} s" if read_task_state(pid) else "it has ended"
    return found, "" if found else why


def _find_obstacle(pid: int, file: IO[bytes], descriptor: int) -> str:
    """Return why a signal would end a process, or its stack be lost; empty if it may be sent."""
    lines = _read_text(f"/proc/{pid}/status").splitlines()
    status = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    state, place = status.get("State", "")[:1], ""
    caught, blocked = (int(status.get(mask, "0"), 16) for mask in ("SigCgt", "SigBlk"))
    with suppress(OSError):  # not stat: what it is now may be on a file server that hangs
        place = os.readlink(f"/proc/{pid}/fd/{descriptor}")
    is_open = place == os.readlink(f"/proc/self/fd/{file.fileno()}")
    bit = 1 << (STACKS - 1)
    obstacles = {
        "it has ended": state in _ENDED,
        "it waits in the kernel (state D)": state == "D",
        "it is stopped": state == "T",
        "it is traced": state == "t",
        "it is another program, or has removed the handler": not caught & bit,
        "it blocks signals": blocked & bit,
        "it has closed the file for its stacks": not is_open,
    }
    return next((why for why, is_so in obstacles.items() if is_so), "")


def _await_stack(file: IO[bytes], start: int, pid: int, until: float) -> str:
    text, changed = "", time.monotonic()
    while (now := time.monotonic()) < until and not _OUTERMOST.search(text):
        file.seek(start)
        more = file.read(_FILE_BYTES).decode(errors="replace")
        if len(more) > len(text):
            text, changed = more, now
        elif read_task_state(pid) is None or (text and now > changed + _STILL_SECONDS):
            break
        time.sleep(0.01)
    return text


def _trim(frames: Sequence[str]) -> tuple[str, ...]:
    """Drop the frames below the program's own, or its parent's, and the middle of many."""
    kept = list(itertools.takewhile(lambda frame: not _FORKED.match(frame), frames))
    while len(kept) > 1 and _BELOW_PROGRAM.match(kept[-1]):
        kept.pop()
    del kept[_FRAMES // 2 : -_FRAMES // 2]
    return tuple(frame[:_TEXT] for frame in kept)


# --- The answer of a rank: its stacks, and its collectives as PyTorch's flight recorder has them --

# The numbers of ``pg_status`` are of no use: Gloo's count ``send`` and ``recv``, too (``seq_`` in
# ProcessGroupGloo.cpp, torch 2.13), and NCCL's are behind (``workEnqueue``, ProcessGroupNCCL.cpp).


@dataclass(frozen=True)
class _Group:
    name: AnyText
    desc: AnyText = ""
    ranks: tuple[int, ...] = ()
    backends: AnyText = ""  # ``cpu:gloo,cuda:nccl``

    def list_backends(self) -> list[str]:
        return sorted({pair.partition(":")[2] for pair in self.backends.split(",")})


@dataclass(frozen=True)
class _Entry:
    """A collective, as the flight recorder keeps it (FlightRecorder.hpp, version 2.10)."""

    pg_id: int
    process_group: tuple[AnyText, AnyText]
    number: int = field(metadata={"json": "collective_seq_id"})
    name: AnyText = field(metadata={"json": "profiling_name"})
    is_p2p: bool = False
    state: AnyText = ""
    retired: bool = False
    input_sizes: tuple[tuple[int, ...], ...] = ()
    input_dtypes: tuple[AnyText, ...] = ()
    output_sizes: tuple[tuple[int, ...], ...] = ()
    output_dtypes: tuple[AnyText, ...] = ()

    @property
    def group(self) -> tuple[int, str, str]:
        """Number, name and backend of its group; a later one may have an older one's name."""
        return self.pg_id, self.process_group[0], self.name.partition(":")[0]


@dataclass(frozen=True)
class _Line:
    """A line of an answer, which has one of these."""

    stacks: tuple[ThreadStack, ...] = ()
    groups: tuple[_Group, ...] = ()
    entries: tuple[_Entry, ...] = ()


def ask_rank(
    path: str, seconds: float
) -> tuple[tuple[ThreadStack, ...], tuple[CollectiveState, ...]]:
    """Ask a rank through its socket for its stacks, the main thread's first, and collectives."""
    lines = list(_read_lines(_ask(path, seconds)))
    stacks = [one for line in lines for one in line.stacks][:_THREADS]
    groups = {group.name: group for line in lines for group in line.groups[:_GROUPS]}
    entries = [entry for line in lines for entry in line.entries if not entry.is_p2p]
    states = itertools.islice(_describe_groups(groups, entries), _GROUPS)
    return tuple(ThreadStack(one.name[:_TEXT], _trim(one.frames)) for one in stacks), tuple(states)


def _describe_groups(
    groups: Mapping[str, _Group], entries: Sequence[_Entry]
) -> Iterator[CollectiveState]:
    get_group = operator.attrgetter("group")
    by_group = itertools.groupby(sorted(entries, key=get_group), get_group)
    found = {(name, backend): list(same) for (_, name, backend), same in by_group}
    known = [(group.name, each) for group in groups.values() for each in group.list_backends()]
    for name, backend in dict.fromkeys([*known, *found]):
        if name in groups:  # else it has been destroyed
            state = _describe_group(groups[name], list(groups.values()), backend)
            yield _add_numbers(state, found.get((name, backend), ()))


def _describe_group(group: _Group, all_groups: Sequence[_Group], backend: str) -> CollectiveState:
    same = [other for other in all_groups if other.desc == group.desc]
    is_only = sum(other.ranks == group.ranks for other in same) <= 1
    label = group.desc if is_only else f"{group.desc} {group.name}"
    if group.desc in ("", "undefined"):  # torch has the second one for a group without
        label = group.name
    if len(group.list_backends()) > 1:
        label += f" ({backend})"
    is_whole = len(group.ranks) == max(len(other.ranks) for other in all_groups)
    return CollectiveState(label[:_TEXT], () if is_whole else group.ranks)


def _add_numbers(state: CollectiveState, entries: Sequence[_Entry]) -> CollectiveState:
    if not entries:
        return state
    last = max(entries, key=operator.attrgetter("number"))
    is_nccl = last.group[2] == "nccl"  # of Gloo's, it is only recorded that they are retired
    pending = [one for one in entries if one.state != "completed" and (is_nccl or not one.retired)]
    started = [one.number for one in entries if one.state != "scheduled"]
    inputs = _describe_tensors(last.input_sizes, last.input_dtypes)
    outputs = _describe_tensors(last.output_sizes, last.output_dtypes)
    return replace(
        state,
        enqueued=last.number,
        started=max(started, default=-1),
        completed=min((one.number for one in pending), default=last.number + 1) - 1,
        operation=last.name.partition(":")[2].lstrip("_")[:_TEXT],
        shapes=f"{inputs} -> {outputs}" if inputs + outputs else "",
    )


def _describe_tensors(sizes: Sequence[Sequence[int]], kinds: Sequence[str]) -> str:
    """Return ``[32, 10] Float, [10] Float, 5 more``."""
    shown = [f"{list(size)} {kind}" for size, kind in zip(sizes[:_TENSORS], kinds)]
    shown += [f"{len(sizes) - _TENSORS} more"] if len(sizes) > _TENSORS else []
    return ", ".join(shown)[:_TEXT]


def _read_lines(answer: bytes) -> Iterator[_Line]:
    for line in answer.split(b"\n", _LINES)[:-1]:
        with suppress(ValueError, RecursionError):
            # All digits of a very long number would take very long.
            raw = json.loads(line, parse_int=lambda text: int(text[:20]))
            yield decode(_Line, raw, strict=False)


def _ask(path: str, seconds: float) -> bytes:
    """Return what comes from a socket, whose path may be longer than an address can be."""
    (folder, name), until = os.path.split(path), time.monotonic() + seconds
    with suppress(OSError):  # nobody listens
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with close_after(place), socket.socket(socket.AF_UNIX) as client:
            client.settimeout(seconds)
            client.connect(f"/proc/self/fd/{place}/{name}")
            return _receive(client, until, _ANSWER_BYTES)
    return b""


def _receive(client: socket.socket, until: float, most: int) -> bytes:
    answer = bytearray()
    with suppress(OSError, ValueError):  # the latter once the time is over
        while len(answer) < most and (chunk := client.recv(1 << 16)):
            answer += chunk
            client.settimeout(until - time.monotonic())
    return bytes(answer)


# --- What NCCL says of the whole job, through any process of it ----------------------------------

_RAS, _RAS_ADDRESS = "NCCL_RAS_ADDR=", "localhost:28028"
_RAS_SECONDS, _RAS_TIMES, _RAS_BYTES = 2.0, 8, 16_000


def ask_nccl(folder: str, pid: int) -> str:
    """Return the text of NCCL's RAS service, at a rank's address; empty before NCCL 2.24.

    All processes of a user listen at one port of a node, and the kernel chooses: it is asked again
    where another job's process answers.
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html
    """
    variables = [_RAS + _RAS_ADDRESS, *_read_text(f"/proc/{pid}/environ").split("\0")]
    address = [each for each in variables if each.startswith(_RAS)][-1].partition("=")[2]
    host, _, port = address.rpartition(":")
    until = time.monotonic() + _RAS_SECONDS
    with suppress(OSError, ValueError):  # nobody listens, or answers in time
        for _ in range(_RAS_TIMES):
            place, left = (host.strip("[]"), int(port)), until - time.monotonic()
            with socket.create_connection(place, left) as client:
                client.sendall(b"timeout 1\n")  # seconds that NCCL waits for other processes
                if client.recv(3) != b"OK\n":
                    break
                if _is_of_job(client, os.path.dirname(folder)):
                    client.sendall(b"verbose status\n")
                    return _receive(client, until, _RAS_BYTES).decode(errors="replace")
    return ""


def _is_of_job(client: socket.socket, job_dir: str) -> bool:
    """Return whether a process of this job is at the other end of a connection within this node."""
    own, other = (f":{one[1]:04X}" for one in (client.getsockname(), client.getpeername()))
    lines = _read_text("/proc/net/tcp") + _read_text("/proc/net/tcp6")
    fields = map(str.split, lines.splitlines())
    ends = [one[9] for one in fields if one[1].endswith(other) and one[2].endswith(own)]
    for folder in glob.iglob("/proc/[0-9]*/fd") if ends else ():
        with suppress(OSError):  # it has ended, or is another user's
            files_of = (os.readlink(os.path.join(folder, each)) for each in os.listdir(folder))
            if f"socket:[{ends[0]}]" in files_of:
                variables = _read_text(os.path.join(os.path.dirname(folder), "environ"))
                return f"STAGER_JOB_DIR={job_dir}" in variables.split("\0")
    return False
