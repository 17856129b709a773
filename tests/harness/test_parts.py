"""scripts/parts.sh: what the test command makes of tests that fail."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
BODY = """
set -euo pipefail
say() {{ printf '%s\\n' "$*" >&2; }}
export TMPDIR={room}
source {scripts}/parts.sh
pytest=({python} -m pytest -q)
start_part one tests/one
run_part two tests/two
status=0
judge_parts || status=$?
exit "$status"
"""
GOOD = "def test_good(): pass\n"
BAD = "def test_bad(): assert 0\n"
RACE = """\
from pathlib import Path

def test_race():
    mark = Path(__file__).with_suffix(".mark")
    known = mark.exists()
    mark.touch()
    assert known
"""
"""Fails the first time alone."""
NAMED = """\
import os
from pathlib import Path
import pytest

@pytest.mark.parametrize("name", NAMES)
def test_race(name):
    mark = Path(__file__).with_suffix(f".{len(name)}")
    known = mark.exists()
    mark.touch()
    assert known
"""
NAMED_ANEW = NAMED.replace("NAMES", "[str(os.getpid())]")
"""The same under another name each time."""
ODD = NAMED.replace("NAMES", repr(['a"b c', "d::e", "f\ng"]))
ONCE = RACE.replace("assert known", "assert not known")
"""Fails when it is run again."""
MANY = "".join(f"def test_{number}(): assert 0\n" for number in range(6))


@pytest.mark.parametrize(
    ("one", "two", "status", "said"),
    [
        (GOOD, GOOD, 0, []),
        (RACE, GOOD, 0, ["test_race", "they passed alone: a race, to be mended"]),
        (GOOD, RACE, 0, ["test_race", "they passed alone: a race, to be mended"]),
        (NAMED_ANEW, ONCE, 0, ["test_race", "they passed alone: a race, to be mended"]),
        (ODD, ONCE, 0, ["d::e", "they passed alone: a race, to be mended"]),
        (RACE, BAD, 1, ["test_race", "test_bad", "they passed alone"]),
        (BAD, GOOD, 1, ["test_bad"]),
        (MANY, GOOD, 1, []),
        ("import nothing_of_this_name\n", GOOD, 2, []),
    ],
)
def test_only_what_passes_alone_is_forgiven(
    one: str, two: str, status: int, said: list[str], tmp_path: Path
) -> None:
    for name, text in (("one", one), ("two", two)):
        folder = tmp_path / "tests" / name
        folder.mkdir(parents=True)
        (folder / f"test_{name}.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    room = tmp_path / "room"
    room.mkdir()
    body = BODY.format(room=room, scripts=SCRIPTS, python=sys.executable)
    done = subprocess.run(
        ["bash", "-c", body], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == status, done.stderr + done.stdout
    assert all(words in done.stderr for words in said)
    assert ("run once more" in done.stderr) == bool(said)
    assert list(room.iterdir()) == []
