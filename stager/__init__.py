"""The login side: from a requirements file to one verified bundle, and the commands around it.

``docs/python.md`` shows what ``import stager`` offers. Each name is imported when it is first used:
the command line starts with this package, and must answer at once.
"""

from __future__ import annotations

TYPE_CHECKING = False  # what type checkers take for true; `typing` itself takes a while to import
if TYPE_CHECKING:
    from bundle.protocol.enumerations import Backend, Launcher, Stage, TransferWay

    from .api import Project, load
    from .building.build import BuildOptions, BuildResult
    from .cleanup import CleanedItem, CleanResult
    from .config.job_settings import JobOptions
    from .core.errors import JobError, StagerError
    from .diagnosis.failure import FirstFailure
    from .forecast import PlannedJob
    from .jobs.driver import JobListener, SilentListener
    from .jobs.outcome import NodeCheck, RunResult, SubmittedJob, VerifyResult
    from .pipeline import CleanOptions

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "BuildOptions",
    "BuildResult",
    "CleanOptions",
    "CleanResult",
    "CleanedItem",
    "FirstFailure",
    "JobError",
    "JobListener",
    "JobOptions",
    "Launcher",
    "NodeCheck",
    "PlannedJob",
    "Project",
    "RunResult",
    "SilentListener",
    "Stage",
    "StagerError",
    "SubmittedJob",
    "TransferWay",
    "VerifyResult",
    "__version__",
    "load",
]

_MODULES = {
    "Backend": "bundle.protocol.enumerations",
    "BuildOptions": "stager.building.build",
    "BuildResult": "stager.building.build",
    "CleanOptions": "stager.pipeline",
    "CleanResult": "stager.cleanup",
    "CleanedItem": "stager.cleanup",
    "FirstFailure": "stager.diagnosis.failure",
    "JobError": "stager.core.errors",
    "JobListener": "stager.jobs.driver",
    "JobOptions": "stager.config.job_settings",
    "Launcher": "bundle.protocol.enumerations",
    "NodeCheck": "stager.jobs.outcome",
    "PlannedJob": "stager.forecast",
    "Project": "stager.api",
    "RunResult": "stager.jobs.outcome",
    "SilentListener": "stager.jobs.driver",
    "Stage": "bundle.protocol.enumerations",
    "TransferWay": "bundle.protocol.enumerations",
    "StagerError": "stager.core.errors",
    "SubmittedJob": "stager.jobs.outcome",
    "VerifyResult": "stager.jobs.outcome",
    "load": "stager.api",
}
"""The module of each public name."""


def __getattr__(name: str) -> object:
    """Import a public name when it is first used (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
