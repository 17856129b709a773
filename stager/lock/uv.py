"""Resolving with ``uv pip compile``, which can do so for any Python and platform.

uv does not read pip's configuration, so it is told where to look; it is told, too, to take the best
version over all indexes, as pip does, since its own rule stops at the first index with the name.

uv's own settings of the user (``~/.config/uv/uv.toml``, ``UV_EXCLUDE_NEWER``, indexes) hold, as
wherever uv runs. Those of a project do not: the folder uv works in may happen to lie below one, and
what a project wants is in its spec.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from packaging.utils import canonicalize_name

from bundle.redaction.masking import without_url_secrets

from ..core import toml
from ..core.errors import ResolveError
from ..core.processes import Completed
from ..core.values import Target
from .indexes import pip_settings
from .pip import HOUR, index_unreachable, unreachable
from .pylock import select
from .resolver import NoSolution, ResolvedFile, ResolveRequest, UnavailablePackage, names_in

# The platforms `uv pip compile --help` lists: the newest that is not newer than the target's.
_GLIBC = (17, 28, *range(31, 41))
_NO_WHEEL = re.compile(
    r"([\w.-]+?)(?:==[^\s,]+)? ha(?:s|ve) no (?:usable )?wheels|wheels for `([\w.-]+)`"
)
_REDIRECTING = (
    *("UV_CONSTRAINT", "UV_EXCLUDE", "UV_OVERRIDE", "UV_PRERELEASE", "UV_PROJECT"),
    *("UV_RESOLUTION", "UV_TORCH_BACKEND", "UV_WORKING_DIR"),
)
"""Variables by which uv would lock something else than what the project asks for."""
_UNKNOWN = re.compile(r"([\w.-]+) was not found in the package registry")


def command() -> list[str] | None:
    """How to start uv: the one beside this tool, else the one on PATH; None where there is none."""
    if importlib.util.find_spec("uv"):
        return [sys.executable, "-m", "uv"]
    found = shutil.which("uv")
    return [found] if found else None


class Uv:
    """A solver that asks uv."""

    def solve(self, request: ResolveRequest) -> list[ResolvedFile]:
        """Resolve with uv and take, of all files it lists, the one that fits best.

        Raises:
            NoSolution: the requirements cannot all be met, or have no file for the target.
            ResolveError: uv is missing, too old, or could not ask an index.
        """
        done = self._compile(request, _for_target(request.target))
        if done.returncode != 0:
            raise self._failure(request, done)
        found, absent = _files(done.stdout, request.target)
        if absent:
            raise NoSolution("no file fits the target", blamed=request.names, absent=absent)
        return found

    def check(self, request: ResolveRequest) -> None:
        """Resolve and throw the answer away; what it takes is mostly in uv's cache."""
        self.solve(request)

    def _compile(self, request: ResolveRequest, options: Sequence[str]) -> Completed:
        start = command()
        if start is None:
            raise ResolveError(
                "uv is not installed",
                hint="`pip install uv`, or use --resolver pip-tools",
            )
        _refuse_redirection()
        settings = pip_settings(request.run)
        indexes = request.indexes
        if not request.offline:
            indexes = settings.indexes.plus(indexes)
        argv = [*start, "pip", "compile", "--format", "pylock.toml", "--generate-hashes"]
        argv += ["--no-header", "--color", "never", "--quiet", "--no-progress", "--no-annotate"]
        argv += ["--index-strategy", "unsafe-best-match", "--python", sys.executable, *options]
        argv += ["--prerelease", "allow"] if indexes.pre else []
        argv += ["--offline"] if request.offline else []
        for host in indexes.trusted_hosts:
            argv += ["--allow-insecure-host", host]
        if request.constraints:
            limits = _write(request.scratch / "constraints.txt", request.constraints)
            argv += ["--constraints", str(limits)]
        wanted = _write(
            request.scratch / "requirements.in", [*indexes.lines(), *request.requirements]
        )
        # uv looks for a project's settings in this folder and upwards, and stops at the first file.
        _write(request.scratch / "uv.toml", [])
        env = {**settings.environment, "UV_PYTHON_DOWNLOADS": "never"}
        if indexes.index_url:  # a variable would win over the file, which pip has the other way
            env |= {"UV_INDEX_URL": "", "UV_DEFAULT_INDEX": ""}
        return request.run(
            [*argv, str(wanted)],
            timeout=HOUR,
            env=env,
            cwd=request.scratch,
            check=False,
        )

    def _failure(self, request: ResolveRequest, done: Completed) -> Exception:
        told = without_url_secrets(done.stderr)
        if "No solution found" not in told or unreachable(told):
            return _cannot_ask(told)
        reason = _reason(told)
        for name in _UNKNOWN.findall(told):
            # uv does not say so when an index refused to answer; pip does.
            request.pip.existing(name)
        required = " ".join(re.findall(r"you require(.*?)(?:, we can|$)", reason))
        blamed = names_in(required, request.names) or names_in(reason, request.names)
        absent = []
        if _NO_WHEEL.search(told):
            names = {canonicalize_name(a or b) for a, b in _NO_WHEEL.findall(told) if a or b}
            absent = self._absent_anywhere(request) or [
                UnavailablePackage(requirement=name) for name in sorted(names)
            ]
        return NoSolution(reason, blamed=blamed, absent=absent)

    def _absent_anywhere(self, request: ResolveRequest) -> list[UnavailablePackage]:
        """All packages without a file for the target, not only the one uv stopped at.

        Resolved for every platform at once, nothing is left out for want of a wheel, and the
        selection shows what is missing.
        """
        version = request.target.environment()["python_full_version"]
        done = self._compile(request, ["--universal", "--python-version", version])
        return _files(done.stdout, request.target)[1] if done.returncode == 0 else []


def _refuse_redirection() -> None:
    found = [name for name in _REDIRECTING if os.environ.get(name)]
    if found:
        raise ResolveError(
            f"{', '.join(found)}: set in the environment, so uv would lock something else than "
            "what the project asks for",
            hint="unset it; limit versions with environment.constraints, choose PyTorch's index "
            "with environment.torch-backend, allow pre-releases with --pre in a requirement file",
        )


def _for_target(target: Target) -> list[str]:
    version = ["--python-version", target.environment()["python_full_version"]]
    libc, (_, minor) = target.libc
    if libc == "musl":
        return [*version, "--python-platform", f"{target.machine}-unknown-linux-musl"]
    known = [number for number in _GLIBC if number <= minor]
    if target.machine not in ("x86_64", "aarch64") or not known:
        if target == Target.of_host():
            return version
        raise ResolveError(
            f"uv cannot resolve for {target.platform}",
            hint="run stager on such a machine, or choose another environment.platform",
        )
    return [*version, "--python-platform", f"{target.machine}-manylinux_2_{known[-1]}"]


def _files(answer: str, target: Target) -> tuple[list[ResolvedFile], list[UnavailablePackage]]:
    data = toml.loads(answer, Path("the answer of uv"))
    return select(data, target, base=Path("/"), source="the answer of uv")


def _reason(told: str) -> str:
    """What uv says is the reason, in one paragraph, without hints."""
    body = told.partition("cause:")[2] or told
    return re.sub(r"\s+", " ", body.partition("\nhint:")[0]).strip()


def _cannot_ask(told: str) -> ResolveError:
    text = re.sub(r"\s+", " ", told.replace("error:", "")).strip()[:1200]
    if unreachable(told):
        return index_unreachable(told)
    if "unexpected argument" in told or "invalid value" in told:
        return ResolveError(
            "this uv does not know an option it needs",
            hint="upgrade it (`pip install -U uv`), or use --resolver pip-tools",
            context=[text],
        )
    return ResolveError("uv could not resolve the requirements", context=[text])


def _write(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path
