"""Hosts without Slurm: one fan-out over OpenSSH starts the agents, and another sends a file."""

from __future__ import annotations

import binascii
import contextlib
import json
import os
import re
import shlex
import sys
import zlib
from collections.abc import Iterator, Mapping

from ...launch.program_variables import drop_schedulers
from ...protocol.job import Job
from ...protocol.problem import NodeError, Problem, ProblemCode
from ...redaction.secret_names import remove_secret_variables
from ...system.hostlist import find_invalid_hosts
from ...system.processes import describe_exit
from .agent_program import make_container_command, make_start_command
from .phase_run import PhaseAnswers
from .slurm_text import PATIENCE
from .ssh_fanout import LOGIN_SECONDS, REPORT_PREFIX, HostEnd, find_reason
from .step_transport import SendCommand, StepTransport
from .transport import Ended, Step, StepErrors, Transfer

_NO_SSH = 127
_SSH_FAILED = 255
_KILLED = 128 + 9
_TAIL = 3  # lines of a host that are shown


class SshErrors(StepErrors):
    """Reads what a fan-out has written to standard error."""

    def parse_step_faults(self, stderr: str) -> dict[str, Ended]:
        """Return the hosts that ended badly, and why."""
        return {end.host: _describe_end(end) for end in _read_ends(stderr)}

    def parse_failed_tasks(self, stderr: str) -> dict[str, set[int]]:
        """Return the one task of each host that ended badly."""
        return {end.host: {0} for end in _read_ends(stderr)}

    def general_fault(self, code: int, stderr: str) -> Ended:
        """Return the fault of a host of which nothing was said: that of the fan-out."""
        lines = [line for line in stderr.splitlines() if line.strip()]
        others = [line for line in lines if not line.startswith(REPORT_PREFIX)]
        why = "; ".join([describe_exit(code), *others[-_TAIL:]])
        return Ended(ProblemCode.NO_ANSWER, {"why": why})


def _read_ends(stderr: str) -> Iterator[HostEnd]:
    for line in stderr.splitlines():
        if line.startswith(REPORT_PREFIX):
            with contextlib.suppress(TypeError, ValueError):  # it was cut
                yield HostEnd(**json.loads(line[len(REPORT_PREFIX) :]))


def _describe_end(end: HostEnd) -> Ended:
    why = {"why": _format_end(end)}
    if not end.begun:
        code = None if end.slow else find_reason(end.said)[0]
        if end.status == _NO_SSH:
            code = ProblemCode.SSH_NOT_STARTED
        return Ended(code or ProblemCode.SSH_LOGIN_FAILED, why)
    if end.status == _SSH_FAILED:
        return Ended(ProblemCode.SSH_CONNECTION_LOST, why)
    if end.status == _KILLED:
        return Ended(ProblemCode.NO_ANSWER_KILLED, why, -9)
    return Ended(ProblemCode.NO_ANSWER_EXITED, why, end.status)


def _format_end(end: HostEnd) -> str:
    if end.slow:
        return f"no reply for {LOGIN_SECONDS:.0f} s"
    line = "" if end.begun else find_reason(end.said)[1]
    if line:
        return f"{line}; tried {end.tries} times" if end.tries > 1 else line
    lines = list(end.said[-_TAIL:])
    return "; ".join([*lines, describe_exit(end.status)] if end.begun or not lines else lines)


_LOADER = "import binascii,sys,zlib;exec(zlib.decompress(binascii.a2b_base64(sys.argv.pop(1))))"
"""Runs the bootstrap program from an argument in which no shell finds anything of its own."""
_OF_THIS_HOST = re.compile(
    r"(SSH|XDG|DBUS|KRB5\w*|STAGER_PROGRAM)_\w*"
    r"|HOME|USER|LOGNAME|SHELL|SHLVL|PATH|PWD|OLDPWD|MAIL|TERM|COLUMNS|LINES|DISPLAY|XAUTHORITY"
    r"|HOSTNAME|HOST|TMPDIR|TMP|TEMP|TTY|KRB5CCNAME|_"
)  # variables that belong to a session or to one machine


class SshTransport(StepTransport):
    """The transport to the hosts of a job."""

    errors = SshErrors()
    not_started = ProblemCode.SSH_NOT_STARTED
    patience = PATIENCE

    def __init__(self, job: Job) -> None:
        for name in find_invalid_hosts(job.nodes):
            values = {"why": "letters, digits, -, ., _ and : make a host's name"}
            raise NodeError(Problem(ProblemCode.NODE_LIST_UNREADABLE, repr(name), values))
        super().__init__(job)
        # The ssh here is the user's own, with agent and tickets; hosts get less.
        self.variables = self.rank_variables = dict(os.environ)

    def _make_argv(self, step: Step, bootstrap: str, command: str) -> list[str]:
        program = binascii.b2a_base64(zlib.compress(bootstrap.encode(), 9), newline=False).decode()
        words = ("-c", _LOADER, program, "agent", command)
        argv = make_start_command(self._job.python_hints, command, words)
        if self._job.launch.is_run_by_apptainer:
            argv = make_container_command(self._job, command, argv, stays=True)
        # A shell stays, whose status tells how the agent has ended: where a signal ends the process
        # that sshd has started, OpenSSH's client ends with 255, as after a broken connection; and
        # bash runs the last command of `-c` in its own place.
        return _make_fanout_argv("--attached", f"{shlex.join(argv)}; exit", *step.nodes)

    def _sent_variables(self, *, ranks: bool) -> Mapping[str, str]:
        allowed = self._job.launch.pass_env if ranks else ()
        sent = drop_schedulers(remove_secret_variables(os.environ, allowed))
        return {name: sent[name] for name in sent if not _OF_THIS_HOST.fullmatch(name)}

    def _make_send_command(self, transfer: Transfer, answers: PhaseAnswers) -> SendCommand:
        argv = _make_fanout_argv(f"exec cat >{shlex.quote(transfer.target)}", *answers.nodes)
        return SendCommand(argv, _parse_send_faults, transfer.source)


def _parse_send_faults(stderr: str) -> dict[str, str]:
    return {end.host: _format_end(end) for end in _read_ends(stderr)}


def _make_fanout_argv(*words: str) -> list[str]:
    return [sys.executable, "-I", "-S", sys.argv[0], "fanout", *words]
