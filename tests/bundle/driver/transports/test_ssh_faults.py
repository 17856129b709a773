"""What becomes of the words of ssh: each end of a host has a problem that says what to do."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bundle.driver.transports.ssh import SshErrors
from bundle.driver.transports.ssh_fanout import REPORT_PREFIX
from bundle.driver.transports.transport import Ended
from bundle.protocol.problem import Problem, ProblemCode
from tests.support.needs import needs
from tests.support.ports import unused_port
from tests.support.processes import until

REPO = Path(__file__).resolve().parents[4]
KEYS = ("host", "other", "user")

CHANGED = """\
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
Host key for n2 has changed and you have requested strict checking.
Host key verification failed."""


CLOSED = "kex_exchange_identification: Connection closed by remote host"
BEHIND = f"{CLOSED}\nConnection closed by UNKNOWN port 65535"
"""What ssh says when its jump host cannot go on, whatever the reason."""
UNVERIFIED = "Host key verification failed"


def report(said: str = "", *, status: int = 255, begun: bool = False, slow: bool = False) -> str:
    end = {"host": "n2", "status": status, "begun": begun, "slow": slow}
    return REPORT_PREFIX + json.dumps({**end, "said": said.splitlines()})


@pytest.mark.parametrize(
    ("line", "code", "why"),
    [
        *(
            (report(f"a banner\nssh: {said}.\n{behind}"), code, said)
            for code, said in (
                (ProblemCode.SSH_UNREACHED, "connect to host n2 port 22: No route to host"),
                (ProblemCode.SSH_UNREACHED, "channel 0: open failed: No route to host"),
                (ProblemCode.SSH_UNREACHED, "Connection timed out during banner exchange"),
                (ProblemCode.SSH_NAME_UNKNOWN, "Could not resolve hostname n2: Name not known"),
                (ProblemCode.SSH_NO_LOGIN, "ann@n2: Permission denied (publickey,password)"),
            )
            for behind in ("", BEHIND)
        ),
        *(
            (report(f"{before}{said}\n{behind}"), ProblemCode.SSH_TURNED_AWAY, said)
            for before, said, behind in (
                (f"{CLOSED}\n", "Connection closed by 10.0.0.7 port 22", ""),
                ("", "kex_exchange_identification: read: Connection reset by peer", ""),
                ("", "Connection reset by 10.0.0.7 port 22", BEHIND),
            )
        ),
        (report(f"{UNVERIFIED}."), ProblemCode.SSH_KEY_UNKNOWN, UNVERIFIED),
        (report(CHANGED), ProblemCode.SSH_KEY_CHANGED, UNVERIFIED),
        (report("Not available.", status=1), ProblemCode.SSH_LOGIN_FAILED, "Not available."),
        (report(status=-9, slow=True), ProblemCode.SSH_LOGIN_FAILED, "no reply for 90 s"),
        (report("Bye.", begun=True), ProblemCode.SSH_CONNECTION_LOST, "Bye.; exit status 255"),
        (report(status=137, begun=True), ProblemCode.NO_ANSWER_KILLED, "exit status 137"),
        (report("no", status=2, begun=True), ProblemCode.NO_ANSWER_EXITED, "no; exit status 2"),
    ],
)
def test_an_end_has_a_problem(line: str, code: ProblemCode, why: str) -> None:
    faults = SshErrors().parse_step_faults(f"noise\n{line}\n")
    assert list(faults) == ["n2"]
    problem = Problem(faults["n2"].problem, "n2", {**faults["n2"].values, "phase": "x"})
    assert (problem.code, problem.what != "") == (code, True)
    assert faults["n2"].values["why"] == why


@dataclass(frozen=True)
class Sshd:
    """A real sshd on the loopback interface."""

    path: str
    """A ``PATH`` whose ``ssh`` knows hosts that are this sshd."""
    port: int
    """The port that it listens on."""

    def fan_out(self, *names: str) -> tuple[list[str], dict[str, Ended]]:
        """Send a line to some hosts; return what they print, and the faults of hosts."""
        code = (
            f"import sys; sys.path.insert(0, {str(REPO)!r}); from bundle.driver.transports import "
            "ssh_fanout; ssh_fanout.PAUSES = (1.0, 1.0); "
            "sys.exit(ssh_fanout.main(sys.argv[2:], sys.argv[1]))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, "read line; echo $STAGER_NODE $line", *names],
            env={**os.environ, "PATH": self.path},
            input=b"well\n",
            capture_output=True,
            timeout=300,
            check=False,
        )
        faults = SshErrors().parse_step_faults(done.stderr.decode())
        return sorted(done.stdout.decode().splitlines()), faults


@pytest.fixture
def sshd(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Sshd]:
    """An sshd; a parameter is a line of its configuration."""
    needs("sshd")
    Path("/run/sshd").mkdir(exist_ok=True)
    for key in (*KEYS, "stranger"):
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / key)]
        subprocess.run(argv, check=True)
    keys = {key: (tmp_path / f"{key}.pub").read_text().rsplit(" ", 1)[0] for key in KEYS}
    (tmp_path / "authorized").write_text(f"{keys['user']}\n")
    port, free = unused_port(), unused_port()
    (tmp_path / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {tmp_path}/host\n"
        f"AuthorizedKeysFile {tmp_path}/authorized\nPidFile none\nStrictModes no\nUsePAM no\n"
        f"PermitRootLogin yes\n{getattr(request, 'param', '')}\n"
    )
    (tmp_path / "config").write_text("".join(ssh_config(tmp_path, keys, port, free)))
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {tmp_path}/config "$@"\n')
    program.chmod(0o755)
    argv = [shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin") or "sshd", "-D", "-e"]
    with subprocess.Popen(
        [*argv, "-f", str(tmp_path / "sshd_config")], stderr=subprocess.DEVNULL
    ) as server:
        try:
            assert until(lambda: connects(port))
            yield Sshd(f"{program.parent}:{os.environ['PATH']}", port)
        finally:
            server.terminate()


def ssh_config(folder: Path, keys: dict[str, str], port: int, free: int) -> Iterator[str]:
    """The configuration of a client; writes the host keys that it knows."""
    known = {"good": "host", "nokey": "host", "changed": "other", "refused": "host"}
    (folder / "known").write_text("".join(f"{name} {keys[known[name]]}\n" for name in known))
    yield "Host behind*\nProxyJump good\nHostKeyAlias good\n"
    for name in (*known, "unknown"):
        yield f"Host {name}* behind*\n" if name == "good" else f"Host {name}\n"
        yield (
            f"HostKeyAlias {name}\nHostName 127.0.0.1\nPort {free if name == 'refused' else port}\n"
            f"IdentityFile {folder}/{'stranger' if name == 'nokey' else 'user'}\n"
        )
    yield f"Host *\nIdentitiesOnly yes\nUserKnownHostsFile {folder}/known\n"
    yield "GlobalKnownHostsFile /dev/null\n"


def connects(port: int) -> bool:
    """Whether something listens there."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_the_words_of_a_real_ssh(sshd: Sshd) -> None:
    names = ["good", "nokey", "changed", "unknown", "refused", "nosuch.invalid", "nosuch@good"]
    lines, faults = sshd.fan_out(*names)
    assert lines == ["good well"]
    assert {name: fault.problem for name, fault in faults.items()} == {
        "nokey": ProblemCode.SSH_NO_LOGIN,
        "changed": ProblemCode.SSH_KEY_CHANGED,
        "unknown": ProblemCode.SSH_KEY_UNKNOWN,
        "refused": ProblemCode.SSH_UNREACHED,
        "nosuch.invalid": ProblemCode.SSH_NAME_UNKNOWN,
        "nosuch@good": ProblemCode.SSH_NO_LOGIN,
    }


@pytest.mark.parametrize("sshd", ["MaxStartups 1:100:1"], indirect=True)
def test_an_sshd_that_takes_no_login_is_named(sshd: Sshd) -> None:
    """Somebody else has the only login that it takes at a time."""
    with contextlib.ExitStack() as others:

        def let_in() -> bool:
            """Whether a connection that stays open is asked for a login."""
            other = others.enter_context(socket.create_connection(("127.0.0.1", sshd.port)))
            return other.recv(4) == b"SSH-"

        assert until(let_in)
        _, faults = sshd.fan_out("good1", "behind1")
    assert {fault.problem for fault in faults.values()} == {ProblemCode.SSH_TURNED_AWAY}
    assert faults.keys() == {"good1", "behind1"}
    assert faults["good1"].values["why"].endswith("tried 3 times")


def test_a_report_that_was_cut_is_none() -> None:
    assert SshErrors().parse_step_faults(report()[:-3]) == {}


def test_the_end_of_the_whole_fan_out() -> None:
    fault = SshErrors().general_fault(1, f"{report()}\nno memory\n")
    assert fault.values == {"why": "exit status 1; no memory"}
