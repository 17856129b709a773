"""The fan-out: starts one command on many hosts, sends all the same input, passes on their lines.

It is to hosts without Slurm what ``srun`` is to an allocation, and is spoken to in the same way.
What comes on standard input goes to each host; whole lines of what a host prints go to standard
output, so that those of several hosts never mix; and for each host that ends badly a line goes to
standard error. It ends when all hosts have. Of one host alone the bytes are passed on as they come.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import stat
import time
from collections.abc import Sequence

from ..system import processes, signals
from .fanout_host import Host
from .login_queue import LoginQueue

_MOST_UNSENT = 8 << 20
"""Bytes of input that wait for the slowest host before more is read."""
_WAIT_SECONDS = 1.0
"""Longest wait for something to do; also the time between two looks at every host."""
_TICK_SECONDS = 0.02
_CHUNK = 1 << 18


def main(names: Sequence[str], script: str, *, attached: bool = False) -> int:
    """Run a shell script on all hosts; return 0, or the exit status of one that ended badly.

    Args:
        names: the hosts.
        script: one line.
        attached: True if nobody is to be logged in to any more once a pipe on standard input has
            ended: whoever has started this has gone, or wants the end.
    """
    signals.end_on_signals()
    processes.raise_open_files()  # three for each host
    fanout = Fanout(names, script, attached=attached)
    try:
        while fanout.runs():
            fanout.turn()
        return fanout.status
    except signals.Stopped:
        return signals.TERMINATED
    except BrokenPipeError:  # whoever has started this is gone
        return 1
    finally:
        fanout.close()


class Fanout:
    """Hosts that run one command.

    Attributes:
        status: 0, or the exit status of a host that ended badly.
    """

    def __init__(self, names: Sequence[str], script: str, *, attached: bool = False) -> None:
        self.status = 0
        self._waiting, self._script = LoginQueue(names), script
        self._mixes = len(names) > 1
        self._hosts: list[Host] = []
        """Those that have been started, and have not ended."""
        self._ending: list[Host] = []
        """Those whose output has ended, so that their process is about to."""
        self._next_look = 0.0
        """The time at which all hosts are looked at."""
        self._selector = selectors.DefaultSelector()
        self._input = bytearray()
        self._passed = 0
        """Bytes of the input before those that are kept."""
        self._input_ended = False
        self._from_file = stat.S_ISREG(os.fstat(0).st_mode)
        """True if the input is a file: it can always be read, and no selector takes it."""
        self._attached = attached and not self._from_file
        self._listens = False
        os.set_blocking(0, self._from_file)

    def runs(self) -> bool:
        """Return whether some host is still to end."""
        return bool(self._hosts or self._waiting)

    def turn(self) -> None:
        """Do what can be done now, or wait a moment for something to do."""
        self._start_more()
        self._take_input()
        for key, _ in self._selector.select(self._pause()):
            if key.data is None:
                self._read_input()
            else:
                self._serve(key)
        self._look()

    def close(self) -> None:
        """End what still runs; agents see their input end."""
        for host in self._hosts:
            if host.process is not None:
                with contextlib.suppress(OSError):
                    host.process.terminate()
        self._selector.close()

    def _pause(self) -> float:
        """Return how long to wait: a process that has ended wakes nobody."""
        if self._reads_file():
            return 0.0
        return _TICK_SECONDS if self._ending else _WAIT_SECONDS

    def _look(self) -> None:
        """Find ended hosts by closed output, now and then all: an ssh child may keep it open."""
        now, hosts = time.monotonic(), self._ending
        if now >= self._next_look:
            self._next_look = now + _WAIT_SECONDS
            hosts = self._hosts
            for host in hosts:
                if host.is_late():
                    host.end_late()
        for host in [host for host in hosts if host.has_ended()]:
            self._end(host)

    def _start_more(self) -> None:
        while self._waiting:
            name = self._waiting.next(self._logging_in())
            if not name:
                return
            host = Host(name, self._script)
            if host.ended:
                self._report(host)
                continue
            self._hosts.append(host)
            _, output, errors = host.streams()
            self._selector.register(output, selectors.EVENT_READ, host)
            self._selector.register(errors, selectors.EVENT_READ, host)

    def _logging_in(self) -> int:
        return sum(not host.begun for host in self._hosts)

    def _serve(self, key: selectors.SelectorKey) -> None:
        host: Host = key.data
        stdin, output, _ = host.streams()
        if key.fileobj is stdin:
            self._send(host)
        elif key.fileobj is output:
            begun, data = host.begun, host.read(whole_lines=self._mixes)
            if data is None:
                self._selector.unregister(key.fileobj)
                self._ending.append(host)
                return
            _write(data)
            if host.begun and not begun:
                self._send(host)
        elif host.read_errors() is None:
            self._selector.unregister(key.fileobj)

    def _send(self, host: Host) -> None:
        stdin = host.streams()[0]
        if stdin.closed:
            return
        try:
            while host.offset < self._passed + len(self._input):
                start = host.offset - self._passed
                host.offset += os.write(stdin.fileno(), self._input[start : start + _CHUNK])
        except BlockingIOError:
            if stdin not in self._selector.get_map():
                self._selector.register(stdin, selectors.EVENT_WRITE, host)
            return
        except OSError:  # it has ended: that shows elsewhere
            host.offset = self._passed + len(self._input)
        if stdin in self._selector.get_map():
            self._selector.unregister(stdin)
        if self._input_ended:
            with contextlib.suppress(OSError):
                stdin.close()

    def _take_input(self) -> None:
        """Forget what all hosts have, and read on while the slowest one keeps up."""
        if self._input and not self._waiting:
            reached = min((host.offset for host in self._hosts), default=self._passed)
            del self._input[: reached - self._passed]
            self._passed = reached
        if self._reads_file():
            self._read_input()
        wanted = self._wants_input() and not self._from_file
        if wanted and not self._listens:
            self._selector.register(0, selectors.EVENT_READ)
        elif self._listens and not wanted:
            self._selector.unregister(0)
        self._listens = wanted

    def _wants_input(self) -> bool:
        return not self._input_ended and len(self._input) < _MOST_UNSENT

    def _reads_file(self) -> bool:
        return self._from_file and self._wants_input()

    def _read_input(self) -> None:
        try:
            chunk = os.read(0, _CHUNK)
        except BlockingIOError:
            return
        self._input += chunk
        self._input_ended = not chunk
        if self._driver_has_ended():
            self._give_up_logins()
        for host in self._hosts:
            if host.begun:
                self._send(host)

    def _give_up_logins(self) -> None:
        self._waiting = LoginQueue(())
        for host in self._hosts:
            if not host.begun and host.process is not None:
                with contextlib.suppress(OSError):
                    host.process.terminate()

    def _end(self, host: Host) -> None:
        _write(host.rest(whole_lines=self._mixes))
        while host.read_errors():
            pass
        for stream in host.streams():
            if not stream.closed and stream in self._selector.get_map():
                self._selector.unregister(stream)
            with contextlib.suppress(OSError):
                stream.close()
        self._hosts.remove(host)
        if host in self._ending:
            self._ending.remove(host)
        again = host.was_turned_away() and not self._driver_has_ended()
        if not (again and self._waiting.turned_away(host.name, self._logging_in())):
            self._report(host)

    def _driver_has_ended(self) -> bool:
        """Return whether the driver has: nobody is to be logged in to any more."""
        return self._attached and self._input_ended

    def _report(self, host: Host) -> None:
        line = host.report(max(1, self._waiting.tries(host.name)))
        if line:
            self.status = self.status or max(1, host.status)
            os.write(2, line.encode() + b"\n")


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]
