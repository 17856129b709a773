"""File systems of a node: mounts, what matters of a directory, and the files in it."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..protocol.counts import format_size
from ..protocol.problem import NodeError, Problem, ProblemCode

if TYPE_CHECKING:
    from ..protocol.messages import NodeRootFacts

_SHARED = """9p acfs afs beegfs ceph cifs cvmfs2 exafs fhgfs gfs2 glusterfs gpfs lustre ncpfs nfs
    nfs4 ocfs2 orangefs panfs pvfs2 smb3 smbfs wekafs"""
# The daemons behind "fuse.NAME" that reach over a network; squashfuse and overlays do not.
_SHARED_FUSE = """alluxio beegfs blobfuse blobfuse2 ceph ceph-fuse curlftpfs cvmfs2 davfs dfuse
    gcsfuse glusterfs goofys juicefs lizardfs mfs moosefs mount-s3 mountpoint-s3 orangefs pvfs2
    quobyte rclone s3fs seaweedfs smbnetfs sshfs unionfs-hadoop weed"""
_READ_LIMIT = 1 << 28
_NO_LIMIT = 1 << 60  # some network file systems have no end
_CHUNK = 1 << 20
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_ESCAPE = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """One line of /proc/self/mountinfo."""

    id: int
    point: str
    fstype: str  # type of the file system, for example ``ext4``
    options: frozenset[str]

    @property
    def is_shared(self) -> bool:
        """True if other nodes see the same files, so that a copy there gains nothing."""
        kind, _, daemon = self.fstype.partition(".")
        if kind == "fuse":
            return daemon.lower() in _SHARED_FUSE.split()
        return kind in _SHARED.split()


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
                point=_ESCAPE.sub(lambda match: chr(int(match[1], 8)), mount[4]),
                fstype=system[0],
                options=frozenset(f"{mount[5]},{system[2]}".split(",")),
            )
        )
    return mounts


def find_mount(path: str) -> Mount:
    """Return the mount of an existing path; of unknown type in a chroot (proc_pid_mountinfo(5))."""
    try:
        os.statvfs(path)  # makes an automounter mount what it has only announced
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            opened = Path(f"/proc/self/fdinfo/{handle}").read_text("utf-8")
        finally:
            os.close(handle)
        text = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape")
    except OSError as exc:
        problem = Problem(ProblemCode.PATH_NOT_EXAMINED, path, {"why": error_text(exc)})
        raise NodeError(problem) from exc
    found = (mount for mount in parse_mounts(text) if f"\nmnt_id:\t{mount.id}\n" in opened)
    return next(found, Mount(id=0, point="/", fstype="unknown", options=frozenset()))


def examine_directory(path: str) -> NodeRootFacts:
    """Examine an existing directory."""
    from ..protocol.messages import NodeRootFacts  # slow to import, and not loaded in every program

    # statvfs of network and FUSE file systems does not always have the flags.
    mount, state, owner = find_mount(path), os.statvfs(path), os.lstat(path)
    return NodeRootFacts(
        path=path,
        fstype=mount.fstype,
        free_bytes=min(state.f_bavail * state.f_frsize, _NO_LIMIT),
        free_inodes=min(state.f_favail, _NO_LIMIT) if state.f_files else None,
        noexec=bool(state.f_flag & os.ST_NOEXEC) or "noexec" in mount.options,
        read_only=bool(state.f_flag & os.ST_RDONLY) or "ro" in mount.options,
        shared=mount.is_shared,
        owner=owner.st_uid,
        mode=f"{owner.st_mode & 0o7777:04o}",
    )


def list_refusals(facts: NodeRootFacts, needed_bytes: int, needed_inodes: int) -> list[str]:
    """Return every reason why an environment of this size does not fit there."""
    return list_use_refusals(facts) + list_room_refusals(facts, needed_bytes, needed_inodes)


def list_use_refusals(facts: NodeRootFacts) -> list[str]:
    """Return every reason why no environment can be used there, however small."""
    return [
        *(["it is mounted read-only"] if facts.read_only else []),
        *(["it is mounted noexec, so that nothing in it can be run"] if facts.noexec else []),
    ]


def list_room_refusals(facts: NodeRootFacts, needed_bytes: int, needed_inodes: int) -> list[str]:
    """Return every way in which an environment of this size lacks room there."""
    reasons = []
    if facts.free_bytes < needed_bytes:
        reasons.append(
            f"needs {format_size(needed_bytes)}, {format_size(facts.free_bytes)} are free"
        )
    if facts.free_inodes is not None and facts.free_inodes < needed_inodes:
        reasons.append(f"needs {needed_inodes} inodes, {facts.free_inodes} are free")
    return reasons


def error_text(exc: OSError) -> str:
    """Return what an error says, without its number and its file."""
    return exc.strerror or str(exc)


def is_full(exc: OSError) -> bool:
    """Return whether an error says that a disk or a quota is full."""
    return exc.errno in (errno.ENOSPC, errno.EDQUOT)


def disk_problem(exc: OSError, where: str, full: ProblemCode, other: ProblemCode) -> Problem:
    """Return the problem of a failed write: ``full`` for a full disk or quota, else ``other``."""
    values = {"why": error_text(exc)}
    return Problem(full if is_full(exc) else other, where, values)


def read_file(path: str, limit: int = _READ_LIMIT) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes; a link is not followed."""
    handle = os.open(path, _OPEN)
    with open(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
            raise OSError(errno.EINVAL, "it is not a file of a possible size", path)
        return file.read()


def compute_digest(handle: int) -> str:
    """Return the sha256 of an open file, from its current position."""
    digest = hashlib.sha256()
    while data := os.read(handle, _CHUNK):
        digest.update(data)
    return digest.hexdigest()
