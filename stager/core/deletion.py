"""Removing trees of any depth, without following links; a failure is logged, not raised."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

from bundle.node.removal import delete, measure

log = logging.getLogger(__name__)


def remove(path: Path) -> bool:
    """Remove a file, a link or a tree; what cannot be removed stays, and is logged.

    Returns:
        True if it is gone.
    """
    try:
        delete(str(path))
    except FileNotFoundError:
        return True
    except OSError as exc:
        log.warning("%s could not be removed, or not all of it: %s", path, exc.strerror or exc)
        return False
    return True


def size_of(path: Path) -> int:
    """Return the bytes that become free with a file or a tree."""
    return measure(str(path), Counter())
