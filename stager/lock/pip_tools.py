"""Resolving with pip-tools for this Python and machine; pip's report names each file."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

from ..core.errors import ResolveError
from ..core.values import Target
from .indexes import write_lines
from .pip import HOUR, ResolvedFile, condense, is_unreachable, unreachable_index_error
from .resolver import NoSolution, ResolveRequest, UnavailablePackage, find_names

_NOT_FOUND = re.compile(
    r"Could not find a version that satisfies the requirement (?P<wanted>[^;\n(]+?)"
    r"(?:\s*;[^\n(]*)?(?: \(from (?P<parent>(?!versions)[^)]*)\))? \(from versions:"
)
_CONFLICT = re.compile(
    r"The conflict is caused by:(.*?)(?:Additionally,|To fix this|\Z)", re.DOTALL
)


def solve(request: ResolveRequest) -> list[ResolvedFile]:
    """Resolve with pip-tools, let pip choose each file; NoSolution if there are none."""
    _require_host(request.spec.target)
    _refuse_uv_settings(request)
    try:
        pins = _compile(request)
    except (NoSolution, ResolveError):  # an index may have lost a version, for example
        if not request.pins:
            raise
        pins = _compile(replace(request, pins=()))
    chosen, missing = request.pip.choose(list(pins))
    if missing:
        unavailable = [UnavailablePackage(requirement=pin) for pin in missing]
        raise NoSolution("no file fits the target", blamed=request.names, absent=unavailable)
    allowed = set().union(*pins.values())
    changed = [file.filename for file in chosen if file.sha256 and file.sha256 not in allowed]
    if allowed and changed:
        message = "the files on an index changed while the lock was being made"
        raise ResolveError(message, hint="run `stager lock` again", context=changed)
    return chosen


def check(request: ResolveRequest) -> None:
    """Resolve with pip alone: no digests are needed to know if there is a solution."""
    options = ["--dry-run", "--ignore-installed", *_limits(request)]
    done = request.pip.call("install", options, request.requirements)
    if done.returncode == 0:
        return
    output = done.stdout + "\n" + done.stderr
    conflict = _CONFLICT.search(output)
    if conflict:
        parts = [line.strip() for line in conflict[1].splitlines() if line.strip()]
        blamed = find_names(" ".join(parts), request.names)
        raise NoSolution("conflict: " + "; ".join(parts), blamed=blamed, absent=[])
    if is_unreachable(output):
        raise unreachable_index_error(done.stderr)
    not_found = _NOT_FOUND.search(output)
    if not_found:
        wanted, parent = not_found["wanted"].strip(), not_found["parent"] or ""
        blamed = find_names(wanted, request.names) or find_names(parent, request.names)
        if parent.startswith("-r "):  # required by the user, in our requirement file
            parent = ""
        package = UnavailablePackage(requirement=wanted, parent=parent)
        raise NoSolution(f"nothing satisfies {wanted}", blamed=blamed, absent=[package])
    raise NoSolution(condense(done.stderr), blamed=set(), absent=[])


def _compile(request: ResolveRequest) -> dict[str, set[str]]:
    """Return the digests of all files of each version that pip-tools chose."""
    lines = [*request.pip.indexes.pip_lines(), *request.requirements]
    source = write_lines(request.pip.scratch / "requirements.in", lines)
    output = request.pip.scratch / "requirements.txt"
    write_lines(output, request.pins)  # pip-tools keeps what stands in its output file
    argv = [sys.executable, "-m", "piptools", "compile", "--generate-hashes", "--quiet"]
    argv += ["--no-header", "--no-annotate", "--no-emit-options", "--allow-unsafe"]
    argv += ["--strip-extras", "--no-config", *_limits(request)]
    argv += ["--output-file", str(output), source]
    env, scratch = request.pip.environment(), request.pip.scratch
    done = request.pip.run(argv, timeout=HOUR, env=env, cwd=scratch, check=False)
    if done.returncode != 0:
        if is_unreachable(done.stderr):
            raise unreachable_index_error(done.stderr)
        check(request)  # raises the reason in words that can be shown
        raise ResolveError(
            "pip-tools could not resolve the requirements",
            hint="try --resolver uv",
            context=[condense(done.stderr.rpartition("\nTraceback")[0] or done.stderr)],
        )
    pins: dict[str, set[str]] = {}
    for line in output.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        pin = re.split(r"\s+--hash=", line.strip())[0].strip()
        if pin and not pin.startswith(("#", "-")):
            pins[pin] = set(re.findall(r"--hash=sha256:([0-9a-f]{64})", line))
    return pins


def _limits(request: ResolveRequest) -> list[str]:
    places = [*request.settings.constraints]
    if request.constraints:
        places.append(write_lines(request.pip.scratch / "constraints.txt", request.constraints))
    argv = [word for place in places for word in ("--constraint", place)]
    newest = request.exclude_newer
    return [*argv, "--uploaded-prior-to", newest] if newest else argv


def _refuse_uv_settings(request: ResolveRequest) -> None:
    keys = list(request.spec.uv_project.keys) if request.spec.uv_project else []
    if request.spec.index_strategy not in (None, "unsafe-best-match"):  # which is what pip does
        keys.append(f'environment.index-strategy: "{request.spec.index_strategy}"')
    if keys:
        raise ResolveError(
            "pip-tools does not honour settings of uv, and would install other packages",
            hint="use uv (--resolver uv), which does",
            context=keys,
        )


def _require_host(target: Target) -> None:
    host = Target.from_host()
    if target.python != host.python or target.machine != host.machine:
        raise ResolveError(
            f"pip-tools resolves only for the Python and machine it runs on "
            f"({host.python}, {host.machine}), not for {target.python}, {target.machine}",
            hint="use uv (--resolver uv), which can, or run stager with that Python",
        )
