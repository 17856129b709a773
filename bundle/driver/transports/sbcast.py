"""Broadcasts with Slurm's ``sbcast``."""

from __future__ import annotations

from collections.abc import Mapping

from . import slurm_commands, slurm_faults
from .file_sender import FileSender, SendCommand
from .phase_answers import PhaseAnswers
from .transport import Transfer


def broadcaster(env: Mapping[str, str], version: tuple[int, int]) -> FileSender:
    """Return what sends files to agents of steps."""

    def command(transfer: Transfer, answers: PhaseAnswers) -> SendCommand:
        width = slurm_commands.fanout(len(answers.nodes), version)
        argv = slurm_commands.broadcast_argv(
            transfer.source, transfer.target, answers.step_id, width
        )
        return SendCommand(argv, slurm_faults.broadcast_faults)

    return FileSender(env, command)
