"""The error family: one root, and the exit codes that scripts rely on."""

from __future__ import annotations

import json
import os
import pty
import subprocess

import pytest
from rich.console import Console as RichConsole

from bundle.system.processes import CompletedCommand
from stager.console.job_result import Console
from stager.console.tables import make_node_table
from stager.core import errors
from stager.core.errors import (
    TURNING,
    JobError,
    StagerError,
    apply_carriage_returns,
    escape_invisible,
    escape_line_feeds,
)
from stager.core.processes import CommandError
from stager.jobs.outcome import NodeCheck
from stager.report.page import show_value
from tests.support.building import STAGER
from tests.support.events import record

FAMILY = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, Exception)
]


def test_exit_codes_are_the_documented_ones():
    codes = (errors.EXIT_OK, errors.EXIT_FAILURE, errors.EXIT_JOB)
    assert codes == (0, 1, 3)


@pytest.mark.parametrize("kind", FAMILY)
def test_every_error_has_the_root_and_says_why(kind):
    error = kind("it broke", hint="mend it", context=["line 1", "line 2"])
    assert isinstance(error, StagerError)
    assert (str(error), error.message, error.hint) == ("it broke", "it broke", "mend it")
    assert error.context == ("line 1", "line 2")
    assert error.exit_code == (3 if kind is JobError else 1)


def test_a_failed_command_belongs_to_the_family():
    done = CompletedCommand(argv=("pip", "two words"), returncode=1, stdout="", stderr="")
    error = CommandError(done, reason="exit status 1")
    assert isinstance(error, StagerError)
    assert error.message == "exit status 1: pip 'two words'"
    assert error.exit_code == errors.EXIT_FAILURE


# --- Hostile text is shown and never obeyed: on a terminal, in a pipe, in JSON, in the report


OSC = "\x1b]52;c;ZWNobw==\x07"
TURNED = "\u202egpj.exe\u2066"
HOSTILE = f"ValueError: {OSC}\x1b[2J\x9b5i\x07{TURNED}\x7f \x1b[31mred\x1b[0m\ttab"
SHOWN = r"ValueError: \x1b]52;c;ZWNobw==\x07\x1b[2J\x9b5i\x07\u202egpj.exe\u2066\x7f red" + "\ttab"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (HOSTILE, SHOWN),
        ("plain \u05d0 \xe4 \U0001f3d6\ttab\nline", "plain \u05d0 \xe4 \U0001f3d6\ttab\nline"),
        ("\x1b[1;31mbold\x1b[0m \x1b[38:5:1mx\x9b0m", "bold x"),
        ("\x1b[1;31", r"\x1b[1;31"),
        ("10%\r20%\r", r"10%\r20%"),
        ("a\x00b\x08c\x0cd\x0be", r"a\x00b\x08c\x0cd\x0be"),
        ("a\u2028b\u2029c\x85d", r"a\u2028b\u2029c\x85d"),
        ("\udcff", r"\udcff"),
        ("", ""),
    ],
)
def test_what_cannot_be_seen_is_written_out(text, shown):
    assert escape_invisible(text) == shown
    assert escape_invisible(shown) == shown


def test_a_progress_bar_is_its_last_state():
    assert apply_carriage_returns("\r 10%|#  \r 60%|## \r100%|###| 10/10") == "100%|###| 10/10"
    assert apply_carriage_returns("\r 10%|#  \r100%|###\r") == "100%|###"
    assert apply_carriage_returns("no bar") == "no bar"


def test_a_name_stays_in_one_line():
    assert (
        escape_line_feeds("d/x\n00:00:01 n1 0 | FORGED.out") == r"d/x\n00:00:01 n1 0 | FORGED.out"
    )


def test_the_name_of_a_log_forges_no_line(tmp_path):
    (tmp_path / "x\n00:00:01 local1 0 | FORGED.out").write_text("ValueError: z\n")
    argv = [*STAGER, "logs", str(tmp_path)]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert "FORGED" in said
    assert len(said.splitlines()) == 1, said


def test_no_control_character_is_left():
    every = "".join(map(chr, [*range(0x20), *range(0x7F, 0xA0), *TURNING]))
    assert {char for char in escape_invisible(every) if not char.isprintable()} == {"\t", "\n"}


def logs_of(folder):
    """A failed job whose log, node and events hold what a terminal must not get."""
    folder.mkdir()
    error = {"what": f"it {OSC}", "where": TURNED, "why": HOSTILE, "fix": f"see {OSC}"}
    events = [
        {"v": 1, "event": "job", "job_id": "77", "nodes": ["n1"], "log_dir": "x", "time": 1.0},
        {"v": 1, "event": "preflight", "node": "n1", "ok": False, "problems": [error]},
        {"v": 1, "event": "result", "ok": False, "problems": {"n1": [error]}, "seconds": {}},
    ]
    (folder / "events.77.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    text = f"Traceback (most recent call last):\n{HOSTILE}\n"
    (folder / "demo.77.n1.0.out").write_bytes(text.encode())
    return folder


def harmless(shown):
    return all(char.isprintable() or char in "\t\n" for char in shown)


@pytest.mark.parametrize("command", [["logs"], ["logs", "--errors"], ["diagnose"], ["logs", "-v"]])
def test_logs_in_a_pipe(tmp_path, command):
    logs = logs_of(tmp_path / "logs")
    argv = [*STAGER, *command, "--log-dir", str(logs)]
    done = subprocess.run(argv, capture_output=True, check=False)
    said = done.stdout.decode() + done.stderr.decode()
    assert done.returncode == 0, said
    assert r"\u202egpj.exe\u2066" in said
    assert harmless(said), repr(said)
    assert HOSTILE.encode() in (logs / "demo.77.n1.0.out").read_bytes()  # a file keeps every byte


@pytest.mark.parametrize("command", ["logs", "diagnose"])
def test_logs_on_a_terminal(tmp_path, command):
    argv = [*STAGER, command, "--log-dir", str(logs_of(tmp_path / "logs"))]
    main, side = pty.openpty()
    try:
        done = subprocess.run(
            argv, stdout=side, stderr=side, env={**os.environ, "NO_COLOR": "1"}, check=False
        )
        said = os.read(main, 1 << 16).decode().replace("\r\n", "\n")
    finally:
        os.close(main)
        os.close(side)
    assert done.returncode == 0, said
    assert r"\u202egpj.exe\u2066" in said
    assert harmless(said), repr(said)


@pytest.mark.parametrize("command", ["logs", "diagnose"])
def test_json_is_ascii_and_says_all(tmp_path, command):
    argv = [*STAGER, command, "--json", "--log-dir", str(logs_of(tmp_path / "logs"))]
    done = subprocess.run(argv, capture_output=True, check=False)
    assert done.stdout.isascii()
    assert harmless(done.stdout.decode())
    assert TURNED in json.dumps(json.loads(done.stdout), ensure_ascii=False)


def test_an_error_that_names_a_hostile_file(tmp_path):
    (tmp_path / "stager.toml").write_text(f'[environment]\n"{TURNED}" = 1\n')
    argv = [*STAGER, "build", "-v"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert r"\u202egpj.exe" in done.stderr
    assert harmless(done.stdout + done.stderr)


def test_a_table_of_nodes(capsys):
    texts = dict.fromkeys(("node", "python", "interface", "address"), f"{OSC}{TURNED}")
    check = NodeCheck(
        **texts,
        packages={f"a{OSC}": TURNED},
        ok=False,
        origin_ok=False,
        seconds=1.0,
        problems=(HOSTILE,),
    )
    RichConsole(width=400).print(make_node_table([check], 400))
    said = capsys.readouterr().out
    assert r"\x1b]52" in said
    assert harmless(said), repr(said)


def test_the_page_shows_what_turns_text_around():
    assert show_value(TURNED) == r"\u202egpj.exe\u2066"
    assert all(show_value(chr(code)) == f"\\u{code:04x}" for code in TURNING)


def test_what_ranks_print_while_a_job_runs(capsys):
    console = Console()
    console.event(record("output", node="n1", head=True, lines=[HOSTILE]))
    said = capsys.readouterr()
    assert said.out == SHOWN + "\n"
    assert harmless(said.err)
