"""The login side: from a requirements file to one verified bundle, and the commands around it.

``docs/python.md`` shows what ``import stager`` offers. Each name is imported when it is first used:
the command line starts with this package, and must answer at once.
"""

from __future__ import annotations

TYPE_CHECKING = False  # what type checkers take for true; `typing` itself takes a while to import
if TYPE_CHECKING:
    from bundle.protocol.enumerations import Backend as Backend
    from bundle.protocol.enumerations import Launcher as Launcher
    from bundle.protocol.enumerations import Stage as Stage
    from bundle.protocol.enumerations import TransferWay as TransferWay

    from .api import Project as Project
    from .api import load as load
    from .building.build import BuildOptions as BuildOptions
    from .building.build import BuildResult as BuildResult
    from .cleanup import CleanedItem as CleanedItem
    from .cleanup import CleanResult as CleanResult
    from .config.job_settings import JobOptions as JobOptions
    from .core.errors import JobError as JobError
    from .core.errors import StagerError as StagerError
    from .diagnosis.failure import FirstFailure as FirstFailure
    from .forecast import PlannedJob as PlannedJob
    from .jobs.driver import JobListener as JobListener
    from .jobs.driver import SilentListener as SilentListener
    from .jobs.outcome import NodeCheck as NodeCheck
    from .jobs.outcome import RunResult as RunResult
    from .jobs.outcome import SubmittedJob as SubmittedJob
    from .jobs.outcome import VerifyResult as VerifyResult
    from .pipeline import CleanOptions as CleanOptions

__version__ = "0.1.0"

_NAMES = {
    "bundle.protocol.enumerations": ("Backend", "Launcher", "Stage", "TransferWay"),
    "stager.api": ("Project", "load"),
    "stager.building.build": ("BuildOptions", "BuildResult"),
    "stager.cleanup": ("CleanResult", "CleanedItem"),
    "stager.config.job_settings": ("JobOptions",),
    "stager.core.errors": ("JobError", "StagerError"),
    "stager.diagnosis.failure": ("FirstFailure",),
    "stager.forecast": ("PlannedJob",),
    "stager.jobs.driver": ("JobListener", "SilentListener"),
    "stager.jobs.outcome": ("NodeCheck", "RunResult", "SubmittedJob", "VerifyResult"),
    "stager.pipeline": ("CleanOptions",),
}
"""The public names of each module."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = ["__version__", *_MODULES]  # noqa: PLE0604 - they are strings


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
