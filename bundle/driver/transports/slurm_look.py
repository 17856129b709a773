"""A check whether silent nodes of an allocation can be reached, by a step of its own."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from ...channel.bootstrap import in_memory
from ...protocol.problem import Problem
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
        self._errors = open(in_memory(b""), "w+b")  # noqa: SIM115 - closed in close
        self._process: processes.Process | None = None
        step = Step(phase="look", nodes=tuple(nodes), cpus=1)
        try:
            self._process = processes.start(
                slurm_commands.step_argv(step, ["sh", "-c", _LOOK]),
                env=env,
                stdout=processes.DEVNULL,
                stderr=self._errors,
            )
        except processes.ProcessError:
            return  # nothing is found out

    @property
    def ended(self) -> bool:
        """True once it has ended, or has taken too long."""
        running = self._process is not None and self._process.poll() is None
        return not running or time.monotonic() > self._until

    def unreachable(self) -> dict[str, str]:
        """Return the nodes on which Slurm could start nothing, and why."""
        return {
            node: Problem(fault.problem, node, fault.values).why
            for node, fault in slurm_faults.step_faults(self._text()).items()
            if fault.problem in slurm_faults.UNREACHABLE
        }

    def deserted(self) -> frozenset[str]:
        """Return the nodes on which it has found nothing of the job."""
        lines = [line for line in self._text().splitlines() if line.startswith(_DESERTED)]
        return frozenset(line[len(_DESERTED) :].strip() for line in lines)

    def _text(self) -> str:
        """Return what Slurm and the step have written to standard error."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            processes.stop(self._process, 1.0)
        self._errors.close()
