"""scripts/beside.sh: what the test command makes of the programs that it runs beside each other."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.namespaces import entering

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def room(tmp_path: Path) -> Path:
    """The temporary directory of the script, and nothing else's."""
    made = tmp_path / "room"
    made.mkdir()
    return made


def script(body: str, room: Path) -> list[str]:
    """A script as strict as scripts/test, with its temporary directory under ``room``."""
    head = f"set -euo pipefail; export TMPDIR={room}; source {SCRIPTS}/beside.sh\n"
    return ["bash", "-c", head + body]


ENDING = """
start_beside one bash -c 'sleep 0.2; echo one; exit {one}'
start_beside two bash -c 'echo two; exit {two}'
bash -c 'echo in front; exit {front}' || beside_status[front]=$?
wait_beside
for name in one two front; do echo "$name: ${{beside_status[$name]:-}}"; done
"""


def test_each_ones_status_is_kept(room: Path) -> None:
    body = ENDING.format(one=4, two=0, front=6)
    done = subprocess.run(
        script(body, room), check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    written = ["in front", "one", "two"]
    assert done.stdout.splitlines() == [*written, "one: 4", "two: 0", "front: 6"]
    assert list(room.iterdir()) == [], "what they wrote was to be removed"


@pytest.mark.parametrize("front", [0, 7])
def test_whoever_is_left_ends_with_the_script(front: int, room: Path) -> None:
    trace = room.parent / "trace"
    trace.mkdir()
    program = f"trap 'echo told >{trace}/told; exit 1' INT; echo $$ >{trace}/pid; "
    program += "for i in $(seq 300); do sleep 0.1; done"
    body = f"""
    start_beside one bash -c "$PROGRAM"
    until [ -s {trace}/pid ]; do sleep 0.05; done
    exit {front}
    """
    done = subprocess.run(
        script(body, room),
        check=False,
        env={**os.environ, "PROGRAM": program},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == front, done.stderr
    assert (trace / "told").read_text() == "told\n"
    with pytest.raises(ProcessLookupError):
        os.kill(int((trace / "pid").read_text()), 0)
    assert list(room.iterdir()) == []


def test_what_cannot_be_removed_is_no_failure_of_the_whole(room: Path) -> None:
    """Somebody may hold it, or still write there, although every program has ended well."""
    hold = "mkdir $beside/held; mount -t tmpfs none $beside/held\n"
    done = subprocess.run(
        [*entering("-m", ":"), *script(f"{hold}start_beside one true\nwait_beside", room)],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, "busy" in done.stderr) == (0, True), done.stderr


def test_the_old_way_is_what_this_guards_against() -> None:
    """A `kill` that finds nobody, in a trap and under `set -e`, decides the exit status."""
    body = "set -e; trap 'kill -INT 2147483647 2>/dev/null; true' EXIT; exit 0"
    assert subprocess.run(["bash", "-c", body], check=False, timeout=300).returncode == 1


def test_ctrl_c_reaches_those_in_the_background(room: Path) -> None:
    body = "start_beside one sleep 600\necho ready\nwait_beside\n"
    running = subprocess.Popen(
        script(body, room), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert running.stdout is not None
    assert running.stdout.readline() == "ready\n"
    running.send_signal(signal.SIGINT)
    assert running.wait(timeout=300) != 0
    running.stdout.close()
    assert list(room.iterdir()) == []
