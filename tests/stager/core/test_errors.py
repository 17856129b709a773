"""Hostile text is shown and never obeyed: on a terminal, in a pipe, in JSON."""

from __future__ import annotations

import json
import os
import pty
import subprocess

import pytest
from rich.console import Console as RichConsole

from stager.console.job_result import Console
from stager.console.tables import make_node_table
from stager.core.errors import TURNING, StagerError, apply_carriage_returns, escape_invisible
from stager.core.store import Store
from stager.jobs.outcome import NodeCheck
from tests.support.building import STAGER, Project
from tests.support.events import record

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


@pytest.mark.parametrize(
    ("line", "last"),
    [
        ("\r 10%|#  \r 60%|## \r100%|###| 10/10", "100%|###| 10/10"),
        ("\r 10%|#  \r100%|###\r", "100%|###"),
        ("no bar", "no bar"),
    ],
)
def test_a_progress_bar_is_its_last_state(line, last):
    assert apply_carriage_returns(line) == last


def run(folder, *command):
    return Project(root=folder, store=Store(folder)).stager(*command)


def test_the_name_of_a_log_forges_no_line(tmp_path):
    (tmp_path / "x\n00:00:01 local1 0 | FORGED.out").write_text("ValueError: z\n")
    (line,) = run(tmp_path, "logs", ".").stdout.splitlines()
    assert r"x\n00:00:01 local1 0 | FORGED" in line


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


@pytest.mark.parametrize("command", [["logs", "--errors"], ["diagnose"], ["logs", "-v"]])
def test_logs_in_a_pipe(tmp_path, command):
    logs = logs_of(tmp_path / "logs")
    done = run(logs, *command, "--log-dir", ".")
    assert done.returncode == 0, done.stderr
    assert r"\u202egpj.exe\u2066" in done.stdout + done.stderr
    assert harmless(done.stdout + done.stderr), repr(done)
    assert HOSTILE.encode() in (logs / "demo.77.n1.0.out").read_bytes()  # a file keeps every byte


def test_logs_on_a_terminal(tmp_path):
    argv = [*STAGER, "diagnose", "--log-dir", str(logs_of(tmp_path / "logs"))]
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
    said = run(logs_of(tmp_path / "logs"), command, "--json", "--log-dir", ".").stdout
    assert said.isascii()
    assert harmless(said)
    assert TURNED in json.dumps(json.loads(said), ensure_ascii=False)


def test_a_table_of_nodes(capsys):
    texts = dict.fromkeys(("node", "python", "interface", "address"), f"{OSC}{TURNED}")
    rest = {"packages": {f"a{OSC}": TURNED}, "seconds": 1.0, "problems": (HOSTILE,)}
    check = NodeCheck(**texts, **rest, ok=False, origin_ok=False)
    RichConsole(width=400).print(make_node_table([check]))
    said = capsys.readouterr().out
    assert r"\x1b]52" in said
    assert harmless(said), repr(said)


def test_what_ranks_print_while_a_job_runs(capsys):
    console = Console()
    console.event(record("output", node="n1", head=True, lines=[HOSTILE]))
    console.error(StagerError(HOSTILE, hint=HOSTILE, context=[HOSTILE]))
    said = capsys.readouterr()
    assert said.out == SHOWN + "\n"
    assert said.err.count(SHOWN) == 3
    assert harmless(said.err)
