"""Where results land at home: a hidden directory next to their final place, then one rename each.

Each output is written below the hidden directory under its number. A crash leaves nothing else
behind, and the next one that lands in the same place sweeps that away, once its owner is gone.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from ..node import removal
from ..protocol.problem import NodeError, Problem
from .pack import leads_out

PARTIAL = ".partial"
"""Ends the name of an output that did not arrive whole."""

_HIDDEN = re.compile(r"\.stager-results\.(?P<owner>.+)\.(?P<pid>[0-9]+)\.[0-9]+")
_OLD = 7 * 24 * 3600
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE)
_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES)
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)
_MOST_NUMBERS = 100_000


class Hostile(Exception):
    """The stream asks for something that no honest sender asks for; the text says what."""


class Landing:
    """The hidden directory, while a stream is unpacked into it.

    Attributes:
        files: regular files that arrived in full.
        bytes: their content.
        left_out: members that could not be written here, with the reason.
        renamed: outputs that got another name than they should have, with that name.
        placed: names of all outputs that were put in place.
        problems: what went wrong with putting them in place.
    """

    def __init__(self, target: str, roots: Sequence[str]) -> None:
        """Make the hidden directory.

        Args:
            target: an existing directory.
            roots: the outputs, relative to it; checked already.

        Raises:
            NodeError: it cannot be made.
        """
        self._target = target
        self._roots = {root: number for number, root in enumerate(roots)}
        name = f".stager-results.{_owner()}.{os.getpid()}.{time.monotonic_ns()}"
        self._path = os.path.join(target, name)
        try:
            os.mkdir(self._path, 0o700)
        except OSError as exc:
            raise _unusable(target, exc) from exc
        self._folders: dict[str, tuple[str, tarfile.TarInfo]] = {}
        self._lost: set[str] = set()
        self._filled: set[str] = set()
        self._parents: dict[str, str] = {}
        self._kept = False
        self.files, self.bytes = 0, 0
        self.left_out: dict[str, str] = {}
        self.renamed: dict[str, str] = {}
        self.placed: list[str] = []
        self.problems: list[Problem] = []

    def add(self, info: tarfile.TarInfo, content: Callable[[], Iterator[memoryview]]) -> None:
        """Write one member.

        What cannot be written for a reason of its own, a name that this file system does not take
        for example, is noted and passed over.

        Args:
            info: its header; the type is that of a directory, a file or a symbolic link.
            content: gives the file's bytes piece by piece; called only for files, at most once.

        Raises:
            Hostile: it lies outside of the outputs, or is a link out of one.
            OSError: nothing more can be written here.
        """
        root, inner = self._root_of(info.name)
        above = info.name.rpartition("/")[0]
        if inner and above not in self._folders:
            if above not in self._lost:
                raise Hostile(f"{info.name!r} comes before the directory that holds it")
            self._lose(info, "the directory that holds it could not be made")
            return
        if info.issym() and (not inner or leads_out(inner, info.linkname)):
            raise Hostile(f"{info.name!r} is a link that leads out, to {info.linkname!r}")
        path = os.path.join(self._path, str(self._roots[root]), *([inner] if inner else []))
        try:
            self._write(path, info, content)
        except OSError as exc:
            if exc.errno in _FULL:
                raise
            if exc.errno == errno.EEXIST and info.name in self._folders:
                raise Hostile(f"{info.name!r} comes twice") from exc
            self._lose(info, exc.strerror or str(exc))
            return
        if info.isreg():
            self.files += 1
            self.bytes += info.size
        if not info.isdir():
            self._filled.add(root)

    def publish(self, *, complete: bool) -> None:
        """Put the outputs in place; those of a stream that was cut, under a name that says so.

        Of these, only outputs that hold something are kept. One that cannot be put in place stays
        in a directory that is no longer hidden.
        """
        if not complete:
            for root in self._roots.keys() - self._filled:
                removal.sweep(os.path.join(self._path, str(self._roots[root])))
        for path, info in reversed(list(self._folders.values())):
            # A closed directory cannot be moved; the outermost ones get their mode there.
            if info.name not in self._roots:
                _finish(path, info)
        stuck: list[tuple[str, str]] = []
        for root, number in self._roots.items():
            path = os.path.join(self._path, str(number))
            if not os.path.lexists(path):
                continue
            try:
                given = self._place(path, root if complete else root + PARTIAL)
            except OSError as exc:
                stuck.append((root, exc.strerror or str(exc)))
                continue
            if root in self._folders:
                _finish(os.path.join(self._target, given), self._folders[root][1])
            self.placed.append(given)
            if given != root:
                self.renamed[root] = given
        if stuck:
            self._leave(stuck)

    def discard(self) -> None:
        """Remove the hidden directory with what is still in it."""
        if not self._kept:
            removal.sweep(self._path)

    def _root_of(self, name: str) -> tuple[str, str]:
        """The output that a member belongs to, and its path there; empty for the output itself."""
        parts = name.split("/")
        if not {"", ".", ".."}.isdisjoint(parts) or "\0" in name:
            raise Hostile(f"{name!r} is not a plain path")
        for count in range(1, len(parts) + 1):
            root = "/".join(parts[:count])
            if root in self._roots:
                return root, "/".join(parts[count:])
        raise Hostile(f"{name!r} lies in none of the announced outputs")

    def _lose(self, info: tarfile.TarInfo, why: str) -> None:
        self.left_out[info.name] = why
        if info.isdir():
            self._lost.add(info.name)

    def _write(
        self, path: str, info: tarfile.TarInfo, content: Callable[[], Iterator[memoryview]]
    ) -> None:
        if info.isdir():
            os.mkdir(path, 0o700)
            self._folders[info.name] = (path, info)
            return
        if info.issym():
            os.symlink(info.linkname, path)
            return
        # Every directory above was made by us for this stream, so none of them is a link.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(path, flags, 0o600)
        whole = False
        try:
            for piece in content():
                rest = piece
                while rest:
                    rest = rest[os.write(handle, rest) :]
            os.fchmod(handle, info.mode & 0o777)
            _set_time(handle, info)
            whole = True
        finally:
            os.close(handle)
            if not whole:
                os.unlink(path)

    def _place(self, path: str, wanted: str) -> str:
        """Rename to the first free name; returns it."""
        above, _, name = wanted.rpartition("/")
        folder = self._parent(above) if above else ""
        for number in range(_MOST_NUMBERS):
            given = os.path.join(folder, f"{name}.{number}" if number else name)
            try:
                _rename(path, os.path.join(self._target, given))
            except OSError as exc:
                if exc.errno not in _TAKEN:
                    raise
                continue
            return given
        raise OSError(errno.EEXIST, "all names are taken")

    def _parent(self, path: str) -> str:
        """A directory for an output that does not lie at the top: made, or taken if it is real.

        A link, which may lead anywhere, is not followed, and no file has to give way.
        """
        if path in self._parents:
            return self._parents[path]
        above, _, name = path.rpartition("/")
        folder = self._parent(above) if above else ""
        here = os.stat(self._target).st_dev
        for number in range(_MOST_NUMBERS):
            given = os.path.join(folder, f"{name}.{number}" if number else name)
            with suppress(FileExistsError):
                os.mkdir(os.path.join(self._target, given))
            state = os.lstat(os.path.join(self._target, given))
            # Nothing can be renamed into another file system.
            if stat.S_ISDIR(state.st_mode) and state.st_dev == here:
                self._parents[path] = given
                return given
        raise OSError(errno.EEXIST, "all names are taken")

    def _leave(self, stuck: list[tuple[str, str]]) -> None:
        """Show what could not be put in place, so that no sweep takes it away."""
        self._kept = True
        try:
            given = self._place(self._path, f"results{PARTIAL}")
        except OSError:
            given = os.path.basename(self._path)
        for root, why in stuck:
            path = os.path.join(self._target, given, str(self._roots[root]))
            self.problems.append(
                Problem(
                    what="an output could not be put in place",
                    where=os.path.join(self._target, root),
                    why=why,
                    fix=f"it is in {path}",
                )
            )


def sweep(target: str) -> None:
    """Remove hidden directories whose owner is gone, or that are a week old."""
    with suppress(OSError):
        for name in os.listdir(target):
            found = _HIDDEN.fullmatch(name)
            path = os.path.join(target, name)
            if found and _abandoned(path, found["owner"], int(found["pid"])):
                removal.sweep(path)


def _abandoned(path: str, owner: str, pid: int) -> bool:
    state = os.lstat(path)
    if state.st_uid != os.geteuid() or not stat.S_ISDIR(state.st_mode):
        return False
    if time.time() - state.st_mtime > _OLD:
        return True
    if owner != _owner():  # a process on another machine, or in a container: nobody can tell
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _owner() -> str:
    """Within which a process id means one process: the machine and its process namespace."""
    space = os.stat("/proc/self/ns/pid").st_ino
    return f"{os.uname().nodename}-{space}"


def _rename(path: str, final: str) -> None:
    """Rename without taking anything away from a name that is in use.

    Raises:
        OSError: with one of ``_TAKEN`` if it is.
    """
    if os.path.lexists(final):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), final)
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        # A file's rename would replace what somebody made since; a second name cannot.
        try:
            os.link(path, final, follow_symlinks=False)
        except OSError as exc:
            if exc.errno not in _NO_HARD_LINKS:
                raise
            os.close(os.open(final, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        else:
            os.unlink(path)
            return
    os.rename(path, final)


def _finish(path: str, info: tarfile.TarInfo) -> None:
    """Give a directory its mode and time; what it holds is worth more than either."""
    with suppress(OSError):
        _set_time(path, info)
        os.chmod(path, info.mode & 0o777)


def _set_time(where: int | str, info: tarfile.TarInfo) -> None:
    with suppress(OSError, OverflowError, ValueError):  # one that this file system cannot hold
        os.utime(where, (info.mtime, info.mtime))


def _unusable(target: str, exc: OSError) -> NodeError:
    return NodeError(
        Problem(
            what="the results cannot be written",
            where=target,
            why=exc.strerror or str(exc),
            fix="see who may write there, and how full it is",
        )
    )
