"""From requirements to one exact file for each package, or to every reason why not."""

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
    """How to resolve."""

    resolver: ResolverName = "auto"
    """Which program resolves; ``auto`` takes uv where there is one, else pip-tools."""
    offline: bool = False
    """Whether only what is in the offline root counts."""


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
    """The program of that name; ``auto`` takes uv where it is installed."""
    solvers: Mapping[str, type[Solver]] = {"uv": Uv, "pip-tools": PipTools}
    if resolver == "auto":
        resolver = "uv" if uv_command() else "pip-tools"
    if resolver not in solvers:
        raise ResolveError(
            f"no resolver is called {resolver!r}", hint="there are uv, pip-tools and auto"
        )
    return solvers[resolver]()


def explain(first: NoSolution, request: ResolveRequest, solver: Solver) -> ResolveError:
    """Find every reason: drop the requirements one involves, ask again, until there is none."""
    failures = [first]
    rest = request
    for _ in range(ROUNDS):
        blamed = failures[-1].blamed
        left = tuple(text for text in rest.requirements if name_of(text) not in blamed)
        if not left or left == rest.requirements:
            break
        rest = replace(rest, requirements=left)
        try:
            solver.check(rest)
        except NoSolution as failure:
            failures.append(failure)
        except ResolveError:  # the index stopped answering; what is known is worth telling
            break
        else:
            break
    reasons = [failure.reason for failure in failures if not failure.absent]
    absent = {a.requirement: a for failure in failures for a in failure.absent}
    reasons += unavailable_lines(list(absent.values()), request)
    target = request.target
    many = counted(len(reasons), "problem")
    return ResolveError(
        f"the requirements have no solution for Python {target.python} on {target.platform}: "
        f"{many}",
        hint="check the names; change the versions asked for, or environment.python and platform"
        if not request.offline
        else "only the offline root was looked at; lock once without --offline",
        context=reasons,
    )


def unavailable_lines(absent: list[UnavailablePackage], request: ResolveRequest) -> list[str]:
    """Say for each package that has no file what there is instead, asking pip where need be."""
    lines = []
    for one in absent:
        known = one.files or tuple(request.pip.existing(str(name_of(one.requirement))))
        lines.append(describe_unavailable(replace(one, files=known), request.target))
    return lines
