"""Taking unchanged layers from environments that are already on the node.

A hard link costs no space and next to no time. It is safe because a published environment is never
modified. Where somebody did so nevertheless, it shows: a file of another length or mode, or written
to after the environment was published, is not linked; its layer is unpacked instead.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from collections.abc import Collection, Sequence

from .manifest import Digest, Layer, ManifestError, Part, parse
from .unpacking.layer import Entry
from .unpacking.merge import STATE
from .unpacking.pool import share

_RUN = 400
"""Files that are linked in one go: some milliseconds of work.

They are next to one another in the order of paths, so that two processes seldom work in one
directory, for which they would wait for each other."""


def older_layers(envs: str, heads: Collection[str]) -> dict[str, str]:
    """Which layers of a bundle lie in which environment.

    Args:
        envs: the directory of published environments.
        heads: the head digests of the layers that are looked for.

    Returns:
        For the head digest of each layer found, the environment's path; newest environment first.
    """
    wanted = set(heads)
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


def link_layers(
    wanted: Sequence[tuple[str, Sequence[Entry]]], staging: str, processes: int
) -> list[bool]:
    """Link every file of each layer, or none that counts; in several processes.

    Args:
        wanted: for each layer the environment that has it, and its files.
        staging: where they are linked to; the directories are there.
        processes: how many processes link.

    Returns:
        For each layer whether it is linked. It is not where a file is missing, has another length,
        or cannot be linked; the caller then writes the layer.

    Raises:
        NodeError: a process was killed.
    """
    spoilt = mmap.mmap(-1, len(wanted) + 1)  # a byte for each layer, shared with the processes
    published = {source: _published(source) for source, _ in wanted}
    tasks = [
        (number, start)
        for number, (_, entries) in enumerate(wanted)
        for start in range(0, len(entries), _RUN)
    ]

    def work(task: int) -> None:
        number, start = tasks[task]
        source, files = wanted[number]
        try:
            for folder, entries in _folders(files[start : start + _RUN]).items():
                _link(f"{source}/{folder}", f"{staging}/{folder}", entries, published[source])
        except OSError:
            spoilt[number] = 1

    share(len(tasks), work, processes)
    linked = [not spoilt[number] for number in range(len(wanted))]
    for whole, (_, entries) in zip(linked, wanted):
        # Removed, so that the writer makes new files instead of writing into the shared ones.
        for entry in () if whole else entries:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{staging}/{entry.path}")
    return linked


def _folders(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Files by their directories."""
    folders: dict[str, list[Entry]] = {}
    for entry in entries:
        folders.setdefault(entry.path.rpartition("/")[0], []).append(entry)
    return folders


def _link(source: str, target: str, entries: Sequence[Entry], published: int) -> None:
    """Link the files of one directory, by names relative to it, which costs a fifth less.

    Raises:
        OSError: one of them has been changed, or cannot be linked.
    """
    flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    with contextlib.ExitStack() as opened:
        old = os.open(source, flags)
        opened.callback(os.close, old)
        new = os.open(target, flags)
        opened.callback(os.close, new)
        for entry in entries:
            name = entry.path.rpartition("/")[2]
            if not _unchanged(os.stat(name, dir_fd=old, follow_symlinks=False), entry, published):
                raise OSError(f"{source}/{name} has been changed")
            os.link(name, name, src_dir_fd=old, dst_dir_fd=new, follow_symlinks=False)


def _published(env: str) -> int:
    """When an environment was published: the time of the last file that is written before."""
    try:
        return os.stat(_manifest(env)).st_mtime_ns
    except OSError:
        return -1  # older than any file


def head_of(env: str, layer: Layer) -> bytes | None:
    """The head of a layer as an environment keeps it; None where it is not what it must be."""
    return _checked(os.path.join(env, STATE, "layers", layer.id), layer.head)


def decompressor_path(env: str, part: Part) -> str:
    """Where an environment keeps the zstandard wheel that it was unpacked with."""
    return os.path.join(env, STATE, "decompressor", part.name)


def older_decompressor(envs: str, part: Part) -> bytes | None:
    """The zstandard wheel from any environment that has it; None if none does."""
    for env in _newest_first(envs):
        data = _checked(decompressor_path(env, part), part.sha256)
        if data is not None:
            return data
    return None


def has_decompressor(envs: str, name: str, size: int) -> bool:
    """Whether some environment has a wheel of this name and length; its digest is checked later."""
    for env in _newest_first(envs):
        try:
            if os.stat(os.path.join(env, STATE, "decompressor", name)).st_size == size:
                return True
        except OSError:
            continue
    return False


def _checked(path: str, sha256: str) -> bytes | None:
    try:
        with open(path, "rb") as handle:
            data = handle.read()
    except OSError:
        return None
    return data if Digest.of(data) == sha256 else None


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
