"""What the archive says about itself: versions, the diagnosis, and what was taken out of it."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .. import __version__
from ..core.errors import StagerError
from ..core.processes import Runner, run
from ..diagnosis.failure import Diagnosis
from ..logs import events
from ..logs.files import JobFiles
from ..redaction.redact import Redactor

_PATIENCE = 10.0


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A member of the archive, for the list in it."""

    name: str
    """Its name."""
    size: int
    """Its bytes, as they are in the archive."""
    original: int
    """The bytes of the file that it was made from."""
    cut: bool
    """Whether its middle was left out."""


def versions(files: JobFiles | None, runner: Runner = run) -> dict[str, Any]:
    """Which versions of what the job and this machine have.

    Args:
        files: the job's files; None where its events cannot be read.
        runner: what starts Slurm's command.
    """
    slurm = None
    if shutil.which("sinfo"):
        try:
            slurm = runner(["sinfo", "--version"], timeout=_PATIENCE, check=False).stdout.strip()
        except StagerError:
            slurm = None
    nodes: dict[str, Any] = {}
    for event in events.events(files.events) if files is not None and files.job_id else ():
        if event["event"] == "probe" and isinstance(event.get("packages"), dict):
            found = {"python": event.get("python"), **event["packages"]}
            nodes[str(event.get("node", ""))] = found
    torch = sorted({str(found["torch"]) for found in nodes.values() if found.get("torch")})
    return {
        "schema": 1,
        "stager": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "slurm": slurm or None,
        "torch": torch[0] if len(torch) == 1 else torch or None,
        "nodes": nodes,
    }


def cleaned(found: Diagnosis, redactor: Redactor) -> Diagnosis:
    """A diagnosis without secrets: before its lines are cut to fit, which might divide one."""

    def many(lines: Sequence[str]) -> tuple[str, ...]:
        # As one text: a key has several lines.
        return tuple(redactor.words("\n".join(lines)).split("\n")) if lines else ()

    texts = many([proof.text.replace("\n", " ") for proof in found.evidence])
    evidence = [
        replace(proof, text=text) for proof, text in zip(found.evidence, texts, strict=True)
    ]
    first = found.first
    if first is not None:
        first = replace(
            first,
            cause=redactor.words(first.cause),
            hint=redactor.words(first.hint),
            meaning=redactor.words(first.meaning),
            lines=many(first.lines),
        )
    return replace(found, first=first, evidence=tuple(evidence))


def as_json(value: Mapping[str, Any]) -> bytes:
    """An object as the content of a file."""
    return json.dumps(value, indent=2).encode() + b"\n"


def readme(
    what: str, listed: Sequence[Listed], left_out: Sequence[str], counts: Mapping[str, int]
) -> bytes:
    """The page that tells what is in the archive and what is not."""
    total = sum(counts.values())
    lines = [
        f"The evidence of {what}, gathered by stager {__version__}",
        "",
        "LOOK THROUGH IT BEFORE YOU SEND IT. What has the name or the looks of a secret was taken",
        "out, but a secret without either cannot be told from any other word.",
        "",
        "What is in it:",
        *(f"  {one.size:>12,} bytes  {one.name}{_note(one)}" for one in listed),
        "",
        f"What was taken out: {total or 'nothing'}",
        *(f"  {count:>12,} x {kind}" for kind, count in sorted(counts.items())),
    ]
    if total:
        lines += [
            "",
            "In place of each stands [redacted: KIND], or a stand-in for a name. Lines keep their",
            "numbers, but in files of which the middle was left out; it says there how many went.",
        ]
    if left_out:
        lines += ["", "What was not found, or left out:", *(f"  {one}" for one in left_out)]
    lines += [
        "",
        "Unpacked, `stager diagnose FOLDER` and `stager logs FOLDER` read it as they read a job's",
        "own directory.",
    ]
    return "\n".join(lines).encode(errors="surrogateescape") + b"\n"


def _note(one: Listed) -> str:
    return f" (of {one.original:,}; the middle was left out)" if one.cut else ""


Describe = Callable[[Diagnosis], str]
"""A diagnosis in words."""
