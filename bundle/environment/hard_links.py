"""Taking unchanged layers from environments that are already on the node.

A hard link costs no space and next to no time. It is safe because a published environment is never
modified. Where somebody did so nevertheless, it shows: a file of another length, mode or time than
it was published with is not linked, but taken from another environment, or its layer is unpacked.

Environments share the damage of a file that they share. One that is found to have another digest is
marked as written to just now, so that each of them notices when it is used next.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import stat
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ..format.layer import Entry
from ..format.manifest import Layer, Manifest, ManifestError, Part, parse
from ..protocol.digest import Digest
from ..system.files import digest_of, read_file
from . import damage, listing
from .listing import Window
from .merge import STATE
from .process_pool import share

_RUN = 400
"""Files that are linked in one go: some milliseconds of work.

They are next to one another in the order of paths, so that two processes seldom work in one
directory, for which they would wait for each other."""


@dataclass(frozen=True)
class Linking:
    """How files are linked."""

    processes: int
    """How many processes link."""
    verify: bool = False
    """Whether every file is read before, as where some are known to be damaged."""


def older_layers(envs: str, heads: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Which layers of a bundle lie in which environments.

    Args:
        envs: the directory of published environments.
        heads: the head digests of the layers that are looked for.

    Returns:
        For the head digest of each layer found, the environments' paths, newest first.
    """
    wanted = set(heads)
    found: dict[str, tuple[str, ...]] = {}
    for path, manifest in _manifests(envs):
        for layer in manifest.layers:
            if layer.head in wanted:
                found[layer.head] = (*found.get(layer.head, ()), path)
    return found


def sound_layers(envs: str, processes: int) -> set[str]:
    """Return the head digests of layers that lie undamaged in some environment, as far as it shows.

    Raises:
        NodeError: a process that looked was killed.
    """
    sound: set[str] = set()
    for path, manifest in _manifests(envs):
        damaged = damage.damaged_layers(path, damage.faults(path, processes))
        sound |= {
            layer.head for number, layer in enumerate(manifest.layers) if number not in damaged
        }
    return sound


@dataclass(frozen=True)
class Known:
    """A layer that older environments may have."""

    head: str
    """The digest of its head."""
    sources: Sequence[str]
    """The environments."""
    entries: Sequence[Entry]
    """Its files."""


def link_layers(wanted: Sequence[Known], staging: str, how: Linking) -> dict[str, Window]:
    """Link every file of each layer, or none that counts; in several processes.

    Args:
        wanted: the layers.
        staging: where they are linked to; the directories are there.
        how: how they are linked.

    Returns:
        When the files of each layer that is linked were written, by its head. It is not where a
        file is missing or damaged in all of its environments, or cannot be linked; the caller then
        writes the layer.

    Raises:
        NodeError: a process was killed.
    """
    sources = {source for layer in wanted for source in layer.sources}
    written = {source: listing.layers_written(source) for source in sources}
    places = [
        {source: window for source in layer.sources if (window := written[source].get(layer.head))}
        for layer in wanted
    ]
    link = _Links(staging, how.verify)
    tasks = [
        (number, start)
        for number, layer in enumerate(wanted)
        for start in range(0, len(layer.entries), _RUN)
    ]

    # A byte for each layer, shared with the processes.
    with mmap.mmap(-1, len(wanted) + 1) as spoilt:

        def work(task: int) -> None:
            number, start = tasks[task]
            missing = list(wanted[number].entries[start : start + _RUN])
            for source, window in places[number].items():
                missing = link.make(source, missing, window) if missing else []
            if missing:
                spoilt[number] = 1

        share(len(tasks), work, how.processes)
        whole = [bool(places[number]) and not spoilt[number] for number in range(len(wanted))]
    for is_whole, layer in zip(whole, wanted):
        # Removed, so that the writer makes new files instead of writing into the shared ones.
        for entry in () if is_whole else layer.entries:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{staging}/{entry.path}")
    return {
        layer.head: functools.reduce(Window.around, windows.values())
        for is_whole, layer, windows in zip(whole, wanted, places)
        if is_whole
    }


def _folders(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Files by their directories."""
    folders: dict[str, list[Entry]] = {}
    for entry in entries:
        folders.setdefault(entry.path.rpartition("/")[0], []).append(entry)
    return folders


@dataclass(frozen=True)
class _Links:
    """Links files from environments to where another one is built."""

    staging: str
    verify: bool

    def make(self, source: str, files: Sequence[Entry], window: Window) -> list[Entry]:
        """Link what one environment has, written then; returns the files that it has not."""
        missing = []
        for folder, entries in _folders(files).items():
            try:
                missing += self._folder(f"{source}/{folder}", folder, entries, window)
            except OSError:
                missing += entries  # what is linked already is found there, and replaced
        return missing

    def _folder(
        self, source: str, folder: str, entries: Sequence[Entry], window: Window
    ) -> list[Entry]:
        """Link the files of one directory, by names relative to it, which costs a fifth less."""
        flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
        missing = []
        with contextlib.ExitStack() as opened:
            old = os.open(source, flags)
            opened.callback(os.close, old)
            new = os.open(f"{self.staging}/{folder}", flags)
            opened.callback(os.close, new)
            if os.readlink(f"/proc/self/fd/{old}") != source.rstrip("/"):
                return list(entries)  # a link on the way leads elsewhere
            for entry in entries:
                name = entry.path.rpartition("/")[2]
                if self._is_sound(old, name, entry, window):
                    os.link(name, name, src_dir_fd=old, dst_dir_fd=new, follow_symlinks=False)
                else:
                    missing.append(entry)
        return missing

    def _is_sound(self, folder: int, name: str, entry: Entry, window: Window) -> bool:
        """Whether a file is as it was published; it is read where there is a doubt."""
        try:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        if not _fits(found, entry) or not window.first <= found.st_mtime_ns <= window.last:
            return False
        if not self.verify:
            return True
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        with open(handle, "rb"):
            if digest_of(handle) != entry.sha256:
                mark(handle)
                return False
        return True


def mark(handle: int) -> None:
    """Mark a damaged file as written to just now, in every environment that shares it."""
    now = time.time_ns()
    os.utime(handle, ns=(now, now))


def head_of(envs: Sequence[str], layer: Layer) -> bytes | None:
    """The head of a layer as an environment keeps it; None where none has what it must be."""
    kept = (_checked(os.path.join(env, STATE, "layers", layer.id), layer.head) for env in envs)
    return next((head for head in kept if head is not None), None)


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
        data = read_file(path)
    except OSError:
        return None
    return data if Digest.of(data) == sha256 else None


def _fits(found: os.stat_result, entry: Entry) -> bool:
    """Whether a file's kind, length and mode are what they must be."""
    return (
        stat.S_ISREG(found.st_mode)
        and found.st_size == entry.size
        and found.st_mode & 0o500 == entry.mode & 0o500
    )


def _manifests(envs: str) -> Iterator[tuple[str, Manifest]]:
    """The environments that say what they are made of, newest first."""
    for path in _newest_first(envs):
        try:
            manifest = parse(read_file(os.path.join(path, damage.MANIFEST)))
        except (OSError, ManifestError):
            continue
        yield path, manifest


def _newest_first(envs: str) -> list[str]:
    try:
        with os.scandir(envs) as items:
            found = [
                (item.stat().st_mtime, item.path)
                for item in items
                if item.is_dir(follow_symlinks=False)
            ]
    except OSError:
        return []
    return [path for _, path in sorted(found, reverse=True)]
