"""The nodes, and the parts of the bundle, as tables."""

from __future__ import annotations

from collections.abc import Sequence

from bundle.protocol.counts import counted, sized

from .chart import bar
from .contents import BundleContents, BundlePart
from .failure import box
from .markup import Content, Html, clipped, element
from .nodes import FAILED, LEFT_OUT, WELL, Node, apart

LARGEST = 15
"""Parts of a bundle that are shown one by one."""
_NAMED = 6
_SIGNS = {WELL: "\u2713", FAILED: "\u2717", LEFT_OUT: "\u2212"}


def node_table(nodes: Sequence[Node], first: str) -> list[Html | None]:
    """Return a row for each node, and whether they agree on their packages.

    Args:
        nodes: all of them.
        first: the node that failed first; empty for none.
    """
    rows = [(node, _cells(node, first)) for node in nodes]
    columns = [name for name in rows[0][1] if any(cells[name] for _, cells in rows)] if rows else []
    head = [element("th", name, scope="col") for name in ("node", *columns)]
    body = [
        element(
            "tr",
            element("th", node.name, scope="row"),
            [element("td", cells[name], class_=_kind(name, node)) for name in columns],
        )
        for node, cells in rows
    ]
    table = element(
        "table",
        element("caption", "What each node has said of itself"),
        element("thead", element("tr", head)),
        element("tbody", body),
    )
    return [_agreement(nodes), box(table, "Nodes")]


def _cells(node: Node, first: str) -> dict[str, Content]:
    """Return the cells of a node by column; a column without any content is left out."""
    sign = _SIGNS.get(node.state, "")
    order = ", first" if node.name == first and node.state == FAILED else ""
    problems = [element("li", clipped(problem)) for problem in node.problems]
    versions = (f"{name} {version or 'missing'}" for name, version in node.packages.items())
    return {
        "state": f"{sign} {node.state}{order}".strip(),
        "exit status": node.ending,
        "problems": element("ul", problems) if problems else "",
        "Python": node.python,
        "packages": ", ".join(versions),
        "interface": node.interface,
        "address": node.address,
    }


def _kind(name: str, node: Node) -> str | None:
    if name == "state":
        return f"state {node.state.replace(' ', '-')}"
    return name if name in ("packages", "problems") else None


def _agreement(nodes: Sequence[Node]) -> Html | None:
    checked = [node for node in nodes if node.packages]
    if len(checked) < 2:
        return None
    different = apart(tuple(nodes))
    if not different:
        sentence = f"All {len(checked)} nodes that were checked have the same versions."
        return element("p", sentence)
    lines = [
        element(
            "li",
            element("b", package),
            ": ",
            "; ".join(f"{version or 'missing'} on {_some(on)}" for version, on in versions.items()),
        )
        for package, versions in different.items()
    ]
    return element("div", element("p", "Versions differ between nodes:"), element("ul", lines))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def bundle_table(contents: BundleContents) -> list[Html]:
    """Return the largest parts of a bundle, or the reason why they are not known."""
    path = element("p", element("code", contents.path, class_="place"))
    if contents.missing:
        return [path, element("p", f"What was in it cannot be said: {contents.missing}.")]
    parts = contents.parts
    total = f"{counted(len(parts), 'part')}, {counted(sum(p.files for p in parts), 'file')}: "
    total += f"{sized(sum(p.packed for p in parts))} in the bundle, "
    total += f"{sized(sum(p.unpacked for p in parts))} on a node."
    return [path, element("p", total), box(_parts(parts), "Contents of the bundle")]


def _parts(parts: Sequence[BundlePart]) -> Html:
    largest = max((part.packed for part in parts), default=0)
    names = ("part", "share", "in the bundle", "on a node", "files")
    head = [element("th", name, scope="col") for name in names]
    rows = [
        _part(part.name, part.kind, part, part.packed / max(1, largest)) for part in parts[:LARGEST]
    ]
    rest = parts[LARGEST:]
    if rest:
        total = BundlePart(
            name=f"{counted(len(rest), 'smaller one')} together",
            kind="",
            packed=sum(part.packed for part in rest),
            unpacked=sum(part.unpacked for part in rest),
            files=sum(part.files for part in rest),
        )
        rows.append(_part(total.name, "", total, None))
    return element(
        "table",
        element("caption", "The largest parts; a bar compares them with the largest"),
        element("thead", element("tr", head)),
        element("tbody", rows),
        class_="parts",
    )


def _part(name: str, kind: str, part: BundlePart, share: float | None) -> Html:
    note = element("small", f" {kind}") if kind not in ("", "wheel") else None
    return element(
        "tr",
        element("th", name, note, scope="row"),
        element("td", None if share is None else bar(share), class_="bars"),
        element("td", sized(part.packed), class_="number"),
        element("td", sized(part.unpacked), class_="number"),
        element("td", f"{part.files:,}", class_="number"),
    )
