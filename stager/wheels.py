"""The wheels of a lock that are in the offline root already, found by their digests.

A wheel from an index has the name that the lock has. One that was built from an sdist lies in a
folder that is named after all that shaped it, with a note of its digest beside it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from bundle.protocol.counts import counted, sized

from .core.errors import ResolveError, StagerError, WheelError
from .core.files import text_of
from .core.processes import Runner, run
from .core.store import DigestCache, Store, sha256_of
from .core.values import Digest, LockedFile, Wheel
from .lock import source_wheels
from .lock.build_source import BUILT_AGAINST, BuildSettings, advice, needs_nvcc, refuse_without_nvcc
from .lock.indexes import Indexes, pip_settings, restore_credentials
from .lock.lock import install
from .lock.pip import Pip, condense, index_unreachable, unreachable
from .lock.pylock import Lock

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


# --- Downloads of locked wheels: pip's, with digests required ------------------------------------

# So proxies, certificates, key rings and private indexes work as they do for the user. A file is
# requested by its URL first, which names exactly the locked file; if that fails (a URL without its
# credentials, say), by name and version over the indexes, where only a file with the locked digest
# is accepted.

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


# --- Fetching the wheels of a lock into the offline root: from here, from an index, or from source


@dataclass(frozen=True, kw_only=True)
class FetchSettings:
    """The settings of a spec that matter for fetching what its lock names."""

    indexes: Indexes = field(default_factory=Indexes)
    """Its indexes, with the credentials for places that the lock names without."""
    urls: tuple[str, ...] = ()
    """Addresses of single files, with the credentials that the lock does not have."""
    builds: BuildSettings = field(default_factory=BuildSettings)
    """What builds from source are given."""
    elsewhere: FindElsewhere = lambda file: None
    """Asked for wheels that are not in the offline root, before they are fetched."""


def _quiet(line: str) -> None:
    """Ignore a progress line."""


def fetch(
    lock: Lock,
    store: Store,
    *,
    offline: bool,
    run: Runner = run,
    progress: Progress = _quiet,
    given: FetchSettings | None = None,
) -> tuple[Wheel, ...]:
    """Bring every file of a lock into the store and return the wheels, sorted by package.

    Raises:
        WheelError: files that are missing (offline), differ from the lock, or cannot be fetched or
            built; one context line for each.
        ResolveError: neither the files' servers nor a package index can be reached; or a build
            needs a compiler that is not here.
    """
    given = given or FetchSettings()
    if offline:
        places = Indexes(no_index=True, find_links=(str(store.wheels),))
    else:
        places = lock.indexes.with_credentials_from(given.indexes)
    with store.scratch("wheels") as scratch:
        pip = Pip(
            target=lock.target,
            indexes=places,
            scratch=scratch,
            offline=offline,
            builds=given.builds,
            run=run,
        )
        stored = StoredWheels(lock, store, given.builds, given.elsewhere)
        fetcher = _Fetcher(lock, stored, pip, progress, given.urls)
        try:
            fetcher.fetch()
            return fetcher.wheels()
        finally:
            fetcher.stored.save_digests()


class _Fetcher:
    def __init__(
        self, lock: Lock, stored: StoredWheels, pip: Pip, progress: Progress, urls: Sequence[str]
    ) -> None:
        self.lock = lock
        self.urls = urls
        self.stored = stored
        self.store = stored.store
        self.pip = pip
        self.progress = progress
        self.problems: list[str] = []
        self._build_output: list[str] = []

    def fetch(self) -> None:
        self._refuse_without_nvcc()
        self.stored.read_ahead()
        later = [file for file in self.lock.files if self._is_built_last(file)]
        missing = [file for file in self.lock.files if file not in later and not self.is_here(file)]
        if self.pip.offline:
            self.problems += map(self.offline_problem, missing)
        elif missing:
            self.fetch_from_network(missing)
        if later and not self.problems:
            self.build_in_environment(later)
        if self.problems:
            raise self._error()

    def _refuse_without_nvcc(self) -> None:
        sdists = [file for file in self.lock.files if not file.is_wheel]
        unbuilt = [file for file in sdists if self.stored.find(file) is None]
        names = [file.name for file in unbuilt if needs_nvcc(file.name, file.path)]
        refuse_without_nvcc(names, self.pip.builds)

    def _is_built_last(self, file: LockedFile) -> bool:
        return (
            not file.is_wheel
            and file.name in self.pip.builds.in_environment
            and self.stored.find(file) is None
        )

    def build_in_environment(self, files: Sequence[LockedFile]) -> None:
        known = [wheel for wheel in map(self.stored.find, self.lock.files) if wheel is not None]
        lines = [f"{wheel.name} @ {wheel.path.as_uri()}" for wheel in known]
        packages = install(lines, self.pip, self.pip.scratch / "environment")
        for file in files:
            self.progress(f"building a wheel for {file.name} {file.version} in the environment")
            self.build(file, packages)

    def is_here(self, file: LockedFile) -> bool:
        """Return whether a file needs no fetch: it is in the store, or now taken from its place."""
        return self.stored.find(file) is not None or self.take_local(file)

    def fetch_from_network(self, files: Sequence[LockedFile]) -> None:
        self.store.require_space(sum(file.size or 0 for file in files), "the wheels")
        downloads = Downloads(self.pip, self.store, self.progress)
        downloads.fetch([self.locate(file) for file in files if file.is_wheel])
        self.problems += downloads.problems
        self.build_all([file for file in files if not file.is_wheel])

    def _error(self) -> WheelError:
        hint = "the lock is authoritative; if the files were meant to change, run `stager lock`"
        if self.pip.offline:
            hint = f"run once with a network, or put the files into {self.store.wheels}"
        many = counted(len(self.problems), "file")
        return WheelError(
            f"{many} of {self.lock.path.name} cannot be obtained as locked",
            hint=hint,
            context=[*self.problems, *self._build_output],
        )

    def wheels(self) -> tuple[Wheel, ...]:
        wheels = []
        for file in self.lock.files:
            wheel = self.stored.find(file)
            if wheel is None:
                raise WheelError(
                    f"files in {self.store.root} changed while they were being fetched",
                    hint="let only one build use an offline root at a time",
                )
            wheels.append(wheel)
        return tuple(wheels)

    def offline_problem(self, file: LockedFile) -> str:
        digest = self.stored.other_digest(file)
        if digest:
            return differs(file.filename, file.sha256, digest)
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
                path = self._find_wheel(file) if "://" in source else None
                path = path or self.rebuild(source)
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

    def _find_wheel(self, file: LockedFile) -> Path | None:
        known = self.lock.indexes.plus(self.pip.indexes).plus(pip_settings(self.pip.run).indexes)
        return known.find_wheel(file.filename, file.sha256)

    def _copy(self, file: LockedFile, path: Path) -> None:
        digest = sha256_of(path)
        if digest != file.sha256:
            self.problems.append(differs(str(path), file.sha256, digest))
            return
        with self.store.publishing(self.stored.place_of(file)) as partial:
            shutil.copyfile(path, partial)

    def rebuild(self, source: str) -> Path:
        """Build a local project's wheel again; a URL is built from its present content."""
        place: Path | str = source
        if "://" not in source:
            place = self.lock.path.parent.absolute() / source
        else:
            place = restore_credentials(source, self.urls)
        return source_wheels.build(
            source_wheels.describe_source(place, source), self.store, self.pip
        )

    def locate(self, file: LockedFile) -> LockedFile:
        """Add the credentials to a file's URL, if there are any."""
        if file.url is None:
            return file
        return replace(file, url=restore_credentials(file.url, self.urls))

    def build_all(self, files: Sequence[LockedFile]) -> None:
        for file in files:
            self.progress(f"building a wheel for {file.name} {file.version}")
            self.build(file)

    def build(self, file: LockedFile, packages: Path | None = None) -> None:
        keep = self.stored.folder_of(file)
        for line in dict.fromkeys((by_url(self.locate(file)), by_name(file))):
            try:
                wheel = source_wheels.build_line(line, keep, self.store, self.pip, packages)
            except ResolveError as exc:
                problem = f"{file.filename}: {exc.message}"
                output = exc.context
                continue
            self.stored.note_digest(wheel)
            return
        self.problems.append(problem)
        if output:
            what_to_do = advice(file.name, "\n".join([problem, *output]))
            self._build_output += [f"the end of the build of {file.name} {file.version}:"]
            self._build_output += [f"  | {line}" for line in output]
            self._build_output += [f"{file.name}: {what_to_do}"]
