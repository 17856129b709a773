"""Jobs that fail on a real cluster, and what ``run`` and ``diagnose`` then say of them."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.cluster import Cluster
from tests.support.needs import lacks
from tests.support.processes import until
from tests.support.provoking import Bench, Said

PROGRAM = f"""\
import os, resource, signal, sys, time

sys.path.append({sysconfig.get_path("purelib")!r})  # the tests' own PyTorch: all nodes see it

def raises():
    raise ValueError("the labels are wrong")

def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)

def asks_for_too_much():
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    bytearray(4 << 30)

def uses_too_much():
    with open(os.environ["GROUP"] + "/cgroup.procs", "w") as handle:
        handle.write(str(os.getpid()))
    kept = []
    while True:
        kept.append(os.urandom(1 << 20))

def lacks_a_module():
    import nothing_of_that_name

def fetches_data():
    import datasets
    datasets.load_dataset("ag_news")

def does_not_copy():
    import numpy
    numpy.array([1, 2, 3], copy=False)

def saves():
    import torch
    torch.save({{"step": 7}}, "/tmp/kept/checkpoint.pt")

def fills_the_disk():
    with open("/tmp/kept/predictions.bin", "wb") as handle:
        while True:
            handle.write(bytes(1 << 20))

def gather():
    # What comes then happens to all of them at the same time.
    place = "begun." + os.environ["SLURM_JOB_ID"]
    os.makedirs(place, exist_ok=True)
    open(place + "/" + rank, "w").close()
    while len(os.listdir(place)) < int(os.environ.get("RANKS", os.environ["WORLD_SIZE"])):
        time.sleep(0.05)

def meets(late=False):
    import datetime, torch, torch.distributed as dist
    gather()
    patience = datetime.timedelta(seconds=float(os.environ.get("PATIENCE", 300)))
    dist.init_process_group("gloo", timeout=patience)
    rank = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(rank)
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=10))
    print("sum of ranks:", rank.item(), flush=True)
    if late:
        print("reading the validation set", flush=True)
        sleeps()
    dist.all_reduce(rank)

def does_not_come():
    meets(late=True)

def sleeps():
    time.sleep(3600)

rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID"))
asked = dict(word.split("=") for word in sys.argv[1:])
print(f"[RANK {{rank}}] WORLD_SIZE={{os.environ.get('WORLD_SIZE')}}", flush=True)
globals()[asked.get(rank, asked["all"])]()
"""
"""``failing.py``: each rank does as it is told, by ``3=raises all=sleeps``."""

SETTINGS = """\
[environment]
requirements = []
[launch]
launcher = "srun"
backend = "gloo"
"""
LOGS = "%x.%j.%N.%t.out"


class Told(NamedTuple):
    node: str
    rank: int | None
    kind: str


def told(failure: Mapping[str, Any] | None) -> Told:
    assert failure is not None
    return Told(failure["node"], failure["rank"], failure["class"])


@dataclass(frozen=True, kw_only=True)
class Scene:
    bench: Bench
    bundle: Path

    @property
    def cluster(self) -> Cluster:
        return self.bench.cluster

    def start(self, *words: str, options: Sequence[str] = ()) -> subprocess.Popen[str]:
        """``stager run`` with two ranks a node on three nodes, unless the options say more."""
        shape = [] if "--nodes" in options else ["--nodes", "3"]
        shape += [] if "--nproc-per-node" in options else ["--nproc-per-node", "2"]
        own = ("--bundle", str(self.bundle), *shape, *options)
        return self.bench.start("run", *own, "--", "failing.py", *words)

    def finish(self, started: subprocess.Popen[str]) -> Said:
        out, err = started.communicate(timeout=600)
        return Said(code=started.returncode, report=json.loads(out), talk=err)

    def run(self, *words: str, options: Sequence[str] = ()) -> Said:
        return self.finish(self.start(*words, options=options))

    def later(self, job: str | Path) -> dict[str, Any]:
        """What ``stager diagnose`` says of a job, or of a directory, from its files alone."""
        said = self.bench.stager("diagnose", str(job))
        assert said.code == 0, said.talk
        for proof in said.report["evidence"]:
            lines = Path(proof["file"]).read_text(errors="replace").splitlines()
            assert proof["text"] in lines[proof["line"] - 1], proof
        assert said.report["evidence"], said.report
        return said.report

    def assert_told(self, said: Said, expected: Told) -> dict[str, Any]:
        """Both say so, at once and later; returns what is said later."""
        assert said.code == 3, said.talk
        assert told(said.failure) == expected, said.talk
        found = self.later(said.report["job_id"])
        assert told(found["first_failure"]) == expected, found
        assert found["first_failure"] == said.failure
        return found

    def theirs(self, script: str, *options: str) -> dict[str, Any]:
        """What is said of somebody else's batch job: of a bare directory of logs, ``$1``."""
        root, logs = self.bench.root, self.bench.logs / "theirs"
        logs.mkdir()
        job = root / "job.sh"
        job.write_text(f"#!/bin/bash\n{textwrap.dedent(script)}")
        argv = ["sbatch", "--parsable", "--nodes=3", f"--chdir={root}", "--job-name=theirs"]
        argv += [f"--output={logs}/slurm-%j.out", *options, str(job), str(logs)]
        number = self.cluster.run(argv).stdout.strip()
        if not until(lambda: self.cluster.ended(number), 600):
            pytest.fail(f"it goes on: {[path.read_text() for path in logs.iterdir()]}")
        return self.later(logs)


def make_scene(cluster: Cluster, project: Path, folder: Path, **env: str) -> Scene:
    root, logs = folder / "place", folder / "logs"
    for made in (root, logs):
        made.mkdir(parents=True)
    (root / "failing.py").write_text(PROGRAM)
    (root / "stager.toml").write_text(SETTINGS)
    offline = project.parent / "offline"
    env = {"OFFLINE_ROOT": str(offline), "PYTHONDONTWRITEBYTECODE": "1", **env}
    bench = Bench(cluster=cluster, root=root, logs=logs, env=env)
    return Scene(bench=bench, bundle=next((offline / "bundles").glob("*.pkgs.tar")))


@contextmanager
def mounted(cluster: Cluster, node: str, options: str) -> Iterator[None]:
    cluster.on(node, ["mkdir", "-p", "/tmp/kept"])
    cluster.on(node, ["mount", "-t", "tmpfs", "-o", options, "kept", "/tmp/kept"])
    try:
        yield
    finally:
        cluster.on(node, ["umount", "--lazy", "/tmp/kept"])


@contextmanager
def remounted(cluster: Cluster, node: str, options: str, back: str) -> Iterator[None]:
    cluster.on(node, ["mount", "-o", f"remount,{options}", "/tmp"])
    try:
        yield
    finally:
        cluster.on(node, ["mount", "-o", f"remount,{back}", "/tmp"])


@contextmanager
def little_memory() -> Iterator[Path]:
    """A control group whose processes the kernel kills beyond 64 MB; skips where there is none."""
    top = Path("/sys/fs/cgroup")
    old = top / "memory"
    place = (old if old.is_dir() else top) / f"stager-test-{os.getpid()}"
    limit = place / ("memory.limit_in_bytes" if old.is_dir() else "memory.max")
    try:
        place.mkdir()
    except OSError as exc:
        lacks("cgroups", str(exc))
    try:
        if not limit.exists():
            lacks("cgroups", f"{top} does not let groups limit memory")
        limit.write_text(str(64 << 20))
        yield place
    finally:
        until(lambda: not (place / "cgroup.procs").read_text())
        place.rmdir()


@contextmanager
def an_urgent_partition(cluster: Cluster, mode: str = "CANCEL") -> Iterator[str]:
    """A partition whose jobs take the nodes of those in others, for as long as the block runs."""
    conf = cluster.state_dir / "slurm.conf"
    before = conf.read_text()
    own = "PartitionName=urgent Nodes=ALL PriorityTier=9 State=UP"
    conf.write_text(f"{before}PreemptType=preempt/partition_prio\nPreemptMode={mode}\n{own}\n")
    try:
        cluster.run(["scontrol", "reconfigure"])
        yield "urgent"
    finally:
        conf.write_text(before)
        cluster.run(["scontrol", "reconfigure"])
