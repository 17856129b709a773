"""Whether two ranks failed in the same way: what only says where that was is left out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_HERE = (
    (re.compile(r"[^\s'\"`(<\[=:,]*/stager-\d+/jobs/[^/\s'\"]+"), "JOB"),
    (re.compile(r"[^\s'\"`(<\[=:,]*/stager-\d+(?=/|\b)"), "ROOT"),
    (re.compile(r"\b0x[0-9a-fA-F]{4,}\b"), "POINTER"),
    (re.compile(r"\[[0-9a-fA-F:]*::?[0-9a-fA-F:.]*\](?::\d+)?"), "ADDRESS"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"), "ADDRESS"),
    (re.compile(r"\b(local_rank|rank|pid|process|cuda|GPU)([ :=#]{0,2})\d+\b", re.I), r"\1\2N"),
)
"""What differs from rank to rank though the failure is the same, and what stands for it."""


def bare(record: Mapping[str, Any]) -> tuple[str, str]:
    """The exception and the message of a rank's failure, without paths, addresses and numbers of
    its own node and process."""
    text = str(record["message"])
    for pattern, instead in _HERE:
        text = pattern.sub(instead, text)
    if node := str(record["node"]):
        text = re.sub(rf"(?<![\w.-]){re.escape(node)}(?![\w-])", "NODE", text)
    return str(record["exception"]), text
