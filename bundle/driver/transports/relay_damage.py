"""Damage to the bytes of a relay: by the node that sent them, or by the one that received them.

Each chunk has a checksum, so a node notices what did not come as it was sent, and reports the
sender. Faulty memory or a faulty network card of its own looks the same to it. But then several
senders fail it one after the other, while each of them serves others well.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...checks.findings import few_names
from ...protocol.messages import Relayed

_SENDERS = 2
"""Senders that fail one node, and no other, for it to be the node that is at fault."""


def damage_lines(relayed: Mapping[str, Relayed]) -> list[str]:
    """Return a line for each node that damages what it receives, or has sent damaged bytes."""
    senders = {
        node: tuple(dict.fromkeys(report.corrupt))
        for node, report in relayed.items()
        if report.corrupt
    }
    damaging = _damaging_receivers(senders)
    lines = [
        f"{node} damages what it receives: data from {few_names(failed)} arrived damaged there, "
        "and nowhere else; check its memory and its network card"
        for node, failed in damaging.items()
    ]
    lines += [
        f"{sender} sent damaged bytes to {node}{_resort(relayed[node])}"
        for node, failed in senders.items()
        if node not in damaging
        for sender in failed
    ]
    return lines


def _damaging_receivers(
    senders: Mapping[str, tuple[str, ...]],
) -> dict[str, tuple[str, ...]]:
    """Return the nodes that damage what they receive, by evidence of their senders."""
    # A node that several senders failed may be at fault itself: it is no witness against them.
    blamed = {sender for failed in senders.values() if len(failed) < _SENDERS for sender in failed}
    sound = {
        node: tuple(sender for sender in failed if sender not in blamed)
        for node, failed in senders.items()
    }
    return {node: failed for node, failed in sound.items() if len(failed) >= _SENDERS}


def _resort(report: Relayed) -> str:
    return "" if report.failure else ", which took them from another node"
