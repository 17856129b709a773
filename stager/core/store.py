"""The offline root: wheels, layers, bundles and assets on the login side.

Every file gets its final name by a rename, so a build that is killed leaves nothing but files under
``tmp/``, which the next one sweeps. The mode of the root decides on all that is in it, whatever the
umask: a new one is its owner's alone; one that has 2770 before the first build is its group's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, get_args

from bundle.node.removal import delete, measure
from bundle.protocol.counts import format_size
from bundle.protocol.enumerations import LogMode
from bundle.system import permissions

from .errors import SpaceError, StagerError
from .files import open_regular, read_text
from .values import Digest

log = logging.getLogger(__name__)


def remove(path: Path) -> bool:
    """Remove a file, a link or a tree of any depth; return whether it is gone, or log it."""
    try:
        with contextlib.suppress(FileNotFoundError):
            delete(str(path))
    except OSError as exc:
        log.warning("%s could not be removed, or not all of it: %s", path, exc.strerror or exc)
        return False
    return True


def measure_tree(path: Path) -> int:
    """Return the bytes that become free with a file or a tree."""
    return measure(str(path), Counter())


CHUNK = 1 << 20
ScratchKind = Literal["export", "lock", "new", "prove", "spool", "trace", "wheels"]
_SCRATCH = re.compile(rf"({'|'.join(get_args(ScratchKind))})-[a-z0-9_]{{8,16}}")
"""The names of our directories under ``tmp/``, see :meth:`Store.scratch`."""
INCIDENTS, PENDING_JOBS = "incidents", "pending-jobs"  # names of directories in the store
FEW_INODES = 100  # a build makes tens of files in the store: layers stay packed there
_MOVE_AWAY = "move it away and run the command again"
STORE_HINT = (
    "free some space, or move the store with environment.offline-root "
    "in stager.toml or $OFFLINE_ROOT"
)


class _Folder:
    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, store: Store, owner: type[Store]) -> Path:
        path = store.root / self._name
        store.make_folder(path)
        return path


class Store:
    """One offline root. Creating the object touches nothing; directories are made when needed."""

    wheels = _Folder("wheels")  # plain files, for ``pip install --no-index --find-links``
    built = _Folder("wheels-built")  # wheels made here, in a folder for each source's digest
    layers = _Folder("layers")  # ``<layer id>.tar.zst``
    bundles = _Folder("bundles")  # ``<name>-<id12>.pkgs.tar``
    seals = _Folder("seals")  # of each bundle its file's size, time and inode when it was written
    proofs = _Folder("proofs")  # of each set of layers that was proved to be complete
    programs = _Folder("programs")  # the far side's, of each bundle that was used here, by digest
    projects = _Folder("projects")  # for each project its newest bundle, as JSON
    exports = _Folder("exports")  # manifests of exported bundles; a file's time is the export's
    imports = _Folder("imports")  # for each project's name the bundle that was imported last
    hub = _Folder("hub")  # files of a hub, in its cache's layout, until their layers are made
    incidents = _Folder(INCIDENTS)  # the failures of nodes, as JSON lines
    pending_jobs = _Folder(PENDING_JOBS)  # where batch jobs that nobody follows leave their events
    _tmp = _Folder("tmp")

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def compiled_code(self) -> Path:
        """The directory for what this user's jobs have compiled: nobody else may write to it."""
        return self.root / f"compiled-{os.geteuid()}"

    def layer(self, key: Digest) -> Path:
        """Return the path of the layer with this id, whether it exists or not."""
        return self.layers / f"{key}.tar.zst"

    @contextlib.contextmanager
    def lock(self, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Hold the store for one build at a time, a second one waits; then sweep ``tmp/``."""
        self.make_folder(self.root)
        if keep_out_of_projects(self.root):
            self.open_up(self.root / ".gitignore")
        with self._flock(".lock", fcntl.LOCK_EX, waiting):
            with contextlib.suppress(OSError):
                for path in self.root.iterdir():  # of a store that was shared after it was made
                    if path != self.compiled_code:
                        self.open_up(path)
            # A process that publishes without this lock has its file in tmp/ for a moment; then the
            # next sweep removes the rest.
            with self._flock(".tmp.lock", fcntl.LOCK_EX | fcntl.LOCK_NB) as alone:
                if alone:
                    self._sweep(self.root / "tmp")
            yield

    def _sweep(self, folder: Path) -> None:
        """Remove what killed builds left in ``tmp/``, and no file that the user has there."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for path in list(folder.iterdir()):
                if _SCRATCH.fullmatch(path.name):
                    remove(path)
        with contextlib.suppress(OSError):  # somebody else's files are in it
            folder.rmdir()

    @contextlib.contextmanager
    def scratch(self, kind: ScratchKind) -> Iterator[Path]:
        """Yield a new directory under ``tmp/``, which is removed at the end of the block."""
        place = self._tmp
        folder = place / f"{kind}-{secrets.token_hex(8)}"
        try:
            with convert_store_errors(place):
                folder.mkdir(mode=0o700)
                self.open_up(folder)  # so that other users of the store can sweep it
            yield folder
        finally:
            remove(folder)

    @contextlib.contextmanager
    def scratch_without_lock(self, kind: ScratchKind) -> Iterator[Path]:
        """Do the same for a process that does not hold the store: no build sweeps it meanwhile."""
        with self._flock(".tmp.lock", fcntl.LOCK_SH), self.scratch(kind) as folder:
            yield folder

    def open_up(self, path: Path) -> None:
        """Give a file or directory of ours the mode that follows from the root's; OSError."""
        root, status = self.root.stat(), path.lstat()
        mode = stat.S_IMODE(root.st_mode) | stat.S_IRWXU
        if not stat.S_ISDIR(status.st_mode):
            mode &= 0o666
        if status.st_uid != os.geteuid() or stat.S_ISLNK(status.st_mode):
            return  # its owner does this
        if mode & stat.S_IWGRP and status.st_gid != root.st_gid:
            with contextlib.suppress(PermissionError):  # not a member of the root's group
                os.chown(path, -1, root.st_gid)
        if stat.S_IMODE(status.st_mode) != mode:
            with contextlib.suppress(OSError):  # a file system without modes of its own
                path.chmod(mode)

    @contextlib.contextmanager
    def publish(self, final: Path) -> Iterator[Path]:
        """Yield a temporary path to write to; rename it to ``final`` once the block succeeds."""
        with self.scratch_without_lock("new") as folder:
            partial = folder / final.name
            try:
                yield partial
                self.open_up(partial)
                with partial.open("rb") as handle:
                    os.fsync(handle.fileno())
                partial.replace(final)
            except OSError as exc:
                culprit = exc.filename
                if isinstance(culprit, str) and not Path(culprit).is_relative_to(folder):
                    raise StagerError(
                        f"cannot read {culprit}, which {final.name} is made of: {exc.strerror}",
                        hint="check that it exists and is readable",
                    ) from exc
                raise write_error(final, exc) from exc

    def require_space(self, needed: int, what: str, inodes: int = FEW_INODES) -> None:
        """Refuse to start writing if fewer bytes or inodes are free under the root than needed."""
        self.make_folder(self.root)
        state = os.statvfs(self.root)
        free = state.f_bavail * state.f_frsize
        too_few_inodes = bool(state.f_files) and state.f_favail < inodes
        if free >= needed and not too_few_inodes:
            return
        need, have = format_size(needed), format_size(free)
        if too_few_inodes:
            need, have = f"{inodes} inodes", f"{state.f_favail} inodes"
        raise SpaceError(
            f"not enough space for {what}: need {need}, have {have} at {self.root}", hint=STORE_HINT
        )

    @contextlib.contextmanager
    def _flock(
        self, name: str, operation: int, waiting: Callable[[], None] = lambda: None
    ) -> Iterator[bool]:
        """Hold a lock file of the root; yield False if ``LOCK_NB`` is given and it is taken."""
        self.make_folder(self.root)
        path = self.root / name
        with contextlib.ExitStack() as stack:
            with convert_store_errors(path):
                # It is never removed: a lock on a removed file keeps no other process out.
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                stack.callback(os.close, handle)
                self.open_up(path)
                held = False
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(handle, operation | fcntl.LOCK_NB)
                    held = True
                if not held and not operation & fcntl.LOCK_NB:
                    waiting()
                    fcntl.flock(handle, operation)
                    held = True
            yield held

    def make_folder(self, path: Path) -> None:
        """Make the root, or a directory in it, if it does not exist."""
        with convert_store_errors(path):
            if path.is_dir():
                return
            self.root.parent.mkdir(parents=True, exist_ok=True)
            self.root.mkdir(mode=stat.S_IRWXU, exist_ok=True)
            if path != self.root:
                path.mkdir(exist_ok=True)
                self.open_up(path)


def keep_out_of_projects(folder: Path, mode: LogMode = LogMode.PRIVATE) -> bool:
    """Write a ``.gitignore`` of ``*`` into an empty directory; return whether it was written."""
    with contextlib.suppress(OSError):
        if not any(folder.iterdir()):
            mark = folder / ".gitignore"
            with open(mark, "x", encoding="utf-8", opener=permissions.make_opener(mode)) as handle:
                handle.write("*\n")
            return True
    return False


def to_stamp(status: os.stat_result) -> list[int]:
    """Return the values that change whenever a file does: no program can restore ``st_ctime``."""
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def digest_file(path: Path) -> Digest:
    """Return the digest of a file's bytes, read in pieces so that memory use stays constant."""
    state = hashlib.sha256()
    with open_regular(path) as handle:
        while chunk := handle.read(CHUNK):
            state.update(chunk)
    return Digest(state.hexdigest())


@contextlib.contextmanager
def convert_store_errors(path: Path) -> Iterator[None]:
    """Turn a failure to write in the store into an error that says what to do."""
    try:
        yield
    except OSError as exc:
        raise write_error(path, exc) from exc


def write_error(path: Path, exc: OSError) -> StagerError:
    """Return the error for a path in the store that cannot be written, and what to change."""
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return SpaceError(f"no space left while writing {path}", hint=STORE_HINT)
    hint = (
        "check the permissions, or choose another place with environment.offline-root in "
        "stager.toml or $OFFLINE_ROOT; a root that a group shares needs mode 2770, and the next "
        "build of each user gives the others access to that user's files"
    )
    if exc.errno in (errno.EISDIR, errno.EEXIST):  # a file where a folder belongs, or the reverse
        hint = _MOVE_AWAY
    return StagerError(f"cannot write {path}: {exc.strerror or exc}", hint=hint)


# --- Recorded digests of files in the offline root, and of large ones in projects: each is read
# once, as long as its size, times and inode stay the same

FILE_NAME = "checked.json"
SETTLED_NS = 2_000_000_000  # since a change: a later one may fall on the same tick of a clock
_LARGE = 1 << 16  # bytes of a file outside the store from which its digest is worth a record


class DigestCache:
    """Digests of one store's files; call :meth:`save` when done."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, list[object]] = {}
        self._changed = False
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(read_text(store.root / FILE_NAME))
            if isinstance(found, dict):
                self._known = found

    def digest(self, path: Path) -> Digest | None:
        """Return the digest of a file in the store; None where there is no such file."""
        try:
            return self._digest(path, str(path.relative_to(self._store.root)), path.stat())
        except FileNotFoundError:
            return None
        except OSError as exc:  # a directory, or a link to itself, for one
            raise StagerError(
                f"{path} cannot be read: {exc.strerror or exc}",
                hint=f"make it readable, or {_MOVE_AWAY}",
            ) from exc

    def digest_of_content(self, path: Path) -> Digest:
        """Return the digest of a file of a project; OSError if it cannot be read."""
        status = path.stat()
        settled = status.st_ctime_ns < time.time_ns() - SETTLED_NS
        if not settled or status.st_size < _LARGE:
            return digest_file(path)
        return self._digest(path, str(path.absolute()), status)

    def _digest(self, path: Path, key: str, status: os.stat_result) -> Digest:
        current = to_stamp(status)
        record = self._known.get(key)
        if isinstance(record, list) and record[:-1] == current:
            with contextlib.suppress(ValueError):
                return Digest(str(record[-1]))
        digest = digest_file(path)
        self._known[key] = [*current, digest]
        self._changed = True
        return digest

    def save(self) -> None:
        """Write the record, without the files that are gone; does nothing if nothing changed."""
        if not self._changed:
            return
        root = self._store.root
        kept = {key: value for key, value in self._known.items() if (root / key).exists()}
        with self._store.publish(root / FILE_NAME) as partial:
            partial.write_text(json.dumps(kept, sort_keys=True, indent=0), encoding="utf-8")
        self._changed = False
