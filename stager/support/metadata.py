"""The pages about the archive in it: versions, the diagnosis, and a list of its members."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from bundle.protocol.messages import ProbeAnswer

from .. import __version__
from ..core.errors import StagerError
from ..core.processes import Runner, run
from ..diagnosis.failure import Diagnosis
from ..logs import job_record
from ..logs.job_files import JobFiles
from ..redaction.redactor import Redactor

_SLURM_SECONDS = 10.0
"""Time that Slurm may take to tell its version."""


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
    """True where its middle was left out."""


def versions(files: JobFiles | None, runner: Runner = run) -> dict[str, object]:
    """Return the versions of software here and, unless ``files`` is None, on the job's nodes."""
    nodes = _packages_of_nodes(files) if files is not None and files.job_id else {}
    torch = sorted({str(packages["torch"]) for packages in nodes.values() if packages.get("torch")})
    return {
        "schema": 1,
        "stager": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "slurm": _slurm_version(runner) or None,
        "torch": torch[0] if len(torch) == 1 else torch or None,
        "nodes": nodes,
    }


def _slurm_version(runner: Runner) -> str:
    if not shutil.which("sinfo"):
        return ""
    try:
        return runner(["sinfo", "--version"], timeout=_SLURM_SECONDS, check=False).stdout.strip()
    except StagerError:
        return ""


def _packages_of_nodes(files: JobFiles) -> dict[str, dict[str, object]]:
    answers = (record.event for record in job_record.records(files.events))
    return {
        answer.node: {"python": answer.python, **answer.packages}
        for answer in answers
        if isinstance(answer, ProbeAnswer)
    }


def cleaned(diagnosis: Diagnosis, redactor: Redactor) -> Diagnosis:
    """Return a diagnosis without secrets, while its lines are whole: a cut might divide one."""

    def many(lines: Sequence[str]) -> tuple[str, ...]:
        # As one text: a key has several lines.
        return tuple(redactor.words("\n".join(lines)).split("\n")) if lines else ()

    lines = [line.text.replace("\n", " ") for line in diagnosis.evidence]
    evidence = tuple(
        replace(line, text=text) for line, text in zip(diagnosis.evidence, many(lines), strict=True)
    )
    first = diagnosis.first
    if first is not None:
        first = replace(
            first,
            cause=redactor.words(first.cause),
            hint=redactor.words(first.hint),
            meaning=redactor.words(first.meaning),
            lines=many(first.lines),
        )
    return replace(diagnosis, first=first, evidence=evidence)


def as_json(value: Mapping[str, object]) -> bytes:
    """Return an object as the content of a file."""
    return json.dumps(value, indent=2).encode() + b"\n"


def readme(
    what: str, listed: Sequence[Listed], left_out: Sequence[str], counts: Mapping[str, int]
) -> bytes:
    """Return the page that lists what is in the archive and what is not."""
    total = sum(counts.values())
    lines = [
        f"The evidence of {what}, gathered by stager {__version__}",
        "",
        "LOOK THROUGH IT BEFORE YOU SEND IT. What has the name or the looks of a secret was taken",
        "out, but a secret without either cannot be told from any other word.",
        "",
        "What is in it:",
        *(f"  {member.size:>12,} bytes  {member.name}{_note(member)}" for member in listed),
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
        lines += ["", "What was not found, or left out:", *(f"  {reason}" for reason in left_out)]
    lines += [
        "",
        "Unpacked, `stager diagnose FOLDER` and `stager logs FOLDER` read it as they read a job's",
        "own directory.",
    ]
    return "\n".join(lines).encode(errors="surrogateescape") + b"\n"


def _note(member: Listed) -> str:
    return f" (of {member.original:,}; the middle was left out)" if member.cut else ""


Describe = Callable[[Diagnosis], str]
"""Returns a diagnosis in words."""
