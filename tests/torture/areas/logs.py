"""Fuzzed logs, events and results: whatever a job has left can be looked at.

`logs`, `diagnose`, `report` and `support` answer or refuse with a message, and nothing of it
reaches a terminal as a command.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

from .. import checks, fuzz
from ..damage import DAMAGES
from ..product import REPO, refused, stager
from ..registry import Area
from ..rounds import REFUSED, SAME, Round, require

_SAMPLES = REPO / "tests" / "samples" / "failures"
_COMMANDS = (
    ("logs",), ("logs", "--errors"), ("logs", "--json"), ("diagnose",), ("diagnose", "--json"),
    ("report",), ("report", "--json"), ("support",), ("support", "--list"), ("support", "--json"),
    ("logs", "--rank", "0"), ("logs", "--grep", "alpha|error"), ("support", "--hide-names"),
)  # fmt: skip
_ODD: tuple[Any, ...] = (
    *fuzz.ODD, 10**400, -1e308, "\x1b]0;pwned\x07", "\u202e", "n" * 100_000, {"a": {}},
    "2026-13-45", "NaN", float("nan"), float("inf"), "../../etc/passwd", "/etc/passwd",
    ["x"] * 1000, "<script>", "{}", "%s%n",
)  # fmt: skip
_KEYS = (
    "event", "phase", "node", "seconds", "v", "time", "rank", "level", "codes", "ok", "problems",
)  # fmt: skip
_HOSTILE = re.compile(r"\x1b[\[\]]|\u202e|\x07")


def play(round_: Round) -> str:
    round_.use("project", "offline", "home")
    rng = round_.rng
    if rng.random() < 0.3:
        _failure(round_)
    for _ in range(rng.choice((1, 1, 2, 5))):
        round_.did(_change(round_))
    argv = rng.choice(_COMMANDS)
    round_.did(f"stager {' '.join(argv)}")
    done = stager(round_, *argv, seconds=25)
    # A log's own tracebacks are shown; none of ours is.
    require(f'File "{REPO}/stager' not in done.out + done.err, "no traceback", done)
    require(done.code in (0, 1, 3), "the exit code is 0, 1 or 3", done)
    require(not _HOSTILE.search(done.out + done.err), "no escape sequence reaches a terminal", done)
    if "--json" in argv and done.out.strip():
        try:
            json.loads(done.out)
        except ValueError:
            require(False, "standard output is one JSON object", done)
    if done.code == 1 and "Traceback" not in done.err:
        return refused(done)
    if argv[0] == "report" and done.code == 0:
        pages = [*round_.logs.glob("report*.html"), *round_.project.glob("report*.html")]
        text = "".join(page.read_text(errors="replace") for page in pages)
        require("<script>alert" not in text, "nothing of a log is markup in a report", "")
    return SAME if done.code == 0 else REFUSED


def _failure(round_: Round) -> None:
    samples = checks.files_of(_SAMPLES)
    for path in sorted(round_.logs.rglob("*.out")):
        path.write_bytes(round_.rng.choice(samples).read_bytes())
    round_.did("logs of a real failure")


def _change(round_: Round) -> str:
    rng = round_.rng
    files = checks.files_of(round_.logs)
    if not files:
        return "nothing is left"
    roll = rng.random()
    path = rng.choice(files)
    name = str(path.relative_to(round_.logs))
    if roll < 0.2:
        kind = rng.choice(sorted(DAMAGES))
        DAMAGES[kind](path, rng)
        return f"{name} {kind}"
    if roll < 0.3:
        other = path.with_name(rng.choice(_names(path)))
        try:
            path.rename(other)
        except (OSError, ValueError):
            return "a name that cannot be"
        return f"{name} renamed to {other.name[:60]!r}"
    jsons = [path for path in files if path.suffix in (".jsonl", ".json")]
    if roll < 0.75 and jsons:
        path = rng.choice(jsons)
        return f"{path.name}: {_json(path, rng)}"
    return f"{name}: {_text(path, rng)}"


def _names(path: Path) -> tuple[str, ...]:
    return (
        "x", path.name + ".1", path.name.replace("local1", "\x1b[2J"), f"events.{'9' * 100}.jsonl",
        "events..jsonl", path.name.replace("out", "OUT"), "job.1.json", "a.b.c.d.out", "n" * 200,
        path.name.replace("0", "999999999999999999999"), "\u202e.out", "preflight.x.txt",
    )  # fmt: skip


def _json(path: Path, rng: Random) -> str:
    """Change values of the JSON in a file, line by line or as a whole."""
    text = path.read_text(errors="replace")
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    lines = lines or ["{}"]
    number = rng.randrange(len(lines))
    kind = rng.choice(
        ("set", "set", "set", "delete", "add", "cut", "noise", "repeat a line", "type")
    )
    try:
        value = json.loads(lines[number])
    except (ValueError, RecursionError):  # what was changed before is no JSON any more
        value = {}
    if kind in ("set", "delete", "add"):
        change = (rng.randrange(10**6), rng.choice(_ODD), kind)
        lines[number] = json.dumps(fuzz.changed(value, change, rng.choice(_KEYS)))
    elif kind == "cut":
        lines[number] = lines[number][: rng.randrange(len(lines[number]) + 1)]
    elif kind == "noise":
        lines[number] = "".join(chr(rng.choice((0, 9, 27, 65, 200, 0x202E))) for _ in range(50))
    elif kind == "repeat a line":
        lines += [lines[number]] * rng.choice((1, 1000))
    else:
        lines[number] = rng.choice(("[]", "1", '"x"', "null", "[" * 20_000, "{" * 100, "9" * 5000))
    path.write_text("\n".join(lines) + "\n", errors="surrogatepass")
    return f"{kind} in line {number + 1}"


def _text(path: Path, rng: Random) -> str:
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data) + 1)
    pieces: dict[str, bytes] = {
        "noise": rng.randbytes(rng.choice((1, 100, 10_000))),
        "no UTF-8": b"\xff\xfe\n",
        "zeros": bytes(1000),
        "escapes": b"\x1b]0;pwned\x07\x1b[2J\xe2\x80\xaeerror: x\n",
        "a long line": b"x" * 3_000_000,
        "many lines": b"error: one\n" * 20_000,
        "a traceback": b'Traceback (most recent call last):\n  File "x", line 1\nE: \x1b[31m\n',
        "half a traceback": b"Traceback (most recent call last):\n" * 500,
        "carriage returns": b"\r" * 5000 + b"99%\r",
        "markup": b"<script>alert(1)</script> &amp; ]]> --> <img src=x onerror=alert(1)>\n",
        "an event": b'{"v": 1, "event": "result", "ok": "yes"}\n',
        "digits": b"rank " + b"9" * 5000 + b": error\n",
    }
    kind = rng.choice(sorted(pieces))
    data[at:at] = pieces[kind]
    path.write_bytes(data)
    return kind


AREA = Area(play, rounds=600, sample=3)
