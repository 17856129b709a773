"""The page: one file of HTML that needs no other, no network and no script."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from bundle.protocol.counts import counted, sized

from ..diagnosis.failure import Diagnosis
from ..diagnosis.wording import when
from .chart import LineChart, line_chart
from .contents import BundleContents
from .curves import Curves, Epoch, Training
from .facts import FAILED, INTERRUPTED, RUNNING, UNKNOWN, WELL, JobFacts
from .failure import box, trouble
from .markup import Html, element
from .nodes import Node
from .numbers import decimal, duration
from .phases import Passage
from .tables import bundle_table, node_table
from .timeline import MOST, as_table, chosen, legend, patterns, timelines

_SIGNS = {WELL: "\u2713", FAILED: "\u2717", RUNNING: "\u2026", INTERRUPTED: "\u25a0", UNKNOWN: "?"}
_TOLD = {
    WELL: "The job ended well.",
    FAILED: "The job failed.",
    RUNNING: "The job was still running when this was written.",
    INTERRUPTED: "The job was interrupted by its user.",
    UNKNOWN: "It is not known what became of the job: it has left no result.",
}
_LOGS_TOLD = {FAILED: "Something failed.", UNKNOWN: "Nothing failed as far as these files tell."}
_NAMED = 8


@dataclass(frozen=True, kw_only=True)
class Story:
    """Everything on the page."""

    facts: JobFacts
    """The job as a whole."""
    verdict: str
    """Its verdict, one of the words of :mod:`.facts`."""
    diagnosis: Diagnosis | None
    """Its diagnosis; None where that could not be made."""
    passage: Passage
    """The phases of each node."""
    nodes: tuple[Node, ...]
    """The nodes."""
    training: Training
    """The curves of the training."""
    contents: BundleContents | None
    """The contents of the bundle."""
    written: float
    """The time of writing, in seconds since the epoch."""
    program: str
    """The program that writes it, with its version."""

    @property
    def first(self) -> str:
        """The node that failed first; empty where there is none, or it has no name."""
        first = None if self.diagnosis is None else self.diagnosis.first
        return "" if first is None else first.node


def page(story: Story) -> str:
    """Return the whole file."""
    css = resources.files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    # Whatever slipped through could load nothing, and could run nothing.
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    title = f"{story.facts.title}: {story.verdict}"
    sections = _sections(story)
    links = [element("li", element("a", name, href=f"#{key}")) for key, name, _ in sections]
    body = [
        element("a", "Skip to the content", class_="skip", href="#content"),
        patterns(),
        element(
            "header",
            element("h1", story.facts.title),
            _verdict(story),
            element("nav", element("ul", links), aria_label="Sections"),
        ),
        element("main", [section for _, _, section in sections], id="content", tabindex=-1),
        element("footer", element("p", f"Written by {story.program} on {when(story.written)}.")),
    ]
    head = [
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Html(css)),
    ]
    whole = element("html", element("head", head), "\n", element("body", body), lang="en")
    return f"<!DOCTYPE html>\n{whole}\n"


def _sections(story: Story) -> list[tuple[str, str, Html]]:
    """Return each section with its key and its name."""
    sections: list[tuple[str, str, Html]] = []
    failed = None if story.diagnosis is None else trouble(story.diagnosis)
    if failed is not None:
        sections.append(("failure", "What failed first", failed))
    listed = [
        ("job", "The job", _job(story)),
        ("timeline", "Timeline", _timeline(story)),
        ("training", "Training", _training(story.training)),
        ("nodes", "Nodes", node_table(story.nodes, story.first) if story.nodes else None),
        ("bundle", "Bundle", None if story.contents is None else bundle_table(story.contents)),
    ]
    for key, name, content in listed:
        if content:
            head = element("h2", name, id=key)
            sections.append((key, name, element("section", head, content, aria_labelledby=key)))
    return sections


def _verdict(story: Story) -> Html:
    sentence = _TOLD[story.verdict]
    if not story.facts.job_id:
        sentence = _LOGS_TOLD.get(story.verdict, sentence)
    kind = story.verdict.replace(" ", "-")
    sign = element("span", _SIGNS[story.verdict], class_="sign", aria_hidden="true")
    return element("p", sign, " ", element("strong", sentence), class_=f"verdict {kind}")


def _job(story: Story) -> list[Html]:
    facts = story.facts
    rows = [
        ("Job", facts.job_id),
        ("Project", facts.name),
        ("Verdict", story.verdict),
        ("Nodes", _node_names(story.nodes)),
        ("World size", "" if facts.world_size is None else counted(facts.world_size, "rank")),
        ("Launcher", facts.launcher),
        ("Backend", facts.backend),
        ("Command", "" if not facts.command else element("code", facts.command)),
        ("Started", "" if facts.begun is None else when(facts.begun)),
        ("Duration", _duration(story)),
        ("Attempts", f"{facts.attempts}; this is the last" if facts.attempts > 1 else ""),
        ("Staging", _staging(facts)),
        ("Log directory", element("code", str(facts.folder), class_="place")),
        ("Logs lost", facts.logs_lost),
    ]
    known = [
        element("div", element("dt", name), element("dd", text)) for name, text in rows if text
    ]
    pieces = [element("dl", known, class_="facts")]
    if story.diagnosis is None:
        what = (
            "What failed could not be found out: the job's files are not as its driver writes them."
        )
        pieces.append(element("p", what))
    elif not facts.job_id:
        pieces.append(element("p", f"Read: {counted(story.diagnosis.read, 'file')}."))
    return pieces


def _node_names(nodes: Sequence[Node]) -> str:
    """Return the number of nodes, and the names of the first; empty for none."""
    if not nodes:
        return ""
    names = ", ".join(node.name for node in nodes[:_NAMED])
    more = ", \u2026" if len(nodes) > _NAMED else ""
    return f"{len(nodes):,}: {names}{more}"


def _duration(story: Story) -> str:
    """Return the length of the job; empty where no event gives it."""
    passage = story.passage
    if not passage.rows:
        return ""
    so_far = " so far" if story.verdict in (RUNNING, UNKNOWN) else ""
    return f"{duration(passage.end - passage.begin)}{so_far}"


def _staging(facts: JobFacts) -> str:
    """Return how the bundle came to the nodes, and how much of it was sent."""
    sent = f"; {sized(int(facts.sent))} were broadcast" if facts.sent else ""
    return f"{facts.plan}{sent}"


def _timeline(story: Story) -> list[Html] | None:
    passage = story.passage
    if not any(row.spans for row in passage.rows):
        return None
    pieces = [legend(passage)]
    drawn, every = len(chosen(passage.rows, story.first)), len(passage.rows)
    if drawn < every:
        sentence = f"Of {every:,} nodes the {MOST} are drawn that failed or were slowest to stage; "
        pieces.append(element("p", f"{sentence}the table has all."))
    if story.facts.begun is None:
        sentence = "The events say how long each phase took, and not when: they are put one after "
        pieces.append(element("p", f"{sentence}the other."))
    pieces += timelines(passage, story.first)
    table = box(as_table(passage), "Timeline as a table")
    pieces.append(element("details", element("summary", "The same as a table"), table))
    return pieces


def _training(training: Training) -> list[Html] | None:
    pieces = [piece for curves in training.curves for piece in _curves(curves)]
    if training.others:
        listed = [element("li", element("code", path, class_="place")) for path in training.others]
        sentence = "These are there too, but were not written last by this job:"
        pieces += [element("p", sentence), element("ul", listed)]
    return pieces or None


def _curves(curves: Curves) -> list[Html]:
    dots = [
        ((epoch.step, epoch.loss), f"epoch {epoch.epoch:g}: mean loss {decimal(epoch.loss)}")
        for epoch in curves.epochs
        if epoch.loss is not None
    ]
    charts = []
    if curves.loss or dots:
        charts.append(
            LineChart(
                title="Loss",
                unit="mean of a step\u2019s rows",
                across="step",
                points=curves.loss,
                dots=dots,
                dots_are="mean of an epoch",
            )
        )
    if curves.rate:
        charts.append(
            LineChart(
                title="Samples a second",
                unit="all ranks, mean since the start",
                across="step",
                points=curves.rate,
            )
        )
    pieces = [
        element("h3", element("code", curves.path, class_="place")),
        element("div", [line_chart(chart) for chart in charts], class_="charts"),
    ]
    return [*pieces, _epochs(curves.epochs)] if curves.epochs else pieces


def _epochs(epochs: tuple[Epoch, ...]) -> Html:
    head = [element("th", name, scope="col") for name in ("epoch", "step", "mean loss", "accuracy")]
    body = [
        element(
            "tr",
            element("th", f"{epoch.epoch:g}", scope="row"),
            element("td", f"{epoch.step:,.0f}"),
            element("td", "" if epoch.loss is None else decimal(epoch.loss)),
            element("td", "" if epoch.accuracy is None else f"{epoch.accuracy:.2%}"),
        )
        for epoch in epochs
    ]
    table = element(
        "table",
        element("caption", "What each epoch came to"),
        element("thead", element("tr", head)),
        element("tbody", body),
    )
    return element("details", element("summary", "Epochs"), box(table, "Epochs"))
