"""Failures of several ranks compared, without what only tells one place from another."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Each begins where the one before it cannot go on: else a long word is read again from each letter.
_ROOT = r"(?<![^\s'\"`(<\[=:,])[^\s'\"`(<\[=:,]*/stager-\d+"
_OWN = (
    (re.compile(_ROOT + r"/jobs/[^/\s'\"]+"), "JOB"),
    (re.compile(_ROOT + r"(?=/|\b)"), "ROOT"),
    (re.compile(r"\b0x[0-9a-fA-F]{4,}\b"), "POINTER"),
    (re.compile(r"\[(?=[0-9a-fA-F]*:)[0-9a-fA-F:.]{1,45}\](?::\d+)?"), "ADDRESS"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"), "ADDRESS"),
    (re.compile(r"\b(local_rank|rank|pid|process|cuda|GPU)([ :=#]{0,2})\d+\b", re.I), r"\1\2N"),
)
"""What differs from rank to rank though the failure is the same, and what stands for it."""


def comparable(record: Mapping[str, Any]) -> tuple[str, str]:
    """Return the exception and the message of a rank's failure, equal for equal failures.

    The node root, the job's directory, addresses, and the numbers of the rank and its process are
    each rank's own.
    """
    text = str(record["message"])
    for pattern, instead in _OWN:
        text = pattern.sub(instead, text)
    if node := str(record["node"]):
        text = re.sub(rf"(?<![\w.-]){re.escape(node)}(?![\w-])", "NODE", text)
    return str(record["exception"]), text
