"""Running one command on many hosts: real processes in the place of ssh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bundle.driver.transports import ssh_fanout
from bundle.driver.transports.ssh_fanout import LOGINS, PAUSES, REPORT_PREFIX, LoginQueue

REPO = Path(__file__).resolve().parents[3]
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
    """Run a script on all hosts; return status, output and the reports of hosts.

    Args:
        path: the variable of this name.
        script: what runs on each host.
        names: the hosts.
        data: what each gets on its standard input.
        before: Python that the fan-out runs first.
        files: its limit on open files.
        pauses: seconds before each further try of a host that was turned away.
    """
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


def test_the_bytes_of_one_host_come_as_they_are(path: str) -> None:
    data = os.urandom(3 << 20)
    code, out, _ = fan_out(path, "cat", "n1", data=data)
    assert (code, out == data) == (0, True)


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


def test_a_shell_of_any_kind_reads_the_command_as_one() -> None:
    *_, host, command = ssh_fanout.ssh_argv("ann@n1", "echo 'a b'")
    assert host == "ann@n1"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "stager-begun\na b\n"


# --- The order of logins, and what becomes of a host that was turned away ------------------------


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
        assert (queue.tries("n1"), bool(queue)) == (number, True)
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


def test_other_hosts_do_not_wait_for_one_that_pauses() -> None:
    queue = LoginQueue(["n1", "n2"], Clock())
    assert queue.next(0) == "n1"
    assert queue.record_refusal("n1", 5)
    assert [queue.next(LOGINS), queue.next(0), queue.next(0)] == ["", "n2", ""]
    assert queue
