#!/usr/bin/env python3
"""Writes the last part of ``docs/troubleshooting.md``, from the problems and the catalogue.

``docs/problems.toml`` says what a problem means where its own words do not say it all.

Usage: python scripts/troubleshooting.py

What stands above the marker is kept as it is. A test keeps the page in step.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from bundle.protocol.enumerations import FailureClass  # noqa: E402
from bundle.protocol.problem import ProblemCode  # noqa: E402
from stager.catalogue.catalogue import CatalogueEntry, LineRole, LineTells, catalogue  # noqa: E402
from stager.core.toml import read  # noqa: E402

PAGE = HERE.parent / "docs" / "troubleshooting.md"
MEANINGS = PAGE.with_name("problems.toml")
SAMPLES = HERE.parent / "tests" / "samples" / "failures"
_LONGEST = 90
MARKER = (
    "<!-- What follows is written by scripts/troubleshooting.py, from the table of problems and "
    "from the catalogue. -->\n"
)
_GROUP = re.compile(r"(?<!\{)\{\w+\}(?!\})")
_HEADINGS = {
    "Consequences": "Look for an earlier failure; `stager diagnose` does.",
    "Noise": "Lines that look like errors and mean nothing.",
}


def page(old: str) -> str:
    """Return the page with its generated part renewed."""
    above, marker, _ = old.partition(MARKER)
    if not marker:
        raise ValueError(f"{PAGE} has lost its marker: {MARKER.strip()}")
    return above + marker + "\n".join(("", *_problems(), *_generated())) + "\n"


def _problems() -> Iterator[str]:
    """Yield the problems that keep nodes from running a job, by the class of the diagnosis."""
    yield from ("## What nodes and the driver say", "")
    yield "What keeps a node from running a job, or ends it, by the class that a diagnosis gives."
    yield "`--json` and the file of events have the code."
    codes = [code for code in ProblemCode if code is not ProblemCode.OTHER]
    meanings = _meanings()
    for kind in FailureClass:
        own = [code for code in codes if code.row.failure_class == kind]
        if own:
            yield from ("", f"**{kind}**", "", "| problem | means | what to do | code |")
            yield "| --- | --- | --- | --- |"
            yield from (_problem_row(code, meanings.get(code, "")) for code in own)
    yield from ("", "## What logs say", "")
    yield from ("Each class of failure, with the log lines by which it is recognised.", "")


def _meanings() -> dict[ProblemCode, str]:
    """Return the longer text about each problem that has one, as a cell of a table has it."""
    meanings = {}
    for code, text in read(MEANINGS).items():
        cell = text.removesuffix(".")
        keep = cell.startswith("Slurm ")
        meanings[ProblemCode.from_json(code)] = cell if keep else cell[:1].lower() + cell[1:]
    return meanings


def _problem_row(code: ProblemCode, meaning: str) -> str:
    row = code.row
    message = "; ".join(filter(None, map(_without_values, (row.what, row.why))))
    message = message.replace("`", "'")
    return f"| `{message}` | {meaning} | {_without_values(row.fix)} | {code} |"


def _without_values(text: str) -> str:
    """Return a text with dots for its values; empty where there is nothing but a value."""
    blank = _GROUP.sub("...", text)
    return "" if blank == "..." else blank


def _generated() -> Iterator[str]:
    causes = _of_role(LineRole.PRIMARY)
    waiting = [entry for entry in catalogue() if entry.tells == LineTells.STUCK]
    for kind in FailureClass:
        entries = [entry for entry in (*causes, *waiting) if entry.kind == kind]
        if entries:
            yield from (f"### {kind}", "", *_table(entries), "")
    consequences = [entry for entry in _of_role(LineRole.CASCADE) if entry not in waiting]
    yield from ("### Consequences", "", _HEADINGS["Consequences"], "", *_table(consequences), "")
    noise = _of_role(LineRole.NOISE)
    yield from ("### Noise", "", _HEADINGS["Noise"], "", *_table(noise))


def _of_role(role: LineRole) -> list[CatalogueEntry]:
    return [entry for entry in catalogue() if entry.role == role]


def _table(entries: list[CatalogueEntry]) -> Iterator[str]:
    yield "| a line with | means | what to do | written by |"
    yield "| --- | --- | --- | --- |"
    for entry in entries:
        cells = (f"`{_line(entry)}`", _blank(entry.cause), _blank(entry.remedy), entry.source)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _line(entry: CatalogueEntry) -> str:
    """Return the part of a line by which an entry is recognised, as its sample has it."""
    sample = SAMPLES / f"{entry.name}.txt"
    for line in sample.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# ") and (found := entry.pattern.search(line)):
            text = found.group().strip().replace("`", "'")
            return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
    raise ValueError(f"{sample} has no line of {entry.name}")


def _blank(text: str) -> str:
    """Return a sentence with dots for the groups that a line would fill in."""
    return _GROUP.sub("...", text).replace("{{", "{").replace("}}", "}")


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
