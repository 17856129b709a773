"""A project with the real PyTorch and Hugging Face stack, built once, and jobs that use it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.support.processes import Done, living, run, start

STAGER = str(Path(sys.executable).with_name("stager"))  # the installed program, as a user runs it
REQUIREMENTS = ("torch==2.13.0", "numpy", "transformers", "datasets", "accelerate")
SETTINGS = f"""\
[environment]
requirements = {json.dumps(REQUIREMENTS)}
torch-backend = "cpu"

[cluster]
nodes = 2

[launch]
nproc-per-node = 2
"""
# A user's program, as it would be without stager.
TRAIN = """\
import sys
import torch
import torch.distributed as dist

dist.init_process_group()
rank = torch.tensor(float(dist.get_rank()))
dist.all_reduce(rank)
print(f"[RANK {dist.get_rank()}] WORLD_SIZE={dist.get_world_size()}", flush=True)
print("sum of ranks:", rank.item(), "arguments:", sys.argv[1:], flush=True)
dist.destroy_process_group()
"""
# What of the caller's variables the project's commands see, by their beginnings.
PASSED_ON = ("PATH", "LANG", "LC_", "TMPDIR", "TZ", "SSL_", "REQUESTS_CA", "UV_", "CI")
PASSED_ON += ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
PLACES = Path("/var/tmp")  # the nodes of a cluster on this machine have a ``/tmp`` of their own
_PREFIX = "stager-torch-"
COMMON = os.environ.get("STAGER_TEST_SHARED")  # a directory that test processes have in common


R = TypeVar("R", bound="Ran")


@dataclass(frozen=True, kw_only=True)
class Ran:
    code: int
    report: dict[str, Any]  # the JSON object that it printed, and nothing else
    stderr: str
    logs: Path

    @classmethod
    def of(cls: type[R], done: Done, logs: Path) -> R:
        try:
            report = json.loads(done.stdout)
        except ValueError:
            raise AssertionError(f"no JSON alone: {done.stdout}{done.stderr}") from None
        return cls(code=done.returncode, report=report, stderr=done.stderr, logs=logs)

    def log(self, node: str) -> str:
        found = self.logs.glob(f"*.{self.report['job_id']}.{node}.*.out")
        paths = sorted(found, key=lambda path: int(path.name.split(".")[-2]))
        assert paths, f"{node} has no log"
        return "".join(path.read_text() for path in paths)

    def output(self) -> list[str]:
        return [line for node in self.report["nodes"] for line in self.log(node).splitlines()]


@dataclass(frozen=True, kw_only=True)
class TorchProject:
    root: Path
    nodes: Path  # the directory that holds the node roots
    env: Mapping[str, str]
    bundle: Path
    bundle_id: str

    def stager(
        self,
        *arguments: str | Path,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 900,
    ) -> subprocess.CompletedProcess[str]:
        variables = {**self.env, **(env or {})}
        return run([STAGER, *arguments], cwd=cwd or self.root, env=variables, seconds=timeout)

    def job(
        self,
        action: str,
        *arguments: str | Path,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        bundle: Path | None = None,
    ) -> Ran:
        """Run ``verify`` or ``run`` on the bundle, from a directory that gets ``logs``."""
        options = ["--json", "--log-dir", cwd / "logs", "--bundle", bundle or self.bundle]
        defaults = {"--allocation": "local", "--nodes": "2"}
        if action == "run":
            defaults["--nproc-per-node"] = "2"
        for name in defaults.keys() - {*arguments}:
            options += [name, defaults[name]]
        done = self.stager(action, *options, *arguments, cwd=cwd, env=env)
        return Ran.of(done, cwd / "logs")

    def run(self, script: str, *arguments: str, cwd: Path, options: tuple[str, ...] = ()) -> Ran:
        (cwd / "script.py").write_text(script)
        return self.job("run", *options, "--", "script.py", *arguments, cwd=cwd)

    def start(self, *arguments: str | Path, cwd: Path) -> subprocess.Popen[str]:
        return start([STAGER, *arguments], cwd=cwd, env=self.env)

    def left_over(self) -> list[str]:
        """What a finished job must not leave: processes, and its private directories."""
        # A test over ssh, of another part of the suite, names this place to hide it from its nodes.
        running = [one for one in living(self.nodes, self.root.parent) if "nsenter" not in one]
        return running + [str(path) for path in self.nodes.rglob("jobs/*")]


@pytest.fixture(scope="session")
def torch_project(pip_settings: Mapping[str, str]) -> Iterator[TorchProject]:
    """A project with PyTorch, built by the real command; gone when the tests are done."""
    base = _place()
    # On disk: the nodes of a cluster on this machine keep gigabytes of environments in memory, and
    # ranks that the kernel kills for want of it are no finding.
    nodes = base / "nodes"
    for name in ("home", "project", "nodes"):
        (base / name).mkdir()
    caches = os.environ.get("UV_CACHE_DIR", str(base / "cache" / "uv"))
    env = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    env |= {
        **pip_settings,
        # What was downloaded for an earlier run of the tests is used again where that is wanted.
        "PIP_CACHE_DIR": os.environ.get("PIP_CACHE_DIR", str(Path(caches).parent / "pip")),
        "UV_CACHE_DIR": caches,
        "HOME": str(base / "home"),
        "OFFLINE_ROOT": str(base / "offline"),
        "STAGER_NODE_ROOT": str(nodes),
    }
    (base / "project" / "stager.toml").write_text(SETTINGS)
    (base / "project" / "train.py").write_text(TRAIN)
    try:
        with _built_once(base):
            argv = [STAGER, "build", "--json"]
            done = run(argv, cwd=base / "project", env=env, seconds=1800)
            assert done.returncode == 0, done.stderr
        made = json.loads(done.stdout)
        bundle = {"bundle": Path(made["bundle"]), "bundle_id": made["id"]}
        yield TorchProject(root=base / "project", nodes=nodes, env=env, **bundle)
    finally:
        shutil.rmtree(base, ignore_errors=True)


@contextlib.contextmanager
def _built_once(base: Path) -> Iterator[None]:
    """Let the first of the test processes that run side by side build, and the others copy that."""
    if not COMMON:
        yield
        return
    made, places = Path(COMMON, "torch"), ("project", "offline")
    with Path(COMMON, "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.is_dir():
            yield
            for place in places:
                shutil.copytree(base / place, made.with_suffix(".partial") / place, symlinks=True)
            made.with_suffix(".partial").rename(made)
            return
    for place in places:
        shutil.copytree(made / place, base / place, symlinks=True, dirs_exist_ok=True)
    yield


def _place() -> Path:
    """A new directory for everything else; those of test runs that were killed are removed."""
    for other in PLACES.glob(f"{_PREFIX}*"):
        owner = other.name[len(_PREFIX) :].split("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            shutil.rmtree(other, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=PLACES))
