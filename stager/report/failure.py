"""The first failure on the page: its cause, what to do, and the lines that prove it."""

from __future__ import annotations

from ..diagnosis.failure import Diagnosis, Evidence, FirstFailure
from ..diagnosis.wording import ranks_in_words, when
from .markup import Html, clipped, element


def trouble(diagnosis: Diagnosis) -> Html | None:
    """Return the diagnosis; None where nothing failed."""
    first = diagnosis.first
    if first is None:
        return None
    rows = [
        ("Class", element("code", first.kind)),
        ("What", clipped(first.cause)),
        ("Cause", first.meaning if first.meaning != first.cause else ""),
        ("Remedy", first.hint),
        ("When", when(first.time) if first.time else ""),
        ("Exit status", "" if first.exit_code is None else str(first.exit_code)),
        ("Missing from the collective", ranks_in_words(diagnosis.missing)),
        ("The same on", ranks_in_words(diagnosis.same_failure)),
        ("Consequences", ranks_in_words(diagnosis.consequences)),
    ]
    known = [
        element("div", element("dt", name), element("dd", text), class_=name.lower().split()[0])
        for name, text in rows
        if text
    ]
    return element(
        "section",
        element("h2", f"What failed first: {who(first)}", id="failure"),
        element("dl", known, class_="facts wide"),
        _evidence(diagnosis.evidence),
        _last_lines(first),
        class_="trouble",
        aria_labelledby="failure",
    )


def who(first: FirstFailure) -> str:
    """Return the node and the rank that failed."""
    node = first.node or "a node that is not named"
    return node if first.rank is None else f"{node}, rank {first.rank}"


def _evidence(evidence: tuple[Evidence, ...]) -> list[Html] | None:
    if not evidence:
        return None
    lines = [
        element(
            "li",
            element("code", f"{line.path}:{line.number}", class_="place"),
            element("pre", clipped(line.text)),
        )
        for line in evidence
    ]
    return [element("h3", "Shown by"), element("ul", lines, class_="proofs")]


def _last_lines(first: FirstFailure) -> Html | None:
    """Return the last output of the rank, folded as it may be long."""
    if len(first.lines) < 2:
        return None
    text = "\n".join(clipped(line) for line in first.lines)
    return element(
        "details",
        element("summary", f"Its last {len(first.lines)} lines"),
        box(element("pre", text), "The last lines of what failed"),
    )


def box(content: Html, label: str) -> Html:
    """Return a box for something wide or long, which scrolls, by the keyboard too."""
    return element("div", content, class_="box", role="region", aria_label=label, tabindex=0)
