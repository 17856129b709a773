"""Long arguments, messages and lines take time in proportion to their length.

Each text has 200,000 characters: whoever reads on from every one of them would take many
minutes, and whoever reads each a few times takes some seconds.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

LENGTH = 200_000
LIMIT = 600.0
"""Seconds; no more than a guard."""

PROGRAM = """
import sys
from bundle.redaction.secrets import mask_arguments
from stager.console.job_result import _short
from stager.diagnosis import process_exits as exit_reports, verdict as driver_verdict
from stager.logs.prefixes import show_block_as_terminal
from stager.catalogue.catalogue import match_line
from stager.diagnosis.diagnosis import make_comparable
from bundle.protocol.events import read_record
from stager.redaction.redactor import Redactor
from stager.core.errors import escape_invisible

def failure(text):
    lines = ["Traceback (most recent call last)", f"RuntimeError: {text}", f"error: {text}"]
    record = {"exception": "RuntimeError", "message": text, "lines": lines}
    record |= {"exit_code": 1, "node": "node01", "rank": 0, "time": 1.0}
    return read_record({"event": "result", "ok": False, "failures": [record]}).event

READERS = {
    "masked": lambda text: mask_arguments(["train.py", text, "x"]),
    "masked-words": lambda text: mask_arguments(["docker", "login", *["-pabc"] * (len(text) // 5)]),
    "comparable": lambda text: make_comparable(failure(text).failures[0]),
    "verdict": lambda text: driver_verdict.find_first_failure_of_result(failure(text)),
    "shown": _short,
    "visible": escape_invisible,
    "match": match_line,
    "table": exit_reports._FIELD.search,
    "rewritten": lambda text: show_block_as_terminal(f"{text}\\n|||||\\r|".encode()),
    "redacted": lambda text: Redactor().text(text.encode()),
}
length = int(sys.argv[2])
for piece in sys.argv[3:]:
    READERS[sys.argv[1]]((piece * length)[:length])
"""
TEXTS = {
    "letters": "a",
    "equals": "=",
    "quotes": '"',
    "dots": ".",
    "pluses": "a+",
    "blanks": " ",
    "pairs": "a=",
    "secrets": "token = [",
    "json": '{"token": ["a", ',
    "urls": "http://a:b/?c@",
    "base64": "QUJDREVG/+",
    "paths": "/envs/stager-1",
    "addresses": "[fe80::",
    "logins": "docker login -u ",
}


@pytest.mark.parametrize(
    "reader",
    [
        "masked", "masked-words", "comparable", "verdict", "shown", "visible", "match", "table",
        "rewritten", "redacted",
    ],
)  # fmt: skip
def test_a_long_text_is_read_a_few_times_at_most(reader: str) -> None:
    argv = [sys.executable, "-c", PROGRAM, reader, str(LENGTH), *TEXTS.values()]
    subprocess.run(argv, check=True, timeout=LIMIT)
