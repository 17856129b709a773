"""Resolving with pip-tools: ``python -m piptools compile --generate-hashes``.

pip-tools resolves for the Python and machine it runs on, and gives versions with the digests of all
their files; which of the files is the one for the target, pip's installation report says.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ..core.errors import ResolveError
from ..core.values import Target
from .indexes import strip_credentials
from .pip import HOUR, condense, index_unreachable, unreachable
from .resolver import NoSolution, ResolvedFile, ResolveRequest, UnavailablePackage, names_in

_NOT_FOUND = re.compile(
    r"Could not find a version that satisfies the requirement (?P<wanted>[^;\n(]+?)"
    r"(?:\s*;[^\n(]*)?(?: \(from (?P<parent>(?!versions)[^)]*)\))? \(from versions:"
)
_CONFLICT = re.compile(
    r"The conflict is caused by:(.*?)(?:Additionally,|To fix this|\Z)", re.DOTALL
)


class PipTools:
    """A solver that asks pip-tools, and pip for the files and for its reasons."""

    def solve(self, request: ResolveRequest) -> list[ResolvedFile]:
        """Resolve with pip-tools, then let pip choose the file of each version.

        Raises:
            NoSolution: the requirements cannot all be met, or have no file for the target.
            ResolveError: the target is not this machine's Python, or an index cannot be asked.
        """
        _require_own(request.target)
        pins = self._compile(request)
        installs, missing = request.pip.choose(list(pins))
        if missing:
            absent = [UnavailablePackage(requirement=pin) for pin in missing]
            raise NoSolution("no file fits the target", blamed=request.names, absent=absent)
        found = []
        for entry in installs:
            info = entry["download_info"]
            digest = info.get("archive_info", {}).get("hashes", {}).get("sha256")
            url, path = info["url"], None
            filename = unquote(urlsplit(url).path.rpartition("/")[2])
            if url.startswith("file://"):
                url, path = None, Path(unquote(urlsplit(url).path))
            found.append(
                ResolvedFile(
                    filename=filename,
                    url=strip_credentials(url) if url else None,
                    path=path,
                    sha256=digest,
                )
            )
        _require_pinned(found, set().union(*pins.values()) if pins else set())
        return found

    def check(self, request: ResolveRequest) -> None:
        """Resolve with pip alone: no digests are needed to know whether it can be done."""
        limits = _constraints(request)
        options = ["--dry-run", "--ignore-installed", *limits]
        done = request.pip.call("install", options, request.requirements)
        if done.returncode == 0:
            return
        told = done.stdout + "\n" + done.stderr
        conflict = _CONFLICT.search(told)
        if conflict:
            parts = [line.strip() for line in conflict[1].splitlines() if line.strip()]
            reason = "conflict: " + "; ".join(parts)
            blamed = names_in(" ".join(parts), request.names)
            raise NoSolution(reason, blamed=blamed, absent=[])
        if unreachable(told):
            raise index_unreachable(done.stderr)
        nowhere = _NOT_FOUND.search(told)
        if nowhere:
            wanted = nowhere["wanted"].strip()
            blamed = names_in(wanted, request.names) or names_in(
                nowhere["parent"] or "", request.names
            )
            parent = nowhere["parent"] or ""
            absent = UnavailablePackage(
                requirement=wanted, parent="" if parent.startswith("-r ") else parent
            )
            raise NoSolution(f"nothing satisfies {wanted}", blamed=blamed, absent=[absent])
        raise NoSolution(condense(done.stderr), blamed=set(), absent=[])

    def _compile(self, request: ResolveRequest) -> dict[str, set[str]]:
        """The pins, each with the digests that pip-tools allows for it."""
        pip = request.pip
        source = request.scratch / "requirements.in"
        source.write_text(
            "".join(f"{x}\n" for x in [*request.indexes.pip_lines(), *request.requirements]),
            encoding="utf-8",
        )
        output = request.scratch / "requirements.txt"
        argv = [sys.executable, "-m", "piptools", "compile", "--generate-hashes", "--quiet"]
        argv += ["--no-header", "--no-annotate", "--no-emit-options", "--allow-unsafe"]
        argv += ["--strip-extras", "--no-config", *_constraints(request)]
        done = request.run(
            [*argv, "--output-file", str(output), str(source)],
            timeout=HOUR,
            env=pip.environment(),
            cwd=request.scratch,
            check=False,
        )
        if done.returncode != 0:
            if unreachable(done.stderr):
                raise index_unreachable(done.stderr)
            self.check(request)  # which says why, in words that can be shown
            raise ResolveError(
                "pip-tools could not resolve the requirements",
                hint="try --resolver uv",
                context=[condense(done.stderr.rpartition("\nTraceback")[0] or done.stderr)],
            )
        return _parse_pins(output.read_text(encoding="utf-8"))


def _constraints(request: ResolveRequest) -> list[str]:
    if not request.constraints:
        return []
    path = request.scratch / "constraints.txt"
    path.write_text("".join(f"{x}\n" for x in request.constraints), encoding="utf-8")
    return ["--constraint", str(path)]


def _require_own(target: Target) -> None:
    host = Target.of_host()
    if target.python != host.python or target.machine != host.machine:
        raise ResolveError(
            f"pip-tools resolves only for the Python and machine it runs on "
            f"({host.python}, {host.machine}), not for {target.python}, {target.machine}",
            hint="install uv (`pip install uv`), which can, or run stager with that Python",
        )


def _parse_pins(text: str) -> dict[str, set[str]]:
    """Requirement lines of a compiled file with their sha256 digests."""
    pins: dict[str, set[str]] = {}
    for line in text.replace("\\\n", " ").splitlines():
        pin = re.split(r"\s+--hash=", line.strip())[0].strip()
        if pin and not pin.startswith(("#", "-")):
            pins[pin] = set(re.findall(r"--hash=sha256:([0-9a-f]{64})", line))
    return pins


def _require_pinned(found: list[ResolvedFile], allowed: set[str]) -> None:
    """The file pip chose must be one that pip-tools saw; an index may change in between."""
    strange = [f.filename for f in found if f.sha256 and allowed and f.sha256 not in allowed]
    if strange:
        raise ResolveError(
            "an index gave other files than it did a moment ago",
            hint="run `stager lock` again",
            context=strange,
        )
