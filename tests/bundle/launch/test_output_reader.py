"""What a launcher and its ranks write: real processes, real named pipes."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from bundle.launch import output_reader
from bundle.launch.output_reader import KEPT, Outputs, RecentOutput
from bundle.protocol.messages import split_lines
from bundle.protocol.problem import NodeError
from bundle.system import signals
from tests.support.processes import living, until

REPO = Path(__file__).resolve().parents[3]
Said = tuple["int | None", bytes]


def followed(
    code: str, tmp_path: Path, ranks: Sequence[range] = (), *arguments: str
) -> tuple[int, RecentOutput, list[Said]]:
    """Attend to a Python program, whose first argument is the pipes' folder."""
    said: list[Said] = []
    argv = [sys.executable, "-c", code, str(tmp_path / "output"), *arguments]
    tmp_path.mkdir(exist_ok=True)
    with contextlib.closing(Outputs(str(tmp_path / "output"), ranks, 7)) as outputs:
        status, recent = output_reader.run_launcher(
            argv,
            {**os.environ, **outputs.variables},
            "/",
            outputs,
            lambda rank, data: said.append((rank, data)),
        )
    return status, recent, said


def by_rank(said: list[Said]) -> dict[int | None, list[str]]:
    found: dict[int | None, bytes] = {}
    for rank, data in said:
        found[rank] = found.get(rank, b"") + data
    return {who: split_lines(data) for who, data in found.items()}


def test_all_lines_come_in_order_and_the_last_are_kept(tmp_path: Path) -> None:
    """One without an end, as of a progress bar, does not fill the memory."""
    code = "for n in range(3000): print(n)\nimport sys; sys.stderr.write('no end')\nsys.exit(9)"
    status, recent, said = followed(code, tmp_path)
    lines = [*map(str, range(3000)), "no end"]
    assert (status, by_rank(said)) == (9, {None: lines})
    assert list(recent.tail) == lines[-200:]
    code = "import sys\nfor n in range(3000): sys.stdout.write('\\r' + 'x' * 999)"
    _, _, said = followed(code, tmp_path / "bar")
    assert b"".join(data for _, data in said) == (b"\r" + b"x" * 999) * 3000
    assert max(len(data) for _, data in said) < 2 * output_reader.LONGEST_LINE


@pytest.mark.parametrize(
    ("end", "status"), [("", 0), ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL)]
)
def test_a_launcher_that_ends_or_is_killed_takes_along_what_it_has_started(
    tmp_path: Path, end: str, status: int
) -> None:
    child = "import time\nwhile True: print('still here', flush=True); time.sleep(0.01)"
    code = (
        "import os, signal, subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)\n"
        f"print('done', flush=True)\n{end}\n"
    )
    started = time.monotonic()
    ended, _, said = followed(code, tmp_path)
    assert time.monotonic() - started < 120
    assert (ended, "done" in by_rank(said)[None]) == (status, True)
    assert living("still here") == []


def test_a_launcher_that_cannot_start(tmp_path: Path) -> None:
    absent = [str(tmp_path / "absent")]
    outputs = Outputs(str(tmp_path / "output"), (), 7)
    with pytest.raises(NodeError, match="the launcher cannot start"):
        output_reader.run_launcher(absent, {}, str(tmp_path), outputs, lambda rank, data: None)


# --- which rank wrote what -----------------------------------------------------------------------

RANK = (
    "import os, sys, time\n"
    "def rank(local, number):\n"
    "    pipe = os.open(f'{sys.argv[1]}/{local}', os.O_WRONLY)\n"
    "    nonce = os.environ['STAGER_OUTPUT_NONCE']\n"
    "    os.write(pipe, f'\\x1erank {number} {nonce}\\n'.encode())\n"
    "    return pipe\n"
)
"""What the wrapper does, for programs that stand for a launcher and its ranks."""


def test_each_line_is_its_own_ranks(tmp_path: Path) -> None:
    child = RANK + (
        "pipe = rank(int(sys.argv[2]), int(sys.argv[2]) + 4)\n"
        "for n in range(400):\n"
        "    os.write(pipe, f'{sys.argv[2]}'.encode())\n"
        "    os.write(pipe, f' line {n}\\n'.encode())\n"
    )
    code = (
        "import subprocess, sys\n"
        f"child = {child!r}\n"
        "argv = [sys.executable, '-c', child, sys.argv[1]]\n"
        "running = [subprocess.Popen([*argv, str(n)]) for n in range(3)]\n"
        "print('launcher')\n"
        "[one.wait() for one in running]\n"
    )
    status, recent, said = followed(code, tmp_path, [range(n + 4, n + 5) for n in range(3)])
    assert status == 0
    assert by_rank(said) == {
        None: ["launcher"],
        **{n + 4: [f"{n} line {k}" for k in range(400)] for n in range(3)},
    }
    assert {rank: list(lines) for rank, lines in recent.by_rank.items()} == {
        None: ["launcher"],
        **{n + 4: [f"{n} line {k}" for k in range(200, 400)] for n in range(3)},
    }
    assert len(recent.tail) == KEPT


def test_after_a_restart_a_pipe_is_another_ranks(tmp_path: Path) -> None:
    code = RANK + (
        "pipe = rank(0, 2)\nos.write(pipe, b'first\\nhalf a line')\nos.close(pipe)\n"
        "pipe = rank(0, 5)\nos.write(pipe, b'second\\n')\n"
    )
    _, recent, said = followed(code, tmp_path, [range(2, 8, 3)])
    assert by_rank(said) == {2: ["first", "half a line"], 5: ["second"]}
    assert list(recent.tail) == ["first", "half a line", "second"]


INTERRUPTED = """
import contextlib, os, signal, sys
from bundle.launch import output_reader
from bundle.system import processes, signals
signals.end_on_signals()
taken = []
def take(rank, data):
    if not taken:
        signal.raise_signal(signal.SIGTERM)
    taken.append((rank, data))
with contextlib.closing(output_reader.Outputs(sys.argv[1], [range(2)], 1)) as outputs:
    argv = [sys.executable, "-c", sys.argv[2], sys.argv[1]]
    output_reader.run_launcher(argv, {**os.environ, **outputs.variables}, ".", outputs, take)
print(taken)
"""


def test_a_signal_between_reading_and_passing_on_loses_nothing(tmp_path: Path) -> None:
    """It comes when the first of two ranks' lines is passed on that were read together."""
    code = (
        "import os, sys, time\n"
        "name = '\\x1erank %d ' + os.environ['STAGER_OUTPUT_NONCE'] + '\\n'\n"
        "text = name % 0 + 'one\\n' + name % 1 + 'two\\n'\n"
        "os.write(os.open(sys.argv[1] + '/0', os.O_WRONLY), text.encode())\n"
        "time.sleep(600)\n"
    )
    argv = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "output"), code]
    done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, check=False, timeout=300)
    assert (done.stderr, done.stdout) == ("", "[(0, b'one\\n'), (1, b'two\\n')]\n")


FORGED = [b"\x1erank 1\n", b"\x1erank " + b"9" * 5000 + b"\n", b"\x1erank 1 \n\x1e\x1erank\n"]


@pytest.mark.parametrize("name", FORGED)
def test_what_only_looks_like_a_name_is_output(tmp_path: Path, name: bytes) -> None:
    code = RANK + (
        f"pipe = rank(0, 0)\nos.write(pipe, b'before\\nand ' + {name!r} + b'behind\\n')\n"
        f"os.write(1, {name!r} + b'launcher\\n')\n"
    )
    status, recent, said = followed(code, tmp_path, [range(1), range(1, 2)])
    assert status == 0
    assert [b"".join(data for who, data in said if who == rank) for rank in (0, None)] == [
        b"before\nand " + name + b"behind\n",
        name + b"launcher\n",
    ]
    assert set(recent.by_rank) == {0, None}


def test_a_name_counts_only_where_that_rank_may_write(tmp_path: Path) -> None:
    """Whoever has got hold of the nonce: not another rank's name, and not in the launcher's."""
    code = RANK + (
        "pipe = rank(0, 0)\nos.write(pipe, b'one\\n')\n"
        "rank(0, 1)\nos.write(pipe, b'two\\n')\n"
        "os.write(1, f'\\x1erank 0 {os.environ[\"STAGER_OUTPUT_NONCE\"]}\\nthree\\n'.encode())\n"
    )
    _, recent, said = followed(code, tmp_path, [range(1), range(1, 2)])
    own = by_rank(said)
    assert (own[0][0], own[0][2], len(own[0])) == ("one", "two", 3)
    assert (own[None][1], len(own[None])) == ("three", 2)
    assert set(recent.by_rank) == {0, None}


def test_the_pipes_are_private_and_go(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    folder = tmp_path / "output"
    outputs = Outputs(str(folder), [range(1), range(1, 2)], 7)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for name in ("0", "1"):
        state = (folder / name).stat()
        assert stat.S_ISFIFO(state.st_mode)
        assert stat.S_IMODE(state.st_mode) == 0o600
    outputs.close()
    outputs.close()  # twice does nothing more
    assert set(os.listdir("/proc/self/fd")) == before
    with pytest.raises(FileExistsError):
        Outputs(str(folder), [range(1)], 7)


TOLD = f"""
import contextlib, os, sys
sys.path.insert(0, {str(REPO)!r})
from bundle.system import processes, signals
from bundle.launch import output_reader
signals.end_on_signals()
say = lambda rank, data: print(data.decode(), end="", flush=True)
_, folder, grace, program = sys.argv
with contextlib.closing(output_reader.Outputs(folder, [range(1)], float(grace))) as outputs:
    argv = [sys.executable, "-c", program]
    code, recent = output_reader.run_launcher(argv, os.environ, "/", outputs, say)
print("status", code, *recent.tail)
"""


@pytest.mark.parametrize(("grace", "saved"), [(300, True), (0.2, False)])
def test_how_long_ranks_may_save(grace: float, saved: bool, tmp_path: Path) -> None:
    done = tmp_path / "saved"
    program = (
        "import pathlib, signal, time\n"
        "def save(*_):\n"
        f"    time.sleep({1 if saved else 600}); pathlib.Path({str(done)!r}).touch()\n"
        "    raise SystemExit\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print(1, flush=True)\n"
        "time.sleep(603)"
    )
    argv = [sys.executable, "-c", TOLD, str(tmp_path / "output"), str(grace), program]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "1\n"
        running.send_signal(signal.SIGTERM)
        assert running.stdout.read() == "status 143 1\n"
    assert done.exists() == saved
    assert living("sleep(603)") == []


RANKS_THEN_WAITS = """
import json, os, sys, time
folder, *finished = sys.argv[1:]
with open(f"{folder}/ranks", "w") as pipe:
    for rank in range(2):
        told = {"rank": rank, "local_rank": rank, "pid": os.getpid() + rank, "time": time.time()}
        print(json.dumps({"event": "started", **told}), file=pipe)
        if str(rank) in finished:
            told.update(event="finished", status=0)
            print(json.dumps(told), file=pipe)
time.sleep(600)
"""
"""A launcher that waits for other nodes after the ranks that it is told have ended."""


@pytest.mark.parametrize(("ended", "status"), [(("0", "1"), 0), (("0",), 143)])
def test_ranks_that_have_ended_while_their_launcher_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: tuple[str, ...], status: int
) -> None:
    """That is told; and an end from outside is then no failure of theirs."""
    monkeypatch.setattr(output_reader, "_FINISHED_SECONDS", 0.2)
    told: list[str] = []
    argv = [sys.executable, "-c", RANKS_THEN_WAITS, str(tmp_path / "output"), *ended]

    def stop(*_: object) -> None:
        raise signals.Stopped

    def end(outputs: Outputs) -> None:
        known = outputs.monitor.ranks
        until(lambda: len(known) == 2 and outputs.monitor.count_finished_well() == len(ended), 300)
        if len(ended) == 2:
            until(lambda: told == ["over"], 300)
        else:
            time.sleep(1)  # nothing may be told however long it takes
        os.kill(os.getpid(), signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, stop)
    try:
        ranks = [range(1), range(1, 2)]
        with contextlib.closing(Outputs(str(tmp_path / "output"), ranks, 1)) as outputs:
            outputs.on_finished = lambda: told.append("over")
            ending = threading.Thread(target=end, args=(outputs,))
            ending.start()
            code, _ = output_reader.run_launcher(
                argv, os.environ, str(tmp_path), outputs, lambda rank, data: None
            )
            ending.join()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert code == status
    assert told == ["over"] * (len(ended) == 2)


NOISY_AND_QUIET = """
import os, signal, sys, time
folder, nonce = os.environ["STAGER_OUTPUT"], os.environ["STAGER_OUTPUT_NONCE"]
def rank(number):
    pipe = os.open(f"{folder}/{number}", os.O_WRONLY)
    os.write(pipe, f"\\x1erank {number} {nonce}\\n".encode())
    return pipe
noisy = os.fork()
if not noisy:
    pipe, written = rank(0), 0
    line = b"x" * 99 + b"\\n"
    ended = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
    while not ended:
        written += os.write(pipe, line * 20)
        with open("written", "w") as count:
            count.write(str(written))
    os._exit(0)
while not os.path.exists("written"):  # now it heeds the signal
    time.sleep(0.01)
pipe = rank(1)
for number in range(100):
    os.write(pipe, b"%d\\n" % number)
    time.sleep(0.01)
os.kill(noisy, signal.SIGTERM)
os.waitpid(noisy, 0)
os.write(pipe, b"end\\n")
"""


def test_a_rank_that_prints_without_end_waits_and_the_others_do_not(tmp_path: Path) -> None:
    """With a driver that takes little: what is on the way is bounded, and none of it is lost."""
    passed = {0: 0, 1: 0}
    ahead = [0]
    quiet: list[bytes] = []

    def take_slowly(rank: int | None, data: bytes) -> None:
        assert rank is not None
        passed[rank] += len(data)
        if rank == 1:
            quiet.append(data)
        time.sleep(0.01)
        with contextlib.suppress(OSError, ValueError):
            ahead.append(int((tmp_path / "written").read_text()) - passed[0])

    argv = [sys.executable, "-c", NOISY_AND_QUIET]
    ranks = [range(1), range(1, 2)]
    tmp_path.mkdir(exist_ok=True)
    with contextlib.closing(Outputs(str(tmp_path / "output"), ranks, 7)) as outputs:
        status, _ = output_reader.run_launcher(
            argv, {**os.environ, **outputs.variables}, str(tmp_path), outputs, take_slowly
        )
    assert status == 0
    assert b"".join(quiet) == b"".join(b"%d\n" % number for number in range(100)) + b"end\n"
    assert passed[0] == int((tmp_path / "written").read_text()) > 0
    assert max(ahead) < 1 << 18  # a pipe holds 64 KiB, and a read takes as much
