"""Resolving and building packages whose builds import other packages of the environment.

Their dependencies can be learned only where these are installed: so the others are resolved first,
installed into a folder, and kept as they are while all are resolved together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ..core.errors import ResolveError
from .pip import Pip, condense
from .resolve import resolve
from .resolver import ResolvedFile, ResolveRequest, ResolverName, name_of


def resolve_all(request: ResolveRequest, resolver: ResolverName) -> list[ResolvedFile]:
    """Resolve requirements, some of which may have to be built in the environment.

    Raises:
        ResolveError: see :func:`stager.lock.resolve.resolve`; or what is needed to build cannot be
            installed.
    """
    named = request.spec.builds.in_environment
    if named and resolver == "pip-tools":
        raise ResolveError(
            "environment.no-build-isolation works with uv only", hint="leave --resolver out"
        )
    others = tuple(text for text in request.requirements if name_of(text) not in named)
    if len(others) == len(request.requirements):
        return resolve(request, resolver)
    try:
        return resolve(request, resolver)  # an sdist may state what it depends on
    except ResolveError:
        if not others:
            raise
    first = resolve(replace(request, requirements=others), resolver)
    folder = install(_lines(first), request.pip, request.scratch / "environment")
    pins = tuple(f"{name}=={version}" for name, version in (file.identity for file in first))
    together = (*request.constraints, *pins)
    return resolve(replace(request, constraints=together, packages=folder), resolver)


def install(lines: Iterable[str], pip: Pip, folder: Path) -> Path:
    """Install what requirement lines name into a folder, for builds to import; return the folder.

    Raises:
        ResolveError: pip fails.
    """
    options = ["--no-deps", "--no-compile", "-q", "--target", str(folder)]
    done = pip.call("install", options, lines)
    if done.returncode != 0:
        raise ResolveError(
            "what environment.no-build-isolation builds against cannot be installed",
            context=[condense(done.stderr or done.stdout)],
        )
    return folder


def _lines(files: Sequence[ResolvedFile]) -> list[str]:
    """Return requirement lines of exactly these files; what is no wheel yet is left out."""
    lines = []
    for file in files:
        place = file.path.as_uri() if file.path else file.url
        if place is not None and file.filename.endswith(".whl"):
            digest = f" --hash=sha256:{file.sha256}" if file.sha256 and file.url else ""
            lines.append(f"{file.identity[0]} @ {place}{digest}")
    return lines
