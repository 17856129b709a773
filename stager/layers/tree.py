"""Trees of files and links to be shipped: collecting, checking and identifying them."""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import field
from pathlib import Path

from bundle.format.layer import (
    LINK_LIMIT,
    LayerError,
    Link,
    abridge_path,
    check_link,
    explain_excess,
)
from bundle.protocol.counts import format_count
from bundle.protocol.dataclass import dataclass
from bundle.protocol.digest import canonical_json

from ..core.errors import StagerError
from ..core.store import digest_file, to_stamp
from ..core.values import Digest

_PREFIX = "project"  # stands for a tree's directory when paths are measured


@dataclass(frozen=True, kw_only=True)
class TreeFile:
    """One file to be shipped."""

    path: str  # its relative path in the tree, with forward slashes
    source: Path
    mode: int  # 0o755 if its owner may execute it, else 0o644
    size: int  # its length in bytes when it was looked at


@dataclass(frozen=True, kw_only=True)
class Tree:
    """Files and links to be shipped, in an order that depends on their names alone."""

    files: tuple[TreeFile, ...] = ()  # sorted by path
    links: tuple[tuple[str, str], ...] = ()  # path and target, sorted; the targets are in this tree
    skipped: tuple[str, ...] = ()  # notes on files left out although no pattern names them
    # Stamps of directories (with their names) and files that decided this; empty where one is gone.
    looked_at: Mapping[str, Sequence[int | str]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def size(self) -> int:
        """Sum of the files' lengths in bytes."""
        return sum(file.size for file in self.files)


def _decode_path(path: str) -> str:
    return os.fsencode(path).decode("utf-8", "surrogateescape")


def _output_files() -> set[tuple[int, int]]:
    found = set()
    for descriptor in (1, 2):
        with suppress(OSError):
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode):
                found.add((status.st_dev, status.st_ino))
    return found


@dataclass(kw_only=True)
class Collector:
    """The files that a walk has found so far, and every reason to refuse them."""

    files: dict[str, TreeFile] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    looked_at: dict[str, Sequence[int | str]] = field(default_factory=dict)
    """The stamps of directories and files before they were read."""
    refused: list[str] = field(default_factory=list)
    # Device and inode of the files that our own output goes to: they still grow.
    outputs: Collection[tuple[int, int]] = field(default_factory=_output_files)

    def entries(self, folder: str, path: str) -> list[os.DirEntry[str]]:
        """Return a directory's entries; refuse one that is unreadable, or too deep for a node."""
        if path and self._is_excessive(path):
            return []
        try:
            before = to_stamp(os.stat(folder))  # noqa: PTH116
            with os.scandir(folder) as listing:
                entries = list(listing)
            self.looked_at[folder] = (*before, digest_names(entries))
            return entries
        except OSError as exc:
            self.refuse(path or folder, exc.strerror or str(exc))
            return []

    def add(self, path: str, source: str) -> None:
        """Add the file at ``source``, following links; note a socket, a pipe or a device."""
        path = _decode_path(path)
        if not self._has_usable_name(path):
            return
        try:
            status = os.stat(source)  # noqa: PTH116 - a Path each would cost more than the call
            if not stat.S_ISREG(status.st_mode):
                self.notes.append(f"{path}: a pipe, socket or device, left out")
                return
            # Mode bits do not show what a file server or an access list forbids; opening does.
            os.close(os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            known = self.files.get(path)
            if known is not None and not known.source.samefile(source):
                self.refuse(path, f"{known.source} and {source} would both be put there")
        except OSError as exc:
            self.refuse(path, exc.strerror or str(exc))
            return
        if (status.st_dev, status.st_ino) in self.outputs:
            self.notes.append(f"{path}: the output of this command goes there, left out")
            return
        self.looked_at[source] = to_stamp(status)
        mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
        self.files[path] = TreeFile(path=path, source=Path(source), mode=mode, size=status.st_size)

    def link(self, path: str, target: str) -> None:
        """Add a symbolic link; its target is checked when all files are known."""
        path, target = _decode_path(path), _decode_path(target)
        if self._has_usable_name(path) and self.links.setdefault(path, target) != target:
            self.refuse(path, "two links would be put there")

    def refuse(self, path: str, reason: str) -> None:
        """Note why ``path`` cannot be shipped."""
        self.refused.append(f"{quote_path(path)}: {reason}")

    def tree(self, *, what: str, hint: str) -> Tree:
        """Return the tree of all files and links."""
        folders = list_folders([*self.files, *self.links])
        for path in folders & (self.files.keys() | self.links.keys()):
            self.refuse(path, "a directory, and something else of that name, would be put there")
        for path in self.files.keys() & self.links.keys():
            self.refuse(path, "a file and a link would both be put there")
        if self.refused:
            some = format_count(len(self.refused), "entry", "entries")
            message = f"{some} of {what} cannot be shipped"
            raise StagerError(message, hint=hint, context=sorted(self.refused))
        sound, dropped = _sound_links(self.files, self.links)
        return Tree(
            files=tuple(self.files[path] for path in sorted(self.files)),
            links=tuple(sorted(sound.items())),
            skipped=tuple(sorted(self.notes + dropped)),
            looked_at=self.looked_at,
        )

    def _has_usable_name(self, path: str) -> bool:
        # The same rule as bundle.format.layer.check_path, which has the last word on a node.
        if not path.isprintable():
            self.refuse(path, "its name holds unprintable characters, or is not UTF-8")
            return False
        return not self._is_excessive(path)

    def _is_excessive(self, path: str) -> bool:
        limit = explain_excess(f"{_PREFIX}/{path}")
        if limit:
            self.refuse(abridge_path(path), f"no node can hold {limit}")
        return bool(limit)


def list_changed_files(tree: Tree) -> list[str]:
    """Return the paths of files that are not as they were when the tree was collected."""
    changed = []
    for file in tree.files:
        before = tree.looked_at.get(str(file.source))
        after: list[int] = []
        with suppress(OSError):
            after = to_stamp(file.source.stat())
        if before is not None and list(before) != after:
            changed.append(file.path)
    return changed


def digest_contents(tree: Tree, read: Callable[[Path], Digest] = digest_file) -> list[Digest]:
    """Return the digests of a tree's files, in its order; ``read`` returns that of a file."""
    unread: list[str] = []

    def content(file: TreeFile) -> Digest:
        try:
            return read(file.source)
        except OSError as exc:
            unread.append(f"{file.source}: {exc.strerror or exc}")
        return Digest.of(b"")

    # Threads are enough: hashlib lets go of the interpreter lock for every large piece.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        digests = list(pool.map(content, tree.files))
    if unread:
        raise StagerError(
            f"{len(unread)} of the files to be shipped can no longer be read",
            hint="another program removes or changes them; run the command again when it is done",
            context=sorted(unread),
        )
    return digests


def digest_tree(tree: Tree, digests: Sequence[str]) -> Digest:
    """Return the digest of all that is shipped: paths, modes, contents and links, but not times."""
    pairs = zip(tree.files, digests, strict=True)
    files = [[file.path, file.mode, digest] for file, digest in pairs]
    return Digest.of(canonical_json({"files": files, "links": tree.links}))


def digest_names(entries: Iterable[os.DirEntry[str]]) -> str:
    """Return a digest of a directory's names, kinds and links: its times change with any job."""
    lines = []
    for entry in entries:
        target = os.readlink(entry.path) if entry.is_symlink() else ""  # noqa: PTH115
        lines.append(f"{entry.name}\0{entry.is_dir(follow_symlinks=False):d}{target}")
    return Digest.of("\0".join(sorted(lines)).encode(errors="surrogateescape"))[:32]


def quote_path(path: str) -> str:
    """Return a path that is safe to print: quoted if a terminal would act on it."""
    return path if path.isprintable() else repr(path)


def list_parents(path: str) -> list[str]:
    """Return the directories above a relative path, the topmost first."""
    parts = path.split("/")[:-1]
    return ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]


def list_folders(paths: Iterable[str]) -> set[str]:
    """Return every directory that must exist for these relative paths to exist."""
    folders: set[str] = set()
    for path in paths:
        parent = path.rpartition("/")[0]
        while parent and parent not in folders:
            folders.add(parent)
            parent = parent.rpartition("/")[0]
    return folders


def _sound_links(
    files: Collection[str], links: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    kept, notes = dict(links), list[str]()
    while dead := _list_dead_links(files, kept):  # links may lead through others
        for path in dead:
            goal = quote_path(kept.pop(path))
            notes.append(f"{path} -> {goal}: it leads to nothing that is shipped, left out")
    return kept, notes


def _list_dead_links(files: Collection[str], links: Mapping[str, str]) -> list[str]:
    folders = list_folders([*files, *links])
    return [path for path in links if not _leads_somewhere(path, files, links, folders)]


def _leads_somewhere(
    path: str, files: Collection[str], links: Mapping[str, str], folders: Collection[str]
) -> bool:
    """Follow a link as the kernel will on a node."""
    with suppress(LayerError):
        check_link(Link(f"{_PREFIX}/{path}", links[path]))
        return _is_reached(path, files, links, folders)
    return False


def _is_reached(
    path: str, files: Collection[str], links: Mapping[str, str], folders: Collection[str]
) -> bool:
    folder = path.split("/")[:-1]
    remaining = deque(links[path].split("/"))
    followed = 1
    while remaining:
        part = remaining.popleft()
        place = "/".join([*folder, part])
        if part in ("", "."):
            continue
        if part == "..":
            if not folder:
                return False
            folder.pop()
        elif place in links:
            followed += 1
            if followed > LINK_LIMIT:  # a loop
                return False
            remaining.extendleft(reversed(links[place].split("/")))
        elif place in folders or (place in files and not remaining):
            folder.append(part)
        else:
            return False
    return True
