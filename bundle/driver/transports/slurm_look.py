"""A check whether silent nodes of an allocation can be reached, by a step of its own.

``sinfo`` is asked as well: Slurm creates no step on a node that is down already, and does not name
the node then.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import IO

from ...channel.bootstrap import in_memory
from ...protocol.problem import Problem, ProblemCode
from ...system import processes
from . import slurm_commands, slurm_faults
from .step import Step

_LOOK_SECONDS = 60.0
"""Time that a look may take: to a node that does not answer, Slurm needs ten and more."""
_DESERTED = "stager-deserted "
_LOOK = f"""\
of() {{ grep -sqzx "$1=$2" "$3/environ"; }}
of SLURM_STEP_ID "$SLURM_STEP_ID" "/proc/$$" || exit 0
for process in /proc/[0-9]*; do
    if of SLURM_JOB_ID "$SLURM_JOB_ID" "$process" && of SLURM_STEP_ID '[0-9]*' "$process" &&
        ! of SLURM_STEP_ID "$SLURM_STEP_ID" "$process"; then exit 0; fi
done
echo "{_DESERTED}$SLURMD_NODENAME" >&2
"""
"""Says so where no process of another step of the job runs; nothing where that cannot be known."""


class SlurmLook:
    """A step on some nodes that looks whether the job is still there."""

    def __init__(self, nodes: Sequence[str], env: Mapping[str, str]) -> None:
        self._until = time.monotonic() + _LOOK_SECONDS
        self._nodes = nodes
        self._states = open(in_memory(b""), "w+b")  # noqa: SIM115 - closed in close
        self._errors = open(in_memory(b""), "w+b")  # noqa: SIM115
        self._processes: list[processes.Process] = []
        step = Step(phase="look", nodes=tuple(nodes), cpus=1)
        commands = (
            (slurm_commands.step_argv(step, ["sh", "-c", _LOOK]), processes.DEVNULL, self._errors),
            (slurm_commands.states_argv(nodes), self._states, processes.DEVNULL),
        )
        with contextlib.suppress(processes.ProcessError):  # nothing is found out
            for argv, stdout, stderr in commands:
                started = processes.start(argv, env=env, stdout=stdout, stderr=stderr)
                self._processes.append(started)

    @property
    def ended(self) -> bool:
        """True once it has ended, or has taken too long."""
        running = any(process.poll() is None for process in self._processes)
        return not running or time.monotonic() > self._until

    def unreachable(self) -> dict[str, str]:
        """Return the nodes on which Slurm could start nothing, and why."""
        unreachable = {
            node: Problem(fault.problem, node, fault.values).why
            for node, fault in slurm_faults.step_faults(_read(self._errors)).items()
            if fault.problem in slurm_faults.UNREACHABLE
        }
        for node, state in slurm_commands.down_nodes(_read(self._states)).items():
            if node in self._nodes:
                values = {"phase": "", "why": f"it is {state}"}
                no_start = Problem(ProblemCode.NO_ANSWER_NO_START, node, values)
                unreachable.setdefault(node, no_start.why)
        return unreachable

    def deserted(self) -> frozenset[str]:
        """Return the nodes on which it has found nothing of the job."""
        lines = [line for line in _read(self._errors).splitlines() if line.startswith(_DESERTED)]
        return frozenset(line[len(_DESERTED) :].strip() for line in lines)

    def close(self) -> None:
        """End it."""
        for process in self._processes:
            processes.stop(process, 1.0)
        self._errors.close()
        self._states.close()


def _read(written: IO[bytes]) -> str:
    written.seek(0)
    return written.read().decode(errors="replace")
