"""Outputs that exist already where results are put: new and changed files join them.

No file is lost: one is replaced only by the same content, or if it is still what the job was sent;
and one is removed only if the job, which was sent it, has deleted it. Links are not followed.
"""

from __future__ import annotations

import filecmp
import os
import stat
from collections.abc import Collection, Mapping
from contextlib import suppress

from .patterns import above
from .selection import OutputEntry

SentEntries = Mapping[str, OutputEntry]
"""What the nodes of a job were sent before it began, by path."""


def update(new: str, old: str, name: str, sent: SentEntries) -> list[str] | None:
    """Move the files of an output into the one that exists, unless a file would be lost.

    Returns:
        The paths below the run directory that were written; None, and nothing has changed, if the
        output needs another name.

    Raises:
        OSError: a file cannot be moved; others have been.
    """
    moves = _moves(new, old, name, sent)
    if moves is None:
        return None
    for source, target, _ in moves:
        os.replace(source, target)
    return [moved for _, _, moved in moves]


def _moves(new: str, old: str, name: str, sent: SentEntries) -> list[tuple[str, str, str]] | None:
    """Return what to move where; None if a file would be lost."""
    moves = []
    device = os.lstat(new).st_dev
    pending = [(new, old, name)]
    while pending:
        entry = source, target, path = pending.pop()
        came = os.lstat(source)
        try:
            there = os.lstat(target)
        except FileNotFoundError:
            moves.append(entry)
            continue
        if there.st_dev != device:
            return None
        if stat.S_ISDIR(came.st_mode) and stat.S_ISDIR(there.st_mode):
            children = os.listdir(source)
            pending += [(f"{source}/{child}", f"{target}/{child}", f"{path}/{child}")
                        for child in children]  # fmt: skip
        elif stat.S_ISDIR(came.st_mode):
            return None
        elif path in sent and _is_as_sent(there, sent[path]):
            moves.append(entry)
        elif not _is_same(source, came, target, there):
            return None
    return moves


def _is_same(source: str, came: os.stat_result, target: str, there: os.stat_result) -> bool:
    if stat.S_IFMT(came.st_mode) != stat.S_IFMT(there.st_mode):
        return False
    if stat.S_ISLNK(came.st_mode):
        return os.readlink(source) == os.readlink(target)
    return came.st_size == there.st_size and filecmp.cmp(source, target, shallow=False)


def _is_as_sent(there: os.stat_result, entry: OutputEntry) -> bool:
    return not stat.S_ISDIR(there.st_mode) and (
        stat.S_IFMT(there.st_mode),
        there.st_mtime_ns,
        there.st_size if stat.S_ISREG(there.st_mode) else 0,
    ) == (stat.S_IFMT(entry.mode), entry.mtime_ns, entry.size)


def remove_deleted(target: str, deleted: Collection[str], sent: SentEntries) -> int:
    """Remove files that were sent and that the job deleted, unless changed; return their number."""
    removed = 0
    gone = frozenset(deleted)
    for name, entry in reversed(list(sent.items())):
        if gone.isdisjoint((*above(name), name)) or _lies_behind_link(target, name):
            continue
        path = os.path.join(target, name)
        with suppress(OSError):
            if stat.S_ISDIR(entry.mode):
                os.rmdir(path)  # only if nothing else is in it
            elif _is_as_sent(os.lstat(path), entry):
                os.unlink(path)
                removed += 1
    return removed


def _lies_behind_link(target: str, name: str) -> bool:
    return any(os.path.islink(os.path.join(target, folder)) for folder in above(name))
