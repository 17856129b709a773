"""The files, directories and links on a node that the outputs of a job stand for."""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..protocol.problem import NodeError, Problem, ProblemCode
from ..system.files import error_text
from .patterns import expand_pattern, list_parents, split_pattern

_SPECIAL_KINDS = {stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket"}


class OutputEntry(NamedTuple):
    """One directory, file or link to send."""

    name: str  # its path below the run directory
    source: str  # the path that it is read from
    size: int  # length in bytes; 0 for directories and links
    mode: int  # type and permissions, as ``st_mode``
    mtime_ns: int
    link: str  # the target of a link; empty for anything else


class Selection(NamedTuple):
    """The files, directories and links that the outputs of a job stand for."""

    roots: tuple[str, ...]  # their paths; none lies inside another
    entries: tuple[OutputEntry, ...]  # everything in them, directories before their content
    missing: tuple[str, ...]  # outputs that match nothing
    left_out: Mapping[str, str]  # paths that cannot be sent, each with the reason
    unread: int  # the number of those that this user could not read, whatever they hold


class Sizes(NamedTuple):
    """The amount of data to send: regular files, their bytes, and the inodes of all entries."""

    files: int
    bytes: int
    entries: int


def select_outputs(directory: str, outputs: Sequence[str]) -> Selection:
    """Find what the outputs, paths or patterns below the directory, stand for.

    An output that is a link stands for its target, if that is in the directory; links inside an
    output are kept as long as they do not lead out of it.
    """
    base = _resolve_directory(directory)
    sources: dict[str, str] = {}
    missing: list[str] = []
    left_out: dict[str, str] = {}
    unread: list[str] = []
    for output in outputs:
        pattern = split_pattern(output)
        if pattern is None:
            left_out[output] = "it does not lie in the run directory"
            continue
        names = sorted(expand_pattern(base, pattern))
        missing += [] if names else [output]
        sources.update((name, os.path.realpath(os.path.join(base, name))) for name in names)
    for name, source in tuple(sources.items()):
        if reason := _refuse_root(base, source):
            left_out[name] = reason
            del sources[name]
    roots = [name for name in sorted(sources) if sources.keys().isdisjoint(list_parents(name))]
    walks = (_walk(root, sources[root], left_out, unread) for root in roots)
    entries = tuple(itertools.chain.from_iterable(walks))
    return Selection(tuple(roots), entries, tuple(missing), left_out, len(unread))


def _resolve_directory(directory: str) -> str:
    base = os.path.realpath(directory)
    if not os.path.isdir(base):
        why = "it is not a directory" if os.path.exists(base) else "it does not exist"
        raise NodeError(Problem(ProblemCode.RUN_DIR_MISSING, directory, {"why": why}))
    return base


def exclude_received(selection: Selection, brought: Collection[str]) -> Selection:
    """Return the files and links of a selection besides these, with the directories they lie in."""
    names = {one.name for one in selection.entries if not stat.S_ISDIR(one.mode)} - {*brought}
    kept = names.union(*map(list_parents, names))
    return selection._replace(
        roots=tuple(root for root in selection.roots if root in kept),
        entries=tuple(entry for entry in selection.entries if entry.name in kept),
    )


def is_link_outside(inner: str, target: str) -> bool:
    """Tell whether a link could lead out of the output that holds it, also by other links."""
    if not target or target.startswith("/") or os.path.normpath(target) != target:
        return True
    return target.split("/").count("..") > inner.count("/")


def measure_entries(entries: Sequence[OutputEntry]) -> Sizes:
    """Return the amount of data that these entries stand for."""
    file_sizes = [entry.size for entry in entries if stat.S_ISREG(entry.mode)]
    return Sizes(files=len(file_sizes), bytes=sum(file_sizes), entries=len(entries))


def _refuse_root(base: str, source: str) -> str:
    if not source.startswith(base + "/"):
        return f"it leads out of the run directory, to {source}"
    return "" if os.path.lexists(source) else f"it is a link to {source}, which does not exist"


def _walk(
    root: str, top: str, left_out: dict[str, str], unread: list[str]
) -> Iterator[OutputEntry]:
    """Yield the content of an output; follow no link."""
    pending = [(root, top)]
    while pending:
        name, path = pending.pop()
        try:
            entry = _describe_entry(name, path, root, top)
            is_directory = isinstance(entry, OutputEntry) and stat.S_ISDIR(entry.mode)
            children = sorted(os.listdir(path), reverse=True) if is_directory else []
        except OSError as exc:
            entry = error_text(exc)
            unread.append(name)
        if isinstance(entry, str):
            left_out[name] = entry
            continue
        pending += [(f"{name}/{child}", f"{path}/{child}") for child in children]
        yield entry


def _describe_entry(name: str, path: str, root: str, top: str) -> OutputEntry | str:
    state = os.lstat(path)
    size, link = 0, ""
    kind = stat.S_IFMT(state.st_mode)
    if kind == stat.S_IFREG:
        if not os.access(path, os.R_OK):
            raise PermissionError(errno.EACCES, "this user may not read it")
        size = state.st_size
    elif kind == stat.S_IFLNK:
        link = _link_target(path, top)
        if not link:
            return f"it is a link out of {root}, to {os.readlink(path)}"
    elif kind != stat.S_IFDIR:
        return f"it is a {_SPECIAL_KINDS.get(kind, 'device')}"
    return OutputEntry(name, path, size, state.st_mode, state.st_mtime_ns, link)


def _link_target(path: str, top: str) -> str:
    """Return the target, if need be made relative; empty if it leads out of ``top``."""
    text = os.readlink(path)
    if not is_link_outside(os.path.relpath(path, top), text):
        return text
    folder, last = os.path.dirname(path), os.path.basename(text)
    target = os.path.join(folder, text)
    if last in ("", ".", ".."):
        target = os.path.realpath(target)
    else:
        target = os.path.join(os.path.realpath(os.path.dirname(target)), last)
    return os.path.relpath(target, folder) if f"{target}/".startswith(f"{top}/") else ""
