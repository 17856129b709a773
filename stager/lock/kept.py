"""The parts of a lock that the next one keeps: pins, commits, and its cutoff."""

from __future__ import annotations

from packaging.utils import canonicalize_name

from .cutoff import NONE
from .pylock import Lock
from .resolve import ResolveOptions
from .resolver import KeptPins


def kept(options: ResolveOptions, earlier: Lock | None) -> KeptPins:
    """Return what is kept of a lock; of none, where there was none."""
    asked = options.exclude_newer
    cutoff = None if asked == NONE else asked
    if earlier is None:
        return KeptPins(cutoff=cutoff)
    if asked is None:
        cutoff = earlier.exclude_newer
    if options.upgrade:
        return KeptPins(cutoff=cutoff)
    upgraded = {canonicalize_name(name) for name in options.upgrade_packages}
    commits = tuple(pin for pin in earlier.git if canonicalize_name(pin.name) not in upgraded)
    return KeptPins(pins=earlier.pins(upgraded), git=commits, cutoff=cutoff)
