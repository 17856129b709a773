"""Resolving requirements to one exact file for each package, or to every reason against it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from bundle.protocol.counts import counted

from ..core.errors import ResolveError
from .cutoff import NONE
from .indexes import TORCH_INDEX, Indexes
from .pip_tools import PipTools
from .resolver import (
    NoSolution,
    ResolvedFile,
    ResolveRequest,
    ResolverName,
    Solver,
    UnavailablePackage,
    describe_unavailable,
    name_of,
)
from .torch_backend import FindDriver
from .uv import Uv

_BUILD_OF_TORCH = re.compile(r"(?:^|\n)(torch[\w-]*)==[\w.]+\+(cpu|cu\d+|rocm[\d.]+)")
_SOLVERS: Mapping[str, type[Solver]] = {"auto": Uv, "uv": Uv, "pip-tools": PipTools}
# Each round drops what the last reason involved, so this many independent reasons are found.
ROUNDS = 20


@dataclass(frozen=True, kw_only=True)
class ResolveOptions:
    """Options of a resolution."""

    resolver: ResolverName = "uv"
    """The program that resolves; ``auto`` is another word for uv."""
    offline: bool = False
    """True if only the contents of the offline root count."""
    upgrade: bool = False
    """True to keep no pin of the lock before."""
    upgrade_packages: tuple[str, ...] = ()
    """Packages whose pins are not kept, as the user wrote their names."""
    exclude_newer: str | None = None
    """See :mod:`stager.lock.cutoff`; None for that of the lock before."""

    driver: FindDriver | None = None
    """Finds the nodes' NVIDIA driver, for ``torch-backend = "auto"``; None where nobody can."""
    note: Callable[[str], None] | None = None
    """Takes a line about what was chosen; None for nobody."""

    def outdates(self, cutoff: str | None) -> bool:
        """Return whether a lock with this cutoff is to be made again, whatever its spec."""
        if self.upgrade or self.upgrade_packages:
            return True
        return self.exclude_newer is not None and self.exclude_newer != (cutoff or NONE)


def resolve(request: ResolveRequest, resolver: ResolverName) -> list[ResolvedFile]:
    """Resolve requirements.

    Raises:
        ResolveError: they cannot be met; one context line for each reason, packages without a file
            for the target with what exists instead. Or no index could be asked.
    """
    if resolver not in _SOLVERS:
        raise ResolveError(f"unknown resolver {resolver!r}", hint="choose uv or pip-tools")
    solver = _SOLVERS[resolver]()
    try:
        return solver.solve(request)
    except NoSolution as failure:
        raise explain(failure, request, solver) from failure


def explain(first: NoSolution, request: ResolveRequest, solver: Solver) -> ResolveError:
    """Return one error with every reason why the requirements have no solution."""
    failures = _all_failures(first, request, solver)
    reasons = [failure.reason for failure in failures if not failure.absent]
    unavailable = {one.requirement: one for failure in failures for one in failure.absent}
    reasons += unavailable_lines(list(unavailable.values()), request)
    target = request.spec.target
    configured = request.settings.indexes if request.settings else Indexes()
    misplaced = [] if request.offline else configured.plus(request.indexes).misplaced()
    not_searched = dict.fromkeys(line for one in failures for line in one.not_searched)
    return ResolveError(
        f"the requirements have no solution for Python {target.python} on {target.platform}: "
        f"{counted(len(reasons), 'problem')}",
        hint=_remedy(failures, request),
        context=[*reasons, *not_searched, *misplaced],
    )


def _remedy(failures: list[NoSolution], request: ResolveRequest) -> str:
    if request.offline:
        return "only the offline root was searched; lock once without --offline"
    build = _BUILD_OF_TORCH.search("\n".join(request.requirements))
    if build and request.torch_backend != build[2]:
        return (
            f"{build[0].strip()} is on PyTorch's own index: set environment.torch-backend = "
            f'"{build[2]}", or name the index in a requirement file (--extra-index-url '
            f"{TORCH_INDEX}{build[2]})"
        )
    others = "check the names; change the versions asked for, or environment.python and platform"
    if not any(failure.not_searched for failure in failures):
        return others
    remedy = 'set environment.index-strategy = "unsafe-best-match" to search all indexes'
    if all(failure.not_searched for failure in failures):
        return remedy
    return f"{remedy}; {others}"


def _all_failures(first: NoSolution, request: ResolveRequest, solver: Solver) -> list[NoSolution]:
    """Find further reasons: drop the requirements that one involves and resolve the rest."""
    failures = [first]
    for _ in range(ROUNDS):
        blamed = failures[-1].blamed
        rest = tuple(text for text in request.requirements if name_of(text) not in blamed)
        if not rest or rest == request.requirements:
            break
        request = replace(request, requirements=rest)
        try:
            solver.check(request)
        except NoSolution as failure:
            failures.append(failure)
        except ResolveError:  # the index stopped answering; report what is known
            break
        else:
            break
    return failures


def unavailable_lines(packages: list[UnavailablePackage], request: ResolveRequest) -> list[str]:
    """Describe what exists for each package without a file that fits; ask pip if not known."""
    lines = []
    for package in packages:
        files = package.files or tuple(request.pip.existing(name_of(package.requirement)))
        lines.append(describe_unavailable(replace(package, files=files), request.spec.target))
    return lines
