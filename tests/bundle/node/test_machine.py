"""What a machine is: recorded cgroup trees, and this machine's real facts."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bundle.node import machine
from bundle.node.machine import Limits
from bundle.protocol.codec import decode, encode
from bundle.protocol.digest import Digest
from bundle.protocol.messages import Gpu, GpuFacts, HostFacts, NodeRootFacts, NodeRootProblem
from tests.support.gpu_machines import CLOSED_MODULE, OPEN_MODULE, nvidia_smi, proc
from tests.support.processes import is_alive, until

GB = 1 << 30


def limits(root: Path, own: str, mounts: str, files: dict[str, str]) -> Limits:
    """Those below a root directory with /proc/self as given and files below the cgroup mounts."""
    given = {"proc/self/cgroup": own, "proc/self/mountinfo": mounts, **files}
    for name, content in given.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return machine.cgroup_limits(str(root))


V2 = "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 24 0:27 / /cg/memory rw - cgroup cgroup rw,memory\n"
    "32 24 0:28 / /cg/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
)


def test_version_2_the_tightest_level_counts(tmp_path: Path) -> None:
    job = "sys/fs/cgroup/system.slice/slurmstepd.scope/job_7"
    files = {
        f"{job}/step_0/cpu.max": "max 100000\n",
        f"{job}/step_0/memory.max": "max\n",
        f"{job}/step_0/memory.current": "5\n",
        f"{job}/cpu.max": "350000 100000\n",
        f"{job}/memory.max": f"{4 * GB}\n",
        f"{job}/memory.current": f"{3 * GB}\n",
        f"{job}/memory.stat": f"anon {GB}\ninactive_file {2 * GB}\nactive_file 0\n",
        "sys/fs/cgroup/system.slice/memory.max": f"{8 * GB}\n",
        "sys/fs/cgroup/system.slice/memory.current": f"{int(7.5 * GB)}\n",
        "sys/fs/cgroup/system.slice/cpu.max": "800000 100000\n",
    }
    own = "0::/system.slice/slurmstepd.scope/job_7/step_0\n"
    # Of the job's 3 GB 2 are cache, so 3 are left; of its parent's 8 GB only half a one is.
    assert limits(tmp_path, own, V2, files) == Limits(3.5, 4 * GB, GB // 2)


def test_version_1(tmp_path: Path) -> None:
    files = {
        "cg/memory/slurm/job/memory.limit_in_bytes": f"{2 * GB}\n",
        "cg/memory/slurm/job/memory.usage_in_bytes": f"{GB}\n",
        "cg/memory/slurm/job/memory.stat": "total_inactive_file 1024\n",
        "cg/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "cg/memory/memory.usage_in_bytes": "1\n",
        "cg/cpu/slurm/job/cpu.cfs_quota_us": "-1\n",
        "cg/cpu/slurm/job/cpu.cfs_period_us": "100000\n",
        "cg/cpu/slurm/cpu.cfs_quota_us": "150000\n",
        "cg/cpu/slurm/cpu.cfs_period_us": "100000\n",
    }
    own = "4:memory:/slurm/job\n3:cpuset:/slurm\n1:cpu,cpuacct:/slurm/job\n0::/\n"
    assert limits(tmp_path, own, V1, files) == Limits(1.5, 2 * GB, GB + 1024)


def test_a_container_that_sees_its_own_group_at_the_top(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/cpu.max": "200000 100000\n",
        "sys/fs/cgroup/memory.max": f"{GB}\n",
        "sys/fs/cgroup/memory.current": "0\n",
    }
    own = "0::/docker/0123456789abcdef\n"
    assert machine.cgroup_limits(str(tmp_path)) == Limits()
    assert limits(tmp_path, own, V2, files) == Limits(2.0, GB, GB)


def test_usable_cpus() -> None:
    for slurm, affinity, quota, cpus in (
        ("", 8, None, 8), ("4", 8, None, 4), ("4", 2, None, 2), ("", 8, 3.5, 3), ("", 8, 0.5, 1),
        ("many", 8, None, 8),
    ):  # fmt: skip
        env = {"SLURM_CPUS_ON_NODE": slurm} if slurm else {}
        assert machine.usable_cpus(env, affinity, Limits(cpus=quota)) == cpus


def test_memory() -> None:
    text = (
        "MemTotal:       1000 kB\nMemFree:  100 kB\nMemAvailable:    600 kB\nHugePages_Total: 0\n"
    )
    assert machine.read_memory(text, Limits()) == (1024000, 614400)
    assert machine.read_memory(text, Limits(memory=5000, memory_left=0)) == (5000, 0)
    assert machine.read_memory(text, Limits(memory=GB, memory_left=GB)) == (1024000, 614400)


DEVICES = ["null", "nvidia0", "nvidia1", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "sda"]


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4), ("", 0), ("0", 1), ("0,3", 2), ("3, 1 ,0", 3), ("-1", 0), ("0,-1,1", 1),
        ("0,4", 1), ("NoDevFiles", 0), ("0,0", 0), ("GPU-8932f937-d72c,GPU-1", 2), ("MIG-12", 1),
    ],
)  # fmt: skip
def test_gpus(visible: str | None, count: int) -> None:
    assert machine.count_gpus(DEVICES, visible) == count
    assert machine.count_gpus(["null", "nvidiactl"], visible) == 0


CPUINFO = "processor\t: 0\nmodel name\t: Xeon 9\nflags\t\t: fpu avx2 avx512f\n\n" * 2
H100 = GpuFacts("570.124.06", gpus=(Gpu("NVIDIA H100"), Gpu("NVIDIA H100")))


def kind_of(cpuinfo: str = CPUINFO, gpus: GpuFacts | None = H100, **changed: Any) -> str:
    software, compiler = changed.pop("software", "a" * 64), changed.pop("compiler", "/bin/g++-12")
    host = replace(machine.host_facts(), machine="x86_64", libc="glibc", libc_version="2.36")
    found = replace(host, **changed)
    return machine.describe_kind(Digest(software), found, gpus, cpuinfo, compiler)[0]


def test_machines_of_one_kind_have_one_name() -> None:
    others = [CPUINFO.replace("Xeon 9", "EPYC"), CPUINFO.replace("fpu avx2", "avx2 fpu")]
    assert {kind_of(other) for other in others} == {kind_of()}
    assert kind_of(hostname="another", cpus=1, memory_total=1) == kind_of()
    changes: list[dict[str, Any]] = [
        {"software": "b" * 64},
        {"cpuinfo": CPUINFO.replace(" avx512f", "")},
        {"cpuinfo": ""},
        {"gpus": None},
        {"gpus": replace(H100, driver="580.1")},
        {"gpus": replace(H100, gpus=(Gpu("NVIDIA A100"),))},
        {"libc_version": "2.28"},
        {"machine": "aarch64"},
        {"compiler": "/bin/g++-14"},
        {"compiler": ""},
    ]
    assert len({kind_of(), *(kind_of(**change) for change in changes)}) == len(changes) + 1
    words = machine.describe_kind(Digest("a" * 64), machine.host_facts(), H100, CPUINFO, "")[1]
    assert words == f"{platform.machine()}, Xeon 9, NVIDIA H100"


def test_the_facts_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = machine.host_facts(str(tmp_path))
    assert decode(HostFacts, json.loads(json.dumps(encode(facts)))) == facts
    assert facts.hostname == platform.node()
    assert (facts.libc, facts.libc_version) == platform.libc_ver()
    assert facts.machine == platform.machine()
    assert facts.python == platform.python_version()
    assert 1 <= facts.cpus <= len(os.sched_getaffinity(0))
    assert 0 < facts.memory_available <= facts.memory_total
    root = facts.node_root
    assert isinstance(root, NodeRootFacts)
    assert (root.owner, root.path) == (os.getuid(), str(tmp_path))
    assert root.mode == f"{tmp_path.stat().st_mode & 0o7777:04o}"
    absent = machine.directory_facts(str(tmp_path / "absent"))
    assert isinstance(absent, NodeRootProblem)
    assert "No such file" in absent.problem
    # Some network file systems report 8 EiB of free space: a size that travels all the same.
    endless = os.statvfs_result((4096, 4096, *[(1 << 63) - 1] * 6, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: endless)
    root = machine.directory_facts(str(tmp_path))
    assert isinstance(root, NodeRootFacts)
    assert decode(NodeRootFacts, encode(root)) == root


def test_a_process_s_own_cpus_count() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert machine.host_facts().cpus == 1
    finally:
        os.sched_setaffinity(0, before)


# --- What a node finds out about its NVIDIA driver and GPUs --------------------------------------


A100 = "NVIDIA A100-SXM4-40GB"
GIB40 = 40960 << 20
MIG_LISTING = f"""GPU 0: {A100} (UUID: GPU-1)
  MIG 3g.20gb     Device  0: (UUID: MIG-1)
  MIG 2g.10gb     Device  1: (UUID: MIG-2)
GPU 1: {A100} (UUID: GPU-2)"""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a program that gets no processor for a while answer all the same."""
    monkeypatch.setattr(machine, "_SECONDS", 300.0)


def found(folder: Path, kernel: Path = Path("/nowhere"), **env: str) -> GpuFacts | None:
    path = f"{folder}{os.pathsep}{os.defpath}"
    return machine.Question({"PATH": path, **env}, kernel).answer()


def test_a_machine_without_a_driver_and_one_with_a_gpu_in_parts(tmp_path: Path) -> None:
    assert found(tmp_path) is None
    nvidia_smi(tmp_path, "NVIDIA-SMI has failed", code=9)
    assert found(tmp_path) is None
    rows = f"{A100}, 40960, 535.129.03, Enabled\n{A100}, 40960, 535.129.03, Disabled"
    nvidia_smi(tmp_path, rows, MIG_LISTING)
    parts = Gpu(A100, GIB40, ("3g.20gb", "2g.10gb"))
    assert found(tmp_path) == GpuFacts("535.129.03", gpus=(parts, Gpu(A100, GIB40)))


@pytest.mark.parametrize("module", [OPEN_MODULE, CLOSED_MODULE])
def test_the_kernel_knows_the_driver_and_the_names(tmp_path: Path, module: str) -> None:
    """There is no ``nvidia-smi``, or it knows less than is asked."""
    kernel = proc(tmp_path / "proc", "525.60.13", "Tesla V100", "Tesla V100", module=module)
    names = (Gpu("Tesla V100"), Gpu("Tesla V100"))
    assert found(tmp_path, kernel) == GpuFacts("525.60.13", gpus=names)
    nvidia_smi(tmp_path, 'Field "mig.mode.current" is not a valid field to query.', code=2)
    assert found(tmp_path, kernel) == GpuFacts("525.60.13", gpus=names)
    fault = "Failed to initialize NVML: Driver/library version mismatch"
    nvidia_smi(tmp_path, fault, code=18)
    assert found(tmp_path, kernel) == GpuFacts("525.60.13", gpus=names, fault=fault)


def test_nobody_waits_for_a_driver_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_SECONDS", 0.2)
    nvidia_smi(tmp_path, "", body="exec sleep 900")
    kernel = proc(tmp_path / "proc", "570.26")
    facts = found(tmp_path, kernel)  # the test would last as long as the program
    assert facts == GpuFacts("570.26", fault="nvidia-smi gave no answer in 0.2 s")


def test_a_newer_library_stands_in_for_the_driver(tmp_path: Path) -> None:
    kernel = proc(tmp_path / "proc", "535.54.03")
    for version in ("535.54.03", "580.65.06"):
        folder = tmp_path / version
        folder.mkdir()
        (folder / f"libcuda.so.{version}").touch()
        (folder / "libcuda.so.1").symlink_to(f"libcuda.so.{version}")
    both = f"/nowhere::{tmp_path}/580.65.06:{tmp_path}/535.54.03"
    assert found(tmp_path, kernel, LD_LIBRARY_PATH=both) == GpuFacts("535.54.03", "580.65.06")
    own = f"{tmp_path}/535.54.03"
    assert found(tmp_path, kernel, LD_LIBRARY_PATH=own) == GpuFacts("535.54.03")


@pytest.mark.parametrize("memory", ["\u00b2", "9" * 5000, "many"])
def test_rows_that_make_no_sense_are_no_gpus_of_a_driver(tmp_path: Path, memory: str) -> None:
    nvidia_smi(tmp_path, f"A, {memory}, [N/A], [N/A]")
    assert found(tmp_path) is None
    kernel = proc(tmp_path / "proc", "570.26")
    assert found(tmp_path, kernel) == GpuFacts("570.26", gpus=(Gpu("A"),))


def test_a_flood_is_not_read_to_its_end(tmp_path: Path) -> None:
    """It is ended with what it started."""
    nvidia_smi(tmp_path, "", body=f"echo $$ > {tmp_path}/pid; yes; sleep 300")
    kernel = proc(tmp_path / "proc", "570.26")
    facts = found(tmp_path, kernel)
    assert facts == GpuFacts("570.26", fault="nvidia-smi wrote more than 1 MiB")
    assert until(lambda: not is_alive(int((tmp_path / "pid").read_text())))
