"""Both sides of an air gap, with real hosts behind it; one of them is the login node there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import processes
from tests.support.building import STAGER
from tests.support.namespaces import REPO, entering
from tests.support.ssh_hosts import SshHosts

NOT_THERE = """\
import importlib.util, shutil
print([name for name in ("pip", "stager", "packaging") if importlib.util.find_spec(name)],
      [name for name in ("pip", "pip3", "uv", "stager") if shutil.which(name)])
"""
LOGIN, NODES = "node01", "node02,node03"
_BASE = {"base": sys.base_prefix, "platbase": sys.base_prefix}


@dataclass(frozen=True, kw_only=True)
class Inside:
    hosts: SshHosts

    base = Path("/tmp/inside")  # a folder of its own ``/tmp``
    home = base / "home"
    lab = home / "lab"
    tool = home / ".local" / "share" / "stager" / "bin" / "stager"

    @property
    def root(self) -> Path:
        return self.hosts.root(LOGIN)

    def seen(self, path: Path) -> Path:
        return self.root / path.relative_to("/")

    def make(self) -> None:
        for folder in ("home", "bin"):
            self.seen(self.base / folder).mkdir(parents=True)
        programs = self.seen(self.base / "bin")
        base = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
        (programs / "python3").symlink_to(base)  # without this test's environment
        (programs / "ssh").symlink_to(self.hosts.state_dir / "bin" / "ssh")

    def carry(self, file: Path) -> Path:
        shutil.copyfile(file, self.seen(self.base / file.name))
        return self.base / file.name

    def run(self, *argv: str | Path, cwd: Path = home) -> subprocess.CompletedProcess[str]:
        """Run a program there, where nothing of the other side can be seen."""
        hidden = [REPO, Path("/etc/xdg/pip"), Path(sysconfig.get_path("purelib", vars=_BASE))]
        hidden += Path("/var/tmp").glob("stager-torch-*")
        shell = [f"mount -t tmpfs none {path}" for path in hidden if path.is_dir()]
        if Path("/etc/pip.conf").exists():
            shell.append("mount --bind /dev/null /etc/pip.conf")
        shell.append(f"cd {cwd}")
        start = [*self.hosts.entering(LOGIN), *entering("-m", "\n".join(shell))]
        env = ["env", "-i", f"HOME={self.home}", f"PATH={self.base / 'bin'}"]
        return processes.run([*start, *env, *argv])

    def stager(self, *arguments: str | Path, cwd: Path = home) -> dict[str, Any]:
        """Run the tool that was installed there; return what it reports."""
        done = self.run(self.tool, arguments[0], "--json", *arguments[1:], cwd=cwd)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    def refusal(self, *arguments: str | Path) -> str:
        done = self.run(self.tool, *arguments)
        assert done.returncode == 1, (arguments, done.stdout, done.stderr)
        return done.stderr


@contextmanager
def made_inside(hosts: SshHosts) -> Iterator[Inside]:
    """The login node; what was brought there is gone afterwards, and from the nodes."""
    made = Inside(hosts=hosts)
    try:
        made.make()
        yield made
    finally:
        shutil.rmtree(made.seen(made.base))
        for node in NODES.split(","):
            hosts.on(node, "sh", "-c", "rm -rf /tmp/stager-*")


def export(
    folder: Path, file: Path, *arguments: str, env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    argv = [*STAGER, "export", "-o", file, "--json", *arguments]
    done = processes.run(argv, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report
