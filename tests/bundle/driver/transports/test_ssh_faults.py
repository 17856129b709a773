"""What becomes of the words of ssh: each end of a host has a problem that says what to do."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bundle.channel.fanout_host import REPORT
from bundle.driver.transports import ssh_faults
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


def report(said: str = "", *, status: int = 255, begun: bool = False, slow: bool = False) -> str:
    end = {"host": "n2", "status": status, "begun": begun, "slow": slow}
    return REPORT + json.dumps({**end, "said": said.splitlines()})


@pytest.mark.parametrize(
    ("line", "code", "why"),
    [
        (
            report("ssh: connect to host n2 port 22: No route to host"),
            ProblemCode.SSH_UNREACHED,
            "connect to host n2 port 22: No route to host",
        ),
        (
            report("ssh: Could not resolve hostname n2: Name or service not known"),
            ProblemCode.SSH_NAME_UNKNOWN,
            "Could not resolve hostname n2: Name or service not known",
        ),
        (
            report("a banner\nann@n2: Permission denied (publickey,password)."),
            ProblemCode.SSH_NO_LOGIN,
            "ann@n2: Permission denied (publickey,password)",
        ),
        (
            report("Host key verification failed."),
            ProblemCode.SSH_KEY_UNKNOWN,
            "Host key verification failed",
        ),
        (report(CHANGED), ProblemCode.SSH_KEY_CHANGED, "Host key verification failed"),
        (
            report("This account is currently not available.", status=1),
            ProblemCode.SSH_LOGIN_FAILED,
            "This account is currently not available.",
        ),
        (report(status=-9, slow=True), ProblemCode.SSH_LOGIN_FAILED, "nothing came back for 90 s"),
        (
            report("Timeout, server n2 not responding.", begun=True),
            *[
                ProblemCode.SSH_CONNECTION_LOST,
                "Timeout, server n2 not responding.; exit status 255",
            ],
        ),
        (report("6", status=91, begun=True), ProblemCode.NO_PYTHON, None),
        (report(status=137, begun=True), ProblemCode.NO_ANSWER_KILLED, "exit status 137"),
        (report("no", status=2, begun=True), ProblemCode.NO_ANSWER_EXITED, "no; exit status 2"),
    ],
)
def test_an_end_has_a_problem(line: str, code: ProblemCode, why: str | None) -> None:
    faults = ssh_faults.step_faults(f"noise\n{line}\n")
    assert list(faults) == ["n2"]
    problem = Problem(faults["n2"].problem, "n2", {**faults["n2"].values, "phase": "x"})
    assert (problem.code, problem.what != "") == (code, True)
    if why is not None:
        assert faults["n2"].values["why"] == why


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    """A ``PATH`` whose ``ssh`` knows hosts that are one real sshd on the loopback interface."""
    needs("sshd")
    Path("/run/sshd").mkdir(exist_ok=True)
    for key in ("host", "other", "user", "stranger"):
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / key)]
        subprocess.run(argv, check=True)
    keys = {key: (tmp_path / f"{key}.pub").read_text().rsplit(" ", 1)[0] for key in KEYS}
    port, free = unused_port(), unused_port()
    (tmp_path / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {tmp_path}/host\n"
        f"AuthorizedKeysFile {tmp_path}/user.pub\nPidFile none\nStrictModes no\nUsePAM no\n"
        "PermitRootLogin yes\n"
    )
    known = {"good": "host", "nokey": "host", "changed": "other", "refused": "host"}
    (tmp_path / "known").write_text("".join(f"{name} {keys[known[name]]}\n" for name in known))
    blocks = [
        f"Host {name}\nHostKeyAlias {name}\nHostName 127.0.0.1\n"
        f"Port {free if name == 'refused' else port}\n"
        f"IdentityFile {tmp_path}/{'stranger' if name == 'nokey' else 'user'}\n"
        for name in (*known, "unknown")
    ]
    common = f"Host *\nIdentitiesOnly yes\nUserKnownHostsFile {tmp_path}/known\n"
    blocks.append(f"{common}GlobalKnownHostsFile /dev/null\n")
    (tmp_path / "config").write_text("".join(blocks))
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {tmp_path}/config "$@"\n')
    program.chmod(0o755)
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin") or "sshd"
    with subprocess.Popen(
        [sshd, "-D", "-e", "-f", str(tmp_path / "sshd_config")], stderr=subprocess.DEVNULL
    ) as server:
        try:
            assert until(lambda: connects(port))
            yield f"{program.parent}:{os.environ['PATH']}"
        finally:
            server.terminate()


def connects(port: int) -> bool:
    """Whether something listens there."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_the_words_of_a_real_ssh(path: str) -> None:
    names = ["good", "nokey", "changed", "unknown", "refused", "nosuch.invalid"]
    code = f"import sys; sys.path.insert(0, {str(REPO)!r}); from bundle.channel import fanout; "
    code += "sys.exit(fanout.main(sys.argv[2:], sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "read line; echo $STAGER_NODE $line", *names],
        env={**os.environ, "PATH": path},
        input=b"well\n",
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.stdout == b"good well\n"
    faults = ssh_faults.step_faults(done.stderr.decode())
    assert {name: fault.problem for name, fault in faults.items()} == {
        "nokey": ProblemCode.SSH_NO_LOGIN,
        "changed": ProblemCode.SSH_KEY_CHANGED,
        "unknown": ProblemCode.SSH_KEY_UNKNOWN,
        "refused": ProblemCode.SSH_UNREACHED,
        "nosuch.invalid": ProblemCode.SSH_NAME_UNKNOWN,
    }


def test_a_report_that_was_cut_is_none() -> None:
    assert ssh_faults.step_faults(report()[:-3]) == {}


def test_the_end_of_the_whole_fan_out() -> None:
    fault = ssh_faults.general_fault(1, f"{report()}\nno memory\n")
    assert fault.values == {"why": "exit status 1; no memory"}
