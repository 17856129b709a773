"""Hard links to the files of unchanged layers in environments that are already on the node.

It is safe because a published environment is never modified. A file whose length, mode or time
differs from when it was published is not linked. One that is found to have another digest is marked
as written to just now, so that each environment that shares it notices when it is used next.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import mmap
import os
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from ..format.layer import Entry
from ..format.manifest import Manifest, ManifestError, parse
from ..node.node_root import close_after
from ..protocol.digest import Digest
from ..system.files import compute_digest, read_file
from . import damage, listing
from .listing import STATE, Window
from .process_pool import run_tasks

_RUN = 400
"""Files that are linked as one task, some milliseconds of work. They are next to one another in the
order of paths: two processes that work in one directory wait for each other."""


def find_older_layers(envs: str, heads: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return the environments with each layer, newest first, by the layer's head digest."""
    wanted = set(heads)
    sources: dict[str, tuple[str, ...]] = {}
    for path, manifest in _manifests(envs):
        for layer in manifest.layers:
            if layer.head in wanted:
                sources[layer.head] = (*sources.get(layer.head, ()), path)
    return sources


def find_sound_layers(envs: str, processes: int) -> set[str]:
    """Return the head digests of layers that lie in some environment without visible damage."""
    sound: set[str] = set()
    for path, manifest in _manifests(envs):
        damaged = damage.list_damaged_layers(manifest, damage.compare_with_listing(path, processes))
        sound.update(layer.head for i, layer in enumerate(manifest.layers) if i not in damaged)
    return sound


def _find_windows(
    layers: Sequence[tuple[str, Sequence[Entry]]], older: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, Window]]:
    written = {source: listing.layers_written(source) for source in {*chain(*older.values())}}
    return {
        head: {env: written[env][head] for env in older.get(head, ()) if head in written[env]}
        for head, _ in layers
    }


def link_layers(
    layers: Sequence[tuple[str, Sequence[Entry]]],
    older: Mapping[str, Sequence[str]],
    staging: str,
    processes: int,
    *,
    verify: bool = False,
) -> dict[str, Window]:
    """Link every file of each layer, or none that counts; return when linked layers were written.

    Layers, and the environments that may have them, go by the digest of the layer's head. With
    ``verify``, every file is read first, as when some are known to be damaged.
    """
    windows = _find_windows(layers, older)
    tasks = [
        (number, entries[start : start + _RUN])
        for number, (head, entries) in enumerate(layers)
        for start in range(0, len(entries) if windows[head] else 0, _RUN)
    ]
    # A byte for each layer, shared with the processes.
    with mmap.mmap(-1, len(layers) + 1) as incomplete:

        def work(task: int) -> None:
            number, missing = tasks[task]
            for source, window in windows[layers[number][0]].items():
                missing = _link_files(source, staging, missing, window, verify)
            if missing:
                incomplete[number] = 1

        run_tasks(len(tasks), work, processes)
        linked: dict[str, Window] = {}
        for mark, (head, entries) in zip(incomplete[:], layers):
            if mark:  # else the writer would write to the shared files
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(f"{staging}/{entry.path}")
            elif windows[head]:
                linked[head] = functools.reduce(Window.around, windows[head].values())
    return linked


def _link_files(
    source: str, staging: str, files: Sequence[Entry], window: Window, verify: bool
) -> list[Entry]:
    folders: dict[str, list[Entry]] = {}
    for entry in files:
        folders.setdefault(entry.path.rpartition("/")[0], []).append(entry)
    missing = []
    for folder, entries in folders.items():
        left = entries  # after an error, too: files that are linked already are replaced later
        here, there = f"{source}/{folder}", f"{staging}/{folder}"
        with contextlib.suppress(OSError), _open_folder(here) as old, _open_folder(there) as new:
            left = [entry for entry in entries if not _link_file(old, new, entry, window, verify)]
        missing += left
    return missing


@contextlib.contextmanager
def _open_folder(path: str) -> Iterator[int]:
    """Open a directory; OSError if a link on the way leads elsewhere."""
    with close_after(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as handle:
        if os.readlink(f"/proc/self/fd/{handle}") != path.rstrip("/"):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        yield handle


def _link_file(old: int, new: int, entry: Entry, window: Window, verify: bool) -> bool:
    name = entry.path.rpartition("/")[2]  # relative names are 20 % faster
    try:
        status = os.stat(name, dir_fd=old, follow_symlinks=False)
    except FileNotFoundError:
        return False
    is_sound = (
        stat.S_ISREG(status.st_mode)
        and status.st_size == entry.size
        and status.st_mode & 0o500 == entry.mode & 0o500
        and window.first <= status.st_mtime_ns <= window.last
    )
    if is_sound and verify:
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=old)
        with open(handle, "rb"):
            is_sound = compute_digest(handle) == entry.sha256
            if not is_sound:
                mark_as_damaged(handle)
    if is_sound:
        os.link(name, name, src_dir_fd=old, dst_dir_fd=new, follow_symlinks=False)
    return is_sound


def mark_as_damaged(handle: int) -> None:
    """Mark a damaged file as written to just now, in every environment that shares it."""
    now = time.time_ns()
    os.utime(handle, ns=(now, now))


def read_kept_file(envs: Iterable[str], path: str, sha256: str) -> bytes | None:
    """Return a file that environments keep, such as a layer's head; None if none has it whole."""
    for env in envs:
        with contextlib.suppress(OSError):
            if Digest.of(data := read_file(f"{env}/{STATE}/{path}")) == sha256:
                return data
    return None


def has_decompressor(envs: str, name: str, size: int) -> bool:
    """Return True if some environment has a wheel of this name and length."""
    for env in list_newest_first(envs):
        with contextlib.suppress(OSError):
            if os.stat(f"{env}/{STATE}/decompressor/{name}").st_size == size:
                return True
    return False


def _manifests(envs: str) -> Iterator[tuple[str, Manifest]]:
    for path in list_newest_first(envs):
        with contextlib.suppress(OSError, ManifestError):
            yield path, parse(read_file(os.path.join(path, damage.MANIFEST)))


def list_newest_first(envs: str) -> list[str]:
    """Return the environments in a directory; none if it cannot be read."""
    try:
        with os.scandir(envs) as items:
            folders = [item for item in items if item.is_dir(follow_symlinks=False)]
            dated = [(folder.stat().st_mtime, folder.path) for folder in folders]
    except OSError:
        return []
    return [path for _, path in sorted(dated, reverse=True)]
