"""An agent's channel to the driver: its requests, the driver's commands, and its answers."""

from __future__ import annotations

import binascii
import contextlib
import json
import os
import queue
import select
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence

from ..protocol import messages
from ..protocol.codec import decode, encode
from ..protocol.messages import AgentEvent, FramesAgain, Handover, Heartbeat, RequestReader
from ..system import processes, signals
from ..system.hostlist import get_node_name
from ..system.signals import USER_SIGNALS
from .frames import FrameWriter, Lines, heartbeat

GO, STOP = "go", "stop"
"""Commands to an agent that waits for a file: all of it has come, or it will not."""
PACKED = "="  # the beginning of a compressed request; zlib's result follows, in base64
RELAY = "relay"  # begins the command to take part in a relay; the nodes follow, compressed
END = "end"  # the command to agents at work: end it, and stay until all output has come
SIGNAL = "signal "  # begins the command to pass a signal on to the ranks; its number follows
LOOK = "look "  # begins the command to report on the ranks; the question's number follows
AGAIN = "again"  # the key of a line that asks for frames once more, by source
STAY_SECONDS = 900.0  # after the last answer; longer than the driver waits, and Slurm needs
_LONGEST_PAUSE_SECONDS = 600.0
BEAT_SECONDS = 10.0
"""Time between two heartbeats of an agent, in every phase: ``srun`` may never report a lost node,
as Slurm's controller must resolve the name of its host for that, since 23.11; and an sshd that
never sends notices only after two hours, by TCP's keepalive, that the network has gone."""
HANG_SECONDS = 60.0  # without progress: no disk takes as long for one request
_MOST_NAMED = 3  # processes that a heartbeat names
_REPEAT_SECONDS = 4.0  # before an agent that stays repeats its last message; it doubles


class AgentChannel:
    """Takes the driver's requests and commands, and sends events to it.

    On a local node each request is one line of standard input. In a step of Slurm's each line after
    the first request is a command or a request, for all nodes; the end means that the driver has
    gone. ``sent`` counts the bytes of output since the last request, by rank.
    """

    def __init__(self, handle: int | None, *, follow: bool = True) -> None:
        """Read the first request from an open file, or stdin, whose end may end this process."""
        self._lines: queue.Queue[str] = queue.Queue()  # the driver's, in a step; empty: the end
        self._busy = True
        self.sent: dict[int | None, int] = {}
        self._on_look: Callable[[int], None] = lambda number: None
        self._requests = RequestReader(get_node_name(os.environ))
        self.request = self._requests.first(_read_first_message(handle))
        self._in_step = self._requests.in_step
        self.handed_over = self._requests.handed_over
        self.node = self.request.node
        self._source = f"{self.node}:{os.environ.get('SLURM_PROCID', '0')}"
        self._writer = FrameWriter(self._source, self._requests.frames_sent)
        self._writing = threading.Lock()
        self._progress: TaskProgress | None = None
        self._before_last = 0  # the number of the frame before the last message
        if self._in_step and follow:
            threading.Thread(target=self._listen, daemon=True).start()
            threading.Thread(target=self._beat, daemon=True).start()

    def emit(self, event: AgentEvent, name: str = "") -> None:
        """Send one event."""
        raw = {**event.to_json(), "node": self.node}
        self._send(json.dumps({**raw, "event": name or event.event}).encode())

    def output(self, rank: int | None, data: bytes) -> None:
        """Pass on what a rank has written, or the launcher (None)."""
        self.sent[rank] = self.sent.get(rank, 0) + len(data)
        self._send(messages.make_output_line(self.node, rank, data))

    def _send(self, line: bytes) -> None:
        with signals.defer_signals(), self._writing:  # half of it would be lost
            if not self._in_step:
                _write(line + b"\n")
                return
            self._before_last = self._writer.number
            _write(self._writer.frames(line))

    def command(self) -> str:
        """Wait for the driver's next line."""
        return self._lines.get()

    def await_request(self) -> bool:
        """Wait for the next request to this node; return False where there is none any more."""
        while line := self._next():
            # A command is too late: this node had failed before.
            is_late = line in (GO, STOP, END) or line.startswith((RELAY, LOOK))
            message = None if is_late else unpack_line(line)
            if message is None:
                continue
            self.sent = {}
            request = self._requests.next(message)
            if request is not None:
                self.request = request
                return True
        return False

    def send_last_answer(self, event: AgentEvent, name: str = "") -> None:
        """Send the last answer; stay until the driver has all that was sent, or has gone."""
        if self._in_step:
            signals.ignore_signals()  # Slurm ends all tasks when one has died: not from here on
        self.emit(event, name)
        self._busy = False
        until = time.monotonic() + STAY_SECONDS
        while self._in_step and self._await_line(until):
            pass

    def handover_file(self) -> int:
        """Return the current request as an open file, for the program that goes on with it."""
        from .bootstrap import make_memory_file

        handover = Handover(self.request.to_json(), self._in_step, self._writer.number)
        return make_memory_file(json.dumps({"handover": encode(handover)}).encode())

    def _next(self) -> str:
        if not self._in_step:
            return sys.stdin.readline()
        self._busy = False
        line = self._await_line(float("inf"))
        self._busy = True
        return line

    def _await_line(self, until: float) -> str:
        """Wait for the driver's next line, repeating the last message; return "" at its end."""
        pause = _REPEAT_SECONDS
        while time.monotonic() < until:
            try:
                return self._lines.get(timeout=pause)
            except queue.Empty:
                self._send_again([(self._before_last + 1, self._writer.number)])
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        return ""

    def _listen(self) -> None:
        self._take_input()
        self._interrupt()  # before it could take the end for a command, and answer
        self._lines.put("")

    def _take_input(self, until: int | None = None) -> None:
        lines, ready = Lines(), select.poll()
        for handle in (0, *(() if until is None else (until,))):
            ready.register(handle, select.POLLIN)
        with contextlib.suppress(OSError):  # as good as its end
            while until not in dict(ready.poll()) and (chunk := os.read(0, 1 << 16)):
                for line in lines.feed(chunk):
                    self._take(line.decode(errors="replace"))

    @contextlib.contextmanager
    def answer_looks(self, look: Callable[[int], None]) -> Iterator[None]:
        """Call a function with the number of each question for what the ranks do, from a thread."""
        ignore, self._on_look = self._on_look, look
        end, stop = os.pipe()
        listener = threading.Thread(target=self._take_input, args=(end,), daemon=True)
        try:
            if not self._in_step:
                listener.start()
            yield
        finally:
            os.close(stop)
            if listener.ident is not None:
                listener.join()
            os.close(end)
            self._on_look = ignore

    @contextlib.contextmanager
    def watch_progress(self) -> Iterator[None]:
        """Say in heartbeats what this process hangs in, or its children, while the block runs."""
        self._progress = TaskProgress(processes.list_own_tasks())
        try:
            yield
        finally:
            self._progress = None

    def _beat(self) -> None:
        """Send heartbeats, from a thread: the other one may be what hangs."""
        frame = heartbeat(self._source)
        with contextlib.suppress(OSError):  # the driver has gone
            while True:
                time.sleep(BEAT_SECONDS)
                progress, payload = self._progress, b""
                if progress is not None:
                    hung = progress.find_hang(processes.list_own_tasks(), BEAT_SECONDS)
                    event = Heartbeat(hung=hung, seconds=progress.still_seconds)
                    payload = json.dumps(event.to_json()).encode() if hung else b""
                with self._writing:
                    _write(frame.replace(b"\n", payload + b"\n"))

    def _take(self, line: str) -> None:
        if line == END:
            self._interrupt()
        known = {str(int(number)) for number in USER_SIGNALS}
        if line.startswith(SIGNAL) and line[len(SIGNAL) :] in known:  # it may be cut
            signals.add_user_signal(int(line[len(SIGNAL) :]))
        elif line.startswith(LOOK) and line[len(LOOK) :].isdecimal():
            self._on_look(int(line[len(LOOK) :]))
        elif not line.startswith((f'{{"{AGAIN}"', SIGNAL, LOOK)):
            self._lines.put(line)
        elif line.startswith("{"):
            with contextlib.suppress(ValueError):  # it was cut; the driver asks again
                question = decode(FramesAgain, json.loads(line))
                self._send_again(question.again.get(self._source, ()))

    def _interrupt(self) -> None:
        """End what this process is doing, as a signal does; nothing if it only waits."""
        if self._busy:
            os.kill(os.getpid(), signal.SIGTERM)

    def _send_again(self, gaps: Sequence[tuple[int, int]]) -> None:
        with contextlib.suppress(OSError), self._writing:  # the driver may have gone
            for first, last in gaps:
                _write(self._writer.again(first, last))


def _read_first_message(handle: int | None) -> object:
    if handle is None:
        return json.loads(sys.stdin.readline())
    with open(handle, encoding="utf-8") as stream:
        return json.load(stream)


def unpack_line(line: str) -> object:
    """Return the JSON object of a line, compressed or not; None for a line that was cut."""
    try:
        if line.startswith(PACKED):
            line = zlib.decompress(binascii.a2b_base64(line[len(PACKED) :])).decode()
        message = json.loads(line)
    except (ValueError, zlib.error):
        return None
    return message if isinstance(message, dict) else None


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


class TaskProgress:
    """The progress of some processes."""

    def __init__(self, tasks: tuple[processes.TaskState, ...]) -> None:
        self._tasks = tasks
        self.still_seconds = 0.0  # the time for which none of them has made progress

    def find_hang(self, tasks: tuple[processes.TaskState, ...], seconds: float) -> str:
        """Return what the processes hang in, or empty; no clock: all may have been stopped."""
        moved = processes.has_progress(self._tasks, tasks)
        self._tasks = tasks
        self.still_seconds = 0.0 if moved else self.still_seconds + seconds
        if self.still_seconds < HANG_SECONDS:
            return ""
        hung = [task for task in tasks if task.is_hanging]
        more = len(hung) - _MOST_NAMED
        named = "; ".join(map(str, hung[:_MOST_NAMED]))
        return f"{named}; and {more} more" if more > 0 else named
