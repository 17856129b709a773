"""Caches of the hub on this machine, in which a file may be already."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bundle.protocol.counts import sized
from bundle.protocol.digest import Digest

from ..core.errors import StagerError
from ..core.store import Store, sha256_of
from .client import Hub, HubEntry
from .locked import HubFile, LockedRepository
from .names import HubRequest

Progress = Callable[[str], None]
"""Called with a line for each file that is fetched."""


def user_caches(variables: Mapping[str, str]) -> list[Path]:
    """Return the places where the user's own programs keep files of the hub, likeliest first."""
    named = [variables[name] for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME")
             if variables.get(name)]  # fmt: skip
    if variables.get("HF_HOME"):
        named[-1] += "/hub"
    named.append(f"{variables.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface/hub")
    # As the library reads them; Path's own expansion raises where there is no such home.
    return [Path(os.path.expanduser(name)) for name in named]  # noqa: PTH111


def is_the_users(folder: Path, variables: Mapping[str, str]) -> bool:
    """Return whether the user's own programs keep their files of the hub in a folder."""
    return folder.resolve() in (cache.resolve() for cache in user_caches(variables))


@dataclass(frozen=True, kw_only=True)
class HubFiles:
    """Files of the hub, from the user's caches, else fetched into the offline root."""

    hub: Hub | None
    """The hub; None if nothing may be fetched."""
    store: Store
    """The offline root."""
    progress: Progress
    """Called with a line for each file that is fetched."""

    def find(self, request: HubRequest, commit: str, path: str) -> Path | None:
        """Return a file that is here already, unchecked; None if none is."""
        for cache in (*user_caches(os.environ), self.store.hub):
            file = cache / request.folder / "snapshots" / commit / path
            if os.path.isfile(file):  # noqa: PTH113 - False also where it cannot be looked at
                return file
        return None

    def digest(self, request: HubRequest, commit: str, entry: HubEntry) -> Digest:
        """Return the digest of a small file, fetched if it is not here as the hub lists it.

        Raises:
            StagerError: it cannot be fetched, or may not be; or what was fetched is another file.
        """
        file = self.find(request, commit, entry.path)
        if file is None or not _is_listed(file, entry):
            file = self._fetch(request, commit, entry.path, entry.size)
            if not _is_listed(file, entry):
                file.resolve().unlink(missing_ok=True)  # fetched once more, the next time
                raise StagerError(
                    f"{request.kind} {request.label}: {entry.path} is not the file that the hub "
                    "lists: its size or its digest is another",
                    hint="run this again; if it stays so, check HF_ENDPOINT and the proxy",
                )
        return sha256_of(file)

    def locked(self, repository: LockedRepository, file: HubFile) -> Path:
        """Return a file with the content that the lock says.

        Raises:
            StagerError: there is none, and it cannot be fetched.
        """
        request, commit = repository.request, repository.commit
        found = self.find(request, commit, file.path)
        if found is not None and _has_content(found, file):
            return found
        fetched = self._fetch(request, commit, file.path, file.size)
        if not _has_content(fetched, file):
            fetched.resolve().unlink(missing_ok=True)  # fetched once more, the next time
            raise StagerError(
                f"{request.kind} {request.label}: {file.path} is not the file that was locked: "
                "its digest is another",
                hint="run this again; if it stays so, run `stager lock` and review the difference",
            )
        return fetched

    def _fetch(self, request: HubRequest, commit: str, path: str, size: int) -> Path:
        if self.hub is None:
            raise StagerError(
                f"{request.kind} {request.label} is not on this machine: {path} is missing, and "
                "nothing may be fetched",
                hint="run `stager build` once where the hub can be reached",
                context=[f"looked in {cache}" for cache in user_caches(os.environ)],
            )
        self.store.require_space(size, f"{request.name} {path}")
        self.progress(f"{request.label} {path}, {sized(size)}")
        return self.hub.fetch(request, commit, path, self.store.hub)


def _is_listed(path: Path, entry: HubEntry) -> bool:
    """Compare a file with the hub's size and, if known, git SHA-1: it finds damage, not attacks."""
    try:
        data = path.read_bytes() if path.stat().st_size == entry.size else None
    except OSError:
        return False
    if data is None:
        return False
    state = hashlib.sha1(b"blob %d\0" % len(data), usedforsecurity=False)
    state.update(data)
    return entry.blob in ("", state.hexdigest())


def _has_content(path: Path, file: HubFile) -> bool:
    try:
        return path.stat().st_size == file.size and sha256_of(path) == file.sha256
    except OSError:
        return False
