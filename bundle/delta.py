"""Taking unchanged layers from environments that are already on the node.

A hard link costs no space and next to no time. It is safe because a published environment is never
modified. Where somebody did so nevertheless, it shows: a file of another length or mode, or written
to after the environment was published, is not linked; its layer is unpacked instead.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from .layer import Entry
from .manifest import Manifest, ManifestError, parse
from .merge import STATE


def older_layers(envs: str, manifest: Manifest) -> dict[str, str]:
    """Which layers of a bundle lie in which environment.

    Args:
        envs: the directory of published environments.
        manifest: the bundle that is to be unpacked.

    Returns:
        For the head digest of each layer found, the environment's path; newest environment first.
    """
    wanted = {layer.head for layer in manifest.layers}
    found: dict[str, str] = {}
    for path in _newest_first(envs):
        if wanted <= found.keys():
            break
        try:
            with open(_manifest(path), "rb") as handle:
                older = parse(handle.read())
        except (OSError, ManifestError):
            continue
        for layer in older.layers:
            if layer.head in wanted:
                found.setdefault(layer.head, path)
    return found


def link_layer(source: str, staging: str, entries: Sequence[Entry]) -> bool:
    """Link every file of one layer, or none that counts.

    Returns:
        False where a file is missing, has another length, or cannot be linked; the caller then
        writes the layer, over whatever was linked.
    """
    done: list[str] = []
    try:
        # The last file that is written before an environment is published.
        published = os.stat(_manifest(source)).st_mtime_ns
        for entry in entries:
            old, new = f"{source}/{entry.path}", f"{staging}/{entry.path}"
            if not _unchanged(os.stat(old, follow_symlinks=False), entry, published):
                raise OSError(f"{old} has been changed")
            os.link(old, new, follow_symlinks=False)
            done.append(new)
    except OSError:
        # Removed, so that the writer makes new files instead of writing into the shared ones.
        for new in done:
            os.unlink(new)
        return False
    return True


def _unchanged(found: os.stat_result, entry: Entry, published: int) -> bool:
    """Whether a file is as it was published, as far as can be told without reading it.

    Its ``ctime`` does not tell: linking a file changes it.
    """
    return (
        stat.S_ISREG(found.st_mode)
        and found.st_size == entry.size
        and found.st_mode & 0o100 == entry.mode & 0o100
        and found.st_mtime_ns <= published
    )


def _manifest(env: str) -> str:
    return os.path.join(env, STATE, "manifest.json")


def _newest_first(envs: str) -> list[str]:
    try:
        with os.scandir(envs) as listing:
            found = [(item.stat().st_mtime, item.path) for item in listing if item.is_dir()]
    except OSError:
        return []
    return [path for _, path in sorted(found, reverse=True)]
