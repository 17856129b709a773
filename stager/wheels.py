"""The wheels of a lock, brought into the offline root: from here, an index, or source."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bundle.protocol.counts import format_count, format_size
from bundle.protocol.dataclass import dataclass

from .core.errors import ResolveError, StagerError, WheelError
from .core.files import read_text
from .core.processes import Runner, run
from .core.store import DigestCache, Store, digest_file
from .core.values import Digest, LockedFile, Wheel
from .lock import source_wheels
from .lock.build_source import (
    BUILT_AGAINST,
    advise_on_failed_build,
    needs_nvcc,
    refuse_without_nvcc,
)
from .lock.indexes import Indexes, pip_settings, restore_credentials
from .lock.lock import install
from .lock.pip import Pip, condense, is_unreachable, unreachable_index_error
from .lock.pylock import Lock
from .lock.spec import Spec

Progress = Callable[[str], None]
BATCH = 8  # files requested in one call of pip: few calls, yet a progress line now and then
_ACTUAL_DIGEST = re.compile(r"Got\s+([0-9a-f]{64})")


@dataclass(frozen=True, kw_only=True)
class WheelSource:
    """The places that wheels are fetched from, and into."""

    spec: Spec
    store: Store  # the offline root, whose lock must be held
    offline: bool
    progress: Progress = lambda line: None
    elsewhere: Callable[[LockedFile], Wheel | None] = lambda file: None  # asked first
    run: Runner = run

    def fetch(self, lock: Lock) -> tuple[Wheel, ...]:
        """Bring every file of a lock into the store and return the wheels, sorted by package."""
        if self.offline:
            places = Indexes(no_index=True, find_links=(str(self.store.wheels),))
        else:
            places = lock.indexes.restore_credentials(self.spec.all_indexes)
        with self.store.scratch("wheels") as scratch:
            pip = Pip(
                target=lock.target,
                indexes=places,
                scratch=scratch,
                offline=self.offline,
                builds=self.spec.builds,
                run=self.run,
            )
            fetcher = _Fetcher(lock, self, pip)
            try:
                return fetcher.fetch()
            finally:
                fetcher.digests.save()


class _Fetcher:
    def __init__(self, lock: Lock, source: WheelSource, pip: Pip) -> None:
        self.lock, self.source, self.pip = lock, source, pip
        self.store, self.urls = source.store, source.spec.urls
        self.digests = DigestCache(self.store)
        self.problems: list[str] = []
        self._against = [str(file.sha256) for file in lock.files if file.name in BUILT_AGAINST]
        self._downloads = pip.scratch / "new"
        self._build_output: list[str] = []

    def fetch(self) -> tuple[Wheel, ...]:
        later = self._list_unbuilt()
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # each is read once
            list(pool.map(self._digest_in_place, self.lock.files))
        missing = [file for file in self.lock.files if file not in later and self._is_missing(file)]
        if self.pip.offline:
            self.problems += map(self._offline_problem, missing)
        elif missing:
            self._obtain(missing)
        if later and not self.problems:
            self._build_in_environment(later)
        if self.problems:
            raise self._error()
        wheels = tuple(filter(None, map(self.find, self.lock.files)))
        if len(wheels) < len(self.lock.files):
            raise WheelError(
                f"files in {self.store.root} changed while they were being fetched",
                hint="let only one build use an offline root at a time",
            )
        return wheels

    def _list_unbuilt(self) -> list[LockedFile]:
        unbuilt = [file for file in self.lock.files if not file.is_wheel and not self.find(file)]
        need_nvcc = [file.name for file in unbuilt if needs_nvcc(file.name, file.path)]
        refuse_without_nvcc(need_nvcc, self.pip.builds)
        return [file for file in unbuilt if file.name in self.pip.builds.in_environment]

    def _obtain(self, files: Sequence[LockedFile]) -> None:
        self.store.require_space(sum(file.size or 0 for file in files), "the wheels")
        self._download([file for file in files if file.is_wheel])
        for file in files:
            if not file.is_wheel:
                self.source.progress(f"building a wheel for {file.name} {file.version}")
                self._build(file)

    def _error(self) -> WheelError:
        hint = "the lock is authoritative; if the files were meant to change, run `stager lock`"
        if self.pip.offline:
            hint = f"run once with a network, or put the files into {self.store.wheels}"
        many = f"{format_count(len(self.problems), 'file')} of {self.lock.path.name}"
        context = [*self.problems, *self._build_output]
        return WheelError(f"{many} cannot be obtained as locked", hint=hint, context=context)

    def find(self, file: LockedFile) -> Wheel | None:
        """Return the wheel of a locked file; None unless it is here with the right digest."""
        path: Path | None = self.store.wheels / file.filename
        if not file.is_wheel:
            path = source_wheels.find_fitting_wheel(self._choose_folder(file), self.lock.target)
        digest = self.digests.digest(path) if path is not None else None
        if path is None or digest is None:
            return self.source.elsewhere(file)
        if digest != (file.sha256 if file.is_wheel else _read_note(path)):
            return None
        size = path.stat().st_size
        return Wheel(name=file.name, version=file.version, path=path, sha256=digest, size=size)

    def _choose_folder(self, file: LockedFile) -> Path:
        return self.store.built / self.pip.builds.key(file.name, file.sha256, self._against)

    def _digest_in_place(self, file: LockedFile) -> Digest | None:
        return self.digests.digest(self.store.wheels / file.filename) if file.is_wheel else None

    def _offline_problem(self, file: LockedFile) -> str:
        digest = self._digest_in_place(file)
        missing = f"{file.filename}: not in the offline root"
        return _describe_other(file.filename, file.sha256, digest) if digest else missing

    # --- Files that are on this machine

    def _is_missing(self, file: LockedFile) -> bool:
        """Return whether a file has to be fetched; take, or build, what is on this machine."""
        if self.find(file) is not None:
            return False
        source = dict(self.lock.sources).get(file.filename, "")
        try:
            path = self._find_here(file, source)
        except StagerError as exc:
            self.problems.append(f"{file.filename}: from {source}: {exc.message}")
            return False
        if path is None:
            return True
        if not file.is_wheel:
            self._build(file)
        elif (digest := digest_file(path)) != file.sha256:
            self.problems.append(_describe_other(str(path), file.sha256, digest))
        else:
            with self.store.publish(self.store.wheels / file.filename) as partial:
                shutil.copyfile(path, partial)
        return False

    def _find_here(self, file: LockedFile, source: str) -> Path | None:
        if file.path and file.path.is_file():
            return file.path
        if not source:
            return None
        place: Path | str = self.lock.path.parent.absolute() / source
        if "://" in source:
            configured = pip_settings(self.pip.run).indexes
            known = self.lock.indexes.merge(self.pip.indexes).merge(configured)
            found = known.find_wheel(file.filename, file.sha256)
            if found:
                return found
            place = restore_credentials(source, self.urls)
        described = source_wheels.describe_source(place, source)
        return source_wheels.build(described, self.store, self.pip)

    # --- Downloads: pip's, with digests required

    # So proxies, certificates, key rings and private indexes work as they do for the user.

    def _download(self, files: Sequence[LockedFile]) -> None:
        for start in range(0, len(files), BATCH):
            batch = files[start : start + BATCH]
            names = ", ".join(f"{file.name} {file.version}" for file in batch)
            size = sum(file.size or 0 for file in batch)
            amount = f" ({format_size(size)})" if size else ""
            done = f"downloading {start + len(batch)} of {len(files)}"
            self.source.progress(f"{done}{amount}: {names}")
            self._download_batch(batch)
            for file in batch:
                downloaded = self._downloads / file.filename
                if downloaded.is_file() and digest_file(downloaded) == file.sha256:
                    with self.store.publish(self.store.wheels / file.filename) as partial:
                        downloaded.replace(partial)

    def _download_batch(self, batch: Sequence[LockedFile]) -> None:
        said = self._try_to_download(batch)
        if said and all(map(is_unreachable, said)):
            raise unreachable_index_error("".join(said))
        for file in batch if said else ():
            self._download_alone(file)

    def _download_alone(self, file: LockedFile) -> None:
        said = self._try_to_download([file])
        if not said:
            return
        # By name, a file with another digest, or behind a password, is only "not found".
        reason = condense(next(filter(is_unreachable, said), said[-1]))
        problem = f"{file.filename}: {reason}"
        if actual := _ACTUAL_DIGEST.search("\n".join(said)):
            problem = _describe_other(file.url or file.filename, file.sha256, actual[1])
        self.problems.append(problem)

    def _try_to_download(self, files: Sequence[LockedFile]) -> list[str]:
        """Download files by URL, else by name; return what pip says of each, if both fail."""
        said = []
        for line in (self._format_url, _format_pin):
            done = self.pip.download(list(map(line, files)), self._downloads)
            if done.returncode == 0:
                return []
            said.append(done.stderr or done.stdout)
        return said

    def _format_url(self, file: LockedFile) -> str:
        url = file.path.as_uri() if file.path else file.url
        if not url:
            return _format_pin(file)
        return f"{file.name} @ {restore_credentials(url, self.urls)} --hash=sha256:{file.sha256}"

    # --- Builds of sdists

    def _build_in_environment(self, files: Sequence[LockedFile]) -> None:
        known = [wheel for wheel in map(self.find, self.lock.files) if wheel is not None]
        lines = [f"{wheel.name} @ {wheel.path.as_uri()}" for wheel in known]
        packages = install(lines, self.pip, self.pip.scratch / "environment")
        for file in files:
            name = f"{file.name} {file.version}"
            self.source.progress(f"building a wheel for {name} in the environment")
            self._build(file, packages)

    def _build(self, file: LockedFile, packages: Path | None = None) -> None:
        keep = self._choose_folder(file)
        for line in dict.fromkeys((self._format_url(file), _format_pin(file))):
            try:
                wheel = source_wheels.build_line(line, keep, self.store, self.pip, packages)
            except ResolveError as exc:
                problem, output = f"{file.filename}: {exc.message}", exc.context
                continue
            with self.store.publish(_note(wheel)) as partial:
                partial.write_text(f"{digest_file(wheel)}\n", encoding="utf-8")
            return
        self.problems.append(problem)
        if output:
            what_to_do = advise_on_failed_build(file.name, "\n".join([problem, *output]))
            self._build_output += [f"the end of the build of {file.name} {file.version}:"]
            self._build_output += [f"  | {line}" for line in output]
            self._build_output += [f"{file.name}: {what_to_do}"]


def _describe_other(place: str, expected: str, actual: str) -> str:
    return f"{place}: differs from the lock: expected sha256 {expected}, found {actual}"


def _note(wheel: Path) -> Path:
    return wheel.with_name(f"{wheel.name}.sha256")


def _read_note(wheel: Path) -> str:
    try:
        return Digest(read_text(_note(wheel)).strip())
    except (OSError, ValueError):
        return ""


def _format_pin(file: LockedFile) -> str:
    return f"{file.name}=={file.version} --hash=sha256:{file.sha256}"
