"""The locks that may say where the packages of a bundle came from."""

from __future__ import annotations

import re
from pathlib import Path

from ..building.current_bundle import LOCK_NAME
from ..config import inline_script
from ..config.load import Config
from ..pack.bundle_file import imported_lock

_LOCK = re.compile(r"pylock(\.[^./]+)?\.toml")
"""Names of locks (PEP 751)."""


def locks_at_hand(bundle: Path, config: Config | None) -> tuple[Path, ...]:
    """Return where locks may be: beside the bundle, as an import leaves it, and in the project."""
    beside = imported_lock(bundle)
    if config is None:
        return (beside,)
    names = [LOCK_NAME, "pylock.stager.toml"]
    if inline_script.is_script(config):
        names.insert(0, f"pylock.{inline_script.name_of(config.source)}.toml")
    names += [text for text in config.environment.requirements if _LOCK.fullmatch(Path(text).name)]
    return (beside, *(config.root / name for name in names))
