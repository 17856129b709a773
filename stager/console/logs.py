"""A job's logs, and what they mean, as a person reads them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bundle.protocol.counts import counted

from ..diagnosis.wording import ranks_in_words, when
from .output import Voice

if TYPE_CHECKING:
    from ..diagnosis.failure import Diagnosis, FirstFailure
    from ..logs.files import JobFiles
    from ..logs.lines import Line

_STAGED = re.compile(
    r"(?<![^\s\"'])[^\s\"']*/envs/[0-9a-f]{64}/(?:lib/python[\d.]+/site-packages/)?"
)
"""Where an environment lies on a node, which fills a line and says nothing."""
_LAST_LINES = 6
"""Lines of a failure that are shown at once; the log has the others."""
_WIDEST = 28
_LONG = 600
"""Characters of a line that are shown."""


class Lookings(Voice):
    """What is said about a job that was."""

    def lines(self, lines: Iterator[Line], files: JobFiles | None = None) -> None:
        """Lines of logs, each with who said it; as one JSON object with ``--json``."""
        if self.as_json:
            self.emit({"job_id": files.job_id if files else "", "lines": [_json(x) for x in lines]})
            return
        width = 0
        for line in lines:
            width = min(max(width, len(line.who)), _WIDEST)
            at = time.strftime("%H:%M:%S", time.localtime(line.time)) if line.time else "--:--:--"
            self.data(f"{at} {line.who:<{width}} | {line.text}")

    def failure(self, failure: FirstFailure) -> None:
        """Say what went wrong first, with the lines that show it."""
        who = failure.node or "somebody"
        who = who if failure.rank is None else f"{failure.node} rank {failure.rank}".strip()
        code = "" if failure.exit_code is None else f" (exit status {failure.exit_code})"
        self._write(f"error: {who} {_did(failure)}{code}: {failure.cause[:_LONG]}", "error")
        for line in failure.lines[-_LAST_LINES:]:
            if failure.cause not in line or len(failure.lines) > 1:  # else it says nothing more
                self._write(f"  | {_short(line)}")
        if failure.meaning and failure.meaning != failure.cause:
            self._write(f"cause: {failure.meaning}")
        self._write(f"class: {failure.kind}")
        self._write(f"hint: {failure.hint}", "good")

    def diagnosed(self, found: Diagnosis) -> None:
        """The whole diagnosis, for somebody who asks."""
        name = f"job {found.job_id}" if found.job_id else str(found.folder)
        first = found.first
        if first is None:
            self.data(f"{name}: {_well(found)}")
            return
        who = first.node or "a node that is not named"
        who = who if first.rank is None else f"{who} rank {first.rank}"
        at = f" at {when(first.time)}" if first.time else ""
        code = "" if first.exit_code is None else f", exit status {first.exit_code}"
        launch = ", before the launch" if found.before_launch else ""
        if found.command:
            self.data(f"`stager {found.command}` failed{at}, before its job began")
        else:
            self.data(f"{name}: {who} {_did(first)} first{at}{code}{launch}")
        self.data(f"class:  {first.kind}")
        self.data(f"what:   {first.cause[:_LONG]}")
        if first.meaning and first.meaning != first.cause:
            self.data(f"cause:  {first.meaning}")
        if first.hint:
            self.data(f"hint:   {first.hint}")
        for proof in found.evidence:
            self.data(f"shown by {proof.path}:{proof.number}")
            self.data(f"  {_short(proof.text)}")
        if len(first.lines) > 1:
            self.data("its last lines:")
            for line in first.lines:
                self.data(f"  | {_short(line)}")
        if found.missing:
            self.data(f"missing from the collective: {ranks_in_words(found.missing)}")
        if found.same_failure:
            self.data(f"the same on {ranks_in_words(found.same_failure)}")
        if found.consequences:
            self.data(f"consequences: {ranks_in_words(found.consequences)}")

    def followed_by(self, found: Diagnosis) -> None:
        """What else there is to know, in a line or two, after the first failure."""
        if found.same_failure:
            self._write(f"the same on {ranks_in_words(found.same_failure)}")
        if found.consequences:
            self._write(f"consequences: {ranks_in_words(found.consequences)}")
        if found.evidence:
            proof = found.evidence[0]
            self._write(f"shown by {proof.path}:{proof.number}")


def _did(failure: FirstFailure) -> str:
    return "left" if failure.exit_code == 0 else "failed"


def _short(line: str) -> str:
    """A line as it is shown: files of the environment by their names in it."""
    return _STAGED.sub("", line)[:_LONG]


def _well(found: Diagnosis) -> str:
    if found.ok:
        return "it ended well"
    if found.ok is None and found.job_id:
        return (
            f"nothing failed as far as its {counted(found.read, 'log')} can tell; it may still run"
        )
    if found.interrupted:
        return "it was interrupted by its user, and nothing had failed by then"
    return f"no failure was recognised in {counted(found.read, 'file')} there"


def _json(line: Line) -> dict[str, object]:
    return {
        "time": line.time or None,
        "node": line.node,
        "rank": line.rank,
        "file": str(line.path),
        "line": line.number,
        "text": line.text,
    }
