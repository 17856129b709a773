"""Across an air gap, onto two real hosts: outside an index, inside one file and a plain Python.

One of the hosts is the login node inside: its network leads to the other hosts and nowhere else,
and what this machine has of pip, uv and stager cannot be seen there.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stager.core.store import Store
from stager.pack.existing import manifest_of
from tests.support.building import STAGER, Project, Supplies
from tests.support.namespaces import REPO, entering
from tests.support.ssh_hosts import SshHosts
from tests.support.wheelhouse import make_wheel

SETTINGS = """
[project]
name = "lab"
outputs = ["out"]

[launch]
launcher = "processes"
backend = "gloo"
"""
TRAIN = """\
import os, pathlib, socket, time
import alpha

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def mean(gradient, peers):
    # Of all ranks: each sends its own to the first, which sends the mean to each.
    if rank:
        peers[0].write(f"{gradient}\\n")
        peers[0].flush()
        return float(peers[0].readline())
    total = sum((float(peer.readline()) for peer in peers), gradient)
    for peer in peers:
        peer.write(f"{total / world}\\n")
        peer.flush()
    return total / world


def connect():
    while True:
        try:
            return socket.create_connection(place)
        except ConnectionRefusedError:
            time.sleep(0.1)


if rank:
    sockets = [connect()]
else:
    server = socket.create_server(place)
    sockets = [server.accept()[0] for _ in range(world - 1)]
peers = [one.makefile("rw") for one in sockets]
weight, goal = 0.0, rank + 1.0  # each rank has a point of its own; the best weight is their mean
for step in range(40):
    weight -= 0.2 * mean(2 * (weight - goal), peers)
print("rank", rank, "weight", round(weight, 3), "alpha", alpha.VERSION, "FIRST", flush=True)
if rank == 0:
    pathlib.Path("out").mkdir(exist_ok=True)
    pathlib.Path("out/weight.txt").write_text(f"{weight:.3f} {alpha.VERSION} FIRST")
"""
NOT_THERE = """\
import importlib.util, shutil
print([name for name in ("pip", "stager", "packaging") if importlib.util.find_spec(name)],
      [name for name in ("pip", "pip3", "uv", "stager") if shutil.which(name)])
"""
LOGIN, NODES = "node01", "node02,node03"


@dataclass(frozen=True, kw_only=True)
class Inside:
    """The login node behind the gap."""

    hosts: SshHosts

    base = Path("/tmp/inside")
    """A folder of its own ``/tmp``."""
    home = base / "home"
    lab = home / "lab"

    @property
    def root(self) -> Path:
        """Its files, as this machine sees them."""
        init = (self.hosts.state_dir / LOGIN / "init").read_text().strip()
        return Path("/proc", init, "root")

    def seen(self, path: Path) -> Path:
        """A file of its, as this machine sees it."""
        return self.root / path.relative_to("/")

    def make(self) -> None:
        """Make its home, and the only folder of its ``PATH``."""
        for folder in ("home", "bin"):
            self.seen(self.base / folder).mkdir(parents=True)
        programs = self.seen(self.base / "bin")
        (programs / "python3").symlink_to(_interpreter())
        (programs / "ssh").symlink_to(self.hosts.state_dir / "bin" / "ssh")

    def carry(self, file: Path) -> Path:
        """Bring a file in by hand."""
        shutil.copyfile(file, self.seen(self.base / file.name))
        return self.base / file.name

    def run(self, *argv: str | Path, cwd: Path = home) -> subprocess.CompletedProcess[str]:
        """Run a program there."""
        hidden = [REPO, Path("/etc/xdg/pip"), Path(sysconfig.get_path("purelib", vars=_BASE))]
        shell = [f"mount -t tmpfs none {path}" for path in hidden if path.is_dir()]
        shell += [
            f"mount --bind /dev/null {path}" for path in [Path("/etc/pip.conf")] if path.exists()
        ]
        shell.append(f"cd {cwd}")
        start = [*self.hosts.entering(LOGIN), *entering("-m", "\n".join(shell))]
        env = ["env", "-i", f"HOME={self.home}", f"PATH={self.base / 'bin'}"]
        return subprocess.run(
            [*start, *env, *map(str, argv)],
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )

    def stager(self, *arguments: str | Path, cwd: Path = home) -> dict[str, Any]:
        """Run the tool that was installed there; return what it reports."""
        tool = self.home / ".local" / "share" / "stager" / "bin" / "stager"
        done = self.run(tool, arguments[0], "--json", *arguments[1:], cwd=cwd)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    def refusal(self, *arguments: str | Path) -> str:
        """What the tool says when it refuses something."""
        tool = self.home / ".local" / "share" / "stager" / "bin" / "stager"
        done = self.run(tool, *arguments)
        assert done.returncode == 1, (arguments, done.stdout, done.stderr)
        return done.stderr


_BASE = {"base": sys.base_prefix, "platbase": sys.base_prefix}


def _interpreter() -> Path:
    """The Python without this test's environment."""
    return Path(getattr(sys, "_base_executable", sys.executable)).resolve()


@pytest.fixture
def inside(hosts: SshHosts) -> Iterator[Inside]:
    """The login node; what was brought there is gone afterwards, and from the nodes."""
    made = Inside(hosts=hosts)
    try:
        made.make()
        yield made
    finally:
        shutil.rmtree(made.seen(made.base))
        for node in NODES.split(","):
            hosts.on(node, "sh", "-c", "rm -rf /tmp/stager-*")


@dataclass(frozen=True, kw_only=True)
class Outside:
    """The machine with the index."""

    project: Project
    tool_env: Mapping[str, str]
    """Variables with which the tool's own packages are found."""

    def export(self, name: str, *arguments: str) -> tuple[Path, dict[str, Any]]:
        """Build, and write what is carried."""
        built = self.project.stager("build", "--upgrade", "--json")
        assert built.returncode == 0, built.stderr
        file = self.project.root.with_name(name)
        done = subprocess.run(
            [*STAGER, "export", "-o", str(file), "--json", *arguments],
            cwd=self.project.root,
            env=dict(self.tool_env),
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        return file, {**json.loads(built.stdout), **json.loads(done.stdout)}


@pytest.fixture
def outside(
    hosts: SshHosts,
    index_env: dict[str, str],
    supplies: Supplies,
    own_place: None,
    pip_settings: Mapping[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Outside]:
    """The project and its store, where no host sees them."""
    folder = hosts.hidden / "outside"
    (folder / "lab").mkdir(parents=True)
    (folder / "lab" / "train.py").write_text(TRAIN)
    monkeypatch.setenv("OFFLINE_ROOT", str(folder / "offline"))
    project = Project(root=folder / "lab", store=supplies.put_into(Store(folder / "offline")))
    without_index = {name: value for name, value in os.environ.items() if name not in index_env}
    try:
        yield Outside(
            project=project.settings("alpha", more=SETTINGS),
            tool_env={**without_index, **pip_settings},
        )
    finally:
        shutil.rmtree(folder)


def test_from_nothing_to_two_nodes(outside: Outside, inside: Inside, wheelhouse: Path) -> None:
    """Install, import, verify, train; edit and build there; then only what is new."""
    assert inside.run("python3", "-c", NOT_THERE).stdout == "[] []\n"
    file, first = outside.export("lab.carry.tar", "--with-tool")
    carried = inside.carry(file)
    installed = inside.run("python3", carried, "install")
    assert installed.returncode == 0, installed.stderr
    imported = inside.stager("import", carried, "--project", inside.lab, "--id", first["id"])
    assert (imported["project"], imported["notes"]) == (str(inside.lab), [])
    hosts = ("--hosts", NODES, "--nodes", "2")
    verified = inside.stager("verify", *hosts, "--id", first["id"])
    assert [node["ok"] for node in verified["nodes"]] == [True, True]
    train = (*hosts, "--nproc-per-node", "1", "--", "train.py")
    ran = inside.stager("run", "--id", first["id"], *train, cwd=inside.lab)
    assert (ran["nodes"], ran["world_size"]) == (NODES.split(","), 2)
    assert result(inside) == "1.500 1.0 FIRST"

    # The code is changed there; neither an index nor a wheel is needed.
    script = inside.seen(inside.lab / "train.py")
    script.write_text(script.read_text().replace("FIRST", "EDITED"))
    built = inside.stager("build", cwd=inside.lab)
    assert (built["proved"], built["layers_built"]) == (True, 2)  # the project and the trainer
    inside.stager("run", *train, cwd=inside.lab)
    assert result(inside) == "1.500 1.0 EDITED"

    # Outside a package changes: only that is carried, and sent to the nodes.
    noise = {
        "alpha/__init__.py": "VERSION = '9.0'\n",
        "alpha/data": random.Random(5).randbytes(400_000),
    }
    make_wheel(wheelhouse, "alpha", "9.0", files=noise)
    file, second = outside.export("more.carry.tar", "--base", first["id"][:12])
    manifest = manifest_of(Path(second["bundle"]))
    layer = next(layer for layer in manifest.layers if layer.name == "alpha")
    assert second["layers"] == 1
    assert file.stat().st_size <= 1.1 * layer.size
    cut = file.with_name("cut.carry.tar")
    cut.write_bytes(file.read_bytes()[:-1000])
    assert "ends too early" in inside.refusal("import", inside.carry(cut))
    assert "does not carry the bundle" in inside.refusal("import", carried, "--id", second["id"])
    inside.stager("import", inside.carry(file), "--id", second["id"])
    ran = inside.stager("run", "--id", second["id"], *train, cwd=inside.lab)
    assert result(inside) == "1.500 9.0 FIRST"
    assert ran["bytes_broadcast"] <= 1.1 * layer.size


def result(inside: Inside) -> str:
    """What the first rank wrote, brought home; it is removed, as the next goes beside it."""
    out = inside.seen(inside.lab / "out")
    text = (out / "weight.txt").read_text()
    shutil.rmtree(out)
    return text
