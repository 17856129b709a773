"""Signatures that are required, on real hosts over ssh: each host checks for itself."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stager.trust import locate_signature
from tests.support.processes import until
from tests.support.signing import ALICE, Key, allow, begun_in_time
from tests.support.ssh_hosts import SshHosts, words

TWO = ("--hosts", "node[01-02]")
GATE = 'command="touch /tmp/waits; until [ -e /tmp/opened ]; do sleep 0.1; done; \
eval \\"$SSH_ORIGINAL_COMMAND\\"" '
"""An option of a line of ``authorized_keys``: a login that goes on when a file is there."""


@pytest.fixture
def trusted(
    hosts: SshHosts, project: Path, alice: Key, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The folder with alice's key as the only allowed signer's, which is asked for."""
    folder = hosts.hidden / "trusted"
    folder.mkdir()
    signers = allow(folder, f"{ALICE} {alice.public}")
    monkeypatch.setenv("STAGER_TRUST_ALLOWED_SIGNERS", str(signers))
    monkeypatch.setenv("STAGER_TRUST_REQUIRE", "true")
    yield folder
    signers.unlink()
    folder.rmdir()
    locate_signature(hosts.bundle).unlink(missing_ok=True)


def sign(hosts: SshHosts, project: Path, key: Key) -> None:
    done = hosts.stager("sign", "--key", str(key.private), folder=project)
    assert done.code == 0, done.talk


@contextmanager
def gate(hosts: SshHosts, node: str) -> Iterator[None]:
    """Let logins to a host wait until ``/tmp/opened`` is there."""
    keys = hosts.state_dir / node / "authorized_keys"
    lines = [f"{GATE}{line}\n" for line in keys.read_text().splitlines()]
    with hosts.changed(keys, "".join(lines)):
        try:
            yield
        finally:
            hosts.on(node, "rm", "-f", "/tmp/opened", "/tmp/waits")


@pytest.mark.full
def test_a_key_that_expires_before_a_host_is_reached(
    hosts: SshHosts, project: Path, trusted: Path, alice: Key
) -> None:
    """That host does nothing for the job, whatever the other one has said by then."""

    def start() -> subprocess.Popen[str] | None:
        started = hosts.start("verify", *TWO, folder=project)
        waits = ("sh", "-c", "ls /tmp/waits 2>/dev/null || true")
        assert until(lambda: started.poll() is not None or bool(hosts.on("node02", *waits)))
        if started.poll() is None:
            return started
        done = hosts.end(started)
        assert "key has expired" in done.talk, done.talk
        return None

    sign(hosts, project, alice)
    hosts.clean(TWO[1], project)
    with gate(hosts, "node02"):
        started = begun_in_time(trusted, alice, start)
        hosts.on("node02", "touch", "/tmp/opened")
        done = hosts.end(started)
    assert done.code == 3, done.talk
    (bad,) = [node for node in done.report["nodes"] if node["node"] == "node02"]
    assert "the bundle's signature is not accepted" in words(bad["problems"]), done.talk
    assert "key has expired" in words(bad["problems"])
    assert hosts.on("node02", "sh", "-c", "ls -d /tmp/stager-*/envs/*", check=False) == ""


@pytest.mark.full
def test_a_host_without_ssh_keygen_is_named(
    hosts: SshHosts, project: Path, trusted: Path, alice: Key
) -> None:
    sign(hosts, project, alice)
    hosts.on("node02", "mount", "--bind", "/dev/null", "/usr/bin/ssh-keygen")
    try:
        done = hosts.stager("verify", *TWO, folder=project)
    finally:
        hosts.on("node02", "umount", "--lazy", "/usr/bin/ssh-keygen")
    assert done.code == 0, done.talk
    assert "node02: the bundle's signature was not checked there, only its id" in done.talk
