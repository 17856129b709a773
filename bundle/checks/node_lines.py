"""Lines about nodes that people grep for, made by the driver from the nodes' answers."""

from __future__ import annotations

from collections.abc import Sequence

from ..protocol.counts import sized
from ..protocol.messages import NodeRootFacts, PreflightAnswer, ProbeAnswer

SHOWN = {"torch": "torch", "transformers": "tfm", "datasets": "datasets", "numpy": "numpy"}
"""Packages that the probe's line shows, in this order, with the name it uses."""


def preflight_line(answer: PreflightAnswer) -> str:
    """Return the line people grep for, ``hpc07 proj=ok pkgs=ok``, and more facts about a node."""
    words = [answer.node, f"proj={_PRESENCE[answer.proj]}", f"pkgs={_PRESENCE[answer.pkgs]}"]
    if answer.host is not None and isinstance(answer.host.node_root, NodeRootFacts):
        words += _root_words(answer.root, answer.host.node_root)
    if answer.python:
        words.append(f"python={answer.python}")
    return " ".join(words)


_PRESENCE = {True: "ok", False: "missing"}


def _root_words(root: str, facts: NodeRootFacts) -> list[str]:
    inodes = "any" if facts.free_inodes is None else facts.free_inodes
    return [
        f"root={root}",
        f"free={sized(facts.free_bytes).replace(' ', '')}",
        f"inodes={inodes}",
        f"exec={'no' if facts.noexec else 'ok'}",
    ]


def probe_line(answer: ProbeAnswer) -> str:
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


def few_names(nodes: Sequence[str]) -> str:
    """Return the names of some nodes for a person: the first three, and how many more."""
    more = f" and {len(nodes) - 3} more" if len(nodes) > 3 else ""
    return ", ".join(nodes[:3]) + more
