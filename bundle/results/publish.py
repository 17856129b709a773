"""Publishing results: a hidden directory next to their final place, then one rename each.

Each output is written below the hidden directory under its number. What a crash leaves, the next
transfer of results to the same place removes, once its owner is gone. Outputs that exist are
updated: a file is replaced only by the same content, or if it is still what the job was sent, and
removed only if the job has deleted what it was sent. Links are not followed.
"""

from __future__ import annotations

import errno
import filecmp
import os
import re
import stat
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from ..node import removal
from ..protocol.problem import NodeError, Problem, ProblemCode
from ..system.files import error_text
from .patterns import is_wanted, list_parents
from .selection import OutputEntry, is_link_outside
from .stream import InvalidStream

SentEntries = Mapping[str, OutputEntry]  # what nodes were sent before the job, by path
PARTIAL = ".partial"  # suffix of the name of an output that did not arrive in full

_HIDDEN = re.compile(r"\.stager-results\.(?P<owner>.+)\.(?P<pid>[0-9]+)\.[0-9]+")
_OLD = 7 * 24 * 3600
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE)
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)
_MOST_NUMBERS = 100_000
# Every directory above is made for this stream, so none of them is a link.
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class ResultsWriter:
    """A hidden directory into which a stream of results is unpacked, and published from."""

    def __init__(
        self, target: str, roots: Sequence[str], sent: SentEntries, joined: Mapping[str, str]
    ) -> None:
        self._target, self._sent, self._joined = target, sent, joined
        self._roots = {root: number for number, root in enumerate(roots)}
        name = f".stager-results.{_name_owner()}.{os.getpid()}.{time.monotonic_ns()}"
        self._path = os.path.join(target, name)
        try:
            os.mkdir(self._path, 0o700)
        except OSError as exc:
            values = {"why": error_text(exc)}
            raise NodeError(Problem(ProblemCode.RESULTS_UNWRITABLE, target, values)) from exc
        self._directories: dict[str, tuple[str, tarfile.TarInfo]] = {}
        self._parents: dict[str, str] = {"": ""}
        self._kept = False
        self.files = self.bytes = 0  # regular files that arrived in full, and their content
        self.names: set[str] = set()  # files and links that arrived
        self.left_out: dict[str, str] = {}  # members that could not be written here, and why
        self.renamed: dict[str, str] = {}  # outputs that got another name, with that name
        self.placed: list[str] = []  # names of all outputs that were put in place
        self.problems: list[Problem] = []  # problems met while putting them in place

    def add(self, info: tarfile.TarInfo, content: Iterator[memoryview]) -> None:
        """Write one member; one whose name this file system does not allow goes to ``left_out``.

        InvalidStream: it leads out of the outputs. OSError: nothing more can be written here.
        """
        root, inner = self._split_root(info.name)
        if inner and info.name.rpartition("/")[0] in self.left_out:
            self.left_out[info.name] = "the directory that holds it could not be made"
            return
        self._check_place(info, inner)
        try:
            self._write(self._locate_hidden(root, inner), info, content)
        except OSError as exc:
            if exc.errno in _FULL:
                raise
            self.left_out[info.name] = error_text(exc)

    def _check_place(self, info: tarfile.TarInfo, inner: str) -> None:
        if inner and info.name.rpartition("/")[0] not in self._directories:
            raise InvalidStream(f"{info.name!r} comes before the directory that holds it")
        if info.issym() and (not inner or is_link_outside(inner, info.linkname)):
            raise InvalidStream(f"{info.name!r} is a link that leads out, to {info.linkname!r}")
        if info.name in self._directories:
            raise InvalidStream(f"{info.name!r} comes twice")

    def _write(self, path: str, info: tarfile.TarInfo, content: Iterator[memoryview]) -> None:
        if info.isdir():
            os.mkdir(path, 0o700)
            self._directories[info.name] = (path, info)
            return
        if info.issym():
            os.symlink(info.linkname, path)
        else:
            _write_file(path, info, content)
        self.names.add(info.name)
        self.files += info.isreg()
        self.bytes += info.size

    def publish(self, *, complete: bool) -> None:
        """Put the outputs in place, or of a truncated stream the non-empty ones as partial."""
        if not complete:
            self._delete_empty_roots()
        inner = self._inner_directories()
        failed: dict[str, str] = {}
        for root in self._roots:
            if not os.path.lexists(self._locate_hidden(root)):
                continue
            folders = inner.get(root, [])
            try:
                if not (complete and self._update(root, folders)):
                    _finish(folders)
                    self._publish_root(root, root if complete else root + PARTIAL)
            except OSError as exc:
                failed[root] = error_text(exc)
        if failed:  # they stay in a directory that is no longer hidden
            self._keep_unpublished(failed)

    def _delete_empty_roots(self) -> None:
        full = {self._split_root(name)[0] for name in self.names}
        for root in self._roots.keys() - full:
            removal.delete_as_far_as_possible(self._locate_hidden(root))

    def remove_deleted(self, deleted: Sequence[str], missing: Sequence[str]) -> int:
        """Remove what the job has deleted of what it was sent; return the number of files.

        What has changed here stays, and outputs that are missing as a whole or have a new name.
        """

        def stays(name: str) -> bool:
            return name in self.renamed or is_wanted(name, missing)

        gone = {name for name in deleted if not any(map(stays, _list_with_parents(name)))}
        sent = [name for name in self._sent if not gone.isdisjoint(_list_with_parents(name))]
        return sum(self._remove(name) for name in reversed(sent))

    def _remove(self, name: str) -> bool:
        """Remove what was sent, if it has not changed; return whether it was a file or link."""
        entry, path = self._sent[name], os.path.join(self._target, name)
        if any(os.path.islink(os.path.join(self._target, folder)) for folder in list_parents(name)):
            return False
        with suppress(OSError):
            if stat.S_ISDIR(entry.mode):
                os.rmdir(path)  # only if nothing else is in it
            elif _is_as_sent(os.lstat(path), entry):
                os.unlink(path)
                return True
        return False

    def discard(self) -> None:
        """Remove the hidden directory with its remaining content."""
        if not self._kept:
            removal.delete_as_far_as_possible(self._path)

    def _locate_hidden(self, root: str, inner: str = "") -> str:
        path = os.path.join(self._path, str(self._roots[root]))
        return os.path.join(path, inner) if inner else path

    def _split_root(self, name: str) -> tuple[str, str]:
        """Return a member's output, and its path inside; empty for the output itself."""
        if not {"", ".", ".."}.isdisjoint(name.split("/")) or "\0" in name:
            raise InvalidStream(f"{name!r} is not a plain path")
        for root in _list_with_parents(name):
            if root in self._roots:
                return root, name[len(root) + 1 :]
        raise InvalidStream(f"{name!r} lies in none of the announced outputs")

    def _inner_directories(self) -> dict[str, list[tuple[str, tarfile.TarInfo]]]:
        """Return inner directories, deepest first; an outermost closed one could not be moved."""
        inner: dict[str, list[tuple[str, tarfile.TarInfo]]] = {}
        for path, info in reversed(list(self._directories.values())):
            root, below = self._split_root(info.name)
            if below:
                inner.setdefault(root, []).append((path, info))
        return inner

    def _update(self, root: str, inner: Sequence[tuple[str, tarfile.TarInfo]]) -> bool:
        """Move an output's files into the existing one; return False if it needs another name."""
        name = self._joined.get(root, root)
        folder = os.path.dirname(name)
        if self._parent(folder) != folder or not os.path.lexists(os.path.join(self._target, name)):
            return False
        final = self._final_path(name)
        moves = _plan_moves(self._locate_hidden(root), final, name, self._sent)
        if moves is None:
            return False
        for source, target, _ in moves:
            os.replace(source, target)
        made = {path for _, _, path in moves}
        for _, info in inner:
            path = info.name[len(root) :]
            if not made.isdisjoint(_list_with_parents(name + path)):
                _finish([(f"{final}{path}", info)])
        self.placed.append(name)
        return True

    def _final_path(self, name: str) -> str:
        """Return where an output is that exists: what was sent is what a link leads to."""
        path = os.path.join(self._target, name)
        real = os.path.realpath(path)
        is_inside = os.path.isdir(real) and real.startswith(f"{os.path.realpath(self._target)}/")
        return real if os.path.islink(path) and is_inside else path

    def _publish_root(self, root: str, wanted: str) -> None:
        given = self._place(self._locate_hidden(root), wanted)
        if root in self._directories:
            _finish([(os.path.join(self._target, given), self._directories[root][1])])
        self.placed.append(given)
        if given != root:
            self.renamed[root] = given

    def _place(self, path: str, wanted: str) -> str:
        """Rename to the first free name, replacing nothing."""
        parent, _, name = wanted.rpartition("/")
        for given in _number_names(self._parent(parent), name):
            final = os.path.join(self._target, given)
            if os.path.lexists(final):
                continue
            try:
                os.rename(path, final)
                return given
            except OSError as exc:
                if exc.errno not in _TAKEN:
                    raise
        raise OSError(errno.EEXIST, "all names are taken")

    def _parent(self, path: str) -> str:
        """Make or take an output's parent directory; follow no link, replace no file."""
        if path in self._parents:
            return self._parents[path]
        parent, _, name = path.rpartition("/")
        device = os.stat(self._target).st_dev
        for given in _number_names(self._parent(parent), name):
            with suppress(FileExistsError):
                os.mkdir(os.path.join(self._target, given))
            state = os.lstat(os.path.join(self._target, given))
            # Nothing can be renamed into another file system.
            if stat.S_ISDIR(state.st_mode) and state.st_dev == device:
                self._parents[path] = given
                return given
        raise OSError(errno.EEXIST, "all names are taken")

    def _keep_unpublished(self, failed: Mapping[str, str]) -> None:
        """Make outputs that could not be published visible, so that no sweep removes them."""
        self._kept = True
        try:
            given = self._place(self._path, f"results{PARTIAL}")
        except OSError:
            given = os.path.basename(self._path)
        for root, why in failed.items():
            path = os.path.join(self._target, given, str(self._roots[root]))
            where, values = os.path.join(self._target, root), {"why": why, "path": path}
            self.problems.append(Problem(ProblemCode.OUTPUT_NOT_PLACED, where, values))


def remove_abandoned(target: str) -> None:
    """Remove hidden directories whose owner is gone, or that are a week old."""
    with suppress(OSError):
        for name in os.listdir(target):
            hidden = _HIDDEN.fullmatch(name)
            path = os.path.join(target, name)
            if hidden and _is_abandoned(path, hidden["owner"], int(hidden["pid"])):
                removal.delete_as_far_as_possible(path)


def _is_abandoned(path: str, owner: str, pid: int) -> bool:
    state = os.lstat(path)
    is_old = time.time() - state.st_mtime > _OLD
    # On another machine, or in a container, its process cannot be looked up.
    has_ended = owner == _name_owner() and not os.path.exists(f"/proc/{pid}")
    is_own = state.st_uid == os.geteuid() and stat.S_ISDIR(state.st_mode)
    return is_own and (is_old or has_ended)


def _name_owner() -> str:
    """Name the scope in which a process id is unique: the machine and its process namespace."""
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"{os.uname().nodename}-{namespace}"


def _number_names(folder: str, name: str) -> Iterator[str]:
    yield os.path.join(folder, name)
    for number in range(1, _MOST_NUMBERS):
        yield os.path.join(folder, f"{name}.{number}")


def _list_with_parents(name: str) -> list[str]:
    return [*list_parents(name), name]


def _plan_moves(
    new: str, old: str, name: str, sent: SentEntries
) -> list[tuple[str, str, str]] | None:
    """Return what to move where, and its path on the node; None if a file would be lost."""
    moves = []
    device = os.lstat(new).st_dev
    pending = [(new, old, name)]
    while pending:
        entry = source, target, path = pending.pop()
        came = os.lstat(source)
        try:
            there = os.lstat(target)
        except FileNotFoundError:
            moves.append(entry)
            continue
        if there.st_dev != device:
            return None
        if stat.S_ISDIR(came.st_mode):
            if not stat.S_ISDIR(there.st_mode):
                return None
            for child in os.listdir(source):
                pending.append((f"{source}/{child}", f"{target}/{child}", f"{path}/{child}"))
        elif path in sent and _is_as_sent(there, sent[path]):
            moves.append(entry)
        elif not _is_same(source, came, target, there):
            return None
    return moves


def _is_same(source: str, came: os.stat_result, target: str, there: os.stat_result) -> bool:
    if stat.S_IFMT(came.st_mode) != stat.S_IFMT(there.st_mode):
        return False
    if stat.S_ISLNK(came.st_mode):
        return os.readlink(source) == os.readlink(target)
    return came.st_size == there.st_size and filecmp.cmp(source, target, shallow=False)


def _is_as_sent(there: os.stat_result, entry: OutputEntry) -> bool:
    return not stat.S_ISDIR(there.st_mode) and (
        stat.S_IFMT(there.st_mode),
        there.st_mtime_ns,
        there.st_size if stat.S_ISREG(there.st_mode) else 0,
    ) == (stat.S_IFMT(entry.mode), entry.mtime_ns, entry.size)


def _write_file(path: str, info: tarfile.TarInfo, content: Iterator[memoryview]) -> None:
    with open(os.open(path, _NEW_FILE, 0o600), "wb") as file:
        try:
            for piece in content:
                file.write(piece)
            file.flush()
            os.fchmod(file.fileno(), info.mode & 0o777)
            _set_time(file.fileno(), info)
        except BaseException:
            os.unlink(path)
            raise


def _finish(directories: Iterable[tuple[str, tarfile.TarInfo]]) -> None:
    """Set the mode and time of directories; a failure does not matter."""
    for path, info in directories:
        with suppress(OSError):
            _set_time(path, info)
            os.chmod(path, info.mode & 0o777)


def _set_time(path: int | str, info: tarfile.TarInfo) -> None:
    with suppress(OSError, OverflowError, ValueError):  # a time that this file system cannot hold
        os.utime(path, (info.mtime, info.mtime))
