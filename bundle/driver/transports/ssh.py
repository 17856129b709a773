"""Hosts without Slurm: one fan-out over OpenSSH starts the agents, and another sends a file."""

from __future__ import annotations

import binascii
import os
import re
import shlex
import sys
import zlib
from collections.abc import Mapping

from ...launch.program_variables import drop_schedulers
from ...protocol.job import Job
from ...protocol.problem import NodeError, Problem, ProblemCode
from ...redaction.secret_names import remove_secret_variables
from ...system.hostlist import find_invalid_hosts
from . import ssh_faults
from .agent_program import make_container_command, make_start_command
from .phase_run import PhaseAnswers
from .slurm_text import PATIENCE
from .step_transport import SendCommand, StepCluster, StepTransport
from .transport import Step, StepErrors, Transfer

_LOADER = "import binascii,sys,zlib;exec(zlib.decompress(binascii.a2b_base64(sys.argv.pop(1))))"
"""Runs the bootstrap program from an argument in which no shell finds anything of its own."""
_OF_THIS_HOST = re.compile(
    r"(SSH|XDG|DBUS|KRB5\w*|STAGER_PROGRAM)_\w*"
    r"|HOME|USER|LOGNAME|SHELL|SHLVL|PATH|PWD|OLDPWD|MAIL|TERM|COLUMNS|LINES|DISPLAY|XAUTHORITY"
    r"|HOSTNAME|HOST|TMPDIR|TMP|TEMP|TTY|KRB5CCNAME|_"
)
"""Variables that belong to a session or to one machine."""


def ssh_transport(job: Job) -> StepTransport:
    """Return the transport to the hosts of a job."""
    return StepTransport(job, _SshCluster(job))


class _SshCluster(StepCluster):
    errors: StepErrors = ssh_faults
    not_started = ProblemCode.SSH_NOT_STARTED
    patience = PATIENCE

    def __init__(self, job: Job) -> None:
        for name in find_invalid_hosts(job.nodes):
            values = {"why": "letters, digits, -, ., _ and : make a host's name"}
            raise NodeError(Problem(ProblemCode.NODE_LIST_UNREADABLE, repr(name), values))
        self._job = job
        # The ssh here is the user's own, with agent and tickets; hosts get less.
        self.variables = self.rank_variables = dict(os.environ)

    def make_argv(self, step: Step, bootstrap: str, command: str) -> list[str]:
        program = binascii.b2a_base64(zlib.compress(bootstrap.encode(), 9), newline=False).decode()
        words = ("-c", _LOADER, program, "agent", command)
        argv = make_start_command(self._job.python_hints, command, words)
        if self._job.launch.is_run_by_apptainer:
            argv = make_container_command(self._job, command, argv, stays=True)
        # A shell stays, whose status tells how the agent has ended: where a signal ends the process
        # that sshd has started, OpenSSH's client ends with 255, as after a broken connection; and
        # bash runs the last command of `-c` in its own place.
        return _fanout("--attached", f"{shlex.join(argv)}; exit", *step.nodes)

    def sent_variables(self, *, ranks: bool) -> Mapping[str, str]:
        allowed = self._job.launch.pass_env if ranks else ()
        sent = remove_secret_variables(os.environ, allowed)
        own = drop_schedulers(sent)
        return {name: own[name] for name in own if not _OF_THIS_HOST.fullmatch(name)}

    def make_send_command(self, transfer: Transfer, answers: PhaseAnswers) -> SendCommand:
        argv = _fanout(f"exec cat >{shlex.quote(transfer.target)}", *answers.nodes)
        return SendCommand(argv, ssh_faults.parse_send_faults, transfer.source)


def _fanout(*words: str) -> list[str]:
    return [sys.executable, "-I", "-S", sys.argv[0], "fanout", *words]
