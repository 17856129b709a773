"""The page: what a parser and a real browser make of it, whatever a job has left."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from stager.core.errors import escape_invisible
from stager.report.page import write_report
from tests.support.browser import Browser, Page, browsing
from tests.support.building import Project
from tests.support.stories import (
    HOSTILE,
    LONG,
    T0,
    Parsed,
    hostile,
    ran,
    reported,
    trainable,
    went_well,
)

REPO = Path(__file__).resolve().parents[3]
STYLE = (REPO / "stager" / "report" / "style.css").read_text(encoding="utf-8")
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "header", "main", "footer", "nav"),
    *("section", "h1", "h2", "h3", "p", "a", "b", "strong", "small", "span", "div", "code", "pre"),
    *("ul", "li", "dl", "dt", "dd", "details", "summary", "figure", "figcaption"),
    *("table", "caption", "thead", "tbody", "tr", "th", "td"),
    *("svg", "g", "rect", "line", "path", "text", "circle", "defs", "pattern"),
}
"""All that a page is made of; SVG's ``title`` has the name of HTML's."""


@pytest.fixture
def hostile_page(tmp_path: Path) -> Path:
    """The page of a job in which every text is hostile."""
    out = tmp_path / "out"
    out.mkdir()
    lines = [
        {"step": n, "loss": 9 / n, "samples_per_second": 1e5 + n, "x": HOSTILE} for n in (1, 9)
    ]
    (out / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    os.utime(out / "metrics.jsonl", (T0 + 60, T0 + 60))
    launch = {"command": [HOSTILE, "--token", "hunter2"], "launcher": HOSTILE, "backend": "auto"}
    told = hostile(tmp_path / "logs")
    files = told.write(
        name=HOSTILE, launch=launch, run_dir=str(tmp_path), outputs=["out"], bundle=LONG
    )
    return write_report(files).path


def test_text_stays_text(hostile_page: Path) -> None:
    source = hostile_page.read_text(encoding="utf-8")
    page = Parsed(source)
    assert {one.name for one in page.elements} <= TAGS
    for one in page.elements:
        assert not [name for name in one.given if name.startswith("on") or name == "style"], one
        assert not {"src", "srcset", "action", "data"} & one.given.keys(), one
        assert one.given.get("href", "#").startswith("#"), one
    # All of it is there to be read, in the end, but for what hides or moves other text.
    shown = escape_invisible(HOSTILE)
    facts = page.facts()
    assert facts["Project"] == facts["Logs lost"] == facts["Backend"] == shown
    assert shown in facts["What"]
    assert page.title == f"Job 77 ({shown}): failed"
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", source)
    assert "hunter2" not in source


def test_what_the_logs_lack_is_told_with_how_much(tmp_path: Path) -> None:
    lost = [
        {"node": "n1", "rank": 3, "bytes": 120, "why": "a reason"},
        {"node": "n2", "rank": None, "frames": 2, "why": "a reason"},
    ]
    told = went_well(tmp_path / "logs", ["n1", "n2"], logs_lost=lost)
    page = Parsed(write_report(told.write()).path.read_text(encoding="utf-8"))
    said = "n1 rank 3 (120 bytes), n2 the node's ranks (2 frames of messages)"
    assert page.facts()["Logs lost"] == said
    # A short beginning is drawn again.
    titles = [one.text for one in page.all("figcaption")]
    assert titles == ["The whole job", "Until the ranks ran, larger"]
    across = [one.text for one in page.all("p", class_="across")]
    assert across == ["seconds since the job began"] * 2


def test_nothing_is_fetched_and_nothing_runs(hostile_page: Path) -> None:
    source = hostile_page.read_text(encoding="utf-8")
    assert "<script" not in source
    assert not re.search(r"""(?:url\(|@import|src=|href=)["']?(?:https?:)?//""", source)
    (policy,) = [
        one.given["content"]
        for one in Parsed(source).all("meta")
        if one.given.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")


def test_headings_names_and_references(hostile_page: Path) -> None:
    page = Parsed(hostile_page.read_text(encoding="utf-8"))
    levels = [int(one.name[1]) for one in page.elements if re.fullmatch("h[1-6]", one.name)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    ids = [one.given["id"] for one in page.elements if "id" in one.given]
    assert len(ids) == len(set(ids))
    used = [one.given["href"][1:] for one in page.all("a")]
    used += [one.given["aria-labelledby"] for one in page.all("section")]
    used += re.findall(
        r"url\(#([\w-]+)\)", " ".join(r.given.get("fill", "") for r in page.elements)
    )
    assert len(used) > 20
    assert set(used) <= set(ids)
    for chart in page.all("svg"):
        seen = chart.given.get("role") == "img" and len(chart.given["aria-label"]) > 20
        inner = "viewbox" in chart.given
        assert seen or inner or chart.given.get("aria-hidden") == "true", chart
    for table in page.all("table"):
        assert table.text
    assert len(page.all("caption")) == len(page.all("table")) > 1
    boxes = page.all("div", class_="box")
    assert boxes
    assert all(box.given["tabindex"] == "0" and box.given["aria-label"] for box in boxes)


def test_of_many_nodes_those_are_drawn_that_matter(tmp_path: Path) -> None:
    nodes = [f"n{number:03}" for number in range(1000)]
    told = went_well(tmp_path, nodes, ok=False, problems={"n999": []}, exit_codes={"n999": 1})
    changed = []
    for line in told.lines:
        event = json.loads(line)
        if event["event"] == "launch" and event["node"] == "n999":
            event |= {"ok": False, "exit_code": 1}
        if event["event"] == "unpack" and event["node"] == "n500":
            event["time"] += 2.0
        changed.append(json.dumps(event))
    told.lines = changed
    page = Parsed(write_report(told.write()).path.read_text())
    assert "Of 1,000 nodes the 40 are drawn that failed or were slowest" in page.text("main")
    bars = {bar.text.partition(":")[0] for bar in page.all("rect", class_="phase-train")} - {""}
    assert len(bars) == 40
    assert {"n500", "n999"} <= bars
    rows = [row.text for row in page.all("th", scope="row")]
    assert rows[:1000] == nodes
    assert rows[1000:] == nodes


def colours(scheme: str) -> dict[str, str]:
    """The variables of one scheme."""
    light, dark = STYLE.split("@media (prefers-color-scheme: dark)")
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", light if scheme == "light" else dark))


# --- a browser -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all these tests."""
    with browsing(tmp_path_factory.mktemp("profile")) as running:
        yield running


WIDE = """[...document.querySelectorAll('body *')].filter(one =>
    !one.parentElement.closest('.box, svg') && one.getBoundingClientRect().right > innerWidth + 1
    ).map(one => one.outerHTML.slice(0, 80))"""
"""Elements that reach out of the window, other than in boxes that scroll."""


FOCUSED = """(() => { const one = document.activeElement, how = getComputedStyle(one);
    return [one.tagName, one.className, one.textContent.slice(0, 40), how.outlineStyle,
            parseFloat(how.outlineWidth), one.getBoundingClientRect().right > 0] })()"""


def looks_right(page: Page) -> None:
    """What holds for every page in every window."""
    assert page.errors() == []
    assert len(page.requests()) == 1
    width = page.value("innerWidth")
    assert page.value("document.documentElement.scrollWidth") <= width
    assert page.value(WIDE) == []
    small = "[...document.querySelectorAll('body *')].filter(one => one.childElementCount == 0"
    small += " && one.textContent.trim() && parseFloat(getComputedStyle(one).fontSize) < 12).length"
    assert page.value(small) == 0
    assert page.value("getComputedStyle(document.body).maxWidth") == "1152px"  # the style is there


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (1200, "dark"), (400, "light")])
def test_a_hostile_page_in_a_browser(
    browser: Browser, hostile_page: Path, width: int, scheme: str
) -> None:
    page = browser.open(hostile_page, width, scheme)
    looks_right(page)
    page.value("document.querySelectorAll('details').forEach(one => { one.open = true })")
    looks_right(page)
    paper = page.value("getComputedStyle(document.body).backgroundColor")
    red = int(colours(scheme)["paper"][1:3], 16)
    assert paper.startswith(f"rgb({red},")
    page.close()


def test_a_real_jobs_page_in_a_browser_by_keyboard(browser: Browser, project: Project) -> None:
    trainable(project)
    ran(project, "metrics")
    path = Path(reported(project).stdout.strip())
    page = browser.open(path, 400)
    looks_right(page)
    met: list[list[object]] = []
    for _ in range(40):
        page.press("Tab", 9)
        found = page.value(FOCUSED)
        if found[0] == "BODY" or found in met:
            break
        met.append(found)
    assert met[0][:3] == ["A", "skip", "Skip to the content"]
    names = [(str(one[0]), str(one[2])) for one in met]
    for link in ("The job", "Timeline", "Training", "Nodes"):
        assert ("A", link) in names
    assert ("SUMMARY", "The same as a table") in names
    assert ("SUMMARY", "Epochs") in names
    assert sum(one[1] == "box" for one in met) == 1  # those that are not folded away
    for one in met:
        assert one[3] == "solid", one
        assert float(str(one[4])) >= 2, one
        assert one[5] is True, one
    page.close()
