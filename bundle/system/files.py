"""File systems of a node: mounts, and the choice of a directory for environments."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from ..protocol.counts import sized
from ..protocol.problem import NodeError, Problem, ProblemCode

ROOT_VARIABLE = "STAGER_NODE_ROOT"
_SHARED = """9p acfs afs beegfs ceph cifs cvmfs2 exafs fhgfs gfs2 glusterfs gpfs lustre ncpfs nfs
    nfs4 ocfs2 orangefs panfs pvfs2 smb3 smbfs wekafs"""
# The daemons behind "fuse.NAME" that reach over a network; squashfuse and overlays do not.
_SHARED_FUSE = """alluxio beegfs blobfuse blobfuse2 ceph ceph-fuse curlftpfs cvmfs2 davfs dfuse
    gcsfuse glusterfs goofys juicefs lizardfs mfs moosefs mount-s3 mountpoint-s3 orangefs pvfs2
    quobyte rclone s3fs seaweedfs smbnetfs sshfs unionfs-hadoop weed"""
_READ_LIMIT = 1 << 28
_CHUNK = 1 << 20
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """One line of /proc/self/mountinfo."""

    id: int
    """The number of the mount."""
    parent: int
    """The number of the mount it lies on."""
    point: str
    """Its mount point."""
    fstype: str
    """Type of the file system, for example ``ext4``."""
    options: frozenset[str]
    """Options of the mount and of the file system below it, together."""

    @property
    def shared(self) -> bool:
        """True if other nodes see the same files, so that a copy there gains nothing."""
        kind, _, daemon = self.fstype.partition(".")
        if kind == "fuse":
            return daemon.lower() in _SHARED_FUSE.split()
        return kind in _SHARED.split()

    def is_mounted_on(self, other: Mount) -> bool:
        """Return True if this mount lies directly on another one; a root names itself."""
        return self.parent == other.id and self.id != other.id


def parse_mounts(text: str) -> list[Mount]:
    """Read /proc/self/mountinfo, see proc(5); lines that are not mounts are skipped."""
    mounts = []
    for line in text.splitlines():
        mount_part, separator, system_part = line.partition(" - ")
        mount, system = mount_part.split(" "), system_part.split(" ")
        if not separator or len(mount) < 6 or len(system) < 3:
            continue
        mounts.append(
            Mount(
                id=int(mount[0]),
                parent=int(mount[1]),
                point=_unescaped(mount[4]),
                fstype=system[0],
                options=frozenset(f"{mount[5]},{system[2]}".split(",")),
            )
        )
    return mounts


def mount_for(path: str, mounts: Iterable[Mount]) -> Mount | None:
    """Return the mount that a path without links lies on, found the way the kernel walks.

    From the root, a mount further up hides those made below it before; of two on the same
    directory the later one counts. Where the root is not listed (after a chroot) the longest
    mount point decides, and of equal ones the last.
    """
    covering = [mount for mount in mounts if _covers(mount.point, path)]
    current = _root_of(covering)
    if current is None:
        return max(reversed(covering), key=_depth, default=None)
    while True:
        children = [mount for mount in covering if mount.is_mounted_on(current)]
        if not children:
            return current
        current = min(reversed(children), key=_depth)


def _root_of(mounts: Sequence[Mount]) -> Mount | None:
    """Return the first mount of ``/`` that lies on no other of these mounts; None for none."""
    ids = {mount.id for mount in mounts}
    for mount in mounts:
        if mount.point == "/" and mount.parent not in ids - {mount.id}:
            return mount
    return None


def _depth(mount: Mount) -> int:
    return len(mount.point)


def mount_of(path: str) -> Mount:
    """Return the mount that holds an existing path on this machine.

    Raises:
        NodeError: the path does not exist, or /proc is not there.
    """
    try:
        os.statvfs(path)  # makes an automounter mount what it has only announced
        text = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape")
    except OSError as exc:
        raise _not_examined(path, error_text(exc)) from exc
    mount = mount_for(os.path.realpath(path), parse_mounts(text))
    if mount is None:
        raise _not_examined(path, "/proc/self/mountinfo does not list its mount")
    return mount


@dataclass(frozen=True)
class DirectoryFacts:
    """The properties of a directory that matter before writing to it."""

    path: str
    """The directory."""
    fstype: str
    """Type of its file system."""
    free_bytes: int
    """Bytes that this user may still write."""
    free_inodes: int | None
    """Files that may still be made; None where the file system does not count them."""
    noexec: bool
    """True if programs and libraries there cannot be run."""
    read_only: bool
    """True if nothing can be written."""
    shared: bool
    """True if it is on a network file system."""


def facts_of(path: str) -> DirectoryFacts:
    """Examine an existing directory.

    Both the kernel's flags and the listed mount options count: statvfs of network and FUSE file
    systems does not always carry the flags.

    Raises:
        NodeError: it does not exist.
    """
    mount = mount_of(path)
    state = os.statvfs(path)
    return DirectoryFacts(
        path=path,
        fstype=mount.fstype,
        free_bytes=state.f_bavail * state.f_frsize,
        free_inodes=state.f_favail if state.f_files else None,
        noexec=bool(state.f_flag & os.ST_NOEXEC) or "noexec" in mount.options,
        read_only=bool(state.f_flag & os.ST_RDONLY) or "ro" in mount.options,
        shared=mount.shared,
    )


def refusals(facts: DirectoryFacts, needed_bytes: int, needed_inodes: int) -> list[str]:
    """Return every reason why an environment of this size does not fit there."""
    return use_refusals(facts) + room_refusals(facts, needed_bytes, needed_inodes)


def use_refusals(facts: DirectoryFacts) -> list[str]:
    """Return every reason why no environment can be used there, however small."""
    reasons = []
    if facts.read_only:
        reasons.append("it is mounted read-only")
    if facts.noexec:
        reasons.append("it is mounted noexec, so that nothing in it can be run")
    return reasons


def room_refusals(facts: DirectoryFacts, needed_bytes: int, needed_inodes: int) -> list[str]:
    """Return every way in which an environment of this size lacks room there."""
    reasons = []
    if facts.free_bytes < needed_bytes:
        reasons.append(f"needs {sized(needed_bytes)}, {sized(facts.free_bytes)} are free")
    if facts.free_inodes is not None and facts.free_inodes < needed_inodes:
        reasons.append(f"needs {needed_inodes} inodes, {facts.free_inodes} are free")
    return reasons


def node_root_name(user: int | None = None) -> str:
    """Return the name of a user's node root in its base directory; by default of this user's."""
    return f"stager-{os.geteuid() if user is None else user}"


def choose_base(setting: str, needed_bytes: int, needed_inodes: int, env: Mapping[str, str]) -> str:
    """Return the directory under which the node root is to be made.

    ``$STAGER_NODE_ROOT`` wins over the setting. ``auto`` takes the first of ``$SLURM_TMPDIR``,
    ``$TMPDIR``, ``/tmp`` and ``/dev/shm`` that is local, writable, executable and has room. A
    directory that was named must meet the same conditions, but may be shared: the user chose it.

    Args:
        setting: ``auto``, or an absolute path in which ``$NAME`` stands for the node's variable.
        needed_bytes: space for new files; 0 if nothing is to be written.
        needed_inodes: number of new files and directories.
        env: the node's variables.

    Raises:
        NodeError: no directory fits; every candidate is listed with all that is wrong with it.
    """
    named = (env.get(ROOT_VARIABLE) or setting) != "auto"
    candidates = named_bases(setting, env) if named else automatic_bases(env)
    refused, code = [], ProblemCode.NO_PLACE
    for source, path in candidates:
        reasons, room_reasons = _faults(path, needed_bytes, needed_inodes, shared_ok=named)
        if not reasons and not room_reasons:
            return path
        if room_reasons:
            code = ProblemCode.NO_PLACE_WITH_ROOM
        refused.append(f"{source}{path}: {', '.join([*reasons, *room_reasons])}")
    raise NodeError(Problem(code, os.uname().nodename, {"why": "; ".join(refused)}))


def automatic_bases(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
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


def named_bases(setting: str, env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the one candidate that the user named, with the node's variables filled in."""
    named = env.get(ROOT_VARIABLE)
    if named:
        yield f"${ROOT_VARIABLE} = ", named
        return
    path = _substituted(setting, env)
    source = "" if path == setting else f"{setting} = "
    yield source, path


def _substituted(setting: str, env: Mapping[str, str]) -> str:
    try:
        return Template(setting).substitute(env)
    except KeyError as exc:
        values = {"name": str(exc.args[0])}
        raise NodeError(Problem(ProblemCode.UNSET_VARIABLE, setting, values)) from exc
    except ValueError:  # a dollar sign that starts no name stands for itself
        return setting


def _faults(
    path: str, needed_bytes: int, needed_inodes: int, *, shared_ok: bool
) -> tuple[list[str], list[str]]:
    """Return every reason why a candidate cannot hold the node root, those of room apart."""
    if not path.startswith("/"):
        return ["it is not an absolute path"], []
    if not os.path.exists(path):
        return ["it does not exist"], []
    if not os.path.isdir(path):
        return ["it is not a directory"], []
    try:
        facts = facts_of(path)
    except NodeError as exc:
        return [exc.problem.values["why"]], []
    reasons = use_refusals(facts)
    if facts.shared and not shared_ok:
        reasons.insert(0, f"it is on a shared file system ({facts.fstype})")
    if not facts.read_only and not _is_writable(path):
        reasons.append("this user may not write to it")
    return reasons, room_refusals(facts, needed_bytes, needed_inodes)


def _is_writable(base: str) -> bool:
    """Return True if this user may write to its node root there, or make one."""
    node_root = os.path.join(base, node_root_name())
    target = node_root if os.path.isdir(node_root) else base
    return os.access(target, os.W_OK | os.X_OK)


def _covers(point: str, path: str) -> bool:
    return point in ("/", path) or path.startswith(point + "/")


def _unescaped(field: str) -> str:
    """Undo the octal escapes of blanks and backslashes."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), field)


def _not_examined(path: str, why: str) -> NodeError:
    return NodeError(Problem(ProblemCode.PATH_NOT_EXAMINED, path, {"why": why}))


def error_text(exc: OSError) -> str:
    """Return what an error says, without its number and its file."""
    return exc.strerror or str(exc)


def is_full(exc: OSError) -> bool:
    """Return whether an error says that a disk or a quota is full."""
    return exc.errno in (errno.ENOSPC, errno.EDQUOT)


def disk_problem(exc: OSError, where: str, full: ProblemCode, other: ProblemCode) -> Problem:
    """Return the problem behind an error while writing.

    Args:
        exc: the error.
        where: the place that was written to.
        full: the problem's code where a disk or a quota is full.
        other: its code otherwise.
    """
    values = {"why": error_text(exc)}
    return Problem(full if is_full(exc) else other, where, values)


def read_file(path: str, limit: int = _READ_LIMIT) -> bytes:
    """Return the content of a file; a link is not followed, a pipe is not waited for.

    Raises:
        OSError: it cannot be read, is not a regular file, or is longer than ``limit`` bytes.
    """
    handle = os.open(path, _OPEN)
    with open(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
            raise OSError(errno.EINVAL, "it is not a file of a possible size", path)
        return file.read()


def digest_of(handle: int) -> str:
    """Return the sha256 of an open file, from its current position."""
    digest = hashlib.sha256()
    while data := os.read(handle, _CHUNK):
        digest.update(data)
    return digest.hexdigest()
