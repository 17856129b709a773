"""The report about a job: one page with its verdict, failure, times, nodes and bundle."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from bundle.system import permissions

from ..core.files import output_file
from ..logs.job_files import JobFiles, output_place
from .collect import collect
from .page import page


@dataclass(frozen=True, kw_only=True)
class Report:
    """A page that was written."""

    ok: bool = True
    """True: a page that cannot be written is an error."""
    path: Path = field(metadata={"json": "report"})
    """The file."""
    job_id: str
    """The job it is about; empty for somebody else's logs."""
    size: int = field(metadata={"json": "bytes"})
    """Its length in bytes."""


def report(files: JobFiles, output: Path | None = None) -> Report:
    """Write the page of a job.

    Raises:
        StagerError: it cannot be written.
    """
    name = files.folder / f"report.{files.job_id}.html" if files.job_id else Path("report.html")
    path = (name if output is None else output).absolute()
    place = output_place(path, files, "the report")
    data = collect(files)
    html = page(data).encode("utf-8", "replace")
    with output_file(place, permissions.opener(data.facts.log_mode)) as file:
        file.write(html)
    return Report(path=path, job_id=files.job_id, size=len(html))
