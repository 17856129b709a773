"""Lines about nodes that people grep for, made by the driver from the nodes' answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..protocol.counts import format_size
from ..protocol.messages import NodeRootFacts, PreflightAnswer, ProbeAnswer

Names = tuple[str, ...]  # of nodes
SHOWN = {"torch": "torch", "transformers": "tfm", "datasets": "datasets", "numpy": "numpy"}
"""Packages that the probe's line shows, in this order, with the name it uses."""


def format_preflight_line(answer: PreflightAnswer) -> str:
    """Return the line people grep for, ``hpc07 proj=ok pkgs=ok``, and more facts about a node."""
    seen = {True: "ok", False: "missing"}
    words = [answer.node, f"proj={seen[answer.proj]}", f"pkgs={seen[answer.pkgs]}"]
    facts = None if answer.host is None else answer.host.node_root
    if isinstance(facts, NodeRootFacts):
        words += [
            f"root={answer.root}",
            f"free={format_size(facts.free_bytes).replace(' ', '')}",
            f"inodes={'any' if facts.free_inodes is None else facts.free_inodes}",
            f"exec={'no' if facts.noexec else 'ok'}",
        ]
    if answer.python:
        words.append(f"python={answer.python}")
    return " ".join(words)


def format_probe_line(answer: ProbeAnswer) -> str:
    """Return the line people grep for: ``NODE hpc09 OK -> PY 3.11 torch 2.3.1 tfm 4.41.2``."""
    if answer.problems:
        first = answer.problems[0]  # its finding and its remedy are shown once, for all nodes
        return f"NODE {answer.node} FAILED -> {first.where}: {first.what}"
    installed = {name: version for name, version in answer.packages.items() if version}
    words = [f"{SHOWN[name]} {installed[name]}" for name in SHOWN if name in installed]
    if not words:
        words = [f"{name} {version}" for name, version in list(installed.items())[:6]]
    python = ".".join(answer.python.split(".")[:2])
    return " ".join([f"NODE {answer.node} OK -> PY {python}", *words])


def group_nodes(texts: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the nodes that have each of the texts."""
    nodes: dict[str, list[str]] = {}
    for node, text in texts:
        nodes.setdefault(text, []).append(node)
    return nodes


def shorten_names(nodes: Sequence[str]) -> str:
    """Return the names of some nodes for a person: the first three, and how many more."""
    more = f" and {len(nodes) - 3} more" if len(nodes) > 3 else ""
    return ", ".join(nodes[:3]) + more
