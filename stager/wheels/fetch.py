"""The wheels of a lock, in the offline root: what is missing is fetched, everything is checked.

Downloads are pip's, with digests required, so that proxies, certificates, key rings and private
indexes work as they do for the user. A file is asked for by its URL first, which names exactly the
locked file; where that fails (a URL without its credentials, say), by name and version over the
indexes, where only a file with the locked digest is taken.
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
"""Files asked for in one call of pip: few calls, yet a progress line now and then."""

_GOT = re.compile(r"Got\s+([0-9a-f]{64})")

Progress = Callable[[str], None]


def _quiet(line: str) -> None:
    """Take a progress line and show it to nobody."""


def fetch(
    lock: Lock,
    store: Store,
    *,
    offline: bool,
    run: Runner = run,
    progress: Progress = _quiet,
    indexes: Indexes | None = None,
) -> tuple[Wheel, ...]:
    """Bring every file of a lock into the store and give the wheels, sorted by package.

    Args:
        lock: what is wanted; its digests decide, whatever an index or the disk holds.
        store: where the files go; those that are there and right are not fetched again.
        offline: whether nothing may be fetched.
        run: starts pip.
        progress: takes one line at a time about what is being done.
        indexes: has credentials (those of the spec) for the places that the lock names without.

    Raises:
        WheelError: files that are missing (offline), differ from the lock, or cannot be fetched or
            built; one context line for each.
        ResolveError: neither the files' servers nor a package index can be reached.
    """
    scratch = store.scratch("wheels")
    here = Indexes(no_index=True, find_links=(str(store.wheels),))
    pip = Pip(
        target=lock.target,
        indexes=here if offline else lock.indexes.with_credentials_from(indexes or Indexes()),
        scratch=scratch,
        offline=offline,
        run=run,
    )
    job = _Fetch(lock, store, pip, progress)
    try:
        return job.all()
    finally:
        job.digest_cache.save()
        remove(scratch)


class _Fetch:
    """One run over a lock's files."""

    def __init__(self, lock: Lock, store: Store, pip: Pip, progress: Progress) -> None:
        self.lock = lock
        self.store = store
        self.pip = pip
        self.progress = progress
        self.digest_cache = DigestCache(store)
        self.problems: list[str] = []

    def all(self) -> tuple[Wheel, ...]:
        """Every wheel, or one error with everything that stands in the way."""
        wanted = [file for file in self.lock.files if self.present(file) is None]
        local = [file for file in wanted if self.bring(file)]
        wanted = [file for file in wanted if file not in local]
        if self.pip.offline and wanted:
            self.problems += [self.why_missing(file) for file in wanted]
        elif wanted:
            self.store.require_space(sum(file.size or 0 for file in wanted), "the wheels")
            wheels = [file for file in wanted if file.is_wheel]
            for start in range(0, len(wheels), BATCH):
                batch = wheels[start : start + BATCH]
                names = ", ".join(f"{file.name} {file.version}" for file in batch)
                self.progress(f"downloading {start + len(batch)} of {len(wheels)}: {names}")
                self.download(batch)
            for file in wanted:
                if not file.is_wheel:
                    self.progress(f"building a wheel of {file.name} {file.version}")
                    self.build(file)
        if self.problems:
            many = counted(len(self.problems), "file")
            raise WheelError(
                f"{many} of {self.lock.path.name} cannot be had as locked",
                hint=f"run once with a network, or put the files into {self.store.wheels}"
                if self.pip.offline
                else "the lock is authoritative; `stager lock` makes a new one if its files "
                "are really meant to have changed",
                context=self.problems,
            )
        found = [self.present(file) for file in self.lock.files]
        whole = tuple(wheel for wheel in found if wheel)
        if len(whole) != len(found):
            raise WheelError(
                f"files in {self.store.root} changed while they were being fetched",
                hint="let only one build use an offline root at a time",
            )
        return whole

    def present(self, file: LockedFile) -> Wheel | None:
        """The wheel of a locked file, if the store has it and its digest is right."""
        if file.is_wheel:
            path: Path | None = self.store.wheels / file.filename
            expected: str = file.sha256
        else:
            folder = self.store.built / file.sha256
            path = sources.fitting(folder, self.lock.target)
            expected = _noted(path) if path else ""
        digest = self.digest_cache.digest(path) if path else None
        if path is None or digest is None or digest != expected:
            return None
        return Wheel(
            name=file.name,
            version=file.version,
            path=path,
            sha256=digest,
            size=path.stat().st_size,
        )

    def why_missing(self, file: LockedFile) -> str:
        """Say what is wrong with a file that may not be fetched."""
        digest = self.digest_cache.digest(self.store.wheels / file.filename)
        if file.is_wheel and digest:
            return _differs(file.filename, file.sha256, digest)
        return f"{file.filename}: not in the offline root"

    def bring(self, file: LockedFile) -> bool:
        """Take a file from where the lock says it lies on this machine; whether that is done.

        A local project's wheel may be gone, or never have been on this machine; then the project
        is built again, which gives the same bytes as long as it has not changed.
        """
        origin = file.path
        source = dict(self.lock.sources).get(file.filename)
        if source and not (origin and origin.is_file()):
            try:
                origin = self.rebuild(source)
            except StagerError as exc:
                self.problems.append(f"{file.filename}: from {source}: {exc.message}")
                return True
        if origin is None or not origin.is_file():
            return False
        if not file.is_wheel:
            self.build(file)
            return True
        digest = sha256_of(origin)
        if digest != file.sha256:
            self.problems.append(_differs(str(origin), file.sha256, digest))
            return True
        with self.store.publishing(self.store.wheels / file.filename) as partial:
            shutil.copyfile(origin, partial)
        return True

    def rebuild(self, source: str) -> Path:
        """Build a local project's wheel again; a URL is built from what it names now."""
        path = self.lock.path.parent.absolute() / source
        again = sources.known_source(path if "://" not in source else source, source)
        return sources.build(again, self.store, self.pip)

    def download(self, batch: Sequence[LockedFile]) -> None:
        """Download wheels in one call; only when that fails, one by one, to know which and why."""
        folder = self.pip.scratch / "new"
        if not self._try([_by_url(file) for file in batch], folder):
            complaint = self._complaint
            by_name = self._try([_by_name(file) for file in batch], folder)
            if not by_name and unreachable(complaint) and unreachable(self._complaint):
                raise index_unreachable(complaint + self._complaint)
            if not by_name:
                self._one_by_one(batch, folder)
        for file in batch:
            arrived = folder / file.filename
            if arrived.is_file() and sha256_of(arrived) == file.sha256:
                with self.store.publishing(self.store.wheels / file.filename) as partial:
                    arrived.replace(partial)

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

    def _try(self, lines: Sequence[str], folder: Path) -> bool:
        done = self.pip.download(lines, folder)
        self._complaint = done.stderr or done.stdout
        return done.returncode == 0

    def _one_by_one(self, batch: Sequence[LockedFile], folder: Path) -> None:
        for file in batch:
            if self._try([_by_url(file)], folder):
                continue
            first = self._complaint
            if self._try([_by_name(file)], folder):
                continue
            # By name, a file with another digest, or behind a password, is only "not found".
            second = self._complaint
            got = _GOT.search(first) or _GOT.search(second)
            told = first if unreachable(first) else second
            self.problems.append(
                _differs(file.url or file.filename, file.sha256, got[1])
                if got
                else f"{file.filename}: {condense(told)}"
            )


def _by_url(file: LockedFile) -> str:
    if file.path:
        return f"{file.name} @ {file.path.as_uri()} --hash=sha256:{file.sha256}"
    if file.url is None:
        return _by_name(file)
    return f"{file.name} @ {file.url} --hash=sha256:{file.sha256}"


def _by_name(file: LockedFile) -> str:
    return f"{file.name}=={file.version} --hash=sha256:{file.sha256}"


def _differs(place: str, expected: str, found: str) -> str:
    return f"{place}: differs from the lock: expected sha256 {expected}, found {found}"


def _note(wheel: Path) -> Path:
    """Where the digest of a wheel that was built here stands."""
    return wheel.with_name(f"{wheel.name}.sha256")


def _noted(wheel: Path) -> str:
    try:
        return Digest(text_of(_note(wheel)).strip())
    except (OSError, ValueError):
        return ""
