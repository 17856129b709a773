"""Recorded digests of files in the offline root, and of large ones in projects: each is read once.

A digest holds as long as the file's size, times (in nanoseconds) and inode stay the same: every
writer of the store publishes by rename, which changes the inode, and an edit in place changes the
time of the last change, which no program can put back.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from pathlib import Path

from .errors import StagerError
from .regular_files import text_of
from .store import Store, sha256_of, stamp
from .values import Digest

FILE_NAME = "checked.json"
SETTLED_NS = 2_000_000_000
"""Nanoseconds that a change must be old: a later one may fall on the same tick of a clock."""
_LARGE = 1 << 16
"""Bytes of a file outside the store from which its digest is worth a record."""


class DigestCache:
    """Digests of one store's files; call :meth:`save` when done."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, list[object]] = {}
        self._changed = False
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(text_of(store.root / FILE_NAME))
            if isinstance(found, dict):
                self._known = found

    def digest(self, path: Path) -> Digest | None:
        """Return the digest of a file in the store; None where there is no such file.

        Raises:
            StagerError: there is something else in its place, or it cannot be read.
        """
        try:
            status = path.stat()
        except FileNotFoundError:
            return None
        except OSError as exc:  # a link to itself, for one
            raise StagerError(
                f"{path} cannot be read: {exc.strerror or exc}",
                hint="move it away and run the command again",
            ) from exc
        if not stat.S_ISREG(status.st_mode):
            raise StagerError(
                f"{path} is not a file, but a file is expected there",
                hint="move it away and run the command again",
            )
        try:
            return self._digest(path, str(path.relative_to(self._store.root)), status)
        except OSError as exc:
            raise StagerError(
                f"{path} cannot be read: {exc.strerror or exc}", hint="make it readable"
            ) from exc

    def digest_of_content(self, path: Path) -> Digest:
        """Return the digest of a file of a project.

        Raises:
            OSError: it cannot be read.
        """
        status = path.stat()
        settled = status.st_ctime_ns < time.time_ns() - SETTLED_NS
        if not settled or status.st_size < _LARGE:
            return sha256_of(path)
        return self._digest(path, str(path.absolute()), status)

    def _digest(self, path: Path, key: str, status: os.stat_result) -> Digest:
        current = stamp(status)
        digest = self._remembered(key, current)
        if digest is None:
            digest = sha256_of(path)
            self._known[key] = [*current, digest]
            self._changed = True
        return digest

    def _remembered(self, key: str, current: list[int]) -> Digest | None:
        record = self._known.get(key)
        if not isinstance(record, list) or record[:-1] != current:
            return None
        with contextlib.suppress(ValueError):
            return Digest(str(record[-1]))
        return None

    def save(self) -> None:
        """Write the record, without the files that are gone; does nothing if nothing changed."""
        if not self._changed:
            return
        root = self._store.root
        kept = {key: value for key, value in self._known.items() if (root / key).exists()}
        with self._store.publishing(root / FILE_NAME) as partial:
            partial.write_text(json.dumps(kept, sort_keys=True, indent=0), encoding="utf-8")
        self._changed = False
