"""A project as a Python object: what ``import stager`` gives; ``docs/python.md`` shows it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from bundle.protocol.dataclass import dataclass
from bundle.protocol.enumerations import Action, Backend, Launcher, Stage, TextEnum, TransferWay

from . import pipeline
from .building.build import BuildOptions, BuildResult
from .building.current_bundle import Listener
from .cleanup import CleanResult
from .config.job_settings import JobOptions
from .config.load import Config
from .config.load import load as load_config
from .core.errors import ConfigError
from .forecast import PlannedJob
from .jobs.driver import JobListener, SilentListener
from .jobs.outcome import (
    Outcome,
    RunResult,
    SubmittedJob,
    VerifyResult,
    make_run_result,
    make_verify_result,
)
from .pipeline import CleanOptions

_Result = TypeVar("_Result")
_WORDS: dict[str, type[TextEnum]] = {
    "launcher": Launcher,
    "backend": Backend,
    "stage": Stage,
    "transfer": TransferWay,
}
"""The options of a job that are members of an enumeration; a word is taken for one, too."""

SILENT = SilentListener()


def load(path: str | os.PathLike[str] = ".") -> Project:
    """Read a project's settings.

    Args:
        path: a settings file, or the folder from which to look upwards for one.

    Raises:
        ConfigError: there is none, or it has values that cannot be used; all of them are named.
    """
    return Project(config=load_config(Path(path)))


@dataclass(frozen=True, kw_only=True)
class Project:
    """A project: its settings, and what can be done with it.

    All methods raise ``StagerError`` for an expected failure; a job that fails is a result.
    """

    config: Config
    """The settings."""

    def build(
        self, options: BuildOptions | None = None, listener: Listener = SILENT
    ) -> BuildResult:
        """Make the bundle, with everything that the offline root has already."""
        return pipeline.build(self.config, options or BuildOptions(), listener)

    def verify(
        self, options: JobOptions | None = None, listener: JobListener = SILENT
    ) -> VerifyResult:
        """Put the bundle on every node and check it there; launch nothing.

        A batch job is followed to its end.
        """
        asked = replace(_convert_words(options), wait=True)
        ended = pipeline.run_job(self.config, asked, Action.VERIFY, listener)
        return make_verify_result(_require_kind(Outcome, ended))

    def run(self, options: JobOptions | None = None, listener: JobListener = SILENT) -> RunResult:
        """Verify, then launch the command once for each rank, and wait for the end.

        A batch job is followed to its end.
        """
        asked = replace(_convert_words(options), wait=True)
        ended = pipeline.run_job(self.config, asked, Action.RUN, listener)
        return make_run_result(_require_kind(Outcome, ended))

    def submit(
        self, options: JobOptions | None = None, listener: JobListener = SILENT
    ) -> SubmittedJob:
        """Submit a run as a batch job, and return as soon as Slurm has accepted it."""
        asked = replace(_convert_words(options), batch=True, wait=False)
        return _require_kind(
            SubmittedJob, pipeline.run_job(self.config, asked, Action.RUN, listener)
        )

    def plan(self, options: JobOptions | None = None, listener: JobListener = SILENT) -> PlannedJob:
        """Return what a batch run would ask of Slurm, and how long it would take; ask nothing."""
        asked = replace(_convert_words(options), batch=True, dry_run=True)
        return _require_kind(PlannedJob, pipeline.run_job(self.config, asked, Action.RUN, listener))

    def clean(
        self, options: CleanOptions | None = None, listener: JobListener = SILENT
    ) -> CleanResult:
        """Remove what nobody uses any more from the nodes and the offline root."""
        asked = options or CleanOptions()
        asked = replace(asked, job=_convert_words(asked.job))
        return pipeline.clean(self.config, asked, listener)


def _convert_words(options: JobOptions | None) -> JobOptions:
    """Return the options of a job, with enumerations in the place of their words.

    Raises:
        ConfigError: there is no such word.
    """
    asked = options or JobOptions()
    words: dict[str, Any] = {}
    for name, kind in _WORDS.items():
        word = getattr(asked, name)
        try:
            words[name] = None if word is None else kind(word)
        except ValueError:
            raise ConfigError(
                f"{name}: {word!r} is not one of {', '.join(kind)}",
                hint=f"use {kind.__name__} of stager",
            ) from None
    return replace(asked, **words)


def _require_kind(kind: type[_Result], ended: object) -> _Result:
    """Return what became of a job, if that is of this kind; only a dry run can be of another."""
    if isinstance(ended, kind):
        return ended
    raise ConfigError(
        "a dry run has no result where nodes would have to be requested from Slurm",
        hint="`plan()` returns the request; inside an allocation a dry run examines the nodes",
    )
