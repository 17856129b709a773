"""Facts about this machine: its CPUs, memory, GPUs, and the share that the job may use."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from ..protocol.digest import Digest
from ..protocol.messages import (
    CodeFacts,
    Gpu,
    GpuFacts,
    HostFacts,
    NodeRootFacts,
    NodeRootProblem,
)
from ..protocol.problem import NodeError
from ..regex import compile_lazily
from ..system import files, processes
from .node_root import code_path

# --- The NVIDIA driver of this machine, and its GPUs ---------------------------------------------

# ``nvidia-smi`` tells most. A driver with a broken GPU may keep it waiting for ever, even where it
# is killed, so nothing waits for its end. What the kernel knows is in ``/proc/driver/nvidia``.

_COLUMNS = "name,memory.total,driver_version,mig.mode.current"
_SECONDS = 20.0  # for all questions; without ``nvidia-persistenced`` the first takes seconds
_MIB = _LIMIT = 1 << 20  # bytes that are read of an answer; many GPUs give some thousands
_ROW = compile_lazily(", ".join(["([^,]*)"] * 4))
_DRIVER = compile_lazily(r"[0-9]{1,6}(\.[0-9]{1,6}){1,3}")
_SHOWN = 200  # characters of a line that are shown
_VERSION = compile_lazily(r"\bKernel Module\b.*?\s(\d+\.\d+(?:\.\d+)*)(?:\s|$)")
"""In ``/proc/driver/nvidia/version``, for either kind of kernel module."""
_PART = compile_lazily(r"^\s+MIG (\S+)", re.MULTILINE)  # an instance of a GPU in ``nvidia-smi -L``
_LIBRARY = compile_lazily(r"libcuda\.so\.(\d+\.\d+(?:\.\d+)*)")


class Question:
    """A question to the driver that is asked at once, and answered later."""

    def __init__(self, env: Mapping[str, str], proc: Path = Path("/proc")) -> None:
        self._folder = proc / "driver" / "nvidia"
        self._library = _library(env)
        self._until = time.monotonic() + _SECONDS
        self._program = shutil.which("nvidia-smi", path=env.get("PATH"))
        self._asked = self._start(f"--query-gpu={_COLUMNS}", "--format=csv,noheader,nounits")

    def answer(self) -> GpuFacts | None:
        """Return the driver and its GPUs; None where there is no driver."""
        lines, fault = self._read(self._asked)
        # Of each GPU the name, memory, driver, and whether it is divided into MIG instances.
        rows = [row for row in map(_ROW.fullmatch, lines) if row]
        if lines and not rows:
            fault = lines[-1][:_SHOWN]
        named = filter(_DRIVER.fullmatch, (row[3] for row in rows))
        driver = kernel_driver(self._folder) or next(named, "")
        if not driver:
            return None  # the program is installed, and there is nothing for it
        library = "" if self._library == driver else self._library
        gpus = self._list_gpus(rows) or _read_gpus_from_proc(self._folder)
        return GpuFacts(driver, library, gpus, fault)

    def _list_gpus(self, rows: Sequence[re.Match[str]]) -> tuple[Gpu, ...]:
        sizes = [int(row[2]) if re.fullmatch("[0-9]{1,9}", row[2]) else 0 for row in rows]
        parts: list[tuple[str, ...]] = [() for _ in rows]
        if any(row[4] == "Enabled" for row in rows):
            listed = "\n".join(self._read(self._start("-L"))[0])
            sections = re.split("^GPU ", listed, flags=re.MULTILINE)[1:]
            if len(sections) == len(rows):
                parts = [tuple(_PART.findall(section)) for section in sections]
        described = zip(rows, sizes, parts)
        return tuple(Gpu(row[1], size * _MIB, part) for row, size, part in described)

    def _start(self, *options: str) -> processes.Process | None:
        if self._program is None:
            return None
        argv, pipe = [self._program, *options], processes.PIPE
        with contextlib.suppress(processes.ProcessError):
            return processes.start(argv, stdout=pipe, stderr=processes.STDOUT)
        return None

    def _read(self, asked: processes.Process | None) -> tuple[Sequence[str], str]:
        if asked is None:
            return (), ""
        out = processes.read_output(asked, max(0.1, self._until - time.monotonic()), _LIMIT)
        if out is None:
            return (), f"nvidia-smi gave no answer in {_SECONDS:g} s"
        if len(out) >= _LIMIT:
            return (), f"nvidia-smi wrote more than {_LIMIT >> 20} MiB"
        lines = [line for line in out.decode(errors="replace").splitlines() if line.strip()]
        if asked.returncode == 0:
            return lines, ""
        why = " ".join(lines[-1:])[:_SHOWN]
        return (), "" if "not a valid field" in why else why  # older than MIG


def kernel_driver(folder: Path = Path("/proc/driver/nvidia")) -> str:
    """Return the version of the driver that the kernel has loaded; empty for none."""
    return parse_driver_version(processes.read_proc(folder / "version"))


def parse_driver_version(text: str) -> str:
    """Return the version of the driver that the kernel's account of it names; empty for none."""
    match = _VERSION.search(text)
    return match[1] if match else ""


def _read_gpus_from_proc(folder: Path) -> tuple[Gpu, ...]:
    found = map(processes.read_proc, sorted(folder.glob("gpus/*/information")))
    names = [re.search(r"^Model:\s*(.+?)\s*$", text, re.MULTILINE) for text in found]
    return tuple(Gpu(name[1]) for name in names if name)


def _library(env: Mapping[str, str]) -> str:
    """Return the version of the driver's library for forward compatibility; empty for none."""
    for folder in filter(None, env.get("LD_LIBRARY_PATH", "").split(":")):
        library = os.path.realpath(os.path.join(folder, "libcuda.so.1"))
        if match := _LIBRARY.fullmatch(os.path.basename(library)):
            return match[1]
    return ""


# --- Facts about this machine, and the share of it that the job may use --------------------------

_GPU = compile_lazily(r"nvidia\d+")
_NO_LIMIT = 1 << 60  # cgroup v1 writes "no limit" as the largest multiple of the page size


class Limits(NamedTuple):
    """Limits that cgroups set; None stands for no limit."""

    cpus: float | None = None  # CPU time a second, in CPUs
    memory: int | None = None
    memory_left: int | None = None  # bytes still free, with page cache that can be reclaimed


def host_facts(node_root: str = "", env: Mapping[str, str] | None = None) -> HostFacts:
    """Return everything about this machine that may trouble a job."""
    env = os.environ if env is None else env
    libc, libc_version = c_library()
    limits = cgroup_limits()
    total, available = read_memory(Path("/proc/meminfo").read_text("utf-8"), limits)
    shm = "/dev/shm"  # noqa: S108 - only examined
    return HostFacts(
        hostname=os.uname().nodename,
        kernel=os.uname().release,
        machine=os.uname().machine,
        libc=libc,
        libc_version=libc_version,
        python=platform.python_version(),
        cpus=usable_cpus(env, len(os.sched_getaffinity(0)), limits),
        memory_total=total,
        memory_available=available,
        gpus=count_gpus(os.listdir("/dev"), env.get("CUDA_VISIBLE_DEVICES")),
        shm_free=files.examine_directory(shm).free_bytes if os.path.isdir(shm) else None,
        clock=time.time(),
        node_root=directory_facts(node_root) if node_root else None,
    )


def oom_kills() -> int | None:
    """Return how many processes the kernel has killed for want of memory; None if not counted."""
    count = re.search(r"^oom_kill (\d+)$", processes.read_proc("/proc/vmstat"), re.MULTILINE)
    return int(count[1]) if count else None


def directory_facts(path: str) -> NodeRootFacts | NodeRootProblem:
    """Return what is known of a directory, or the problem."""
    try:
        return files.examine_directory(path)
    except (NodeError, OSError) as exc:
        return NodeRootProblem(path, str(exc))


def c_library() -> tuple[str, str]:
    """Return name and version of the C library that this process uses: ``("glibc", "2.36")``."""
    with contextlib.suppress(ValueError, OSError):  # the name is glibc's own
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        if name == "glibc":
            return name, version
    for loader in sorted(Path("/lib").glob("ld-musl-*.so.1")):  # which prints its version
        with contextlib.suppress(processes.ProcessError):
            output = processes.run([str(loader)], timeout=10, check=False).stderr
            found = re.search(r"Version (\d+(?:\.\d+)+)", output)
            return "musl", found[1] if found else ""
    return "unknown", ""


def usable_cpus(env: Mapping[str, str], affinity: int, limits: Limits) -> int:
    """Return the number of CPUs for this job: the least that Slurm, the mask and cgroups allow."""
    granted = env.get("SLURM_CPUS_ON_NODE", "")
    by_slurm = int(granted) if granted.isdigit() else affinity
    by_cgroups = affinity if limits.cpus is None else math.floor(limits.cpus)
    return max(1, min(affinity, by_slurm, by_cgroups))


def read_memory(meminfo: str, limits: Limits) -> tuple[int, int]:
    """Return total and available memory in bytes, from /proc/meminfo and the cgroup's limits."""
    rows = re.findall(r"^(\w+):\s+(\d+) kB$", meminfo, re.MULTILINE)
    sizes = {str(name): int(count) * 1024 for name, count in rows}
    total = sizes.get("MemTotal", 0)
    available = sizes.get("MemAvailable", sizes.get("MemFree", 0))
    if limits.memory is not None:
        total = min(total, limits.memory)
    if limits.memory_left is not None:
        available = min(available, limits.memory_left)
    return total, available


def count_gpus(devices: Sequence[str], visible: str | None) -> int:
    """Count visible GPUs; CUDA_VISIBLE_DEVICES ends before its first invalid entry (CUDA guide)."""
    present = sum(1 for name in devices if _GPU.fullmatch(name))
    if visible is None or not present:
        return present

    def is_valid(entry: str) -> bool:
        return entry.startswith(("GPU-", "MIG-")) or (entry.isdigit() and int(entry) < present)

    selected = list(takewhile(is_valid, map(str.strip, visible.split(","))))
    # CUDA shows none at all if one is named twice.
    return len(selected) if len(set(selected)) == len(selected) else 0


def has_step_cgroup() -> bool:
    """Return whether Slurm tracks this step by a cgroup, and sends signals to the tasks alone."""
    # proctrack_p_signal in proctrack_cgroup.c and proctrack_linuxproc.c
    return "/step_" in processes.read_proc("/proc/self/cgroup")


def cgroup_limits(root: str = "/") -> Limits:
    """Return the limits of this process's cgroups, version 1 or 2; the tightest level counts."""
    mounts = files.parse_mounts(processes.read_proc(Path(root, "proc/self/mountinfo")))
    cpus: list[float] = []
    limits: list[int] = []
    left: list[int] = []
    for line in processes.read_proc(Path(root, "proc/self/cgroup")).splitlines():
        _, controllers, group = line.split(":", 2)
        for level in _list_levels(root, controllers, group, mounts):
            cpus += _read_quota(level)
            for limit, used in _read_memory_limit(level):
                limits.append(limit)
                left.append(max(0, limit - used))
    return Limits(min(cpus, default=None), min(limits, default=None), min(left, default=None))


def _list_levels(root: str, controllers: str, group: str, mounts: list[files.Mount]) -> list[Path]:
    """Return a cgroup's directory and its parents: v2 if no controllers are named, else v1."""
    limited = {"cpu", "memory"}.intersection(controllers.split(","))
    for mount in mounts:
        is_v2 = mount.fstype == "cgroup2" and not controllers
        if is_v2 or (mount.fstype == "cgroup" and limited & mount.options):
            top = Path(root, mount.point.lstrip("/"))
            path = top / group.lstrip("/")  # in a container, it may not exist below its mount
            return [one for one in (path, *path.parents) if one == top or top in one.parents]
    return []


def _read_quota(level: Path) -> list[float]:
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        words = [word for name in names for word in processes.read_proc(level / name).split()]
        if len(words) == 2 and words[0].isdigit() and int(words[1]) > 0:  # else "max" or -1
            return [int(words[0]) / int(words[1])]
    return []


def _read_memory_limit(level: Path) -> list[tuple[int, int]]:
    for limit_name, used_name, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = processes.read_proc(level / limit_name).strip()
        used = processes.read_proc(level / used_name).strip()
        if limit.isdigit() and used.isdigit() and int(limit) < _NO_LIMIT:
            stat = processes.read_proc(level / "memory.stat").split()
            reclaimable = int(stat[stat.index(cache) + 1]) if cache in stat else 0
            return [(int(limit), max(0, int(used) - reclaimable))]
    return []


# --- The kind of a machine, as far as compiled code depends on it --------------------------------

# Inductor compiles with ``-march=native`` (``_get_optimization_cflags`` in cpp_builder.py, torch
# 2.13): a processor without one of the features would end a rank with SIGILL.

_COMPILERS = ("g++", "clang++", "c++")
_FEATURES = compile_lazily(r"^(?:flags|Features)\s*:(.*)$", re.MULTILINE)
_MODEL = compile_lazily(r"^model name\s*:(.*)$", re.MULTILINE)
_FIRST_PROCESSOR = 1 << 16  # bytes of /proc/cpuinfo


def describe_code(
    software: Digest,
    host: HostFacts,
    gpus: GpuFacts | None,
    known: Mapping[str, Sequence[str]],
    root: str,
) -> CodeFacts:
    """Return this machine's kind, and whether it has the code known, by kind, from some paths."""
    cpuinfo = processes.read_proc("/proc/cpuinfo")[:_FIRST_PROCESSOR]
    named = os.environ.get("CXX", "").split()[:1]
    compiler = next(filter(None, map(shutil.which, (*named, *_COMPILERS))), "")
    compiler = os.path.realpath(compiler) if compiler else ""  # whose name has its version
    kind, words = describe_kind(software, host, gpus, cpuinfo, compiler)
    folder = code_path(root, kind)
    return CodeFacts(
        kind=kind,
        machine=words,
        has_all=all(os.path.isdir(os.path.join(folder, name)) for name in known.get(kind, ())),
        compiler=compiler,
    )


def describe_kind(
    software: Digest, host: HostFacts, gpus: GpuFacts | None, cpuinfo: str, compiler: str
) -> tuple[Digest, str]:
    """Return the kind of a machine: its digest, and in words."""
    features, model = _FEATURES.search(cpuinfo), _MODEL.search(cpuinfo)
    names = sorted({gpu.name for gpu in gpus.gpus}) if gpus else []
    driver = [gpus.driver] if gpus else []
    system = [host.machine, host.libc, host.libc_version, compiler]
    parts = [*system, *(sorted(features[1].split()) if features else []), "", *names, *driver]
    words = [host.machine, *([model[1].strip()] if model else []), *names]
    return Digest.of("\0".join([software, *parts]).encode()), ", ".join(words)
