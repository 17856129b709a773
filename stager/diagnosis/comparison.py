"""Failures of several ranks compared, without what only tells one place from another."""

from __future__ import annotations

import re

from bundle.protocol.reports import FailureRecord

# Each begins where the one before it cannot go on: else a long word is read again from each letter.
_ROOT = r"(?<![^\s'\"`(<\[=:,])[^\s'\"`(<\[=:,]*/stager-\d+"
_VARIABLE = (
    (re.compile(_ROOT + r"/jobs/[^/\s'\"]+"), "JOB"),
    (re.compile(_ROOT + r"(?=/|\b)"), "ROOT"),
    (re.compile(r"\b0x[0-9a-fA-F]{4,}\b"), "POINTER"),
    (re.compile(r"\[(?=[0-9a-fA-F]*:)[0-9a-fA-F:.]{1,45}\](?::\d+)?"), "ADDRESS"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"), "ADDRESS"),
    (re.compile(r"\b(local_rank|rank|pid|process|cuda|GPU)([ :=#]{0,2})\d+\b", re.I), r"\1\2N"),
)
"""Parts that differ from rank to rank though the failure is the same, and their stand-ins."""


def comparable(record: FailureRecord) -> tuple[str, str]:
    """Return the exception and the message of a rank's failure, equal for equal failures.

    The node root, the job's directory, addresses, and the numbers of the rank and its process are
    each rank's own. With an exit status counts what was printed last.
    """
    text = record.message
    if record.exception == "SystemExit":  # a status alone is no error that two may have in common
        text += "".join(record.lines[-1:])
    for pattern, replacement in _VARIABLE:
        text = pattern.sub(replacement, text)
    if record.node:
        text = re.sub(rf"(?<![\w.-]){re.escape(record.node)}(?![\w-])", "NODE", text)
    return record.exception, text
