"""Hosts without Slurm made by scripts/cluster: each with an sshd and a ``/tmp`` of its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support import processes
from tests.support.building import STAGER
from tests.support.cluster import Hosts, script
from tests.support.processes import living, until
from tests.support.provoking import Said


@dataclass(frozen=True, kw_only=True)
class SshHosts(Hosts):
    """Hosts that stand, and a folder of the login side that none of them sees."""

    hidden: Path

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "PATH": f"{self.state_dir / 'bin'}:{os.environ['PATH']}"}

    def stager(self, *arguments: str, folder: Path, timeout: float = 900) -> Said:
        return self.end(self.start(*arguments, folder=folder), timeout)

    def start(
        self, *arguments: str, folder: Path, before: Sequence[str] = ()
    ) -> subprocess.Popen[str]:
        argv = [*before, *STAGER, arguments[0], "--json", *arguments[1:]]
        return processes.start(argv, cwd=folder, env=self.env)

    def end(self, started: subprocess.Popen[str], timeout: float = 900) -> Said:
        try:
            out, err = started.communicate(timeout=timeout)
        finally:
            if started.poll() is None:
                started.kill()
        return Said(code=started.returncode, report=json.loads(out or "{}"), talk=err)

    def clean(self, listed: str, folder: Path) -> None:
        done = self.stager("clean", "--nodes-only", "--all", "--hosts", listed, folder=folder)
        assert done.code == 0, done.talk

    def on(self, node: str, *argv: str, check: bool = True) -> str:
        done = processes.run([*self.entering(node), *argv])
        assert not check or done.returncode == 0, (argv, done.stdout, done.stderr)
        return done.stdout

    @property
    def bundle(self) -> Path:
        """The project's first bundle; results that a test left have made others."""
        found = (self.hidden / "offline" / "bundles").glob("*.pkgs.tar")
        return min(found, key=lambda path: path.stat().st_mtime)

    def agents(self, node: str) -> list[str]:
        lines = self.on(node, "ps", "-ww", "-eo", "args").splitlines()
        return [line for line in lines if "agent " in line or "train.py" in line]

    def address(self, node: str) -> str:
        return self.on(node, "hostname", "-I").split()[0]

    def link(self, node: str) -> str:
        """The name that this machine's end of the host's cable has."""
        peer = self.on(node, "ip", "-o", "link", "show", "eth0").split("eth0@if")[1].split(":")[0]
        links = processes.run(["ip", "-o", "link"])
        [link] = [line for line in links.stdout.splitlines() if line.startswith(f"{peer}:")]
        return link.split()[1].partition("@")[0]

    def sshd(self, node: str, *, session: bool = False) -> list[str]:
        """The numbers on the host of its sshd: of the one that listens, or of logins."""
        lines = self.on(node, "ps", "-ww", "-eo", "pid,args").splitlines()
        title = "@notty" if session else "[listener]"
        words = [line.split(maxsplit=1) for line in lines if "sshd:" in line and title in line]
        return [number for number, _ in words]

    @contextmanager
    def stopped_sshd(self, node: str) -> Iterator[None]:
        """Let the host's sshd do nothing while the block runs: connections come, and no word."""
        [number] = self.sshd(node)
        self.on(node, "kill", "-STOP", number)
        try:
            yield
        finally:
            self.on(node, "kill", "-CONT", number)

    def clients(self) -> list[str]:
        return [line for line in living(self.state_dir / "ssh_config") if "/ssh -F " in line]

    def restore(self) -> None:
        script("up", "--name", self.name)

    @contextmanager
    def changed(self, file: Path, text: str) -> Iterator[None]:
        before = file.read_text()
        file.write_text(text)
        try:
            yield
        finally:
            file.write_text(before)


def at_work(hosts: SshHosts, *nodes: str) -> bool:
    return all(any("train.py sleep" in line for line in hosts.agents(node)) for node in nodes)


def start_sleeping(hosts: SshHosts, project: Path, *options: str) -> subprocess.Popen[str]:
    """Start ranks that sleep on all hosts; return when they do."""
    argv = ("run", "--hosts", ",".join(hosts.nodes), *options, "--", "train.py", "sleep")
    started = hosts.start(*argv, folder=project)
    assert until(lambda: started.poll() is not None or at_work(hosts, *hosts.nodes))
    assert started.poll() is None, hosts.end(started).talk
    return started


def words(problems: Sequence[str]) -> str:
    return "; ".join(problems)
