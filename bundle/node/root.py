"""The node root: this user's own directory on a node, closed to everyone else, or refused."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from ..protocol.problem import NodeError, Problem, ProblemCode
from ..system import files
from .location import node_root_name

SUBDIRECTORIES = ("incoming", "locks", "envs", "jobs")
_ATTEMPTS = 10


def secure_root(base: str, uid: int | None = None) -> str:
    """Make ``<base>/stager-<uid>`` and its subdirectories, or take those that exist.

    A directory of ours that others could enter is closed to them. It is safe against others who act
    at the same time: directories are opened without following links, then checked while open.

    Returns:
        The node root, with no links in its path.

    Raises:
        NodeError: it is a link, not a directory or someone else's; or the base lets any user
            replace it, does not exist, or cannot be written.
    """
    owner = os.geteuid() if uid is None else uid
    real = os.path.realpath(base)
    for _ in range(_ATTEMPTS):
        with suppress(_Vanished):
            return _secure(real, owner)
    why = "it cannot be made there, or is removed again and again"
    path = str(Path(real, node_root_name(owner)))
    raise NodeError(Problem(ProblemCode.NODE_ROOT_REFUSED, path, {"why": why}))


class _Vanished(Exception):
    """The node root was removed meanwhile, as ``stager clean`` does if nothing is left in it."""


def _secure(real: str, owner: int) -> str:
    base_fd = _open_base(real)
    try:
        root = str(Path(real, node_root_name(owner)))
        root_fd = _open_private(base_fd, root, owner)
        try:
            for name in SUBDIRECTORIES:
                os.close(_open_private(root_fd, str(Path(root, name)), owner))
            _ignore_in_git(root_fd)
        finally:
            os.close(root_fd)
    finally:
        os.close(base_fd)
    return root


def _open_base(real: str) -> int:
    try:
        base_fd = os.open(real, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as exc:
        values = {"why": files.error_text(exc)}
        raise NodeError(Problem(ProblemCode.NODE_ROOT_BASE_REFUSED, real, values)) from exc
    mode = os.fstat(base_fd).st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        os.close(base_fd)
        why = f"any user can replace what is in it (mode {stat.S_IMODE(mode):04o}, no sticky bit)"
        raise NodeError(Problem(ProblemCode.NODE_ROOT_BASE_REFUSED, real, {"why": why}))
    return base_fd


def _open_private(parent: int, path: str, owner: int) -> int:
    name = Path(path).name
    try:
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
            if owner != os.geteuid():
                os.chown(name, owner, -1, dir_fd=parent, follow_symlinks=False)
        except FileExistsError:
            pass
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        opened = os.open(name, flags, dir_fd=parent)
    except OSError as exc:
        if isinstance(exc, FileNotFoundError):
            raise _Vanished from exc
        why = _refused_kind(path) or str(exc.strerror)
        raise NodeError(Problem(ProblemCode.NODE_ROOT_REFUSED, path, {"why": why})) from exc
    status = os.fstat(opened)
    if status.st_uid != owner:
        os.close(opened)
        why = f"it belongs to user {status.st_uid}, not to user {owner}"
        raise NodeError(Problem(ProblemCode.NODE_ROOT_REFUSED, path, {"why": why}))
    if stat.S_IMODE(status.st_mode) != 0o700:
        os.fchmod(opened, 0o700)
    return opened


def _ignore_in_git(root_fd: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with suppress(OSError):  # it exists, or the disk is full: nothing depends on it
        handle = os.open(".gitignore", flags, 0o600, dir_fd=root_fd)
        os.write(handle, b"*\n")
        os.close(handle)


def _refused_kind(path: str) -> str:
    try:
        mode = Path(path).lstat().st_mode
    except OSError:
        return ""
    if stat.S_ISLNK(mode):
        return "it is a symbolic link, which may lead anywhere"
    if not stat.S_ISDIR(mode):
        return "it is not a directory"
    return ""
