"""The node root: its place on a node, the directory itself, and its locks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shlex
import stat
from collections.abc import Iterator, Mapping
from string import Template

from ..protocol.problem import NodeError, Problem, ProblemCode
from ..system import files

# --- The place of a node root on a node: the directory that it is made in, and its name there ----

ROOT_VARIABLE = "STAGER_NODE_ROOT"  # of a node; it wins over the setting ``cluster.node-root``
AUTO, AUTO_WITH_MEMORY = "auto", "auto-memory"  # each node's directory is chosen
MEMORY = "/dev/shm/"  # noqa: S108 - only compared


def choose_base_for_bundle(
    setting: str, bundle_id: str, room: tuple[int, int], env: Mapping[str, str]
) -> str:
    """Return the directory for the node root: one that has an environment, or room for it."""
    base = choose_base(setting, env)
    has_environment = os.path.isdir(env_path(os.path.join(base, node_root_name()), bundle_id))
    return base if has_environment else choose_base(setting, env, room)


def env_path(root: str, bundle_id: str) -> str:
    """Return the path of a bundle's environment under a node root."""
    return os.path.join(root, "envs", bundle_id)


COMPILED = "compiled"  # the directory for compiled code


def code_path(root: str, name: str) -> str:
    """Return the path of the compiled code for a kind of machine under a node root."""
    return os.path.join(root, COMPILED, name)


def node_root_name() -> str:
    """Return the name of this user's node root in its base directory."""
    return f"stager-{os.geteuid()}"


def choose_base(setting: str, env: Mapping[str, str], room: tuple[int, int] = (0, 0)) -> str:
    """Return the directory under which the node root is to be made.

    ``$STAGER_NODE_ROOT`` wins over the setting. ``auto`` takes the first of ``$SLURM_TMPDIR``,
    ``$TMPDIR`` and ``/tmp`` that is local, writable, executable and has room; ``auto-memory`` takes
    ``/dev/shm`` as well. A directory that was named, in which ``$NAME`` stands for the node's
    variable, may be shared. ``room`` is the bytes and inodes of new files.
    """
    candidates, named = list_bases(setting, env)
    allows_memory = named or (env.get(ROOT_VARIABLE) or setting) == AUTO_WITH_MEMORY
    refused, code = [], ProblemCode.NO_PLACE
    for source, path in candidates:
        reasons, room_reasons = _find_base_faults(path, room, shared_ok=named)
        if not allows_memory and os.path.join(os.path.realpath(path), "").startswith(MEMORY):
            reasons.append(f'it takes memory, which node-root = "{AUTO_WITH_MEMORY}" allows')
        if not reasons and not room_reasons:
            return path
        if room_reasons:
            code = ProblemCode.NO_PLACE_WITH_ROOM
        refused.append(f"{source}{path}: {', '.join([*reasons, *room_reasons])}")
    raise NodeError(Problem(code, os.uname().nodename, {"why": "; ".join(refused)}))


def list_bases(setting: str, env: Mapping[str, str]) -> tuple[Iterator[tuple[str, str]], bool]:
    """Return the candidates in order, with the source of each; and whether the user named one."""
    is_named = (env.get(ROOT_VARIABLE) or setting) not in (AUTO, AUTO_WITH_MEMORY)
    return _list_named_bases(setting, env) if is_named else list_automatic_bases(env), is_named


def list_automatic_bases(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the candidates in order, with the source of each; each directory once."""
    seen = set()
    for source, path in (
        ("$SLURM_TMPDIR = ", env.get("SLURM_TMPDIR", "")),
        ("$TMPDIR = ", env.get("TMPDIR", "")),
        ("", "/tmp"),  # noqa: S108 - examined, and guarded
        ("", "/dev/shm"),  # noqa: S108 - the same
    ):
        real = os.path.realpath(path)
        if path and real not in seen:
            seen.add(real)
            yield source, path


def _list_named_bases(setting: str, env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    if named := env.get(ROOT_VARIABLE):
        yield f"${ROOT_VARIABLE} = ", named
        return
    try:
        path = Template(setting).substitute(env)
    except KeyError as exc:
        values = {"name": str(exc.args[0])}
        raise NodeError(Problem(ProblemCode.UNSET_VARIABLE, setting, values)) from exc
    except ValueError:  # a dollar sign that starts no name stands for itself
        path = setting
    yield "" if path == setting else f"{setting} = ", path


def _find_base_faults(
    path: str, room: tuple[int, int], *, shared_ok: bool
) -> tuple[list[str], list[str]]:
    if not path.startswith("/"):
        return ["it is not an absolute path"], []
    if not os.path.exists(path):
        return [f"it does not exist (`mkdir -p {shlex.quote(path)}` makes it)"], []
    if not os.path.isdir(path):
        return ["it is not a directory"], []
    try:
        facts = files.examine_directory(path)
    except NodeError as exc:
        return [exc.problem.values["why"]], []
    reasons = files.list_use_refusals(facts)
    if facts.shared and not shared_ok:
        reasons.insert(0, f"it is on a shared file system ({facts.fstype})")
    if not facts.read_only and not _is_writable(path):
        reasons.append("this user may not write to it")
    elif not shared_ok:
        reasons += find_foreign_root(os.path.join(path, node_root_name()))
    return reasons, files.list_room_refusals(facts, *room)


def find_foreign_root(node_root: str) -> list[str]:
    """Return why a node root is not ours, for the choice; it is checked again when it is opened."""
    try:
        status = os.lstat(node_root)
    except OSError:
        return []
    name = os.path.basename(node_root)
    if not stat.S_ISDIR(status.st_mode):
        return [f"{name} there is no directory"]
    is_own = status.st_uid == os.geteuid()
    return [] if is_own else [f"{name} there belongs to user {status.st_uid}"]


def _is_writable(base: str) -> bool:
    node_root = os.path.join(base, node_root_name())
    return os.access(node_root if os.path.isdir(node_root) else base, os.W_OK | os.X_OK)


# --- The node root: this user's own directory on a node, closed to everyone else, or refused -----

SUBDIRECTORIES = ("incoming", "locks", "envs", "jobs")
_ATTEMPTS = 10
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def make_secure_root(base: str) -> str:
    """Make ``<base>/stager-<uid>`` and its subdirectories, or take those that exist; return it.

    It is safe against others who act at the same time: directories are opened without following
    links, then checked while open.
    """
    real = os.path.realpath(base)
    root = os.path.join(real, node_root_name())
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(_Vanished), contextlib.ExitStack() as opened:
            base_fd = opened.enter_context(close_after(_open_base(real)))
            root_fd = opened.enter_context(close_after(_open_private(base_fd, root)))
            for name in SUBDIRECTORIES:
                os.close(_open_private(root_fd, os.path.join(root, name)))
            _ignore_in_git(root_fd)
            return root
    raise _make_refusal(root, "it cannot be made there, or is removed again and again")


def _make_refusal(path: str, why: str) -> NodeError:
    return NodeError(Problem(ProblemCode.NODE_ROOT_REFUSED, path, {"why": why}))


class _Vanished(Exception):
    """The node root was removed meanwhile, as ``stager clean`` does if nothing is left in it."""


def _open_base(real: str) -> int:
    code = ProblemCode.NODE_ROOT_BASE_REFUSED
    try:
        base_fd = os.open(real, _FOLDER)
    except OSError as exc:
        raise NodeError(Problem(code, real, {"why": files.error_text(exc)})) from exc
    mode = os.fstat(base_fd).st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        os.close(base_fd)
        why = f"any user can replace what is in it (mode {stat.S_IMODE(mode):04o}, no sticky bit)"
        raise NodeError(Problem(code, real, {"why": why}))
    return base_fd


def _open_private(parent: int, path: str) -> int:
    name = os.path.basename(path)
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
        opened = os.open(name, _FOLDER, dir_fd=parent)
    except FileNotFoundError as exc:
        raise _Vanished from exc
    except OSError as exc:
        is_other = exc.errno in (errno.ENOTDIR, errno.ELOOP)
        why = "it is not a directory, or a symbolic link" if is_other else files.error_text(exc)
        raise _make_refusal(path, why) from exc
    status, owner = os.fstat(opened), os.geteuid()
    if status.st_uid != owner:
        os.close(opened)
        raise _make_refusal(path, f"it belongs to user {status.st_uid}, not to user {owner}")
    if stat.S_IMODE(status.st_mode) != 0o700:
        os.fchmod(opened, 0o700)
    return opened


def _ignore_in_git(root_fd: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(OSError):  # it exists, or the disk is full: nothing depends on it
        handle = os.open(".gitignore", flags, 0o600, dir_fd=root_fd)
        os.write(handle, b"*\n")
        os.close(handle)


# --- Locks of a node root: files that may be removed while others wait for them ------------------

# A lock on a file that has lost its name keeps nobody out. A process that gets a lock checks that
# the name still leads to the locked file, and begins again if it does not.

ROOT_LOCK = ".lock"  # shared while something is put in a node root, exclusive while that is removed


def take_lock(path: str, operation: int, *, create: bool = True) -> int:
    """Lock a file until the descriptor's last copy is closed; BlockingIOError with ``LOCK_NB``."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    while True:
        handle = os.open(path, flags, 0o600)
        try:
            fcntl.flock(handle, operation)
            if _leads_to(path, handle):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


@contextlib.contextmanager
def close_after(handle: int) -> Iterator[int]:
    """Close a descriptor at the end of the block."""
    try:
        yield handle
    finally:
        os.close(handle)


@contextlib.contextmanager
def hold_lock(path: str, operation: int, *, create: bool = True) -> Iterator[None]:
    """Hold a lock file while the block runs; see :func:`take_lock`."""
    with close_after(take_lock(path, operation, create=create)):
        yield


def make_locked_directory(path: str) -> int:
    """Make a directory, locked until the descriptor is closed; see hold_directory_alone."""
    while True:
        os.makedirs(path, mode=0o700)
        try:
            handle = os.open(path, _FOLDER)
        except FileNotFoundError:  # another process removed it as a left-over
            continue
        with contextlib.suppress(OSError):  # without locks nobody can hold it alone, either
            fcntl.flock(handle, fcntl.LOCK_SH)
        if _leads_to(path, handle):
            return handle
        os.close(handle)


@contextlib.contextmanager
def hold_directory(path: str) -> Iterator[None]:
    """Wait for a directory, and hold it while the block runs, if its file system has locks."""
    with close_after(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as handle:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def hold_directory_alone(path: str) -> Iterator[None]:
    """Hold a directory while the block runs; OSError if another process holds it, or it is gone."""
    with close_after(os.open(path, _FOLDER)) as handle:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _leads_to(path, handle):  # it was removed, and the name is now another directory's
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        yield


@contextlib.contextmanager
def hold_root(root: str) -> Iterator[None]:
    """Keep a node root from being removed while the block runs; make it if it is missing."""
    base, lock = os.path.dirname(root), os.path.join(root, ROOT_LOCK)
    while True:
        try:
            handle = take_lock(lock, fcntl.LOCK_SH)
            break
        except FileNotFoundError:
            make_secure_root(base)
    with close_after(handle):
        # A process that failed to remove it may have removed a part.
        if not all(os.path.isdir(os.path.join(root, name)) for name in SUBDIRECTORIES):
            make_secure_root(base)
        yield


def _leads_to(path: str, handle: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.lstat(path), os.fstat(handle))
    return False
