"""Reading a ``uv.lock`` with ``uv export``, which writes it in the standard's form (PEP 751)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bundle.redaction.masking import without_url_secrets

from ..core import toml
from ..core.errors import ResolveError
from .pip import HOUR, index_unreachable, unreachable
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
    done = request.run(
        [*required_command(), *_arguments(lock, request), "-o", str(request.scratch / _ANSWER)],
        timeout=HOUR,
        env={"UV_PYTHON_DOWNLOADS": "never"},
        cwd=request.scratch,
        check=False,
    )
    if done.returncode != 0:
        raise _failure(lock, without_url_secrets(done.stderr))
    return toml.read(request.scratch / _ANSWER)


def _arguments(lock: UvLock, request: ResolveRequest) -> list[str]:
    argv = ["export", "--format", "pylock.toml", "--no-editable"]
    argv += ["--script", str(lock.script)] if lock.script else ["--project", str(lock.project)]
    argv += ["--quiet", "--no-header", "--color", "never", "--no-progress"]
    if request.offline:
        argv += ["--frozen", "--offline"]
    elif request.target.is_host_python:
        argv.append("--locked")  # refuses a lock that does not fit its pyproject.toml
    else:
        argv.append("--frozen")  # uv checks a lock only with a Python that the project is for
    if lock.script:
        return argv
    if not lock.itself:
        argv.append("--no-emit-project")
    for extra in lock.extras:
        argv += ["--extra", extra]
    for group in lock.groups:
        argv += ["--group" if lock.dependencies else "--only-group", group]
    if "dev" not in lock.groups:
        argv.append("--no-dev")
    return argv


def _failure(lock: UvLock, output: str) -> ResolveError:
    source = f"the block of {lock.script.name}" if lock.script else "its pyproject.toml"
    if "needs to be updated" in output:
        return ResolveError(
            f"{lock.file} is out of date: {source} has changed",
            hint=f"run `{lock.command}` there, and this command again",
        )
    if unreachable(output):
        return index_unreachable(output)
    text = re.sub(r"\s+", " ", output.replace("error:", "")).strip()[:1200]
    return ResolveError(
        f"uv cannot read {lock.file}",
        hint=f"`{lock.command}` makes it again; one that a newer uv wrote needs that "
        "(`pip install -U uv`)",
        context=[text],
    )
