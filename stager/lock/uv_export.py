"""Reading a ``uv.lock`` with ``uv export``, which writes it in the standard's form (PEP 751)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from bundle.redaction.secrets import without_url_secrets
from bundle.system.processes import CompletedCommand

from ..core import toml
from ..core.errors import ResolveError
from .pip import HOUR, index_unreachable, keep_end, unreachable
from .resolver import ResolveRequest
from .uv import required_command
from .uv_lock import UvLock

_ANSWER = "pylock.uv.toml"
"""The file that uv writes its answer to, in the scratch folder."""


def export(lock: UvLock, request: ResolveRequest) -> Mapping[str, Any]:
    """Return a lock of uv in the standard's form; relative paths in it start at the scratch folder.

    Raises:
        ResolveError: uv is missing, or cannot read the lock, or the lock is out of date.
    """
    done = _export(lock, request, "--locked")
    if done.returncode != 0 and not _is_stale(done.stderr, request) and _may_be_unchecked(request):
        done = _export(lock, request, "--frozen")
    if done.returncode != 0:
        raise _failure(lock, request, without_url_secrets(done.stderr))
    return toml.read(request.scratch / _ANSWER)


def _export(lock: UvLock, request: ResolveRequest, check: str) -> CompletedCommand:
    """Run uv; ``check`` is ``--locked``, which refuses a stale lock, or ``--frozen``."""
    answer = str(request.scratch / _ANSWER)
    return request.run(
        [*required_command(), *_arguments(lock, request), check, "-o", answer],
        timeout=HOUR,
        env={"UV_PYTHON_DOWNLOADS": "never"},
        cwd=request.scratch,
        check=False,
    )


def _is_stale(output: str, request: ResolveRequest) -> bool:
    """Recognize a stale lock in uv's output: offline, uv resolves only then, and fails."""
    return "needs to be updated" in output or (request.offline and "No solution found" in output)


def _may_be_unchecked(request: ResolveRequest) -> bool:
    """Return whether uv may lack a Python or build requirements, without which it cannot check."""
    return request.offline or not request.spec.target.is_host_python


def _arguments(lock: UvLock, request: ResolveRequest) -> list[str]:
    argv = ["export", "--format", "pylock.toml", "--no-editable"]
    # A .python-version may name one that is not here, and the lock is for all.
    argv += ["--python", sys.executable]
    project = lock.project
    if project.is_script:
        argv += ["--script", str(project.file)]
    else:
        argv += ["--project", str(project.file.parent)]
    argv += ["--quiet", "--no-header", "--color", "never", "--no-progress"]
    if request.offline:
        argv.append("--offline")
    if project.is_script:
        return argv
    if not lock.itself:
        argv.append("--no-emit-project")
    argv += [word for extra in project.extras for word in ("--extra", extra)]
    group_option = "--group" if project.dependencies else "--only-group"
    argv += [word for group in project.groups for word in (group_option, group)]
    if "dev" not in project.groups:
        argv.append("--no-dev")
    return argv


def _failure(lock: UvLock, request: ResolveRequest, output: str) -> ResolveError:
    if _is_stale(output, request):
        file = lock.project.file
        source = f"the block of {file.name}" if lock.project.is_script else "its pyproject.toml"
        return ResolveError(
            f"{lock.file} is out of date: {source} has changed",
            hint=f"run `{lock.command}` there, and this command again",
        )
    if unreachable(output):
        return index_unreachable(output)
    text = keep_end(output.replace("error:", ""))
    return ResolveError(
        f"uv cannot read {lock.file}",
        hint=f"`{lock.command}` makes it again; one that a newer uv wrote needs that "
        "(`pip install -U uv`)",
        context=[text],
    )
