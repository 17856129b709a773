"""The hub, through ``huggingface_hub``: what a repository holds, and its files.

That library comes with the extra ``stager[hub]`` and is imported here alone, when it is needed. It
reads its own variables: ``HF_ENDPOINT``, ``HF_TOKEN``, the proxies'. The user's token stays in it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bundle.format.layer import excess
from bundle.protocol.digest import Digest

from ..core.errors import ConfigError, StagerError
from ..core.store import cannot_write
from .locked import is_safe
from .names import HubRequest

_INSTALL = "uv tool install --reinstall '.[hub]'"
_TOO_MANY, _SERVER_FAULT = 429, 500
"""Statuses of HTTP; from the second on it is the server's fault."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG)
"""Errors that are those of this machine's disk."""
_WHY_LINES = 3
"""Lines of the library's own message that are shown."""


@dataclass(frozen=True, kw_only=True)
class HubEntry:
    """A file of a repository, as the hub describes it."""

    path: str
    """Its path in the repository."""
    size: int
    """Length in bytes."""
    sha256: Digest | None
    """Digest of its bytes; None for a small file, for which the hub has none."""
    blob: str = ""
    """Git's own digest of a small file; empty where the hub does not say it."""
    problem: str = ""
    """Why it cannot be taken; empty if it can."""
    is_named_badly: bool = False
    """True if its name is the problem, and not what the hub says about it."""


@dataclass(frozen=True, kw_only=True)
class HubAnswer:
    """A repository at one commit, as the hub describes it."""

    commit: str
    """The commit's full name."""
    licence: str
    """The licence its card names; empty if it names none."""
    entries: tuple[HubEntry, ...]
    """Its files."""
    configs: tuple[Mapping[str, object], ...]
    """``configs`` of a data set's card."""


class Hub(Protocol):
    """A hub that can be asked."""

    def describe(self, request: HubRequest) -> HubAnswer:
        """Return what a repository holds at the revision that is asked for."""

    def fetch(self, request: HubRequest, commit: str, path: str, cache: Path) -> Path:
        """Fetch a file into a cache, or find it there; return its path."""


class HubClient:
    """The real hub."""

    def describe(self, request: HubRequest) -> HubAnswer:
        """Return what a repository holds at the revision that is asked for.

        Raises:
            StagerError: it does not exist, asks for a token, or the hub does not answer.
        """
        library = _library()
        with _explained(request):
            api = library.HfApi(endpoint=_endpoint(), library_name="stager")
            asks = {"model": api.model_info, "dataset": api.dataset_info, "space": api.space_info}
            info = asks[request.kind](
                request.name, revision=request.revision or None, files_metadata=True
            )
            card = info.card_data.to_dict() if hasattr(info.card_data, "to_dict") else {}
        configs = card.get("configs")
        return HubAnswer(
            commit=_commit(request, info.sha),
            licence=_licence(card),
            entries=tuple(map(_entry, info.siblings or ())),
            configs=tuple(c for c in configs if isinstance(c, dict))
            if isinstance(configs, list)
            else (),
        )

    def fetch(self, request: HubRequest, commit: str, path: str, cache: Path) -> Path:
        """Fetch a file into a cache, or find it there; return its path.

        A connection that is cut is taken up where it was. The library's progress bars are for a
        terminal only.

        Raises:
            StagerError: it cannot be fetched, or not be written, or not in the cache.
        """
        library = _library()
        with _explained(request), _bars():
            found = library.hf_hub_download(
                request.name,
                path,
                repo_type=request.kind,
                revision=commit,
                cache_dir=cache,
                endpoint=_endpoint(),
            )
        # It stores a file under the name that the server gives its content, wherever that leads.
        if not Path(found).resolve().is_relative_to(cache.resolve()):
            raise StagerError(
                f"{request.kind} {request.label}: the hub gives {path} a name that leads out of "
                f"{cache}: {Path(found).resolve()}",
                hint="check HF_ENDPOINT: what answers there is not a hub; look at that file",
            )
        return Path(found)


def _library() -> Any:  # noqa: ANN401 - a module that need not be installed
    # Its telemetry is nobody's business here; the variable counts when it is imported.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        import huggingface_hub
    except ImportError as exc:
        raise ConfigError(
            "models, datasets and spaces in [assets] need huggingface_hub, which is not installed",
            hint=f"in the clone of stager: {_INSTALL}; or in its virtual environment: "
            "pip install huggingface_hub",
            context=[str(exc)],
        ) from exc
    return huggingface_hub


def _endpoint() -> str | None:
    """Return the address in HF_ENDPOINT, which the library reads only once, at its import."""
    return os.environ.get("HF_ENDPOINT") or None


@contextlib.contextmanager
def _bars() -> Iterator[None]:
    """Disable the library's progress bars where standard error is not a terminal."""
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    quiet = not sys.stderr.isatty()
    if quiet:
        disable_progress_bars()
    try:
        yield
    finally:
        if quiet:
            enable_progress_bars()


@contextlib.contextmanager
def _explained(request: HubRequest) -> Iterator[None]:
    """Convert every error of the library into a StagerError that names the repository."""
    try:
        yield
    except StagerError:
        raise
    # Its errors come from three HTTP libraries by version, and from its own classes.
    except Exception as exc:
        if isinstance(exc, OSError) and exc.errno in _FULL:
            place = Path(exc.filename or f"the files of {request.label}")
            raise cannot_write(place, exc) from exc
        raise _fault(request, exc) from exc


def _fault(request: HubRequest, exc: Exception) -> StagerError:
    kinds = {kind.__name__ for kind in type(exc).__mro__}
    what = f"{request.kind} {request.label}"
    status = _status(exc)
    if "GatedRepoError" in kinds:
        return StagerError(
            f"{what} is gated: the hub gives it only to users who accepted its terms",
            hint=f"accept them on the page of {request.name}, then log in with `hf auth login` or "
            "set HF_TOKEN, and run this again; the token stays on this machine",
        )
    if "RevisionNotFoundError" in kinds:
        return StagerError(
            f"{what}: there is no such revision",
            hint="correct what follows the @ (a branch, a tag or a commit)",
        )
    if "RepositoryNotFoundError" in kinds or status in (401, 403):
        return StagerError(
            f"{what}: the hub has no such repository, or shows it to some users only",
            hint="check its name; for a private one log in with `hf auth login` or set HF_TOKEN",
        )
    if "OfflineModeIsEnabled" in kinds:
        return StagerError(
            f"{what} must be asked for at the hub, and HF_HUB_OFFLINE forbids that",
            hint="unset HF_HUB_OFFLINE for this command",
        )
    hint = "check the network and HF_ENDPOINT, and run this again: files that are whole are kept"
    if status == _TOO_MANY:
        hint = "it has had too many requests: wait some minutes; `hf auth login` raises the limit"
    elif status is not None and status >= _SERVER_FAULT:
        hint = "that is the hub's own fault: run this again later; files that are whole are kept"
    return StagerError(
        f"{what}: the hub did not give it", hint=hint, context=_reasons(exc.__cause__ or exc)
    )


def _status(exc: BaseException | None) -> int | None:
    """Return the status of the HTTP response that caused an error; None if none did."""
    while exc is not None:
        status = getattr(getattr(exc, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
        exc = exc.__cause__
    return None


def _reasons(exc: BaseException) -> list[str]:
    """Return the first lines of the library's message, with tokens masked."""
    text = f"{type(exc).__name__}: {exc}"
    return [re.sub(r"\bhf_\w{8,}", "hf_***", line) for line in text.splitlines() if line.strip()][
        :_WHY_LINES
    ]


def _commit(request: HubRequest, value: object) -> str:
    if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{40}", value):
        return value
    raise StagerError(
        f"{request.kind} {request.label}: the hub names no commit, but {value!r}",
        hint="check HF_ENDPOINT: what answers there is not a hub",
    )


def _licence(card: Mapping[str, object]) -> str:
    value = card.get("license")
    if value == "other" and isinstance(card.get("license_name"), str):
        value = card["license_name"]
    names = value if isinstance(value, list) else [value]
    return ", ".join(str(name) for name in names if name and str(name).isprintable())[:200]


def _entry(sibling: Any) -> HubEntry:  # noqa: ANN401 - the library's
    """Check the hub's answer about one file; a problem matters only if the file is selected."""
    path, size, lfs = str(sibling.rfilename), sibling.size, sibling.lfs
    digest, problem = None, ""
    if not is_safe(path):
        problem = "its name leaves the repository, or cannot be printed"
    elif excess(path):
        problem = f"no node can hold {excess(path)}"
    elif type(size) is not int or size < 0:
        problem = f"its size is {size!r}"
    try:
        digest = Digest(lfs.sha256) if lfs else None
    except (ValueError, TypeError):
        problem = "its digest is not a sha256"
    return HubEntry(
        path=path,
        size=0 if problem else size,
        sha256=digest,
        blob="" if lfs else str(sibling.blob_id or ""),
        problem=problem,
        is_named_badly=not is_safe(path) or bool(excess(path)),
    )
