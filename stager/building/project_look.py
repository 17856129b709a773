"""The last look at a project's files, so that the next one only asks if something has changed.

A look lists every directory, reads every file, and applies the patterns. It holds as long as the
same patterns apply, each directory has the names that it had, and each file the size, times and
inode. A directory's times say nothing of the content of its files, so each file is asked for.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence

from bundle.protocol.digest import Digest, canonical_json

from ..config.load import Config
from ..core.errors import StagerError
from ..core.files import text_of
from ..core.store import SETTLED_NS, Store, stamp
from ..layers.project import repository_of
from ..layers.source import LayerSource
from ..layers.tree import names_digest

_VERSION = 2
_STAMP, _CHANGED = 4, 2
"""Length of a stamp, and the place of the time of the last change in it."""
_FEWEST = 1_000
"""Files and directories below which a look is as quick as its record."""


class ProjectLook:
    """The record of one project's last look."""

    def __init__(self, store: Store, config: Config, left_out: Sequence[str]) -> None:
        project, assets = config.project, config.assets
        folder = project.path or config.root
        shaped_by = {
            "version": _VERSION,
            "name": config.name,
            "path": str(project.path),
            "repository": str(repository_of(folder.resolve())),
            "patterns": [*project.exclude, None, *project.outputs, None, *left_out],
            "assets": [str(path) for path in assets.paths],
            "env": [[name, str(path)] for name, path in assets.env],
        }
        self._key = Digest.of(canonical_json(shaped_by))
        self._store = store
        self._file = store.root / "projects" / f"{Digest.of(str(config.source).encode())[:32]}.look"
        self._started = time.time_ns()
        # The directories that a pattern was looked for in are not known.
        self._usable = all(os.path.lexists(path) for path in assets.paths)

    def unchanged(self) -> list[LayerSource] | None:
        """Return the sources that the last look found, without their files; None to look again."""
        try:
            record = json.loads(text_of(self._file))
            if record["key"] != self._key or not _all_as_before(record["stamps"]):
                return None
            return [
                LayerSource(kind=kind, name=name, digest=Digest(digest), prefix=prefix, size=size)
                for kind, name, digest, prefix, size in record["sources"]
            ]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def remember(self, sources: Sequence[LayerSource]) -> None:
        """Keep a look, if it is worth it, and nothing has changed just now."""
        stamps: dict[str, Sequence[int | str]] = {}
        for source in sources:
            if source.tree is not None:
                stamps |= source.tree.looked_at
        latest = max((int(one[_CHANGED]) for one in stamps.values() if one), default=0)
        if not self._usable or len(stamps) < _FEWEST or latest > self._started - SETTLED_NS:
            return
        found = [[one.kind, one.name, one.digest, one.prefix, one.size] for one in sources]
        record = {"key": self._key, "sources": found, "stamps": stamps}
        # A store that cannot be written to is no reason to fail.
        with contextlib.suppress(StagerError), self._store.publishing(self._file) as partial:
            partial.write_text(json.dumps(record), encoding="utf-8")


def _all_as_before(stamps: Mapping[str, Sequence[int | str]]) -> bool:
    """Compare the stamps of paths with earlier ones; an empty stamp stands for a missing file."""
    for path, before in stamps.items():
        try:
            now = stamp(os.stat(path))  # noqa: PTH116 - a Path each would cost more than the call
        except FileNotFoundError:
            if before:
                return False
            continue
        if now != before[:_STAMP] and not _has_same_names(path, before):
            return False
    return True


def _has_same_names(path: str, before: Sequence[int | str]) -> bool:
    if len(before) <= _STAMP:
        return False
    with os.scandir(path) as entries:
        return names_digest(entries) == before[_STAMP]
