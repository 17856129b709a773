"""The ends of a fan-out's hosts: what each of them means for a job. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from ...protocol.codec import DecodeError, decode
from ...protocol.problem import ProblemCode
from ...system.processes import describe_exit
from . import ssh_fanout
from .ssh_fanout import LOGIN_SECONDS, REPORT_PREFIX
from .transport import StepFault

_NO_SSH = 127
_SSH_FAILED = 255
_KILLED = 128 + 9
_TAIL = 3
"""Lines of a host that are shown."""


@dataclass(frozen=True)
class HostEnd:
    """The end of a host, as the fan-out reports it."""

    host: str
    status: int
    """The exit status of its ``ssh``."""
    begun: bool
    """True if the login succeeded."""
    slow: bool
    """True if its login took too long, and was ended."""
    said: tuple[str, ...]
    """The last lines that ``ssh`` and the host have written to standard error."""
    tries: int = 1
    """How often it was tried to log in."""


def parse_step_faults(stderr: str) -> dict[str, StepFault]:
    """Return the hosts that ended badly, and why."""
    return {end.host: _fault(end) for end in _ends(stderr)}


def parse_failed_tasks(stderr: str) -> dict[str, set[int]]:
    """Return the one task of each host that ended badly."""
    return {end.host: {0} for end in _ends(stderr)}


def general_fault(code: int, stderr: str) -> StepFault:
    """Return the fault of a host of which nothing was said: that of the fan-out."""
    others = [
        line for line in stderr.splitlines() if line.strip() and not line.startswith(REPORT_PREFIX)
    ]
    return StepFault(ProblemCode.NO_ANSWER, {"why": "; ".join([describe_exit(code), *others[-3:]])})


def parse_send_faults(stderr: str) -> dict[str, str]:
    """Return the hosts that a file could not be sent to, and why."""
    return {end.host: _words(end) for end in _ends(stderr)}


def _ends(stderr: str) -> Iterator[HostEnd]:
    for line in stderr.splitlines():
        if line.startswith(REPORT_PREFIX):
            try:
                yield decode(HostEnd, json.loads(line[len(REPORT_PREFIX) :]))
            except (DecodeError, ValueError):  # it was cut
                continue


def _fault(end: HostEnd) -> StepFault:
    why = {"why": _words(end)}
    if not end.begun:
        code = None if end.slow else ssh_fanout.find_reason(end.said)
        if end.status == _NO_SSH:
            code = ProblemCode.SSH_NOT_STARTED
        return StepFault(code or ProblemCode.SSH_LOGIN_FAILED, why)
    if end.status == _SSH_FAILED:
        return StepFault(ProblemCode.SSH_CONNECTION_LOST, why)
    if end.status == _KILLED:
        return StepFault(ProblemCode.NO_ANSWER_KILLED, why, -9)
    return StepFault(ProblemCode.NO_ANSWER_EXITED, why, end.status)


def _words(end: HostEnd) -> str:
    if end.slow:
        return f"no reply for {LOGIN_SECONDS:.0f} s"
    line = "" if end.begun else ssh_fanout.find_reason_line(end.said)
    if line:
        return f"{line}; tried {end.tries} times" if end.tries > 1 else line
    lines = list(end.said[-_TAIL:])
    return "; ".join([*lines, describe_exit(end.status)] if end.begun or not lines else lines)
