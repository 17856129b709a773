"""How a rank writes: in whole lines, as several ranks share one log."""

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

WRAPPER = Path(__file__).resolve().parents[2] / "bundle" / "wrapper.py"
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
