"""Taking unchanged layers from environments that are already on the node.

A hard link costs no space and next to no time. It is safe because a published environment is never
modified. Where somebody did so nevertheless, it shows: a file of another length or mode is not
linked, and one that was written to after the environment was published only if it has its digest;
else the file is taken from another environment, or its layer is unpacked.

Environments share the damage of a file that they share. One that is found to have another digest is
marked as written to just now, so that each of them notices when it is used next.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .fs import digest_of, read_file
from .manifest import Digest, Layer, Manifest, ManifestError, Part, parse
from .unpacking import damage, listing
from .unpacking.layer import Entry
from .unpacking.merge import STATE
from .unpacking.pool import share

_RUN = 400
"""Files that are linked in one go: some milliseconds of work.

They are next to one another in the order of paths, so that two processes seldom work in one
directory, for which they would wait for each other."""


_UNTOUCHED = 315_532_800 * 10**9
"""A time before every environment's, 1980: a file that was touched, and has its digest, gets it."""


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


def link_layers(
    wanted: Sequence[tuple[Sequence[str], Sequence[Entry]]], staging: str, how: Linking
) -> list[bool]:
    """Link every file of each layer, or none that counts; in several processes.

    Args:
        wanted: for each layer the environments that may have it, and its files.
        staging: where they are linked to; the directories are there.
        how: how they are linked.

    Returns:
        For each layer whether it is linked. It is not where a file is missing or damaged in all of
        its environments, or cannot be linked; the caller then writes the layer.

    Raises:
        NodeError: a process was killed.
    """
    published = {source: listing.published(source) for sources, _ in wanted for source in sources}
    link = _Links(staging, published, how.verify)
    tasks = [
        (number, start)
        for number, (_, entries) in enumerate(wanted)
        for start in range(0, len(entries), _RUN)
    ]

    # A byte for each layer, shared with the processes.
    with mmap.mmap(-1, len(wanted) + 1) as spoilt:

        def work(task: int) -> None:
            number, start = tasks[task]
            sources, files = wanted[number]
            missing = list(files[start : start + _RUN])
            for source in sources:
                missing = link.make(source, missing) if missing else []
            if missing:
                spoilt[number] = 1

        share(len(tasks), work, how.processes)
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


@dataclass(frozen=True)
class _Links:
    """Links files from environments to where another one is built."""

    staging: str
    published: Mapping[str, int]
    """When each environment was published."""
    verify: bool

    def make(self, source: str, files: Sequence[Entry]) -> list[Entry]:
        """Link what one environment has; returns the files that it has not."""
        missing = []
        for folder, entries in _folders(files).items():
            try:
                missing += self._folder(source, folder, entries)
            except OSError:
                missing += entries  # what is linked already is found there, and replaced
        return missing

    def _folder(self, source: str, folder: str, entries: Sequence[Entry]) -> list[Entry]:
        """Link the files of one directory, by names relative to it, which costs a fifth less."""
        flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
        missing = []
        with contextlib.ExitStack() as opened:
            old = os.open(f"{source}/{folder}", flags)
            opened.callback(os.close, old)
            new = os.open(f"{self.staging}/{folder}", flags)
            opened.callback(os.close, new)
            if os.readlink(f"/proc/self/fd/{old}") != f"{source}/{folder}".rstrip("/"):
                return list(entries)  # a link on the way leads elsewhere
            for entry in entries:
                name = entry.path.rpartition("/")[2]
                if self._is_sound(old, name, entry, self.published[source]):
                    os.link(name, name, src_dir_fd=old, dst_dir_fd=new, follow_symlinks=False)
                else:
                    missing.append(entry)
        return missing

    def _is_sound(self, folder: int, name: str, entry: Entry, published: int) -> bool:
        """Whether a file is as it was published; it is read where there is a doubt."""
        try:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        if not _fits(found, entry):
            return False
        late = found.st_mtime_ns > published
        if not late and not self.verify:
            return True
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        with open(handle, "rb") as file:
            if digest_of(handle) != entry.sha256:
                mark(handle)
                return False
            if late:
                os.utime(file.fileno(), ns=(found.st_atime_ns, _UNTOUCHED))
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
        and found.st_mode & 0o100 == entry.mode & 0o100
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
