"""A project as a Python object: what ``import stager`` gives; ``docs/python.md`` shows it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from bundle.protocol.dataclass import dataclass
from bundle.protocol.enumerations import Action, Backend, Launcher, Stage, TransferWay

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
_WORDS = {"launcher": Launcher, "backend": Backend, "stage": Stage, "transfer": TransferWay}
"""The options of a job that are members of an enumeration; a word is taken for one, too."""

SILENT = SilentListener()


def load(path: str | os.PathLike[str] = ".") -> Project:
    """Read the settings of a project, in a file or in a folder, from which it looks upwards."""
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
        """Put the bundle on every node and check it there; follow a batch job to its end."""
        asked = replace(_convert_words(options), wait=True)
        return make_verify_result(self._do(Outcome, Action.VERIFY, asked, listener))

    def run(self, options: JobOptions | None = None, listener: JobListener = SILENT) -> RunResult:
        """Verify, launch the command once for each rank; follow a batch job to its end, too."""
        asked = replace(_convert_words(options), wait=True)
        return make_run_result(self._do(Outcome, Action.RUN, asked, listener))

    def submit(
        self, options: JobOptions | None = None, listener: JobListener = SILENT
    ) -> SubmittedJob:
        """Submit a run as a batch job, and return as soon as Slurm has accepted it."""
        asked = replace(_convert_words(options), batch=True, wait=False)
        return self._do(SubmittedJob, Action.RUN, asked, listener)

    def plan(self, options: JobOptions | None = None, listener: JobListener = SILENT) -> PlannedJob:
        """Return what a batch run would ask of Slurm, and how long it would take; ask nothing."""
        asked = replace(_convert_words(options), batch=True, dry_run=True)
        return self._do(PlannedJob, Action.RUN, asked, listener)

    def _do(
        self, kind: type[_Result], action: Action, options: JobOptions, listener: JobListener
    ) -> _Result:
        ended = pipeline.run_job(self.config, options, action, listener)
        if isinstance(ended, kind):
            return ended
        raise ConfigError(
            "a dry run has no result where nodes would have to be requested from Slurm",
            hint="`plan()` returns the request; inside an allocation a dry run examines the nodes",
        )

    def clean(
        self, options: CleanOptions | None = None, listener: JobListener = SILENT
    ) -> CleanResult:
        """Remove what nobody uses any more from the nodes and the offline root."""
        asked = options or CleanOptions()
        job = _convert_words(asked.job)
        return pipeline.clean(self.config, replace(asked, job=job), listener)


def _convert_words(options: JobOptions | None) -> JobOptions:
    asked = options or JobOptions()
    words: dict[str, Any] = {name: getattr(asked, name) for name in _WORDS}
    for name, word in words.items():
        try:
            words[name] = word and _WORDS[name](word)
        except ValueError:
            kind = _WORDS[name]
            raise ConfigError(
                f"{name}: {word!r} is not one of {', '.join(kind)}",
                hint=f"use {kind.__name__} of stager",
            ) from None
    return replace(asked, **words)
