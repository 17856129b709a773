"""A node's file systems: where an environment may be put, and the directory made for it there."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template

from ..protocol.problem import NodeError, Problem

ROOT_VARIABLE = "STAGER_NODE_ROOT"
MOVE_IT = (
    f"name another directory with [cluster] node-root in stager.toml, or with ${ROOT_VARIABLE}"
)

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
    """Its number."""
    parent: int
    """The number of the mount it lies on."""
    point: str
    """Where it is mounted."""
    fstype: str
    """Type of the file system, for example ``ext4``."""
    options: frozenset[str]
    """Options of the mount and of the file system below it, together."""

    @property
    def shared(self) -> bool:
        """Whether other nodes see the same files, so that nothing is gained by copying there."""
        kind, _, daemon = self.fstype.partition(".")
        if kind == "fuse":
            return daemon.lower() in _SHARED_FUSE.split()
        return kind in _SHARED.split()


def parse_mounts(text: str) -> list[Mount]:
    """Read /proc/self/mountinfo, see proc(5); lines that are not mounts are passed over."""
    mounts = []
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        front, back = left.split(" "), right.split(" ")
        if not separator or len(front) < 6 or len(back) < 3:
            continue
        options = frozenset(f"{front[5]},{back[2]}".split(","))
        mounts.append(Mount(int(front[0]), int(front[1]), _plain(front[4]), back[0], options))
    return mounts


def mount_for(path: str, mounts: Iterable[Mount]) -> Mount | None:
    """The mount a path without links lies on, found the way the kernel walks.

    From the root, a mount further up hides those made below it before; of two on the same
    directory the later one counts. Where the root is not listed (after a chroot) the longest
    mount point decides, and of equal ones the last.
    """
    held = [mount for mount in mounts if _covers(mount.point, path)]
    ids = {mount.id for mount in held}
    here = next((m for m in held if m.point == "/" and m.parent not in ids - {m.id}), None)
    if here is None:
        return max(reversed(held), key=lambda mount: len(mount.point), default=None)
    while True:
        above = [m for m in held if m.parent == here.id and m.id != here.id]
        if not above:
            return here
        here = min(reversed(above), key=lambda mount: len(mount.point))


def mount_of(path: str) -> Mount:
    """The mount that holds an existing path on this machine.

    Raises:
        NodeError: the path does not exist, or /proc is not there.
    """
    try:
        os.statvfs(path)  # makes an automounter mount what it has only announced
        text = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape")
    except OSError as exc:
        raise fault("cannot be examined", path, exc.strerror or str(exc)) from exc
    found = mount_for(os.path.realpath(path), parse_mounts(text))
    if found is None:
        raise fault("cannot be examined", path, "/proc/self/mountinfo does not list its mount")
    return found


@dataclass(frozen=True)
class Facts:
    """What matters about a directory before writing to it."""

    path: str
    """The directory."""
    fstype: str
    """Type of its file system."""
    free_bytes: int
    """Bytes that this user may still write."""
    free_inodes: int | None
    """Files that may still be made; None where the file system does not count them."""
    noexec: bool
    """Whether programs and libraries there cannot be run."""
    read_only: bool
    """Whether nothing can be written."""
    shared: bool
    """Whether it is on a network file system."""

    @property
    def tmpfs(self) -> bool:
        """Whether files there take memory."""
        return self.fstype in ("tmpfs", "ramfs")


def facts_of(path: str) -> Facts:
    """Examine an existing directory.

    Both the kernel's flags and the listed mount options are looked at: statvfs of network and FUSE
    file systems does not always carry the flags.

    Raises:
        NodeError: it does not exist.
    """
    mount = mount_of(path)
    state = os.statvfs(path)
    return Facts(
        path=path,
        fstype=mount.fstype,
        free_bytes=state.f_bavail * state.f_frsize,
        free_inodes=state.f_favail if state.f_files else None,
        noexec=bool(state.f_flag & os.ST_NOEXEC) or "noexec" in mount.options,
        read_only=bool(state.f_flag & os.ST_RDONLY) or "ro" in mount.options,
        shared=mount.shared,
    )


def refusals(facts: Facts, needed_bytes: int, needed_inodes: int) -> list[str]:
    """Every reason why an environment of this size cannot be put there."""
    reasons = []
    if facts.read_only:
        reasons.append("it is mounted read-only")
    if facts.noexec:
        reasons.append("it is mounted noexec, so that nothing in it can be run")
    if facts.free_bytes < needed_bytes:
        reasons.append(f"needs {size(needed_bytes)}, {size(facts.free_bytes)} are free")
    if facts.free_inodes is not None and facts.free_inodes < needed_inodes:
        reasons.append(f"needs {needed_inodes} inodes, {facts.free_inodes} are free")
    return reasons


def choose_base(setting: str, needed_bytes: int, needed_inodes: int, env: Mapping[str, str]) -> str:
    """The directory under which the node root is to be made.

    ``$STAGER_NODE_ROOT`` wins over the setting. ``auto`` takes the first of ``$SLURM_TMPDIR``,
    ``$TMPDIR``, ``/tmp`` and ``/dev/shm`` that is local, writable, executable and has room. A
    directory that was named is held to the same, but may be shared: the user chose it.

    Args:
        setting: ``auto``, or an absolute path in which ``$NAME`` stands for the node's variable.
        needed_bytes: room for what is to be written; 0 where all is there already.
        needed_inodes: how many files and directories that makes.
        env: the node's variables.

    Raises:
        NodeError: no such directory; every candidate is listed with all that is wrong with it.
    """
    named = env.get(ROOT_VARIABLE) or setting
    refused = []
    for source, path in automatic_places(env) if named == "auto" else named_places(setting, env):
        reasons = _unfit(path, needed_bytes, needed_inodes, shared_ok=named != "auto")
        if not reasons:
            return path
        refused.append(f"{source}{path}: {', '.join(reasons)}")
    raise NodeError(
        Problem(
            what="no directory on this node can hold the environment",
            where=os.uname().nodename,
            why="; ".join(refused),
            fix=MOVE_IT,
        )
    )


def size(count: int) -> str:
    """A number of bytes for people: ``1.4 GB``."""
    amount, units = float(count), ("bytes", "kB", "MB", "GB")
    for unit in units:
        if amount < 1000:
            break
        if unit != units[-1]:
            amount /= 1000
    return f"{count} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"


def automatic_places(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Candidates in order, with where each comes from; each directory once."""
    seen = set()
    for name in ("$SLURM_TMPDIR", "$TMPDIR", "/tmp", "/dev/shm"):  # noqa: S108 - looked at, guarded
        path = env.get(name[1:], "") if name.startswith("$") else name
        if path and os.path.realpath(path) not in seen:
            seen.add(os.path.realpath(path))
            yield (f"{name} = " if path != name else ""), path


def named_places(setting: str, env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The one candidate that the user named, with the node's variables put in."""
    path = env.get(ROOT_VARIABLE)
    if path:
        yield f"${ROOT_VARIABLE} = ", path
        return
    try:
        path = Template(setting).substitute(env)
    except KeyError as exc:
        why = f"the variable ${exc.args[0]} is not set on this node"
        raise fault("no directory can be chosen for the environment", setting, why) from exc
    except ValueError:  # a dollar sign that starts no name stands for itself
        path = setting
    yield (f"{setting} = " if path != setting else ""), path


def _unfit(path: str, needed_bytes: int, needed_inodes: int, *, shared_ok: bool) -> list[str]:
    if not path.startswith("/"):
        return ["it is not an absolute path"]
    if not Path(path).is_dir():
        return ["it is not a directory" if Path(path).exists() else "it does not exist"]
    try:
        facts = facts_of(path)
    except NodeError as exc:
        return [exc.problem.why]
    reasons = refusals(facts, needed_bytes, needed_inodes)
    if facts.shared and not shared_ok:
        reasons.insert(0, f"it is on a shared file system ({facts.fstype})")
    ours = Path(path, f"stager-{os.geteuid()}")
    if not facts.read_only and not os.access(ours if ours.is_dir() else path, os.W_OK | os.X_OK):
        reasons.append("this user may not write to it")
    return reasons


def _covers(point: str, path: str) -> bool:
    return point in ("/", path) or path.startswith(point + "/")


def _plain(field: str) -> str:
    """Undo the octal escapes of blanks and backslashes."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), field)


def fault(what: str, where: str, why: str) -> NodeError:
    """The error about a directory that will not do; the remedy is to name another one."""
    return NodeError(Problem(what=what, where=where, why=why, fix=MOVE_IT))


def read_file(path: str, limit: int = _READ_LIMIT) -> bytes:
    """What is in a file, which is neither followed if it is a link nor waited for if it is a pipe.

    Raises:
        OSError: it cannot be read, is no file, or is longer than this.
    """
    handle = os.open(path, _OPEN)
    with open(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_size > limit:
            raise OSError(errno.EINVAL, "it is not a file of a possible size", path)
        return file.read()


def digest_of(handle: int) -> str:
    """The sha256 of an open file, from where it stands."""
    digest = hashlib.sha256()
    while data := os.read(handle, _CHUNK):
        digest.update(data)
    return digest.hexdigest()
