"""Hosts without Slurm: one fan-out over OpenSSH starts the agents, and another sends a file."""

from __future__ import annotations

import binascii
import os
import re
import shlex
import sys
import zlib
from collections.abc import Collection, Mapping, Sequence

from ...launch.program_variables import drop_schedulers
from ...protocol.job import Job
from ...protocol.problem import NodeError, Problem, ProblemCode
from ...redaction.secret_names import remove_secret_variables
from ...system.hostlist import find_invalid_hosts
from . import apptainer, ssh_faults
from .file_sender import SendCommand
from .liveness import Look
from .phase_run import PhaseAnswers
from .slurm_text import PATIENCE, PYTHONS
from .step_transport import StepTransport
from .transport import Ended, OnEvent, Retry, Step, StepErrors, Transfer

_LOADER = "import binascii,sys,zlib;exec(zlib.decompress(binascii.a2b_base64(sys.argv.pop(1))))"
"""Runs the bootstrap program from an argument in which no shell finds anything of its own."""
_IS_NEW_ENOUGH = "import sys; sys.exit(sys.version_info < (3, 9))"
_OF_THIS_HOST = re.compile(
    r"(SSH|XDG|DBUS|KRB5\w*|STAGER_PROGRAM)_\w*"
    r"|HOME|USER|LOGNAME|SHELL|SHLVL|PATH|PWD|OLDPWD|MAIL|TERM|COLUMNS|LINES|DISPLAY|XAUTHORITY"
    r"|HOSTNAME|HOST|TMPDIR|TMP|TEMP|TTY|KRB5CCNAME|_"
)
"""Variables that belong to a session or to one machine."""


def ssh_transport(job: Job) -> StepTransport:
    """Return the transport to the hosts of a job.

    Raises:
        NodeError: a name cannot be a host's.
    """
    return StepTransport(job, SshCluster(job))


class SshCluster:
    """The hosts of a job."""

    carries = False

    def __init__(self, job: Job) -> None:
        """Look at the names of the hosts.

        Raises:
            NodeError: a name cannot be a host's.
        """
        for name in find_invalid_hosts(job.nodes):
            values = {"why": "letters, digits, -, ., _ and : make a host's name"}
            raise NodeError(Problem(ProblemCode.NODE_LIST_UNREADABLE, repr(name), values))
        self.errors: StepErrors = ssh_faults
        self._job = job
        # The ssh here is the user's own, with agent and tickets; hosts get less.
        self.variables: Mapping[str, str] = dict(os.environ)
        self.rank_variables: Mapping[str, str] = self.variables
        self.cpus = 1
        self.patience = PATIENCE

    def argv(self, step: Step, bootstrap: str, command: str) -> list[str]:
        """Return the fan-out of a step."""
        program = binascii.b2a_base64(zlib.compress(bootstrap.encode(), 9), newline=False).decode()
        names = list(dict.fromkeys([*self._job.python_hints, *PYTHONS]))
        script = (
            f"for python in {shlex.join(names)}; do "
            f'if "$python" -I -S -c "{_IS_NEW_ENOUGH}" 2>/dev/null; then '
            f'"$python" -I -S -c "{_LOADER}" {program} agent {shlex.quote(command)}; exit; fi; '
            f"done; echo {len(names)} >&2; exit {ssh_faults.NO_PYTHON_STATUS}"
        )
        if self._job.launch.is_run_by_apptainer:
            inside = ["/bin/sh", "-c", script]
            script = shlex.join(
                apptainer.make_container_command(self._job, command, inside, stays=True)
            )
        return _fanout("--attached", script, *step.nodes)

    def sent_variables(self, *, ranks: bool) -> Mapping[str, str]:
        """Return the variables that hosts get, besides their own."""
        allowed = self._job.launch.pass_env if ranks else ()
        sent = remove_secret_variables(os.environ, allowed)
        own = drop_schedulers(sent)
        return {name: own[name] for name in own if not _OF_THIS_HOST.fullmatch(name)}

    def retries(self, on_event: OnEvent) -> Retry:
        """Return what tries nothing again: each host answers for itself."""
        return lambda errors: False

    def look_at(self, nodes: Sequence[str]) -> Look | None:
        """Return nothing: ``ssh`` notices by itself when a connection has gone."""
        return None

    def down(self, nodes: Collection[str]) -> dict[str, Ended]:
        """Return none: each host says for itself why it cannot be reached."""
        return {}

    def send_command(self, transfer: Transfer, answers: PhaseAnswers) -> SendCommand:
        """Return the fan-out that sends a file to agents that wait for it."""
        argv = _fanout(f"exec cat >{shlex.quote(transfer.target)}", *answers.nodes)
        return SendCommand(argv, ssh_faults.send_faults, source=transfer.source)

    def relay_ports(self) -> range | None:
        """Return None: hosts may connect to any port of this one, as far as is known."""
        return None

    def not_started(self, why: str) -> Problem:
        """Return the problem of a fan-out that cannot be started."""
        return Problem(ProblemCode.SSH_NOT_STARTED, "", {"why": why})

    def ended_by(self, errors: str) -> str:
        """Return nothing: only the user ends this allocation."""
        return ""

    def hurry(self) -> None:
        """Do nothing: all waits are short."""


def _fanout(*words: str) -> list[str]:
    return [sys.executable, "-I", "-S", sys.argv[0], "fanout", *words]
