"""The amount and the form of a command's output, and the file that it writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
import typer.models

from ..program import make_console, make_reports
from .values import path_option

if TYPE_CHECKING:
    from ...console.job_result import Console
    from ...console.reports import Reports

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print only errors and results.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Print what is done, and how.")]


def file_option(help_text: str) -> typer.models.OptionInfo:
    """Return the option that names the file a command writes."""
    option: typer.models.OptionInfo = typer.Option(
        "-o", "--output", metavar="FILE", parser=path_option, help=help_text
    )
    return option


@dataclass(frozen=True, kw_only=True)
class Talk:
    """The amount and the form of a command's output."""

    quiet: Quiet = False
    verbose: Verbose = False
    json: Json = False

    def console(self) -> Console:
        """Return the output of a command with a job."""
        return make_console(quiet=self.quiet, verbose=self.verbose, as_json=self.json)

    def reports(self) -> Reports:
        """Return the output of a command without a job."""
        return make_reports(quiet=self.quiet, verbose=self.verbose, as_json=self.json)
