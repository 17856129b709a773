"""What this machine is, and how much of it the job may use."""

from __future__ import annotations

import math
import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..protocol.problem import NodeError
from ..system import files, processes

_GPU = re.compile(r"nvidia\d+")
_NO_LIMIT = 1 << 60  # cgroup v1 writes "no limit" as the largest multiple of the page size


@dataclass(frozen=True)
class Limits:
    """What cgroups allow; None stands for no limit."""

    cpus: float | None = None
    """CPU time a second, in CPUs."""
    memory: int | None = None
    """Bytes of memory."""
    memory_left: int | None = None
    """Bytes of memory not yet used; page cache that would be given back is not used."""


def host_facts(node_root: str = "", env: Mapping[str, str] | None = None) -> dict[str, object]:
    """Everything about this machine that a job may trip over, as JSON values.

    Keys: ``hostname``, ``kernel``, ``machine``, ``libc``, ``libc_version``, ``python``, ``cpus``
    (usable by this job), ``memory_total`` and ``memory_available`` (bytes, within the job's limit),
    ``gpus``, ``shm_free`` (bytes; null without /dev/shm), ``clock`` (seconds since the epoch) and
    ``node_root`` (null, or see :func:`directory_facts`).

    Args:
        node_root: a directory to examine; empty for none.
        env: the job's variables; None for this process's.
    """
    env = os.environ if env is None else env
    libc, libc_version = c_library()
    limits = cgroup_limits()
    total, available = memory(Path("/proc/meminfo").read_text("utf-8"), limits)
    shm = Path("/dev/shm")  # noqa: S108 - only looked at
    return {
        "hostname": os.uname().nodename,
        "kernel": os.uname().release,
        "machine": os.uname().machine,
        "libc": libc,
        "libc_version": libc_version,
        "python": platform.python_version(),
        "cpus": usable_cpus(env, len(os.sched_getaffinity(0)), limits),
        "memory_total": total,
        "memory_available": available,
        "gpus": count_gpus(
            [entry.name for entry in Path("/dev").iterdir()], env.get("CUDA_VISIBLE_DEVICES")
        ),
        "shm_free": files.facts_of(str(shm)).free_bytes if shm.is_dir() else None,
        "clock": time.time(),
        "node_root": directory_facts(node_root) if node_root else None,
    }


def oom_kills() -> int | None:
    """How many processes the kernel has killed here for want of memory, since it was started.

    Those that a control group's limit has cost are among them. None where it does not count.
    """
    try:
        found = re.search(
            r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text("utf-8"), re.MULTILINE
        )
    except OSError:
        return None
    return int(found[1]) if found else None


def directory_facts(path: str) -> dict[str, object]:
    """A directory's :class:`fs.Facts` with its owner and mode, or ``{path, problem}``."""
    try:
        facts = files.facts_of(path)
        state = Path(path).lstat()
    except (NodeError, OSError) as exc:
        return {"path": path, "problem": str(exc)}
    return {
        "path": path,
        "fstype": facts.fstype,
        "free_bytes": facts.free_bytes,
        "free_inodes": facts.free_inodes,
        "noexec": facts.noexec,
        "read_only": facts.read_only,
        "shared": facts.shared,
        "owner": state.st_uid,
        "mode": f"{state.st_mode & 0o7777:04o}",
    }


def c_library() -> tuple[str, str]:
    """Name and version of the C library this process runs on: ``("glibc", "2.36")``.

    glibc tells through confstr(3); musl's loader prints its version when it is run without
    arguments. ``("unknown", "")`` for another one.
    """
    try:
        said = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):  # the name is glibc's own
        said = ""
    if said.startswith("glibc "):
        return "glibc", said.partition(" ")[2]
    for loader in sorted(Path("/lib").glob("ld-musl-*.so.1")):
        try:
            said = processes.run([str(loader)], timeout=10, check=False).stderr
        except processes.ProcessError:
            continue
        found = re.search(r"Version (\d+(?:\.\d+)+)", said)
        return "musl", str(found[1]) if found else ""
    return "unknown", ""


def usable_cpus(env: Mapping[str, str], affinity: int, limits: Limits) -> int:
    """How many CPUs this job may use here: the least of what Slurm, the mask and cgroups allow.

    ``os.cpu_count()`` counts the machine's.
    """
    counts = [affinity]
    granted = env.get("SLURM_CPUS_ON_NODE", "")
    if granted.isdigit():
        counts.append(int(granted))
    if limits.cpus is not None:
        counts.append(math.floor(limits.cpus))
    return max(1, min(counts))


def memory(meminfo: str, limits: Limits) -> tuple[int, int]:
    """Total and available memory in bytes, from /proc/meminfo and the cgroup's limit and use."""
    rows = re.findall(r"^(\w+):\s+(\d+) kB$", meminfo, re.MULTILINE)
    found = {str(name): int(count) * 1024 for name, count in rows}
    total, available = found.get("MemTotal", 0), found.get("MemAvailable", found.get("MemFree", 0))
    if limits.memory is not None:
        total = min(total, limits.memory)
    if limits.memory_left is not None:
        available = min(available, limits.memory_left)
    return total, available


def count_gpus(devices: Sequence[str], visible: str | None) -> int:
    """How many NVIDIA GPUs a process will see.

    Args:
        devices: names in /dev.
        visible: ``CUDA_VISIBLE_DEVICES``, or None where it is not set. As the CUDA C++ Programming
            Guide has it, the list ends before the first entry that is not a device.
    """
    there = sum(1 for name in devices if _GPU.fullmatch(name))
    if visible is None or not there:
        return there
    seen: list[str] = []
    for entry in (part.strip() for part in visible.split(",")):
        if not (entry.startswith(("GPU-", "MIG-")) or (entry.isdigit() and int(entry) < there)):
            break
        if entry in seen:  # CUDA then shows none at all
            return 0
        seen.append(entry)
    return len(seen)


def cgroup_limits(root: str = "/") -> Limits:
    """What this process's cgroups, version 1 or 2, allow it; the tightest level counts.

    Args:
        root: where /proc and the cgroup file systems are looked for.
    """
    try:
        own = Path(root, "proc/self/cgroup").read_text("utf-8")
        mounts = files.parse_mounts(Path(root, "proc/self/mountinfo").read_text("utf-8", "replace"))
    except OSError:
        return Limits()
    cpus: list[float] = []
    limits: list[int] = []
    left: list[int] = []
    for line in own.splitlines():
        _, controllers, inner = line.split(":", 2)
        for level in _levels(root, controllers, inner, mounts):
            cpus += _quota(level)
            for limit, used in _memory(level):
                limits.append(limit)
                left.append(max(0, limit - used))
    return Limits(min(cpus, default=None), min(limits, default=None), min(left, default=None))


def _levels(root: str, controllers: str, inner: str, mounts: list[files.Mount]) -> list[Path]:
    """The cgroup's directory and those above it, for v2 (no controllers named) or v1."""
    wanted = set(controllers.split(",")) & {"cpu", "memory"}
    for mount in mounts:
        if mount.fstype == "cgroup2" and not controllers:
            break
        if mount.fstype == "cgroup" and wanted & mount.options:
            break
    else:
        return []
    top = Path(root, mount.point.lstrip("/"))
    path = top / inner.lstrip("/")
    # In a container without a cgroup namespace the mount shows the container's group at its top,
    # and the levels named below it do not exist.
    return [level for level in (path, *path.parents) if level == top or top in level.parents]


def _quota(level: Path) -> list[float]:
    v2 = _words(level / "cpu.max")
    v1 = _words(level / "cpu.cfs_quota_us") + _words(level / "cpu.cfs_period_us")
    for words in (v2, v1):
        if len(words) == 2 and words[0].isdigit() and int(words[1]) > 0:  # else "max" or -1
            return [int(words[0]) / int(words[1])]
    return []


def _memory(level: Path) -> list[tuple[int, int]]:
    """(limit, used) in bytes; nothing where there is no limit."""
    for limit_name, used_name, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _words(level / limit_name), _words(level / used_name)
        if limit and limit[0].isdigit() and int(limit[0]) < _NO_LIMIT and used:
            stat = _words(level / "memory.stat")
            reclaimable = int(stat[stat.index(cache) + 1]) if cache in stat else 0
            return [(int(limit[0]), max(0, int(used[0]) - reclaimable))]
    return []


def _words(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").split()
    except OSError:
        return []
