"""Reading the output of a launcher and its ranks, byte by byte, until they end.

The output of a local rank comes through a named pipe, the launcher's through its standard output;
it is passed on in whole lines. The wrapper names the rank, which may be another after a restart,
in a line that counts only with the launch's nonce.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import re
import selectors
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from ..protocol.problem import NodeError, Problem, ProblemCode
from ..system import processes, signals
from .rank_monitor import RankMonitor, make_pipe

# --- The last lines of output, kept while all of it is passed on ---------------------------------

OnOutput = Callable[["int | None", bytes], None]
"""Called with the rank, None for the launcher itself, and its next output: whole lines, except for
very long ones, and the last."""
KEPT = 200  # the number of last lines that are kept, of all ranks together and of each
_KEPT_BYTES = 1 << 12  # bytes kept of each of these lines; the beginning tells what is wrong


class RecentOutput:
    """The last lines of all together, and of each rank; under None, of the launcher."""

    def __init__(self) -> None:
        self.tail: collections.deque[str] = collections.deque(maxlen=KEPT)
        self.by_rank: dict[int | None, collections.deque[str]] = {}

    def add(self, rank: int | None, data: bytes) -> None:
        """Keep the last lines of some output."""
        lines = data.rsplit(b"\n", KEPT + 1)[-KEPT - 1 :]
        if not lines[-1]:
            lines.pop()
        texts = [line[:_KEPT_BYTES].decode(errors="replace") for line in lines[-KEPT:]]
        self.tail.extend(texts)
        self.by_rank.setdefault(rank, collections.deque(maxlen=KEPT)).extend(texts)


AGENT_SECONDS = 5.0  # for an agent to end after its ranks: it waits for them, and cleans up
LONGEST_LINE = 1 << 20  # longer ones come in pieces: a progress bar may never end its line
_CHUNK = 1 << 16
_KILLING_SECONDS = 12.0  # see bundle.system.processes
_PAUSE_SECONDS = 0.02  # after a short read: a rank that writes line by line makes few events
_POLL_SECONDS = 1.0  # until ranks are looked after though nothing has come: all day, on each node
_BLIND_POLL_SECONDS = 0.2  # the same where no pidfd tells the launcher's end (before Linux 5.3)
_DRAIN_SECONDS = 2.0  # for the launcher's remaining output, after its end
_LEFT_SECONDS = 1.0  # after SIGTERM, for processes that ranks have left behind, after a good end
_RESERVE = 32  # files that an agent opens besides the pipes, and its launcher as it starts
_FINISHED_SECONDS = 3.0  # until the end of all programs is reported: most launchers end by then


class _Stream:
    """The output of one local rank, or of the launcher, which has no ``possible`` ranks."""

    def __init__(self, handle: int, possible: range = range(0)) -> None:
        self.handle, self.possible = handle, possible
        self.rank: int | None = None  # for the launcher, and until the wrapper has named the rank
        self.held = bytearray()  # a line without an end as yet

    def take(self, chunk: bytes) -> bytes:
        """Return the whole lines so far; of a line that is too long, what there is of it."""
        end = chunk.rfind(b"\n") + 1
        if not end and len(self.held) + len(chunk) > LONGEST_LINE:
            end = len(chunk)
        lines = self.take_rest() + chunk[:end] if end else b""
        self.held += chunk[end:]
        return lines

    def take_rest(self) -> bytes:
        line, self.held = bytes(self.held), bytearray()
        return line


class Outputs:
    """The named pipes of a node's ranks, which find them by ``variables`` of the launcher.

    ``on_signal`` is called with a signal of the user's and the ranks that it was sent to,
    ``on_finished`` once all programs have ended well and the launcher waits, ``on_half_grace``
    where ranks that were told to end have not done so after half of the grace.
    """

    def __init__(self, folder: str, ranks: Sequence[range], grace: float) -> None:
        """Make a pipe per local rank, for the ranks it may be; EMFILE at the limit of files."""
        if ranks and len(ranks) + _RESERVE > processes.get_open_file_limit():
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        nonce = os.urandom(16).hex()
        self.variables = {"STAGER_OUTPUT": folder, "STAGER_OUTPUT_NONCE": nonce} if ranks else {}
        self._name = re.compile(rb"\x1erank (\d{1,9}) %s\n" % nonce.encode())
        self._grace = grace
        self.on_signal: Callable[[int, list[int]], None] = lambda number, ranks: None
        self.on_finished: Callable[[], None] | None = None
        self.on_half_grace: Callable[[], None] = lambda: None
        self._running_until = time.monotonic()
        self._ranks = ranks
        self._streams: list[_Stream] = []
        os.mkdir(folder, 0o700)
        self.monitor = RankMonitor(folder)
        self._pipes: list[int] = []
        try:
            for local in range(len(ranks)):
                self._pipes.append(make_pipe(os.path.join(folder, str(local))))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the pipes."""
        for pipe in self._pipes:
            os.close(pipe)
        self._pipes.clear()
        self.monitor.close()

    @property
    def has_all_finished(self) -> bool:
        """True if the programs of all ranks have ended well; a launcher may still wait."""
        return bool(self._ranks) and self.monitor.count_finished_well() >= len(self._ranks)

    def follow(self, running: processes.Process, recent: RecentOutput, on_output: OnOutput) -> None:
        """Pass on output until the launcher ends, not its pipe; end what it left behind."""
        main = running.stdout.fileno() if running.stdout is not None else -1
        os.set_blocking(main, False)

        def record(rank: int | None, data: bytes) -> None:
            recent.add(rank, data)
            on_output(rank, data)

        with selectors.DefaultSelector() as selector:
            self._streams = [_Stream(main), *map(_Stream, self._pipes, self._ranks)]
            for stream in self._streams:
                selector.register(stream.handle, selectors.EVENT_READ, (stream, record))
            selector.register(self.monitor, selectors.EVENT_READ)
            self._read_to_launchers_end(running, selector)
            self.monitor.note_launcher_end(stopped=False)
            processes.stop(running, 0 if running.returncode else _LEFT_SECONDS)
            deadline = time.monotonic() + _DRAIN_SECONDS
            while time.monotonic() < deadline:
                self._look_after_ranks()
                if not any(self._read_ready(selector, 0)):
                    break
        for stream in self._streams:
            self._record(stream, stream.take_rest(), record)

    def _read_to_launchers_end(
        self, running: processes.Process, selector: selectors.BaseSelector
    ) -> None:
        end = None
        with contextlib.suppress(ProcessLookupError):  # somebody has waited for it
            end = processes.open_pidfd(running.pid)
        if end is not None:
            selector.register(end, selectors.EVENT_READ)
        try:
            while running.poll() is None:
                self._look_after_ranks()
                poll = _BLIND_POLL_SECONDS if end is None else _POLL_SECONDS
                sizes = self._read_ready(selector, poll)
                if sizes and max(sizes) < _CHUNK // 4:
                    time.sleep(_PAUSE_SECONDS)
        finally:
            if end is not None:
                selector.unregister(end)
                os.close(end)

    def _look_after_ranks(self) -> None:
        self.monitor.take()
        processes.reap_orphans()
        now = time.monotonic()
        if not self.has_all_finished:
            self._running_until = now
        elif self.on_finished is not None and now > self._running_until + _FINISHED_SECONDS:
            self.on_finished()
            self.on_finished = None
        for number in signals.take_user_signals():
            self.on_signal(number, self.monitor.send_signal(number))

    def stop(self, running: processes.Process, on_output: OnOutput) -> None:
        """End the launcher with its ranks, whose output is passed on; its own is complaints."""

        def deliver(rank: int | None, data: bytes) -> None:
            with contextlib.suppress(OSError):  # the driver has gone
                on_output(rank, data)

        of_ranks = self._streams[1:] or self._streams  # a rank that Slurm started has no launcher
        targets: dict[_Stream, OnOutput] = dict.fromkeys(self._streams, lambda rank, data: None)
        targets.update(dict.fromkeys(of_ranks, deliver))
        ending = threading.Thread(target=processes.stop, args=(running, self._grace))
        ending.start()
        half = time.monotonic() + self._grace / 2
        deadline = time.monotonic() + self._grace + _KILLING_SECONDS
        with selectors.DefaultSelector() as selector:
            for stream, target in targets.items():
                selector.register(stream.handle, selectors.EVENT_READ, (stream, target))
            while time.monotonic() < deadline:
                ended = not ending.is_alive()
                sizes = self._read_ready(selector, 0 if ended else _PAUSE_SECONDS)
                if ended:
                    if not any(sizes):
                        break
                elif time.monotonic() > half:
                    self.on_half_grace()
                    half = deadline  # once
                if not sizes:  # without open streams, the selector does not wait
                    time.sleep(_PAUSE_SECONDS)
        ending.join()
        for stream in of_ranks:
            self._record(stream, stream.take_rest(), deliver)

    def _read_ready(self, selector: selectors.BaseSelector, seconds: float) -> list[int]:
        ready = [key.data for key, _ in selector.select(seconds) if key.data is not None]
        return [self._read(stream, selector, record) for stream, record in ready]

    def _read(self, stream: _Stream, selector: selectors.BaseSelector, record: OnOutput) -> int:
        with signals.defer_signals():  # what was read and not recorded would be lost
            try:
                chunk = os.read(stream.handle, _CHUNK)
            except BlockingIOError:
                return 0
            if chunk:
                self._record(stream, stream.take(chunk), record)
            else:
                selector.unregister(stream.handle)
            return len(chunk)

    def _record(self, stream: _Stream, data: bytes, record: OnOutput) -> None:
        """Record whole lines; one that names a rank changes the rank of the lines after it."""
        start = 0
        for name in self._name.finditer(data):
            if int(name[1]) not in stream.possible:
                continue
            if before := data[start : name.start()]:
                # The last line of the previous rank may have no end.
                record(stream.rank, before if before.endswith(b"\n") else before + b"\n")
            stream.rank, start = int(name[1]), name.end()
        if data[start:]:
            record(stream.rank, data[start:])


def run_launcher(
    argv: list[str],
    variables: Mapping[str, str],
    cwd: str,
    outputs: Outputs,
    on_output: OnOutput,
    running: processes.Process | None = None,
) -> tuple[int, RecentOutput]:
    """Run a launcher, or one that is ``running``, to its end; pass on output of it and its ranks.

    Processes that a rank left behind end with it. Returns the exit status, 128 and more for a
    signal, and the last lines of output.
    """
    recent = RecentOutput()
    try:
        with signals.ignore_user_signals():  # torchrun would end; ranks do not ignore them
            running = running or processes.start(
                argv, env=variables, cwd=cwd, stdout=processes.PIPE, stderr=processes.STDOUT
            )
    except processes.ProcessError as exc:
        problem = Problem(ProblemCode.LAUNCHER_NOT_STARTED, argv[0], {"why": exc.reason})
        raise NodeError(problem) from exc
    try:
        outputs.follow(running, recent, on_output)
        code = running.wait()
    except signals.Stopped:
        outputs.monitor.note_launcher_end(stopped=True)
        with contextlib.suppress(OSError):  # the driver has gone, too
            outputs.stop(running, on_output)
        return 0 if outputs.has_all_finished else signals.TERMINATED, recent
    finally:
        processes.stop(running, 0)
    return code if code >= 0 else 128 - code, recent
