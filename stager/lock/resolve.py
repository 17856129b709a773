"""Resolving requirements to one exact file for each package, or to every reason against it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from bundle.protocol.counts import counted

from ..core.errors import ResolveError
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
from .uv import Uv
from .uv import command as uv_command

# Each round drops what the last reason involved, so this many independent reasons are found.
ROUNDS = 20


@dataclass(frozen=True, kw_only=True)
class ResolveOptions:
    """Options of a resolution."""

    resolver: ResolverName = "auto"
    """The program that resolves; ``auto`` takes uv if it is installed, else pip-tools."""
    offline: bool = False
    """True if only the contents of the offline root count."""


def resolve(request: ResolveRequest, resolver: ResolverName) -> list[ResolvedFile]:
    """Resolve requirements.

    Raises:
        ResolveError: they cannot be met; one context line for each reason, packages without a file
            for the target with what exists instead. Or no index could be asked.
    """
    solver = solver_for(resolver)
    try:
        return solver.solve(request)
    except NoSolution as failure:
        raise explain(failure, request, solver) from failure


def solver_for(resolver: ResolverName) -> Solver:
    """Return the solver of that name; ``auto`` takes uv if it is installed."""
    solvers: Mapping[str, type[Solver]] = {"uv": Uv, "pip-tools": PipTools}
    if resolver == "auto":
        resolver = "uv" if uv_command() else "pip-tools"
    if resolver not in solvers:
        raise ResolveError(f"unknown resolver {resolver!r}", hint="choose uv, pip-tools or auto")
    return solvers[resolver]()


def explain(first: NoSolution, request: ResolveRequest, solver: Solver) -> ResolveError:
    """Return one error with every reason why the requirements have no solution."""
    failures = _all_failures(first, request, solver)
    reasons = [failure.reason for failure in failures if not failure.absent]
    unavailable: dict[str, UnavailablePackage] = {}
    for failure in failures:
        unavailable.update((package.requirement, package) for package in failure.absent)
    reasons += unavailable_lines(list(unavailable.values()), request)
    target = request.target
    hint = "check the names; change the versions asked for, or environment.python and platform"
    if request.offline:
        hint = "only the offline root was searched; lock once without --offline"
    return ResolveError(
        f"the requirements have no solution for Python {target.python} on {target.platform}: "
        f"{counted(len(reasons), 'problem')}",
        hint=hint,
        context=reasons,
    )


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
        files = package.files
        if not files:
            files = tuple(request.pip.existing(str(name_of(package.requirement))))
        lines.append(describe_unavailable(replace(package, files=files), request.target))
    return lines
