"""Whoever hears of the progress of a job: a console, or a Python program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..building.current_bundle import Listener

if TYPE_CHECKING:
    from pathlib import Path

    from bundle.protocol.events import Record
    from bundle.protocol.job import Job

    from .summary import SubmittedJob


class JobListener(Listener, Protocol):
    """Receives the progress of a job, besides that of a build."""

    def warn(self, line: str) -> None:
        """Report something the user must know."""

    def job(self, job: Job, bundle: Path) -> None:
        """Report a job before the first node is touched."""

    def event(self, record: Record) -> None:
        """Report one event of the far side; ``docs/events.md`` lists them."""

    def talk(self, line: str) -> None:
        """Report a line of Slurm's commands, or of the driver's standard error."""

    def submitted(self, job: SubmittedJob) -> None:
        """Report a batch job that Slurm has accepted."""


class SilentListener:
    """A listener that does nothing; a base for those that want to hear of a few things."""

    def begin(self, phase: str) -> None:
        """Do nothing."""

    def step(self, what: str, done: int, total: int) -> None:
        """Do nothing."""

    def note(self, line: str) -> None:
        """Do nothing."""

    def warn(self, line: str) -> None:
        """Do nothing."""

    def job(self, job: Job, bundle: Path) -> None:
        """Do nothing."""

    def event(self, record: Record) -> None:
        """Do nothing."""

    def talk(self, line: str) -> None:
        """Do nothing."""

    def submitted(self, job: SubmittedJob) -> None:
        """Do nothing."""
