"""Fetching the wheels of a lock into the offline root: from here, from an index, or from source."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bundle.protocol.counts import counted

from ..core.errors import ResolveError, StagerError, WheelError
from ..core.processes import Runner, run
from ..core.store import Store, sha256_of
from ..core.values import LockedFile, Wheel
from ..lock import source_wheels
from ..lock.build_source import BuildSettings, advice, needs_nvcc, refuse_without_nvcc
from ..lock.indexes import Indexes, pip_settings, restore_credentials
from ..lock.lock import install
from ..lock.pip import Pip
from ..lock.pylock import Lock
from .downloads import Downloads, Progress, by_name, by_url
from .stored_wheels import FindElsewhere, StoredWheels, differs


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
