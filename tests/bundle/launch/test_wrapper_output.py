"""How a rank writes: in whole lines, as several ranks share one log."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

WRAPPER = Path(__file__).resolve().parents[3] / "bundle" / "launch" / "wrapper.py"
SCRIPT = """\
import sys
print("one", 2, [3])
print("four", file=sys.stderr)
print("five", end="")
print(" six")
print("bar\\rbar", end="", flush=True)
raise SystemExit("last")
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_line_is_one_write_and_comes_at_once(tmp_path: Path, unbuffered: str) -> None:
    """Each write is a packet here; into a pipe, those of two ranks could alternate."""
    (tmp_path / "script.py").write_text(SCRIPT)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    env = {"PATH": os.defpath, "PYTHONUNBUFFERED": unbuffered}
    argv = [sys.executable, str(WRAPPER), "script.py"]
    with ours, theirs:
        subprocess.run(argv, cwd=tmp_path, env=env, stdout=theirs, stderr=theirs, check=False)
        packets = []
        ours.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                packets.append(ours.recv(65536))
        packets = [packet for packet in packets if packet]
        assert packets == [b"one 2 [3]\n", b"four\n", b"five six\n", b"bar\rbar", b"last\n"]


# --- a pipe of its own ---------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """The pipes' directory with one pipe, for local rank 1, and our end of it."""
    (tmp_path / "output").mkdir()
    os.mkfifo(tmp_path / "output" / "1")
    handle = os.open(tmp_path / "output" / "1", os.O_RDWR | os.O_NONBLOCK)
    yield tmp_path / "output", handle
    os.close(handle)


def ranked(
    script: str, tmp_path: Path, output: object, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script as global rank 5, local rank 1."""
    (tmp_path / "script.py").write_text(script)
    env = {
        "PATH": os.defpath,
        "RANK": "5",
        "LOCAL_RANK": "1",
        "STAGER_OUTPUT": str(output),
        "STAGER_OUTPUT_NONCE": "abc",
    }
    return subprocess.run(
        [sys.executable, str(WRAPPER), "script.py"],
        cwd=tmp_path,
        env={**env, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_all_that_a_rank_writes_goes_into_its_pipe(
    tmp_path: Path, folder: tuple[Path, int]
) -> None:
    """With what its children write, and what Python says when it fails."""
    script = (
        "import os, subprocess, sys\n"
        "print('one')\nprint('two', file=sys.stderr)\n"
        "subprocess.run(['echo', 'three'])\nos.write(1, b'four\\n')\n"
        "raise ValueError('five')\n"
    )
    done = ranked(script, tmp_path, folder[0])
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
    lines = os.read(folder[1], 65536).decode().rstrip().split("\n")
    assert lines[:5] == ["\x1erank 5 abc", "one", "two", "three", "four"]
    assert lines[-1] == "ValueError: five"


def test_a_script_that_is_not_there_is_told_in_the_ranks_own_log(
    tmp_path: Path, folder: tuple[Path, int]
) -> None:
    argv = [sys.executable, str(WRAPPER), "absent.py"]
    env = {"PATH": os.defpath, "LOCAL_RANK": "1", "STAGER_OUTPUT": str(folder[0])}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, b"", b"")
    assert os.read(folder[1], 65536).startswith(b"\x1erank 0 \nrun_wrapper: no script absent.py")


def test_each_start_says_its_rank(tmp_path: Path, folder: tuple[Path, int]) -> None:
    """After a restart in an elastic group it may be another one."""
    for rank in ("5", "2"):
        ranked("print('hello')", tmp_path, folder[0], RANK=rank)
    assert os.read(folder[1], 65536) == b"\x1erank 5 abc\nhello\n\x1erank 2 abc\nhello\n"


SEES_IT = """\
import multiprocessing, os, subprocess, sys
NAME = "STAGER_OUTPUT_NONCE"
def look(how):
    print(how, os.environ.get(NAME), os.getenv(NAME), flush=True)
if __name__ == "__main__":
    look("rank")
    for how in ("fork", "spawn", "forkserver"):
        child = multiprocessing.get_context(how).Process(target=look, args=(how,))
        child.start()
        child.join()
    subprocess.run(["/bin/sh", "-c", f"echo sh ${NAME} None None"])
"""


def test_the_program_and_its_children_do_not_get_the_nonce(
    tmp_path: Path, folder: tuple[Path, int]
) -> None:
    done = ranked(SEES_IT, tmp_path, folder[0])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert os.read(folder[1], 65536).decode().rstrip().split("\n") == [
        "\x1erank 5 abc",
        *(f"{how} None None" for how in ("rank", "fork", "spawn", "forkserver")),
        "sh None None",
    ]


@pytest.mark.parametrize("local", ["0", "7"])
def test_without_a_pipe_of_its_own_it_writes_where_it_always_would(
    tmp_path: Path, folder: tuple[Path, int], local: str
) -> None:
    done = ranked("print('hello')", tmp_path, folder[0], LOCAL_RANK=local)
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello\n", "")


def test_a_pipe_that_nobody_reads_any_more(tmp_path: Path) -> None:
    """Opening it would wait for ever."""
    os.mkfifo(tmp_path / "1")
    done = ranked("print('hello')", tmp_path, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello\n", "")


def test_more_than_a_pipe_holds_waits_for_the_reader(
    tmp_path: Path, folder: tuple[Path, int]
) -> None:
    """The wrapper opens it without waiting; writing must wait all the same."""
    read: list[bytes] = []
    over = threading.Event()

    def reader() -> None:
        while not over.is_set():
            with contextlib.suppress(BlockingIOError):
                read.append(os.read(folder[1], 1 << 16))
            time.sleep(0.001)

    thread = threading.Thread(target=reader)
    thread.start()
    try:
        done = ranked("print('x' * 1_000_000)", tmp_path, folder[0])
    finally:
        over.set()
        thread.join()
    with contextlib.suppress(BlockingIOError):
        while True:
            read.append(os.read(folder[1], 1 << 16))
    assert (done.returncode, done.stderr) == (0, "")
    assert b"".join(read) == b"\x1erank 5 abc\n" + b"x" * 1_000_000 + b"\n"
