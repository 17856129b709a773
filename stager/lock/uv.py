"""Resolving with ``uv pip compile``, which can do so for any Python and platform.

uv does not read pip's configuration, so indexes are passed to it, and so is the rule to take the
best version over all indexes, as pip does: by itself uv stops at the first index with the name.

The user's settings of uv (``~/.config/uv/uv.toml``, ``UV_EXCLUDE_NEWER``, indexes) hold, as always
with uv. Those of a project do not: the folder uv works in may happen to lie below one, and the
requirements of a project are in its spec.
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
from bundle.system.processes import CompletedCommand

from ..core import toml
from ..core.errors import ResolveError
from ..core.values import Target
from .indexes import Indexes, pip_settings
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
"""Variables that make uv lock something else than what the project asks for."""
_UNKNOWN = re.compile(r"([\w.-]+) was not found in the package registry")


def command() -> list[str] | None:
    """Return the command of uv: of this environment, else on PATH; None if it is not installed."""
    if importlib.util.find_spec("uv"):
        return [sys.executable, "-m", "uv"]
    path = shutil.which("uv")
    if path is None:
        return None
    return [path]


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
        files, unavailable = _files(done.stdout, request.target)
        if unavailable:
            raise NoSolution("no file fits the target", blamed=request.names, absent=unavailable)
        return files

    def check(self, request: ResolveRequest) -> None:
        """Resolve and discard the answer; most of what it needs is in uv's cache."""
        self.solve(request)

    def _compile(self, request: ResolveRequest, options: Sequence[str]) -> CompletedCommand:
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
        requirements = request.scratch / "requirements.in"
        _write(requirements, [*indexes.lines(), *request.requirements])
        # uv looks for a project's settings in this folder and upwards, and stops at the first file.
        _write(request.scratch / "uv.toml", [])
        env = {**settings.environment, "UV_PYTHON_DOWNLOADS": "never"}
        if indexes.index_url:  # a variable would win over the file, the opposite of pip's order
            env |= {"UV_INDEX_URL": "", "UV_DEFAULT_INDEX": ""}
        return request.run(
            [*start, *_arguments(request, indexes), *options, str(requirements)],
            timeout=HOUR,
            env=env,
            cwd=request.scratch,
            check=False,
        )

    def _failure(self, request: ResolveRequest, done: CompletedCommand) -> Exception:
        """Return the error for a failed run: no solution, or no answer from an index."""
        output = without_url_secrets(done.stderr)
        if "No solution found" not in output or unreachable(output):
            return _failed(output)
        for name in _UNKNOWN.findall(output):
            # uv does not report that an index refused to answer; pip does.
            request.pip.existing(name)
        reason = _reason(output)
        required = " ".join(re.findall(r"you require(.*?)(?:, we can|$)", reason))
        blamed = names_in(required, request.names) or names_in(reason, request.names)
        unavailable = self._all_unavailable(request, output)
        return NoSolution(reason, blamed=blamed, absent=unavailable)

    def _all_unavailable(self, request: ResolveRequest, output: str) -> list[UnavailablePackage]:
        """Return every package without a file for the target, not only where uv stopped.

        Resolved for every platform at once, nothing is left out for want of a wheel, and the
        selection shows what is missing.
        """
        names = {canonicalize_name(a or b) for a, b in _NO_WHEEL.findall(output)}
        if not names:
            return []
        version = request.target.environment()["python_full_version"]
        done = self._compile(request, ["--universal", "--python-version", version])
        if done.returncode == 0:
            _, unavailable = _files(done.stdout, request.target)
            if unavailable:
                return unavailable
        return [UnavailablePackage(requirement=name) for name in sorted(names)]


def _arguments(request: ResolveRequest, indexes: Indexes) -> list[str]:
    """Return the arguments of ``uv`` that do not depend on the target."""
    argv = ["pip", "compile", "--format", "pylock.toml", "--generate-hashes"]
    argv += ["--no-header", "--color", "never", "--quiet", "--no-progress", "--no-annotate"]
    argv += ["--index-strategy", "unsafe-best-match", "--python", sys.executable]
    if indexes.pre:
        argv += ["--prerelease", "allow"]
    if request.offline:
        argv.append("--offline")
    for host in indexes.trusted_hosts:
        argv += ["--allow-insecure-host", host]
    if request.constraints:
        constraints = request.scratch / "constraints.txt"
        _write(constraints, request.constraints)
        argv += ["--constraints", str(constraints)]
    return argv


def _refuse_redirection() -> None:
    """Refuse variables that make uv lock something else."""
    names = [name for name in _REDIRECTING if os.environ.get(name)]
    if names:
        raise ResolveError(
            f"{', '.join(names)}: set in the environment, so uv would lock something other than "
            "what the project asks for",
            hint="unset it; limit versions with environment.constraints, choose PyTorch's index "
            "with environment.torch-backend, allow pre-releases with --pre in a requirement file",
        )


def _for_target(target: Target) -> list[str]:
    """Return the arguments that make uv resolve for a target."""
    version = ["--python-version", target.environment()["python_full_version"]]
    libc, (_, minor) = target.libc
    if libc == "musl":
        return [*version, "--python-platform", f"{target.machine}-unknown-linux-musl"]
    known = [number for number in _GLIBC if number <= minor]
    if target.machine in ("x86_64", "aarch64") and known:
        return [*version, "--python-platform", f"{target.machine}-manylinux_2_{known[-1]}"]
    if target == Target.of_host():
        return version
    raise ResolveError(
        f"uv cannot resolve for {target.platform}",
        hint="run stager on such a machine, or choose another environment.platform",
    )


def _files(answer: str, target: Target) -> tuple[list[ResolvedFile], list[UnavailablePackage]]:
    data = toml.loads(answer, Path("uv's answer"))
    return select(data, target, base=Path("/"), source="uv's answer")


def _reason(output: str) -> str:
    """Return uv's explanation in one paragraph, without hints."""
    body = output.partition("cause:")[2] or output
    return re.sub(r"\s+", " ", body.partition("\nhint:")[0]).strip()


def _failed(output: str) -> ResolveError:
    """Return the error for a run that says nothing about the requirements."""
    if unreachable(output):
        return index_unreachable(output)
    text = re.sub(r"\s+", " ", output.replace("error:", "")).strip()[:1200]
    if "unexpected argument" in output or "invalid value" in output:
        return ResolveError(
            "this version of uv lacks an option that stager needs",
            hint="upgrade it (`pip install -U uv`), or use --resolver pip-tools",
            context=[text],
        )
    return ResolveError("uv could not resolve the requirements", context=[text])


def _write(path: Path, lines: Sequence[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
