"""Starts the ranks of one node as plain processes: a launcher for programs without PyTorch.

Written verbatim as ``run_processes.py`` beside the run wrapper, so it stands alone: standard
library only, Python 3.9 or newer. Usage::

    python run_processes.py RANKS FIRST-RANK GRACE-SECONDS PROGRAM [ARGUMENT...]

Each rank gets this process's variables, ``RANK`` and ``LOCAL_RANK``. When one fails, or this
process gets SIGTERM, the others get SIGTERM, and SIGKILL after the grace period. Failures are
reported in the form of torchrun's closing report, which the agent reads.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType

_STOPPED = 128 + signal.SIGTERM
_SIGNALS = (signal.SIGTERM, signal.SIGALRM)


class _Ranks:
    def __init__(self, first: int, grace: int) -> None:
        self._failed: list[tuple[int, int, int]] = []  # by themselves, the first one first
        self._first, self._grace = first, grace
        self._running: dict[int, int] = {}
        self._told = False

    def start(self, count: int, program: list[str]) -> None:
        nothing = os.open(os.devnull, os.O_RDONLY)
        # A signal in the middle would miss the ranks that are still to come.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        argv = [sys.executable, *program]
        for local in range(count):
            variables = {**os.environ, "RANK": str(self._first + local), "LOCAL_RANK": str(local)}
            pid = os.fork()
            if not pid:
                _become(argv, variables, nothing)
            self._running[pid] = local
        os.close(nothing)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def end(self, *_signal: object) -> None:
        """Send SIGTERM to those that still run, and later SIGKILL."""
        if self._told:
            return
        self._told = True
        for pid in self._running:
            os.kill(pid, signal.SIGTERM)
        signal.alarm(self._grace)
        for pid in self._running:
            _say(f"stager: Sending process {pid} closing signal SIGTERM")

    def kill(self, _number: int, _frame: FrameType | None) -> None:
        for pid in self._running:
            os.kill(pid, signal.SIGKILL)

    def wait(self) -> int:
        while self._running:
            pid, status = os.waitpid(-1, 0)
            local = self._running.pop(pid, None)
            code = os.waitstatus_to_exitcode(status)
            if local is not None and code and not self._told:
                self._failed.append((local, code, pid))
                self.end()
        for local, code, pid in self._failed:
            _say(f"  rank      : {self._first + local} (local_rank: {local})")
            _say(f"  exitcode  : {code} (pid: {pid})")
        if self._failed:
            return 1
        return _STOPPED if self._told else 0


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it: the agent was killed
        os.write(2, f"{line}\n".encode())


def _become(argv: list[str], variables: dict[str, str], stdin: int) -> None:
    try:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        os.dup2(stdin, 0)
        os.execve(argv[0], argv, variables)
    except OSError as exc:
        print(f"stager: {argv[0]}: {exc.strerror}", file=sys.stderr, flush=True)
    finally:
        os._exit(127)


def main(argv: list[str]) -> int:
    """Run the ranks to their end."""
    count, first, grace = map(int, argv[:3])
    ranks = _Ranks(first, grace)
    signal.signal(signal.SIGTERM, ranks.end)
    signal.signal(signal.SIGALRM, ranks.kill)
    ranks.start(count, argv[3:])
    return ranks.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
