"""Downloads of locked wheels: pip's, with digests required.

So proxies, certificates, key rings and private indexes work as they do for the user. A file is
requested by its URL first, which names exactly the locked file; if that fails (a URL without its
credentials, say), by name and version over the indexes, where only a file with the locked digest is
accepted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from bundle.protocol.counts import sized

from ..core.store import Store, sha256_of
from ..core.values import LockedFile
from ..lock.pip import Pip, condense, index_unreachable, unreachable
from .stored_wheels import differs

BATCH = 8
"""Files requested in one call of pip: few calls, yet a progress line now and then."""

_ACTUAL_DIGEST = re.compile(r"Got\s+([0-9a-f]{64})")

Progress = Callable[[str], None]


class Downloads:
    """Downloads wheels into the offline root.

    Attributes:
        problems: what is wrong with those that it could not get, a line for each.
    """

    def __init__(self, pip: Pip, store: Store, progress: Progress) -> None:
        self.problems: list[str] = []
        self._pip, self._store, self._progress = pip, store, progress
        self._folder = pip.scratch / "new"
        self._output = ""
        """That of the last call of pip."""

    def fetch(self, files: Sequence[LockedFile]) -> None:
        """Download wheels, a batch at a time.

        Raises:
            ResolveError: neither the files' servers nor a package index can be reached.
        """
        for start in range(0, len(files), BATCH):
            batch = files[start : start + BATCH]
            names = ", ".join(f"{file.name} {file.version}" for file in batch)
            size = sum(file.size or 0 for file in batch)
            amount = f" ({sized(size)})" if size else ""
            self._progress(f"downloading {start + len(batch)} of {len(files)}{amount}: {names}")
            self._fetch_batch(batch)

    def _fetch_batch(self, batch: Sequence[LockedFile]) -> None:
        """Download wheels by URL in one call; if that fails, by name, to report each failure."""
        if not self._try([by_url(file) for file in batch]):
            self._fetch_by_name(batch)
        for file in batch:
            downloaded = self._folder / file.filename
            if downloaded.is_file() and sha256_of(downloaded) == file.sha256:
                with self._store.publishing(self._store.wheels / file.filename) as partial:
                    downloaded.replace(partial)

    def _fetch_by_name(self, batch: Sequence[LockedFile]) -> None:
        said_by_url = self._output
        if self._try([by_name(file) for file in batch]):
            return
        if unreachable(said_by_url) and unreachable(self._output):
            raise index_unreachable(said_by_url + self._output)
        for file in batch:
            self._fetch_single(file)

    def _fetch_single(self, file: LockedFile) -> None:
        if self._try([by_url(file)]):
            return
        said_by_url = self._output
        if self._try([by_name(file)]):
            return
        # By name, a file with another digest, or behind a password, is only "not found".
        said_by_name = self._output
        actual = _ACTUAL_DIGEST.search(said_by_url) or _ACTUAL_DIGEST.search(said_by_name)
        if actual:
            place = file.url or file.filename
            self.problems.append(differs(place, file.sha256, actual[1]))
            return
        reason = condense(said_by_url if unreachable(said_by_url) else said_by_name)
        self.problems.append(f"{file.filename}: {reason}")

    def _try(self, lines: Sequence[str]) -> bool:
        done = self._pip.download(lines, self._folder)
        self._output = done.stderr or done.stdout
        return done.returncode == 0


def by_url(file: LockedFile) -> str:
    """Return the requirement line of exactly this file."""
    url = file.path.as_uri() if file.path else file.url
    if url is None:
        return by_name(file)
    return f"{file.name} @ {url} --hash=sha256:{file.sha256}"


def by_name(file: LockedFile) -> str:
    """Return the requirement line that finds a file over the indexes."""
    return f"{file.name}=={file.version} --hash=sha256:{file.sha256}"
