"""Fetching the wheels of a lock into the offline root, and checking those already in it.

Downloads are pip's, with digests required, so that proxies, certificates, key rings and private
indexes work as they do for the user. A file is requested by its URL first, which names exactly the
locked file; if that fails (a URL without its credentials, say), by name and version over the
indexes, where only a file with the locked digest is accepted.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from bundle.protocol.counts import counted

from ..core.deletion import remove
from ..core.digest_cache import DigestCache
from ..core.errors import ResolveError, StagerError, WheelError
from ..core.processes import Runner, run
from ..core.regular_files import text_of
from ..core.store import Store, sha256_of
from ..core.values import Digest, LockedFile, Wheel
from ..lock import sources
from ..lock.indexes import Indexes
from ..lock.pip import Pip, condense, index_unreachable, unreachable
from ..lock.pylock import Lock

BATCH = 8
"""Files requested in one call of pip: few calls, yet a progress line now and then."""

_ACTUAL_DIGEST = re.compile(r"Got\s+([0-9a-f]{64})")

Progress = Callable[[str], None]


def _quiet(line: str) -> None:
    """Ignore a progress line."""


def fetch(
    lock: Lock,
    store: Store,
    *,
    offline: bool,
    run: Runner = run,
    progress: Progress = _quiet,
    indexes: Indexes | None = None,
) -> tuple[Wheel, ...]:
    """Bring every file of a lock into the store and return the wheels, sorted by package.

    Args:
        lock: the files to fetch; its digests decide, whatever an index or the disk holds.
        store: the offline root; files in it with the right digest are not fetched again.
        offline: true if nothing may be fetched.
        run: starts pip.
        progress: takes one line of progress at a time.
        indexes: the spec's, with the credentials for places that the lock names without.

    Raises:
        WheelError: files that are missing (offline), differ from the lock, or cannot be fetched or
            built; one context line for each.
        ResolveError: neither the files' servers nor a package index can be reached.
    """
    scratch = store.scratch("wheels")
    if offline:
        places = Indexes(no_index=True, find_links=(str(store.wheels),))
    else:
        places = lock.indexes.with_credentials_from(indexes or Indexes())
    pip = Pip(target=lock.target, indexes=places, scratch=scratch, offline=offline, run=run)
    fetcher = _Fetcher(lock, store, pip, progress)
    try:
        fetcher.fetch()
        return fetcher.wheels()
    finally:
        fetcher.digest_cache.save()
        remove(scratch)


class _Fetcher:
    """Brings the files of one lock into the store, and collects the problems on the way."""

    def __init__(self, lock: Lock, store: Store, pip: Pip, progress: Progress) -> None:
        self.lock = lock
        self.store = store
        self.pip = pip
        self.progress = progress
        self.digest_cache = DigestCache(store)
        self.problems: list[str] = []
        self._output = ""  # of the last download, if it failed

    def fetch(self) -> None:
        """Bring every missing file into the store.

        Raises:
            WheelError: files that cannot be obtained as locked; all of them.
        """
        missing = [file for file in self.lock.files if not self.is_here(file)]
        if self.pip.offline:
            self.problems += map(self.offline_problem, missing)
        elif missing:
            self.fetch_from_network(missing)
        if self.problems:
            raise self._error()

    def is_here(self, file: LockedFile) -> bool:
        """Return whether a file is in the store, or could be taken from its place here."""
        return self.stored(file) is not None or self.take_local(file)

    def fetch_from_network(self, files: Sequence[LockedFile]) -> None:
        """Download wheels, and build those of sdists."""
        self.store.require_space(sum(file.size or 0 for file in files), "the wheels")
        self.download_all([file for file in files if file.is_wheel])
        self.build_all([file for file in files if not file.is_wheel])

    def _error(self) -> WheelError:
        """Return one error with all problems."""
        hint = "the lock is authoritative; if the files were meant to change, run `stager lock`"
        if self.pip.offline:
            hint = f"run once with a network, or put the files into {self.store.wheels}"
        many = counted(len(self.problems), "file")
        return WheelError(
            f"{many} of {self.lock.path.name} cannot be obtained as locked",
            hint=hint,
            context=self.problems,
        )

    def wheels(self) -> tuple[Wheel, ...]:
        """Return the wheel of every file of the lock.

        Raises:
            WheelError: files are missing, though they were there a moment ago.
        """
        wheels = []
        for file in self.lock.files:
            wheel = self.stored(file)
            if wheel is None:
                raise WheelError(
                    f"files in {self.store.root} changed while they were being fetched",
                    hint="let only one build use an offline root at a time",
                )
            wheels.append(wheel)
        return tuple(wheels)

    def stored(self, file: LockedFile) -> Wheel | None:
        """Return the wheel of a locked file if the store has it with the right digest."""
        path, expected = self._place(file)
        if path is None:
            return None
        digest = self.digest_cache.digest(path)
        if digest is None or digest != expected:
            return None
        return Wheel(
            name=file.name,
            version=file.version,
            path=path,
            sha256=digest,
            size=path.stat().st_size,
        )

    def _place(self, file: LockedFile) -> tuple[Path | None, str]:
        """Return path and digest of a file's wheel in the store; a wheel built here has a note."""
        if file.is_wheel:
            return self.store.wheels / file.filename, file.sha256
        path = sources.fitting(self.store.built / file.sha256, self.lock.target)
        if path is None:
            return None, ""
        return path, _noted_digest(path)

    def offline_problem(self, file: LockedFile) -> str:
        """Describe why a file that may not be fetched cannot be used."""
        digest = self.digest_cache.digest(self.store.wheels / file.filename)
        if file.is_wheel and digest:
            return _differs(file.filename, file.sha256, digest)
        return f"{file.filename}: not in the offline root"

    def take_local(self, file: LockedFile) -> bool:
        """Take a file from its place on this machine; return false if it has to be fetched.

        A local project's wheel may be gone, or never have been on this machine; then the project
        is built again, which gives the same bytes as long as it has not changed.
        """
        path = file.path
        source = dict(self.lock.sources).get(file.filename)
        if source and not (path and path.is_file()):
            try:
                path = self.rebuild(source)
            except StagerError as exc:
                self.problems.append(f"{file.filename}: from {source}: {exc.message}")
                return True
        if path is None or not path.is_file():
            return False
        if file.is_wheel:
            self._copy(file, path)
        else:
            self.build(file)
        return True

    def _copy(self, file: LockedFile, path: Path) -> None:
        """Copy a wheel into the store if it is the locked one."""
        digest = sha256_of(path)
        if digest != file.sha256:
            self.problems.append(_differs(str(path), file.sha256, digest))
            return
        with self.store.publishing(self.store.wheels / file.filename) as partial:
            shutil.copyfile(path, partial)

    def rebuild(self, source: str) -> Path:
        """Build a local project's wheel again; a URL is built from its present content."""
        place: Path | str = source
        if "://" not in source:
            place = self.lock.path.parent.absolute() / source
        return sources.build(sources.known_source(place, source), self.store, self.pip)

    def download_all(self, files: Sequence[LockedFile]) -> None:
        """Download wheels, a batch at a time."""
        for start in range(0, len(files), BATCH):
            batch = files[start : start + BATCH]
            names = ", ".join(f"{file.name} {file.version}" for file in batch)
            self.progress(f"downloading {start + len(batch)} of {len(files)}: {names}")
            self.download(batch)

    def download(self, batch: Sequence[LockedFile]) -> None:
        """Download wheels in one call; only if that fails, one by one, to report each failure."""
        folder = self.pip.scratch / "new"
        if not self._try([_by_url(file) for file in batch], folder):
            self._download_by_name(batch, folder)
        for file in batch:
            downloaded = folder / file.filename
            if downloaded.is_file() and sha256_of(downloaded) == file.sha256:
                with self.store.publishing(self.store.wheels / file.filename) as partial:
                    downloaded.replace(partial)

    def _download_by_name(self, batch: Sequence[LockedFile], folder: Path) -> None:
        """Download wheels from the indexes after a failure by URL, in one call or one by one."""
        by_url = self._output
        if self._try([_by_name(file) for file in batch], folder):
            return
        if unreachable(by_url) and unreachable(self._output):
            raise index_unreachable(by_url + self._output)
        for file in batch:
            self._download_single(file, folder)

    def _download_single(self, file: LockedFile, folder: Path) -> None:
        if self._try([_by_url(file)], folder):
            return
        by_url = self._output
        if self._try([_by_name(file)], folder):
            return
        # By name, a file with another digest, or behind a password, is only "not found".
        by_name = self._output
        actual = _ACTUAL_DIGEST.search(by_url) or _ACTUAL_DIGEST.search(by_name)
        if actual:
            place = file.url or file.filename
            self.problems.append(_differs(place, file.sha256, actual[1]))
            return
        reason = condense(by_url if unreachable(by_url) else by_name)
        self.problems.append(f"{file.filename}: {reason}")

    def _try(self, lines: Sequence[str], folder: Path) -> bool:
        """Download what requirement lines name; keep pip's output and return whether it worked."""
        done = self.pip.download(lines, folder)
        self._output = done.stderr or done.stdout
        return done.returncode == 0

    def build_all(self, files: Sequence[LockedFile]) -> None:
        """Build the wheels of sdists."""
        for file in files:
            self.progress(f"building a wheel for {file.name} {file.version}")
            self.build(file)

    def build(self, file: LockedFile) -> None:
        """Build an sdist's wheel and note its digest beside it."""
        keep = self.store.built / file.sha256
        for line in dict.fromkeys((_by_url(file), _by_name(file))):
            try:
                wheel = sources.build_line(line, keep, self.store, self.pip)
            except ResolveError as exc:
                problem = f"{file.filename}: {exc.message}"
                continue
            with self.store.publishing(_note(wheel)) as partial:
                partial.write_text(f"{sha256_of(wheel)}\n", encoding="utf-8")
            return
        self.problems.append(problem)


def _by_url(file: LockedFile) -> str:
    """Return the requirement line of exactly this file."""
    url = file.path.as_uri() if file.path else file.url
    if url is None:
        return _by_name(file)
    return f"{file.name} @ {url} --hash=sha256:{file.sha256}"


def _by_name(file: LockedFile) -> str:
    """Return the requirement line that finds a file over the indexes."""
    return f"{file.name}=={file.version} --hash=sha256:{file.sha256}"


def _differs(place: str, expected: str, actual: str) -> str:
    return f"{place}: differs from the lock: expected sha256 {expected}, found {actual}"


def _note(wheel: Path) -> Path:
    """Return the file that holds the digest of a wheel that was built here."""
    return wheel.with_name(f"{wheel.name}.sha256")


def _noted_digest(wheel: Path) -> str:
    try:
        return Digest(text_of(_note(wheel)).strip())
    except (OSError, ValueError):
        return ""
