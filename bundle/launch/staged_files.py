"""The project, assets and earlier results, for ranks whose node does not see the project."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from ..node import removal
from ..node.node_root import hold_directory
from ..protocol.job import Job
from ..protocol.messages import UnpackAnswer, UnpackRequest
from ..protocol.problem import NodeError, ProblemCode
from ..results import patterns
from ..system.files import disk_problem
from .program_variables import JobDirectories, locate_work_dir, locate_work_tree

_COPIED_BYTES = 32 << 20  # of a project's files; all others are linked
_MOST_ENTRIES = 20_000  # that are put there one by one; further directories are linked whole
_SENT = ".stager-sent"  # describes the earlier results sent to the copy of the project's folder


def make_work_dir(directories: JobDirectories, job: Job) -> str:
    """Make the ranks' working directory, with project and assets; what is there already stays."""
    tree, path = locate_work_tree(job, directories.root), locate_work_dir(job, directories.root)
    os.makedirs(path, mode=0o700, exist_ok=True)
    if job.run_subdir is None:
        return path
    with hold_directory(tree):  # srun starts several tasks at once
        for folder, to_copy in (("project", _COPIED_BYTES), ("assets", 0)):
            _fill(os.path.join(directories.environment, folder), tree, to_copy, job)
    return path


def _fill(source: str, tree: str, to_copy: int, job: Job) -> None:
    """Copy ``to_copy`` bytes of files, link the rest; always copy outputs: ranks write to them."""
    room = _MOST_ENTRIES
    pending = [""]
    while pending:
        folder = pending.pop()
        listed, path = _list_entries(os.path.join(source, folder)), os.path.join(tree, folder)
        room -= len(listed)
        with contextlib.suppress(FileExistsError):
            if room < 0 and not _may_hold(folder, job):
                os.symlink(os.path.join(source, folder), path)
            else:
                os.mkdir(path, 0o700)
        if os.path.islink(path) or not os.path.isdir(path):
            continue
        for entry in listed:
            name = os.path.join(folder, entry.name)
            if entry.is_dir(follow_symlinks=False):
                pending.append(name)
            elif not os.path.lexists(os.path.join(tree, name)):
                is_output = _is_among(os.path.relpath(name, job.run_subdir), job.outputs)
                limit = to_copy if room >= 0 else -1
                copied = _place(entry, os.path.join(tree, name), limit, is_output)
                to_copy = max(0, to_copy - copied)


def _place(entry: os.DirEntry[str], path: str, limit: int, is_output: bool) -> int:
    """Copy a file of at most ``limit`` bytes, or an output, else link it; return bytes copied."""
    size = entry.stat(follow_symlinks=False).st_size
    if entry.is_file(follow_symlinks=False) and (size <= limit or is_output):
        _copy(entry.path, path)
        return size
    os.symlink(os.readlink(entry.path) if entry.is_symlink() else entry.path, path)
    return 0


def _copy(source: str, path: str) -> None:
    os.replace(shutil.copy2(source, f"{path}.stager-partial"), path)


def _is_among(inner: str, outputs: Sequence[str]) -> bool:
    paths = (*patterns.list_parents(inner), inner)
    return any(patterns.is_wanted(path, outputs) for path in paths)


def _may_hold(name: str, job: Job) -> bool:
    parts = os.path.relpath(name or ".", job.run_subdir).split("/")
    return any(
        all(asked == "**" or fnmatchcase(part, asked) for part, asked in zip(parts, pattern))
        for pattern in map(patterns.split_pattern, job.outputs)
        if pattern is not None
    )


def remove_staged_files(tree: str, environment: str) -> None:
    """Remove what :func:`make_work_dir` has put there, as far as no rank has changed it."""
    for folder in ("project", "assets"):
        source = os.path.join(environment, folder)
        folders = [""]
        for inner in folders:
            for entry in _list_entries(os.path.join(source, inner)):
                name = os.path.join(inner, entry.name)
                path = os.path.join(tree, name)
                if entry.is_dir(follow_symlinks=False) and not os.path.islink(path):
                    folders.append(name)
                else:
                    with contextlib.suppress(OSError):
                        _remove_unchanged(path, entry)
        for inner in reversed(folders[1:]):
            with contextlib.suppress(OSError):  # a rank has written something there
                os.rmdir(os.path.join(tree, inner))


def _remove_unchanged(path: str, entry: os.DirEntry[str]) -> None:
    """Remove a link or copy, unless a rank has changed it; keep content written through a link."""
    status, staged = os.lstat(path), entry.stat(follow_symlinks=False)
    if not stat.S_ISLNK(status.st_mode):
        if (status.st_size, status.st_mtime_ns) == (staged.st_size, staged.st_mtime_ns):
            os.unlink(path)
        return
    if os.readlink(path) != (os.readlink(entry.path) if entry.is_symlink() else entry.path):
        return
    if stat.S_ISREG(staged.st_mode) and staged.st_mtime_ns > status.st_mtime_ns:
        _copy(entry.path, path)
    else:
        os.unlink(path)


def place_earlier_results(request: UnpackRequest, path: str) -> UnpackAnswer:
    """Put results that have arrived into the working directory, once for each node root."""
    from ..results.receive import receive_outputs

    job, root = request.job, request.root
    tree, folder = locate_work_tree(job, root), locate_work_dir(job, root)
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        with hold_directory(tree), open(path, "rb") as stream:
            if os.path.lexists(os.path.join(tree, _SENT)):  # by another node of the same node root
                return UnpackAnswer()
            received = receive_outputs(stream, folder, job.outputs, request.node)
            renamed = received.renamed.values()  # what an earlier attempt of the job has left stays
            for name in (*renamed, *(() if received.complete else received.placed)):
                removal.delete_as_far_as_possible(os.path.join(folder, name))
            if not received.complete:
                raise NodeError(received.problems[0])
            record_sent_files(tree, folder, [x for x in received.placed if x not in renamed])
    except OSError as exc:
        full, unwritable = ProblemCode.INCOMING_DISK_FULL, ProblemCode.INCOMING_UNWRITABLE
        raise NodeError(disk_problem(exc, folder, full, unwritable)) from exc
    return UnpackAnswer()


def record_sent_files(tree: str, folder: str, outputs: Sequence[str]) -> None:
    """Record the state of the earlier results before a rank starts."""
    entries: dict[str, list[int]] = {}
    pending = list(reversed(outputs))
    while pending:
        name = pending.pop()
        path = os.path.join(folder, name)
        state = os.lstat(path)
        entries[name] = _content_state(state)
        if stat.S_ISDIR(state.st_mode):
            pending += [f"{name}/{child}" for child in sorted(os.listdir(path), reverse=True)]
    with open(os.path.join(tree, _SENT), "x", encoding="ascii") as handle:
        json.dump(entries, handle)


def remove_sent_files(tree: str, folder: str) -> tuple[str, ...]:
    """Remove the earlier results that no rank has changed; return those that ranks have deleted."""
    try:
        with open(os.path.join(tree, _SENT), encoding="ascii") as handle:
            entries: dict[str, list[int]] = json.load(handle)
        os.unlink(handle.name)
    except (OSError, ValueError):
        return ()
    deleted: list[str] = []
    folders = set(map(os.path.dirname, entries)).difference(entries)  # that hold the results
    for name, before in entries.items():  # directories before their content
        path = os.path.join(folder, name)
        if os.path.dirname(name) not in folders:
            continue
        try:
            now = _content_state(os.lstat(path))
        except OSError:
            deleted.append(name)
            continue
        if stat.S_ISDIR(now[0]) and stat.S_ISDIR(before[0]):
            folders.add(name)
        elif now == before:
            os.unlink(path)
    return tuple(deleted)


def has_outputs_besides(folder: str, outputs: Sequence[str], brought: Collection[str]) -> bool:
    """Return whether a directory has files or links among the outputs, besides these."""
    known = frozenset(brought)
    for path, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(path, name))]
        inner = (os.path.relpath(os.path.join(path, name), folder) for name in (*files, *links))
        if any(name not in known and _is_among(name, outputs) for name in inner):
            return True
    return False


def _content_state(state: os.stat_result) -> list[int]:
    if stat.S_ISDIR(state.st_mode):
        return [state.st_mode]
    return [state.st_mode, state.st_size, state.st_mtime_ns, state.st_ctime_ns]


def _list_entries(folder: str) -> list[os.DirEntry[str]]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)
    return []
