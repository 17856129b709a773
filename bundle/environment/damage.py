"""Comparing a published environment with its listing, at each use of it, without reading its files.

A damaged file nearly always shows without being read: it is missing, a directory or a link, has
another size, or was written to after the environment was published. (``ctime`` does not tell:
linking a file changes it.) What does not show so is found by :mod:`bundle.checks.deep`.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
import time
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from ..format.manifest import ManifestError, parse
from ..protocol.counts import counted
from ..protocol.problem import Problem
from ..system.files import read_file
from .listing import (
    FOLDER,
    OWN,
    PATH,
    Folder,
    ListingError,
    Window,
    Written,
    names_in,
    read,
    windows_of,
)
from .merge import STATE
from .process_pool import share

MANIFEST = f"{STATE}/manifest.json"
SHOWN = 3
"""Paths that are named where an environment is damaged; the others are counted."""
DAMAGED = "the environment is damaged"
REPAIRED = "stager repairs the environment before using it"

_STRAY = -4
"""What is to be found under a name that is not listed."""
_EVERY = range(1 << 30)
"""The numbers of all layers that there may be."""
_RUN = 16
"""Directories that are compared in one go: some hundred microseconds of work."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
RENEWED = re.compile(r"(?:bin/python|pyvenv\.cfg)\.\d+-\d+")
"""What ``venv`` renames into place when it points an environment at another interpreter."""
_RENEWAL_SECONDS = 0.05
_UNGUARDED = ("project", "assets")
"""Where programs may leave files of their own beside what was published."""


class Fault(NamedTuple):
    """One thing in an environment that is not as it was built."""

    path: str
    """Relative to the environment."""
    why: str
    """What was found, and what should be there."""


def look(env_dir: str, processes: int) -> list[Fault] | None:
    """Compare the environment at a path with what was published there; None where there is none.

    Raises:
        NodeError: a process that looked was killed.
    """
    if not os.path.lexists(env_dir):
        return None
    if not is_directory(env_dir):
        return [Fault(".", "it is not a directory")]
    return faults(env_dir, processes)


def is_directory(path: str) -> bool:
    """Whether it is one itself, and not a link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def faults(env_dir: str, processes: int) -> list[Fault]:
    """Compare a published environment with its listing, without reading its files.

    Args:
        env_dir: the environment, named after its bundle's id; a directory.
        processes: how many processes look.

    Returns:
        Whatever is not as it was published, sorted by path; empty where all is well.

    Raises:
        NodeError: a process was killed.
    """
    try:
        listing = read(env_dir)
    except ListingError as exc:
        return [Fault(PATH, str(exc))]
    found = [*_manifest(env_dir), *_interpreter(env_dir)]
    lines = listing.folders
    with mmap.mmap(-1, len(lines) + 1) as marks:

        def work(run: int) -> None:
            start = run * _RUN
            some = names_in(lines[start : start + _RUN], listing.written)
            for number, (folder, names, window) in enumerate(some, start):
                if window is not None and _is_untouched(env_dir, folder, names, window):
                    continue
                if any(_differences(env_dir, lines[number], listing.written)):
                    marks[number] = 1

        share(-(-len(lines) // _RUN), work, processes)
        bad = [line for number, line in enumerate(lines) if marks[number]]
    for line in bad:
        found += _differences(env_dir, line, listing.written)
    return sorted(found)


def describe(env_dir: str, found: Sequence[Fault], fix: str) -> Problem:
    """Put faults into words: which paths, how many, and why.

    Args:
        env_dir: the environment.
        found: at least one.
        fix: what is done about it, or can be.
    """
    named = [f"{shown(fault.path)}: {fault.why}" for fault in found[:SHOWN]]
    more = len(found) - len(named)
    if more:
        named.append(f"and {more} more")
    count = "1 path in it is" if len(found) == 1 else f"{len(found)} paths in it are"
    why = f"{count} not as published: {'; '.join(named)}"
    return Problem(DAMAGED, env_dir, why, fix)


def damaged_layers(env_dir: str, found: Sequence[Fault]) -> Collection[int]:
    """Return the numbers of the layers that faults are in: of their files, or of their heads."""
    damaged: set[int] = set()
    if not found:
        return damaged
    paths = {fault.path for fault in found}
    try:
        manifest = parse(read_file(os.path.join(env_dir, MANIFEST)))
        folders = read(env_dir).folders
    except (OSError, ManifestError, ListingError):
        return _EVERY
    for number, layer in enumerate(manifest.layers):
        if not paths.isdisjoint((f"{STATE}/layers", f"{STATE}/layers/{layer.id}")):
            damaged.add(number)
    for line in folders:
        folder, content = Folder.parse(line)
        rest = iter(content.names)
        for number, count in content.layers:
            files = {_join(folder, name) for name in islice(rest, count)}
            if (folder or ".") in paths or not paths.isdisjoint(files):
                damaged.add(number)
    return damaged


def own_fault(env_dir: str) -> Fault | None:
    """What is wrong with the listing itself; None if nothing is."""
    try:
        read(env_dir)
    except ListingError as exc:
        return Fault(PATH, str(exc))
    return None


def strays(env_dir: str, other: str) -> list[str]:
    """What programs have left in an environment, and may keep, that is not in another one of it."""
    found, waiting = [], list(_UNGUARDED)
    while waiting:
        folder = waiting.pop()
        here = os.path.join(env_dir, folder)
        for name in _names(here):
            path = f"{folder}/{name}"
            if not os.path.lexists(os.path.join(other, path)):
                found.append(path)
            elif is_directory(os.path.join(other, path)):
                waiting.append(path)
    return found


def _names(folder: str) -> list[str]:
    """Return what is in a directory; nothing where it cannot be read, or is none."""
    try:
        return os.listdir(folder) if is_directory(folder) else []
    except OSError:
        return []


def interpreter_faults(env_dir: str) -> Iterator[Fault]:
    """Compare ``pyvenv.cfg`` with the link to the interpreter, as they are now."""
    try:
        target = os.readlink(os.path.join(env_dir, "bin", "python"))
    except OSError as exc:
        yield Fault("bin/python", f"it is missing or no link: {exc.strerror or exc}")
        return
    wanted = pyvenv_cfg(target)
    try:
        data = read_file(os.path.join(env_dir, "pyvenv.cfg"), len(wanted) + 1)
    except OSError as exc:
        yield Fault("pyvenv.cfg", _reason(exc))
        return
    if data != wanted:
        yield Fault("pyvenv.cfg", f"it does not say what it must for {target}")


def pyvenv_cfg(python: str) -> bytes:
    """The content of ``pyvenv.cfg`` for an interpreter (PEP 405)."""
    return (
        f"home = {os.path.dirname(python)}\n"
        "include-system-site-packages = false\n"
        f"executable = {python}\n"
    ).encode("utf-8", "surrogateescape")


def _manifest(env_dir: str) -> Iterator[Fault]:
    """Compare the manifest with the name of the environment."""
    try:
        bundle_id = parse(read_file(os.path.join(env_dir, MANIFEST))).id
    except (OSError, ManifestError) as exc:
        yield Fault(MANIFEST, _reason(exc))
        return
    if bundle_id != os.path.basename(env_dir):
        yield Fault(MANIFEST, f"it is that of bundle {bundle_id[:12]}")


def _interpreter(env_dir: str) -> list[Fault]:
    """The same, looked at twice: another job may be pointing both at another interpreter."""
    found = list(interpreter_faults(env_dir))
    if found:
        time.sleep(_RENEWAL_SECONDS)
        found = list(interpreter_faults(env_dir))
    return found


def _is_untouched(env_dir: str, folder: str, expected: dict[str, int], window: Window) -> bool:
    """Tell whether a directory has nothing but files and directories that are as they were.

    That is so for nearly all of them. The others, sound or not, are looked at more closely.
    """
    first, last = window
    try:
        handle = os.open(f"{env_dir}/{folder}", _FOLDER)
    except OSError:
        return False
    try:
        with os.scandir(handle) as items:
            for item in items:
                what = expected.pop(item.name, _STRAY)
                if what < 0:
                    if what == FOLDER and item.is_dir(follow_symlinks=False):
                        continue
                    return False
                found = item.stat(follow_symlinks=False)
                mode = found.st_mode
                if (
                    found.st_size * 2 + (mode >> 6 & 1) != what
                    or not first <= found.st_mtime_ns <= last
                    or mode & 0o170400 != 0o100400
                ):
                    return False
    except OSError:
        return False
    finally:
        os.close(handle)
    return not expected


def _differences(env_dir: str, line: bytes, written: Written) -> Iterator[Fault]:
    """Compare one directory with its line."""
    folder, content = Folder.parse(line)
    expected = content.names
    windows = dict(zip(expected, windows_of(content, written)))
    try:
        handle = os.open(f"{env_dir}/{folder}", _FOLDER)
    except OSError as exc:
        yield Fault(folder or ".", f"the directory cannot be read: {exc.strerror or exc}")
        return
    try:
        with os.scandir(handle) as items:
            for item in items:
                what = expected.pop(item.name, _STRAY)
                path = _join(folder, item.name)
                found = item.stat(follow_symlinks=False)
                if what >= 0:
                    why = _file_difference(found, what, windows[item.name])
                else:
                    target = os.readlink(item.name, dir_fd=handle) if item.is_symlink() else ""
                    leads_there = target == content.links.get(item.name)
                    why = _difference(path, found, what, leads_there)
                if why:
                    yield Fault(path, why)
    except OSError as exc:
        yield Fault(folder or ".", f"the directory cannot be read: {exc.strerror or exc}")
    finally:
        os.close(handle)
    for name, what in expected.items():
        if what != OWN:
            yield Fault(_join(folder, name), "it is missing")


def _difference(path: str, found: os.stat_result, what: int, leads_there: bool) -> str:
    """Say what is wrong with what is to be no file; empty if nothing is."""
    if what == OWN:
        return ""
    if what == _STRAY:
        return "" if _may_stay(path) else "it does not belong there"
    if what == FOLDER:
        return "" if stat.S_ISDIR(found.st_mode) else "it is not a directory any more"
    return "" if leads_there else "it is not the symbolic link that it was"


def _file_difference(found: os.stat_result, what: int, window: Window) -> str:
    size, executable = divmod(what, 2)
    if not stat.S_ISREG(found.st_mode):
        return "it is not a file any more"
    if found.st_size != size:
        return f"it has {counted(found.st_size, 'byte')}, not {size:,}"
    if found.st_mode >> 6 & 1 != executable or not found.st_mode & stat.S_IRUSR:
        return f"its mode is {stat.S_IMODE(found.st_mode):04o}"
    if found.st_mtime_ns > window.last:
        return "it was written to after it was published"
    return "another, older file is in its place" if found.st_mtime_ns < window.first else ""


def _may_stay(path: str) -> bool:
    """Tell what may lie there besides: bytecode that Python wrote, and files of the user's own."""
    parts = path.split("/")
    bytecode = parts[-2:-1] == ["__pycache__"] and ".pyc" in parts[-1]
    if bytecode or parts[-1] == "__pycache__" or (len(parts) > 1 and parts[0] in _UNGUARDED):
        return True
    return bool(RENEWED.fullmatch(path))


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def shown(path: str) -> str:
    """Return a path as it may stand in a message."""
    return path if path.isprintable() else ascii(path)


def _reason(exc: Exception) -> str:
    if isinstance(exc, FileNotFoundError):
        return "it is missing"
    return str(getattr(exc, "strerror", None) or exc)
