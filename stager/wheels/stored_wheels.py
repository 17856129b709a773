"""The wheels of a lock that are in the offline root already, found by their digests.

A wheel from an index has the name that the lock has. One that was built from an sdist lies in a
folder that is named after all that shaped it, with a note of its digest beside it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..core.files import text_of
from ..core.store import DigestCache, Store, sha256_of
from ..core.values import Digest, LockedFile, Wheel
from ..lock import source_wheels
from ..lock.build_source import BUILT_AGAINST, BuildSettings
from ..lock.pylock import Lock

FindElsewhere = Callable[[LockedFile], Wheel | None]
"""Returns the wheel of a locked file that is here in another form; None if it is not."""


class StoredWheels:
    """The wheels of one lock in the offline root."""

    def __init__(
        self,
        lock: Lock,
        store: Store,
        builds: BuildSettings,
        elsewhere: FindElsewhere = lambda file: None,
    ) -> None:
        self._lock, self.store, self._builds = lock, store, builds
        self._elsewhere = elsewhere
        self._cache = DigestCache(store)
        self._against = [str(file.sha256) for file in lock.files if file.name in BUILT_AGAINST]

    def read_ahead(self) -> None:
        """Take the digests of the lock's wheels that are here, one on each CPU; they are kept.

        Raises:
            StagerError: there is something else in a wheel's place, or it cannot be read.
        """
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(self.other_digest, self._lock.files))

    def find(self, file: LockedFile) -> Wheel | None:
        """Return the wheel of a locked file; None unless it is here with the right digest."""
        path = self.place_of(file) if file.is_wheel else self._built(file)
        digest = self._cache.digest(path) if path is not None else None
        if path is None or digest is None:
            return self._elsewhere(file)
        expected = file.sha256 if file.is_wheel else _noted_digest(path)
        if digest != expected:
            return None
        return Wheel(
            name=file.name,
            version=file.version,
            path=path,
            sha256=digest,
            size=path.stat().st_size,
        )

    def place_of(self, file: LockedFile) -> Path:
        """Return where a wheel of the lock belongs."""
        return self.store.wheels / file.filename

    def folder_of(self, file: LockedFile) -> Path:
        """Return the folder for the wheel of an sdist."""
        return self.store.built / self._builds.key(file.name, file.sha256, self._against)

    def _built(self, file: LockedFile) -> Path | None:
        return source_wheels.fitting(self.folder_of(file), self._lock.target)

    def other_digest(self, file: LockedFile) -> Digest | None:
        """Return the digest of what lies in the place of a wheel; None if nothing is there."""
        return self._cache.digest(self.place_of(file)) if file.is_wheel else None

    def note_digest(self, wheel: Path) -> None:
        """Note the digest of a wheel that was built here, so that it is known again."""
        with self.store.publishing(_note(wheel)) as partial:
            partial.write_text(f"{sha256_of(wheel)}\n", encoding="utf-8")

    def save_digests(self) -> None:
        """Keep the digests that were taken, for the next build."""
        self._cache.save()


def differs(place: str, expected: str, actual: str) -> str:
    """Return the problem with a file that is not the locked one."""
    return f"{place}: differs from the lock: expected sha256 {expected}, found {actual}"


def _note(wheel: Path) -> Path:
    return wheel.with_name(f"{wheel.name}.sha256")


def _noted_digest(wheel: Path) -> str:
    try:
        return Digest(text_of(_note(wheel)).strip())
    except (OSError, ValueError):
        return ""
