"""What nodes of a relay must know of each other, from their addresses alone."""

from __future__ import annotations

from collections.abc import Sequence

from bundle.driver.transports.relay_source import find_candidates
from bundle.transfer.relay_peers import RelayCandidates, RelayPlace


def at_addresses(addresses: Sequence[tuple[str, int]], position: int) -> RelayCandidates:
    """What the node at a position must know; the source has the first address."""
    places = [RelayPlace(place, "", *address[:2]) for place, address in enumerate(addresses)]
    return find_candidates(position, places)
