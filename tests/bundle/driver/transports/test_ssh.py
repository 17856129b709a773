"""One command on many hosts: processes in the place of ssh, a real one, and what its words mean."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bundle.driver.transports.ssh import SshErrors
from bundle.driver.transports.ssh_fanout import LOGINS, PAUSES, REPORT_PREFIX, LoginQueue
from bundle.protocol.problem import Problem, ProblemCode
from tests.support.needs import needs
from tests.support.ports import unused_port
from tests.support.processes import until

REPO = Path(__file__).resolve().parents[4]
SSH = """\
#!/bin/sh
while [ "$1" != -- ]; do shift; done
case $2 in
    down*) echo "ssh: connect to host $2 port 22: Connection refused" >&2; exit 255 ;;
    chatty*) echo "Welcome to $2"; echo "last line without an end of $2" ;;
    hung*) exec sleep 600 ;;
    slow*) # is turned away when it is asked to end
        trap 'kill $!; echo "Connection closed by 10.0.0.7 port 22" >&2; exit 255' TERM
        sleep 600 & wait ;;
    full*) # takes one login at a time
        if ! mkdir "$0.$2" 2>/dev/null; then
            echo "kex_exchange_identification: Connection closed by remote host" >&2
            exit 255
        fi
        sleep 0.3
        rmdir "$0.$2" ;;
    closed*) echo "Connection closed by 10.0.0.7 port 22" >&2; exit 255 ;;
    broken*) exec /bin/sh -c "$3; kill -9 $$" ;;
esac
exec /bin/sh -c "$3"
"""
START = (
    f"import sys; sys.path.insert(0, {str(REPO)!r}); "
    "from bundle.driver.transports import ssh_fanout"
)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A ``PATH`` on which the program comes first."""
    program = tmp_path / "ssh"
    program.write_text(SSH)
    program.chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


def fan_out(
    path: str,
    script: str,
    *names: str,
    data: bytes = b"",
    before: str = "",
    files: int = 1024,
    pauses: tuple[float, ...] = (0.1,) * 5,
) -> tuple[int, bytes, dict[str, dict[str, Any]]]:
    """Run a script on all hosts; return status, output and the reports of hosts."""
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({files}, 4096)); "
        f"{START}; ssh_fanout.LOGIN_SECONDS = 600; "
        f"ssh_fanout.PAUSES = {pauses}\n{before}\n"
        "sys.exit(ssh_fanout.main(sys.argv[2:], sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, script, *names],
        env={**os.environ, "PATH": path},
        input=data,
        capture_output=True,
        timeout=300,
        check=False,
    )
    lines = done.stderr.decode().splitlines()
    assert all(line.startswith(REPORT_PREFIX) for line in lines), done.stderr
    reports = [json.loads(line[len(REPORT_PREFIX) :]) for line in lines]
    return done.returncode, done.stdout, {report["host"]: report for report in reports}


def test_all_hosts_get_the_input_and_lines_never_mix(path: str) -> None:
    """Of forty hosts sixteen are logged in to at a time; the later ones get all input, too."""
    names = [f"n{number}" for number in range(40)]
    script = 'read a; read b; printf "$STAGER_NODE:"; sleep 0.05; printf "$a-$b\\n"'
    code, out, reports = fan_out(path, script, *names, data=b"one\ntwo\n")
    assert (code, reports) == (0, {})
    assert sorted(out.decode().split()) == sorted(f"{name}:one-two" for name in names)


def test_more_hosts_than_the_soft_limit_of_open_files_has_room_for(
    path: str, tmp_path: Path
) -> None:
    """Each takes three; all forty are there at the same time, as those of a job are."""
    there = tmp_path / "there"
    there.mkdir()
    names = [f"n{number}" for number in range(40)]
    wait = f'while [ "$(ls {there} | wc -l)" -lt 40 ]; do sleep 0.1; done'
    script = f'touch "{there}/$STAGER_NODE"; {wait}; ulimit -Sn'
    code, out, reports = fan_out(path, script, *names, files=64)
    assert (code, reports) == (0, {})
    # What it starts has the limit that it was given itself.
    assert out.decode().split() == ["64"] * 40


def test_what_a_login_prints_is_no_output(path: str) -> None:
    code, out, _ = fan_out(path, "echo well", "chatty1", "ann@chatty2")
    assert (code, out) == (0, b"well\nwell\n")


def test_a_host_that_ends_badly_is_reported_and_the_others_go_on(path: str) -> None:
    code, out, reports = fan_out(path, "cat; exit ${STAGER_NODE#n}", "n0", "down", "n7", data=b"x")
    assert (code in (7, 255), out) == (True, b"x\nx\n")
    assert reports.keys() == {"down", "n7"}
    assert (reports["n7"]["status"], reports["n7"]["begun"]) == (7, True)
    assert reports["down"]["said"] == ["ssh: connect to host down port 22: Connection refused"]
    assert not reports["down"]["begun"]


def test_a_login_that_hangs_is_ended(path: str, tmp_path: Path) -> None:
    """Its time is over once the other host has its input, and so is logged in to."""
    mark = tmp_path / "begun"
    before = (
        "import os, time, types\n"
        f"ahead = lambda: 3600 * os.path.exists({str(mark)!r})\n"
        "ssh_fanout.time = types.SimpleNamespace(monotonic=lambda: time.monotonic() + ahead())"
    )
    script = f'read line; echo well; touch "{mark}"'
    code, out, reports = fan_out(path, script, "hung", "n1", data=b"go\n", before=before)
    assert out == b"well\n"
    assert (reports["hung"]["slow"], reports["hung"]["begun"], code != 0) == (True, False, True)


def test_hosts_that_were_turned_away_are_tried_again(path: str) -> None:
    """The input comes to them as well, and what they print comes once."""
    names = ["full", "full", "full", "n1"]
    code, out, reports = fan_out(path, "cat", *names, data=b"well\n", pauses=(0.5,) * 9)
    assert (code, out, reports) == (0, b"well\n" * 4, {})


def test_one_that_takes_nobody_is_named_and_keeps_no_other_waiting(path: str) -> None:
    code, out, reports = fan_out(path, "echo well", "closed", *[f"n{n}" for n in range(20)])
    assert (code, out) == (255, b"well\n" * 20)
    assert (reports["closed"]["tries"], reports["closed"]["begun"]) == (6, False)


def test_logins_that_are_not_done_end_with_an_attached_input(path: str) -> None:
    """Those who have begun see their input end; a login that hangs would keep all waiting.

    Nobody is logged in to again, not even a host that turned the login away at that moment.
    """
    code = f"{START}; sys.exit(ssh_fanout.main(sys.argv[2:], sys.argv[1], attached=True))"
    with subprocess.Popen(
        [sys.executable, "-c", code, "echo well; cat", "hung", "slow", "n1"],
        env={**os.environ, "PATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"well\n"
        _, errors = running.communicate(timeout=60)  # of itself the login would take 90 s
    reports = [
        json.loads(line.removeprefix(REPORT_PREFIX)) for line in errors.decode().splitlines()
    ]
    ended = sorted((one["host"], one["tries"], one["begun"], one["slow"]) for one in reports)
    assert ended == [("hung", 1, False, False), ("slow", 1, False, False)]


def test_a_large_file_reaches_all(path: str, tmp_path: Path) -> None:
    """More than is kept for the slowest of them, from a file that no selector can wait for."""
    source = tmp_path / "source"
    source.write_bytes(os.urandom(20 << 20))
    argv = [sys.executable, "-c", f"{START}; sys.exit(ssh_fanout.main(sys.argv[2:], sys.argv[1]))"]
    with source.open("rb") as stdin:
        subprocess.run(
            [*argv, f'cat >"{tmp_path}/$STAGER_NODE"', "n1", "n2", "n3"],
            env={**os.environ, "PATH": path},
            stdin=stdin,
            check=True,
            timeout=300,
        )
    copies = [(tmp_path / name).read_bytes() for name in ("n1", "n2", "n3")]
    assert copies == [source.read_bytes()] * 3


def test_without_ssh_each_host_says_so(tmp_path: Path) -> None:
    _, _, reports = fan_out(str(tmp_path), "true", "n1", "n2")
    assert [report["status"] for report in reports.values()] == [127, 127]


class Clock:
    """A clock that a test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_host_that_was_turned_away_comes_again_after_a_pause() -> None:
    clock = Clock()
    queue = LoginQueue(["n1"], clock)
    for number, pause in enumerate(PAUSES, 1):
        assert queue.next(0) == "n1"
        assert queue.record_refusal("n1", 0)
        assert (queue.tries["n1"], bool(queue)) == (number, True)
        clock.now += pause - 0.5
        assert queue.next(0) == ""
        clock.now += 0.5
    assert queue.next(0) == "n1"
    assert not queue.record_refusal("n1", 0)
    assert not queue


def test_then_no_more_are_under_way_than_were_let_in() -> None:
    clock = Clock()
    queue = LoginQueue([f"n{number}" for number in range(40)], clock)
    begun = [queue.next(number) for number in range(LOGINS)]
    for under_way in range(LOGINS - 1, 1, -1):  # all but two of them are turned away
        assert queue.record_refusal(begun[under_way], under_way)
    assert (queue.next(2), queue.next(1)) == ("", "n16")
    assert queue.record_refusal("n16", 0)
    assert (queue.next(1), queue.next(0)) == ("", "n17")


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


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[str]:
    """A ``PATH`` whose ``ssh`` knows hosts that are a real sshd on the loopback interface."""
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
        f"PermitRootLogin yes\n"
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
            yield f"{program.parent}:{os.environ['PATH']}"
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


def test_the_words_of_a_real_ssh(sshd: str) -> None:
    names = ["good", "nokey", "changed", "unknown", "refused", "nosuch.invalid", "nosuch@good"]
    script = "read line; echo $STAGER_NODE $line"
    _, out, ends = fan_out(sshd, script, *names, data=b"well\n", pauses=(1.0, 1.0))
    said = "".join(f"{REPORT_PREFIX}{json.dumps(end)}\n" for end in ends.values())
    faults = SshErrors().parse_step_faults(said)
    assert out == b"good well\n"
    assert {name: fault.problem for name, fault in faults.items()} == {
        "nokey": ProblemCode.SSH_NO_LOGIN,
        "changed": ProblemCode.SSH_KEY_CHANGED,
        "unknown": ProblemCode.SSH_KEY_UNKNOWN,
        "refused": ProblemCode.SSH_UNREACHED,
        "nosuch.invalid": ProblemCode.SSH_NAME_UNKNOWN,
        "nosuch@good": ProblemCode.SSH_NO_LOGIN,
    }


def test_a_report_that_was_cut_is_none_and_the_end_of_the_whole_fan_out() -> None:
    assert SshErrors().parse_step_faults(report()[:-3]) == {}
    fault = SshErrors().general_fault(1, f"{report()}\nno memory\n")
    assert fault.values == {"why": "exit status 1; no memory"}
